"""The streamed runtime: clients stay on disk, and results equal the compiled runtime's."""

import resource

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.participation import Bernoulli, Cyclic, Random
from tests.support import examples

FEEDBACK = fs.FedSGM(0.02, uplink=fs.TopK(0.4), downlink=fs.TopK(0.6), participants=3)


@pytest.fixture(scope="module")
def problem():
    return examples.least_squares(clients=12)


@pytest.fixture(scope="module")
def free():
    return examples.least_squares(clients=12, constrained=False)


def assert_same_bits(one, other):
    np.testing.assert_array_equal(one.params, other.params)
    # What clients hold back is on disk, and not read for this.
    assert one.history.keys() == other.history.keys() - {"uplink_error"}
    for name in one.history:
        values = other.history[name]
        # Sums over all clients that are only told: XLA adds them up as it pleases.
        told = name.startswith(("objective", "constraint", "squared_gradient"))
        close = 1e-6 if told else 0
        np.testing.assert_allclose(one.history[name], values, rtol=close, err_msg=name)


def test_streamed_and_resident_runs_agree_to_the_bit(problem, tmp_path):
    mapped = {}
    for name, values in problem.samples.values.items():
        np.save(tmp_path / f"{name}.npy", values)
        mapped[name] = np.load(tmp_path / f"{name}.npy", mmap_mode="r")
    on_disk = problem.with_clients(mapped)
    resident = fs.solve(problem, FEEDBACK, 20, evaluate_every=6)
    rows: dict[int, bytes] = {}
    streamed = fs.solve(on_disk, FEEDBACK, 20, evaluate_every=6, runtime="streamed", store=rows)
    assert_same_bits(streamed, resident)
    # A row holds the residual and what the client has seen; only those that were asked have one.
    asked = fs.solve(problem, FEEDBACK, 20).history["cohort"]
    assert len(rows) >= len(np.unique(asked))
    residuals = {np.frombuffer(row, np.float32, 5).tobytes() for row in rows.values()}
    expected = np.asarray(resident.state.clients)[np.unique(asked)]
    assert {row.tobytes() for row in expected} <= residuals


def test_drawing_that_depends_on_the_past_and_who_is_up(problem):
    algorithm = fs.SCAFFOLD(0.05, selection=Cyclic(4), availability=Bernoulli(0.6))
    options = {"rounds": 8, "clock": fs.Clock(latency=fs.LogNormal(1, 1)), "evaluate_every": 4}
    resident = fs.solve(problem, algorithm, **options)
    assert_same_bits(fs.solve(problem, algorithm, runtime="streamed", **options), resident)


