"""Checkpoints of runs that are killed, stopped, damaged or moved."""

import dataclasses
import errno
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.experiments import run_folder as folder
from fedsolve.solving import checkpoint as checkpoints
from fedsolve.storage import atomic
from fedsolve.storage.atomic import check_writable
from tests.support import examples, survivor
from tests.support.commands import wait_for_a_checkpoint

KILLS = int(os.environ.get("FEDSOLVE_KILLS", "2"))
EXPERIMENT = """
problem = { kind = "neyman_pearson", clients = 6 }
algorithm = { kind = "FedSGM", step_size = 0.1, tolerance = 0.05, participants = 3 }
run = { rounds = 400, seeds = [0, 1], evaluate_every = 3 }
[variants]
hard = { "algorithm.switching" = "Hard", "algorithm.uplink" = { kind = "RandK", fraction = 0.3 } }
soft = { "algorithm.switching" = { kind = "Soft", beta = 40.0 } }
"""


def start(folder, *words):
    command = [sys.executable, "-m", "fedsolve", "run", *map(str, words)]
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def everything(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def results(folder):
    names = ("config.toml", "history.csv", "params.safetensors", "history.safetensors")
    return {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}


def test_killed_at_any_moment_and_resumed_to_the_same_bits(tmp_path):
    """FEDSOLVE_KILLS=30 kills it thirty times."""
    (tmp_path / "x.toml").write_text(EXPERIMENT)
    rounds = ["--rounds", 400 * KILLS]
    whole = start(tmp_path, "x.toml", *rounds, "--out", "whole")
    _, told = whole.communicate(timeout=300)
    assert whole.returncode == 0, told
    chance = random.Random(KILLS)
    words, killed = ["x.toml", *rounds, "--out", "cut"], 0
    for _ in range(KILLS):
        process = start(tmp_path, *words, "--checkpoint-every", 2)
        wait_for_a_checkpoint(process, tmp_path / "cut")
        time.sleep(chance.uniform(0, 0.3))
        process.kill()
        _, told = process.communicate(timeout=60)
        assert process.returncode in (0, -signal.SIGKILL), told
        killed += process.returncode == -signal.SIGKILL
        words = ["--resume", "cut"]
    last = start(tmp_path, *words)
    _, told = last.communicate(timeout=300)
    assert last.returncode == 0, told
    assert killed > KILLS // 2
    assert results(tmp_path / "cut") == results(tmp_path / "whole")
    assert json.loads((tmp_path / "cut/run.json").read_text())["status"] == "finished"


def test_sigterm_before_the_first_evaluation_saves_and_prints_how_to_resume(tmp_path):
    words = ["--rounds", 10**7, "--set", f"run.evaluate_every={10**7}", "--checkpoint-every", 50]
    process = start(tmp_path, "neyman-pearson", *words)
    wait_for_a_checkpoint(process, tmp_path / "runs/neyman-pearson")
    process.terminate()
    out, told = process.communicate(timeout=60)
    assert process.returncode == 143, told
    assert "To go on: fedsolve run --resume runs/neyman-pearson" in out
    facts = json.loads((tmp_path / "runs/neyman-pearson/run.json").read_text())
    assert facts["status"] == "interrupted"
    saved = checkpoints.load(tmp_path / "runs/neyman-pearson/checkpoints/run-0")
    assert saved.round == facts["rounds"]["seed-0"] >= 50
    assert f"Stopped by the user after round {saved.round} of" in " ".join(told.split())


@pytest.fixture(scope="module")
def task():
    return examples.least_squares(), fs.FedSGM(0.05, 0.1, participants=3, uplink=fs.RandK(0.5))


def same(run, other):
    for name in other.history:
        np.testing.assert_array_equal(run.history[name], other.history[name])
    assert list(run.history) == list(other.history)
    np.testing.assert_array_equal(run.params, other.params)
    np.testing.assert_array_equal(run.average, other.average)


def test_a_run_without_an_evaluation_has_nothing_to_show(task):
    asked = iter([False, True])
    with pytest.raises(fs.Interrupted) as stopped:
        fs.solve(*task, 100, evaluate_every=50, interrupted=lambda: next(asked))
    run = stopped.value.run
    assert (run.rounds, run.evaluated) == (1, False)
    with pytest.raises(fs.InvalidInput, match="nothing to show of a run that was never evaluated"):
        run.plot()
    assert fs.solve(*task, 3, resume=run.state).evaluated


def test_checkpoints_by_time(task, tmp_path):
    """The first chunk is a round: with no time between checkpoints, one is written after it."""
    fs.solve(*task, 40, checkpoint=tmp_path / "often", checkpoint_every="0.000001 s")
    assert checkpoints.load(tmp_path / "often.before").round < 40
    fs.solve(*task, 40, checkpoint=tmp_path / "once", checkpoint_every="2 h")
    assert not (tmp_path / "once.before").exists()
    expected = {"90 s": (None, 90), "5min": (None, 300), "1.5 h": (None, 5400), 7: (7, 30)}
    for text, found in expected.items():
        assert checkpoints.how_often("x", text) == found
    for wrong in ("5", "0 s", "-1 s", "1..2 s", "soon", ". s"):
        with pytest.raises(fs.InvalidInput, match="must be a whole number of rounds"):
            fs.solve(*task, 3, checkpoint_every=wrong)


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_more_rounds_from_a_file_are_as_if_never_stopped(task, tmp_path, precision):
    options = {"evaluate_every": 4, "precision": precision}
    first = fs.solve(*task, 10, checkpoint=tmp_path / "c", checkpoint_every=3, **options)
    assert list(first.history["round"]) == [4, 8, 10]
    again = fs.solve(*task, 10, resume=tmp_path / "c", **options)
    same(again, first)
    seconds = checkpoints.load(tmp_path / "c").seconds
    assert 0 < seconds <= first.seconds
    more = fs.solve(*task, 17, resume=str(tmp_path / "c"), checkpoint=tmp_path / "c", **options)
    same(more, fs.solve(*task, 17, **options))
    assert more.seconds > seconds  # the time before the stop is counted too


def test_a_run_that_a_rule_ended_stays_ended(task, tmp_path):
    rule = fs.Reached(1e9)
    first = fs.solve(*task, 10, checkpoint=tmp_path / "c", stop=rule)
    assert first.rounds == 1
    same(fs.solve(*task, 20, resume=tmp_path / "c", stop=rule), first)
    assert fs.solve(*task, 3, resume=tmp_path / "c").rounds == 3


def test_a_damaged_checkpoint_gives_way_to_the_one_before(task, tmp_path):
    path = tmp_path / "c"
    whole = fs.solve(*task, 9, checkpoint=path, checkpoint_every=4)
    good = path.read_bytes()
    for damage in (good[:-1], good[:100], b"", good[:-9] + bytes([good[-9] ^ 1]) + good[-8:]):
        path.write_bytes(damage)
        with pytest.warns(UserWarning, match="is damaged; going on from the one before, round 8"):
            saved = checkpoints.load(path)
        same(fs.solve(*task, 9, resume=saved), whole)
    path.write_bytes(b"x")
    with pytest.warns(UserWarning, match="damaged"):
        same(fs.solve(*task, 9, resume=path, checkpoint=path), whole)
    assert checkpoints.load(path).round == 9
    path.write_bytes(b"x")
    (tmp_path / "c.before").write_bytes(b"y")
    with pytest.raises(fs.InvalidInput, match="no good checkpoint"):
        checkpoints.load(path)
    with pytest.raises(fs.InvalidInput, match="There is no checkpoint"):
        checkpoints.load(tmp_path / "nothing")


def test_a_checkpoint_of_a_different_run_raises(task, tmp_path, monkeypatch):
    problem, algorithm = task
    path = tmp_path / "c"
    fs.solve(problem, algorithm, 3, checkpoint=path)
    before = path.read_bytes()
    others = {
        "seed": {"seed": 1},
        "algorithm": {"algorithm": dataclasses.replace(algorithm, step_size=0.06)},
        "problem": {"problem": examples.least_squares(constrained=False)},
        "evaluate_every": {"evaluate_every": 2},
        "precision": {"precision": "float64"},
        "follow": {"follow": {"norm": lambda problem, params: (params**2).sum()}},
    }
    for what, changes in others.items():
        words = {"problem": problem, "algorithm": algorithm, "rounds": 5} | changes
        with pytest.raises(fs.InvalidInput, match=f"belongs to another run: {what} differ"):
            fs.solve(**words, resume=path, checkpoint=path)
    with pytest.raises(fs.InvalidInput, match="has done 3 of 2 rounds"):
        fs.solve(problem, algorithm, 2, resume=path)
    with pytest.raises(fs.InvalidInput, match="exists; go on from it with resume"):
        fs.solve(problem, algorithm, 5, checkpoint=path)
    with monkeypatch.context() as other:
        other.setattr(fs, "__version__", "99.0")
        with pytest.raises(fs.InvalidInput, match=r"is of fedsolve .*, and this is 99\.0"):
            fs.solve(problem, algorithm, 5, resume=path)
    assert path.read_bytes() == before


def test_a_full_disk_keeps_existing_files(task, tmp_path):
    """A limit on the size of files is as good as a full disk."""
    path = tmp_path / "c"
    fs.solve(*task, 3, checkpoint=path)
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.warns(UserWarning, match="No checkpoint after round 5: cannot write .*: File"):
            run = fs.solve(*task, 5, resume=path, checkpoint=path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert run.rounds == 5
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_folder_that_cannot_be_written_to():
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o555)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)  # root may write anywhere
        try:
            with pytest.raises(fs.InvalidInput, match=r"Cannot write to .*: Permission denied"):
                check_writable(Path(name))
        finally:
            os.seteuid(user)
        assert not list(Path(name).iterdir())


