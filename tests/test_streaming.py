"""Clients that stay on disk: the bits of the compiled runtime, in the memory of a cohort."""

import numpy as np
import pytest

import examples
import fedsolve as fs
from fedsolve.participation import Bernoulli, Cyclic, Random
from fedsolve.store import Store

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
    monkeypatch.setattr("fedsolve.streaming.Stream._block", 5)
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


def stop_after(rounds):
    def progress(done, wanted, newest):
        if done >= rounds:  # in the midst of things: nothing is saved any more
            raise KeyboardInterrupt

    return progress


def test_what_diverges_is_found_and_the_rounds_before_are_kept(problem):
    algorithm = fs.FedAvg(1e18, participants=3)
    with pytest.raises(fs.Diverged) as resident:
        fs.solve(problem, algorithm, 9)
    with pytest.raises(fs.Diverged, match=r"Round .* is not finite") as streamed:
        fs.solve(problem, algorithm, 9, runtime="streamed")
    assert_same_bits(streamed.value.run, resident.value.run)


def test_held_versions_stay_and_others_make_room(tmp_path):
    first_row = np.zeros((), np.dtype([("value", np.float32, (2,))]))
    store = Store(tmp_path, first_row)

    def put(clients, value):
        rows = store.take(clients)
        rows["value"] = value
        store.put(clients, rows)

    def seen(clients):
        return store.take(clients)["value"][:, 0].tolist()

    put([7, 10**9], 1)
    first = store.save()
    put([7, 3], 2)
    store.hold("here")
    put([7, 5], 3)
    assert seen([7, 3, 5, 10**9, 4]) == [3, 2, 3, 1, 0]
    store.go_back("here")
    assert seen([7, 3, 5, 10**9]) == [2, 2, 0, 1]
    again = Store(tmp_path, first_row)
    again.load(first)
    assert len(again) == 2
    assert again.take([7, 3, 10**9])["value"][:, 0].tolist() == [1, 0, 1]
    for value in range(20):  # two versions and the present one never need more than three rows
        put([7], value)
        store.save()
    assert store.take([7])["value"][0, 0] == 19
    assert store.save()[:, 1].max() < 8


@pytest.mark.parametrize(
    ("algorithm", "options", "sentence"),
    [
        (FEEDBACK, {"store": 3}, "store must be a folder or a mutable mapping"),
        (FEEDBACK, {"checkpoint": "x"}, "needs a store that stays"),
        (FEEDBACK, {"follow": {"x": lambda problem, params: 0.0}}, "follows f, g and the metrics"),
        (FEEDBACK, {"devices": 1}, "Several devices are for the compiled runtime"),
    ],
)
def test_what_cannot_be_streamed_gets_a_sentence(algorithm, options, sentence, problem):
    with pytest.raises(fs.InvalidInput, match=sentence):
        fs.solve(problem, algorithm, 1, runtime="streamed", **options)