@pytest.mark.parametrize(
    "algorithm",
    [
        fs.SCAFFOLD(0.05, local_steps=2),  # everyone
        fs.FedADMM(participants=5, local_iterations=3, lipschitz=3.0),  # once, then a cohort
        fs.PPBC(0.05, select_epoch=Random(4), epoch_length=3, availability=0.7),  # both
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_rounds_that_ask_others_too_are_streamed_in_blocks(algorithm, free, monkeypatch):
    # 5 of 12 clients at a time: the last block looks back
    monkeypatch.setattr("fedsolve.runtimes.streaming.Streamed._block", 5)
    options = {"rounds": 7, "evaluate_every": 3, "stop": fs.Stationary(below=1e-30)}
    resident = fs.solve(free, algorithm, **options)
    streamed = fs.solve(free, algorithm, runtime="streamed", **options)
    if isinstance(algorithm, fs.FedADMM):  # where XLA fuses what a block's program does not
        np.testing.assert_allclose(streamed.params, resident.params, rtol=3e-6)
    else:
        assert_same_bits(streamed, resident)


def test_a_checkpoint_has_the_rows_of_its_round(problem, tmp_path, monkeypatch):
    whole = fs.solve(problem, FEEDBACK, 12)
    how = {"runtime": "streamed", "store": tmp_path / "rows", "checkpoint_every": 4}
    file = tmp_path / "checkpoint"
    with pytest.raises(KeyboardInterrupt):
        fs.solve(problem, FEEDBACK, 12, checkpoint=file, progress=stop_after(6), **how)
    rest = fs.solve(problem, FEEDBACK, 12, checkpoint=file, resume=file, **how)
    assert_same_bits(rest, whole)


@pytest.mark.parametrize("kind", ["folder", "mapping"])
def test_a_store_is_of_one_run(kind, problem, tmp_path):
    """Nobody else writes to it, and a checkpoint never meets rows that are not its own."""
    file, rows = tmp_path / "c", tmp_path / "rows" if kind == "folder" else {}
    how = {"runtime": "streamed", "checkpoint_every": 3}
    with pytest.raises(KeyboardInterrupt):
        fs.solve(problem, FEEDBACK, 12, checkpoint=file, store=rows, progress=stop_after(6), **how)
    other = problem, fs.FedSGM(0.05, uplink=fs.TopK(0.4), downlink=fs.TopK(0.6), participants=3), 2
    for options in ({}, {"checkpoint": tmp_path / "d"}):
        with pytest.raises(fs.InvalidInput, match="has the states of another run; go on from"):
            fs.solve(*other, store=rows, **options, **how)
    others = {} if kind == "mapping" else tmp_path / "others"
    fs.solve(*other, store=others, checkpoint=tmp_path / "other", **how)
    not_there = "does not have the states of this checkpoint"
    for options, sentence in [
        ({"store": others}, not_there),
        ({"store": tmp_path / "nothing"}, not_there),
        ({}, "goes on with the store that it was made with"),
        ({"store": rows, "checkpoint": tmp_path / "e"}, "goes on in its own checkpoint"),
    ]:
        with pytest.raises(fs.InvalidInput, match=sentence):
            fs.solve(problem, FEEDBACK, 12, resume=file, **options, **how)
    old = file.read_bytes()
    rest = fs.solve(problem, FEEDBACK, 12, checkpoint=file, store=rows, resume=file, **how)
    assert_same_bits(rest, fs.solve(problem, FEEDBACK, 12))
    (tmp_path / "copy").write_bytes(old)  # of a round whose rows were let go
    with pytest.raises(fs.InvalidInput, match=not_there):
        fs.solve(problem, FEEDBACK, 12, resume=tmp_path / "copy", store=rows, **how)


def test_a_checkpoint_of_the_compiled_runtime_has_no_store(free, tmp_path):
    algorithm = fs.FedAvg(0.05)
    fs.solve(free, algorithm, 2, checkpoint=tmp_path / "c")
    with pytest.raises(fs.InvalidInput, match="is not of a streamed run"):
        fs.solve(free, algorithm, 4, resume=tmp_path / "c", runtime="streamed", store={})


def test_the_previous_checkpoint_keeps_its_rows_when_a_run_resumes(problem, tmp_path):
    file = tmp_path / "c"
    how = {"runtime": "streamed", "store": tmp_path / "rows", "checkpoint": file}
    how |= {"checkpoint_every": 4}
    with pytest.raises(KeyboardInterrupt):
        fs.solve(problem, FEEDBACK, 12, progress=stop_after(8), **how)
    with pytest.raises(KeyboardInterrupt):  # on from round 8: round 4 must stay
        fs.solve(problem, FEEDBACK, 12, progress=stop_after(11), resume=file, **how)
    file.write_bytes(b"damaged")
    with pytest.warns(UserWarning, match="going on from the one before, round 4"):
        rest = fs.solve(problem, FEEDBACK, 12, resume=file, **how)
    assert_same_bits(rest, fs.solve(problem, FEEDBACK, 12))


def test_rows_are_kept_while_checkpoints_cannot_be_written(problem, tmp_path):
    file = tmp_path / "c"
    how = {"runtime": "streamed", "store": tmp_path / "rows", "checkpoint": file}
    how |= {"checkpoint_every": 2}
    in_the_way = tmp_path / "c.new"  # where a checkpoint is written before it is renamed

    def block(done):
        if done == 4:
            in_the_way.mkdir()

    warned = pytest.warns(UserWarning, match="No checkpoint after round .*: cannot write")
    with warned, pytest.raises(KeyboardInterrupt):
        fs.solve(problem, FEEDBACK, 12, progress=stop_after(11, block), **how)
    in_the_way.rmdir()
    rest = fs.solve(problem, FEEDBACK, 12, resume=file, **how)
    assert_same_bits(rest, fs.solve(problem, FEEDBACK, 12))


def test_a_full_disk_under_a_store_raises(problem, tmp_path):
    """A limit on the size of files is as good as a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        with pytest.raises(fs.InvalidInput, match=r"Cannot write to the store .*: File too large"):
            fs.solve(problem, FEEDBACK, 3, runtime="streamed", store=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def stop_after(rounds, at=lambda done: None):
    def progress(done, wanted, newest):
        at(done)
        if done >= rounds:  # in the midst of things: nothing is saved any more
            raise KeyboardInterrupt

    return progress


def test_divergence_is_found_and_the_rounds_before_are_kept(problem):
    algorithm = fs.FedAvg(1e18, participants=3)
    with pytest.raises(fs.Diverged) as resident:
        fs.solve(problem, algorithm, 9)
    with pytest.raises(fs.Diverged, match=r"Round .* is not finite") as streamed:
        fs.solve(problem, algorithm, 9, runtime="streamed")
    assert_same_bits(streamed.value.run, resident.value.run)


@pytest.mark.parametrize(
    ("algorithm", "options", "sentence"),
    [
        (FEEDBACK, {"store": 3}, "store must be a folder or a mutable mapping"),
        (FEEDBACK, {"checkpoint": "x"}, "needs a store that stays"),
        (FEEDBACK, {"follow": {"x": lambda problem, params: 0.0}}, "follows f, g and the metrics"),
        (FEEDBACK, {"devices": 1}, "Several devices are for the compiled runtime"),
    ],
)
def test_what_cannot_be_streamed_raises(algorithm, options, sentence, problem):
    with pytest.raises(fs.InvalidInput, match=sentence):
        fs.solve(problem, algorithm, 1, runtime="streamed", **options)