def test_resume_on_the_command_line_reports_errors(fedsolve, tmp_path, monkeypatch):
    (tmp_path / "x.toml").write_text(EXPERIMENT)
    assert fedsolve("run", "x.toml", "--rounds", 4, "--out", "x")[0] == 0
    before = everything(tmp_path / "x")
    config = (tmp_path / "x/config.toml").read_text()
    wrong = {
        ("x.toml", "--resume", "x"): "only --rounds may change",
        ("--resume", "x", "--seed", "1"): "only --rounds may change",
        ("--resume", "y"): "y is not the folder of a run: it has no config.toml.",
        ("--resume", "x", "--rounds", "2"): "x has done 4 rounds, more than 2.",
        ("x.toml", "--checkpoint-every", "0"): "--checkpoint-every must be a whole number",
        ("x.toml", "--checkpoint-every", "5 days"): 'or a time such as "90 s" or "5 min"',
        (): "This needs an experiment, or --resume DIR.",
    }
    for words, sentence in wrong.items():
        status, _, told = fedsolve("run", *words)
        assert (status, sentence in told) == (2, True), told
        assert everything(tmp_path / "x") == before
    with monkeypatch.context() as other:
        other.setattr(fs, "__version__", "99.0")
        status, _, told = fedsolve("run", "--resume", "x", "--rounds", 6)
    assert (status, "and this is 99.0." in told) == (2, True), told
    assert everything(tmp_path / "x") == before
    (tmp_path / "x/config.toml").write_text(config.replace("0.05", "0.06"))
    before = everything(tmp_path / "x")
    status, _, told = fedsolve("run", "--resume", "x", "--rounds", 6)
    assert (status, "belongs to another run: algorithm differ" in told) == (2, True), told
    assert everything(tmp_path / "x") == before
    (tmp_path / "x/config.toml").write_text(config)
    assert fedsolve("run", "--resume", "x", "--rounds", 6)[0] == 0
    assert fedsolve("run", "x.toml", "--rounds", 6, "--out", "z")[0] == 0
    assert results(tmp_path / "x") == results(tmp_path / "z")


def test_two_processes_cannot_work_in_one_folder(fedsolve, tmp_path):
    assert fedsolve("run", "neyman-pearson", "--rounds", 2, "--out", "x")[0] == 0
    before = results(tmp_path / "x")
    with folder.alone(tmp_path / "x"):
        status, _, told = fedsolve("run", "--resume", "x", "--rounds", 3)
    assert status == 2
    assert "Another process is working in x; wait for its end." in told
    assert results(tmp_path / "x") == before
    assert fedsolve("run", "--resume", "x", "--rounds", 3)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", survivor.EVERY)
def test_every_algorithm_survives_sigkill(name, tmp_path):
    """Thirty kills of each, unless FEDSOLVE_KILLS says otherwise."""
    kills = int(os.environ.get("FEDSOLVE_KILLS", "30"))
    counts = survivor.survive(tmp_path, name, kills)
    assert counts.total() == kills


def test_resumed_one_by_one_the_numbers_are_the_same(task, tmp_path):
    fs.solve(*task, 3, checkpoint=tmp_path / "c")
    slowly = fs.solve(*task, 5, resume=tmp_path / "c", runtime="debug")
    quickly = fs.solve(*task, 5)
    for name, values in quickly.history.items():
        np.testing.assert_allclose(slowly.history[name], values, rtol=2e-5, err_msg=name)
    np.testing.assert_allclose(slowly.params, quickly.params, rtol=2e-5, atol=1e-6)


def test_resuming_with_another_jax_version_warns(task, tmp_path, monkeypatch):
    fs.solve(*task, 3, checkpoint=tmp_path / "c")
    monkeypatch.setattr(checkpoints.jax, "__version__", "0.99.1")
    sentence = r"is of JAX 0\.\d+\.\d+, and this is 0\.99\.1: the same numbers up to rounding"
    with pytest.warns(UserWarning, match=sentence):
        run = fs.solve(*task, 5, resume=tmp_path / "c")
    assert run.rounds == 5


class Kept(fs.Tracker):
    """Counts how often it was given the files."""

    times = 0

    def keep(self, files):
        Kept.times += 1


def test_a_full_or_read_only_disk_on_the_command_line(fedsolve, tmp_path, monkeypatch):
    words = ["--set", "run.evaluate_every=1", "--track", f"{__name__}:Kept", "--out"]
    again = ["run", "--resume", "x", "--allow", f"{__name__}:Kept"]
    assert fedsolve("run", "neyman-pearson", "--rounds", 40, *words, "x")[0] == 0
    before = results(tmp_path / "x")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2500, limits[1]))
    try:
        status, out, told = fedsolve(*again, "--rounds", 60)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    told = " ".join(told.split())
    assert status == 1
    assert "No checkpoint after round 60: cannot write" in told
    assert "Cannot write to x: File too large." in told
    assert "To go on: fedsolve run --resume x" in out
    assert Kept.times == 2  # trackers are told all the same
    after = results(tmp_path / "x")
    assert after.pop("config.toml") != before.pop("config.toml")  # it says what was begun
    assert after == before

    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as read_only:
        read_only.setattr(atomic, "write_atomically", refuse)
        status, _, told = fedsolve(*again)
    assert status == 2
    assert "Cannot write to x: Read-only file system." in " ".join(told.split())
    assert fedsolve(*again)[0] == 0  # there is room again
    assert fedsolve("run", "neyman-pearson", "--rounds", 60, *words, "y")[0] == 0
    assert results(tmp_path / "x") == results(tmp_path / "y")


def test_the_order_of_names_makes_no_other_problem():
    """JAX may sort a dict, which would make a checkpoint one of a different run."""
    one, other = {"x": np.ones(2), "y": np.zeros(1)}, {"y": np.zeros(1), "x": np.ones(2)}
    assert checkpoints.fingerprint(one) == checkpoints.fingerprint(other)
    assert checkpoints.fingerprint(one) != checkpoints.fingerprint({"x": one["y"], "y": one["x"]})
