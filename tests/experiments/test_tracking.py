"""Trackers get every round exactly once, even after failures, and never delay a run."""

import importlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import fedsolve as fs
from fedsolve.experiments import config, tracking
from tests.support.commands import wait_for_a_checkpoint
from tests.support.documents import blocks
from tests.support.mlflow_database import check

RUN = fs.Tracked("key", "experiment", seed=0)


def entries(first, last):
    rounds = np.arange(first, last + 1)
    return {"round": rounds, "objective": 1.0 / rounds, "wide": np.zeros((len(rounds), 2))}


class Flaky(fs.Tracker):
    """Keeps rows, and fails when it is told to: after the rows were kept, or before."""

    def __init__(self, plan=()):
        super().__init__()
        self.there, self.log, self.plan, self.files = [], [], list(plan), []

    def begin(self, run):
        self._fail("begin")
        return max(self.there, default=0)

    def rows(self, run, entries):
        self._fail("before rows")
        self.there += entries["round"].tolist()
        self._fail("after rows")

    def end(self, run, status):
        self._fail("end")
        self.log.append(status)

    def keep(self, files):
        self._fail("keep")
        self.files = list(files)

    def _fail(self, where):
        if self.plan and self.plan[0] == where:
            self.plan.pop(0)
            raise ConnectionError(f"gone: {where}")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(tracking, "FIRST_PAUSE", 0.01)


@pytest.mark.parametrize(
    "plan",
    [
        [],
        ["begin", "begin"],
        ["before rows", "begin", "after rows", "after rows"],
        ["after rows", "before rows", "end"],
        ["end", "begin", "keep"],
    ],
)
def test_every_round_once_in_order(plan):
    tracker, told = Flaky(plan), []
    follower = fs.Follower(tracker, "it", told.append)
    progress = follower.follow(RUN)
    for first in range(1, 40, 5):
        progress(first + 4, 40, entries(first, first + 4))
    follower.end(RUN, "finished", entries(1, 42))  # two rounds that progress was not told
    deadline = time.monotonic() + 10
    while not tracker.log:  # a failure while it closes would be the last try
        assert time.monotonic() < deadline
        time.sleep(0.01)
    plan = [each for each in plan if each == "keep"]
    assert follower.close([Path("file")]) == ("the files (gone: keep)" if plan else "")
    assert tracker.there == list(range(1, 43))
    assert tracker.log == ["finished"]
    assert tracker.files == ([] if plan else [Path("file")])
    assert any("does not answer" in text for text in told) == bool(told)


def test_unsent_entries_are_reported_and_a_stuck_tracker_is_abandoned():
    follower = fs.Follower(Flaky(["before rows"] * 10**6), "it")
    follower.follow(RUN)(5, 5, entries(1, 5))
    assert follower.close() == "seed-0 after round 0 (gone: before rows)"

    class Stuck(fs.Tracker):
        def rows(self, run, entries):
            threading.Event().wait(60)

    follower = fs.Follower(Stuck(), "it")
    follower.follow(RUN)(5, 5, entries(1, 5))
    assert follower.close(impatient=lambda: True) == "seed-0 after round 0 (it is slow)"


def test_the_table_is_written_during_the_run(tmp_path):
    path = tmp_path / "history.csv"
    table = tracking.Table(path)
    other = fs.Tracked("other", "experiment", seed=1, variant="b")
    first = fs.Tracked("first", "experiment", seed=0, variant="a")
    table.begin(first)
    table.rows(first, entries(1, 2))
    table.rows(first, entries(3, 3))
    assert pd.read_csv(path)["round"].tolist() == [1, 2, 3]
    table.begin(other)
    table.rows(other, entries(1, 2) | {"more": np.ones(2)})  # another column: written anew
    table.rows(other, entries(3, 3) | {"more": np.ones(1)})
    table.begin(other)  # something failed: everything again
    table.rows(other, entries(1, 3) | {"more": np.ones(3)})
    found = pd.read_csv(path)
    assert found["round"].tolist() == [1, 2, 3, 1, 2, 3]
    assert found["variant"].tolist() == ["a"] * 3 + ["b"] * 3
    assert found["more"].isna().tolist() == [True] * 3 + [False] * 3
    assert list(found) == ["variant", "seed", "round", "objective", "more"]


def test_invalid_trackers_raise(fedsolve, tmp_path, monkeypatch):
    wrong = {
        "wandb": "'wandb' is not a known tracker; known: mlflow, or your own as module:Class.",
        "nowhere:Tracker": "nowhere:Tracker cannot be imported: No module named 'nowhere'.",
        "os:system=ls": "os:system is not a subclass of fedsolve.Tracker.",
        "mlflow=http://me:secret@host": "the address must not hold a password",
    }
    for words, sentence in wrong.items():
        status, _, told = fedsolve("run", "neyman-pearson", "--rounds", 2, "--track", words)
        assert (status, sentence in " ".join(told.split())) == (2, True), told
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    status, _, told = fedsolve("run", "neyman-pearson", "--rounds", 2, "--track", "mlflow")
    assert status == 2
    assert "The tracker mlflow needs MLflow: pip install 'fedsolve[mlflow]'." in told
    assert not (tmp_path / "runs").exists()


needs_mlflow = pytest.mark.skipif(find_spec("mlflow") is None, reason="MLflow is not installed")


class Seen(fs.Tracker):
    """What was told, for everyone to see."""

    there: dict = {}  # noqa: RUF012

    def begin(self, run):
        return max((row["round"] for row in self.there.setdefault(run.key, [])), default=0)

    def rows(self, run, entries):
        for k in range(len(entries["round"])):
            row = {name: values[k].item() for name, values in entries.items() if values.ndim == 1}
            self.there[run.key].append(row)


def test_deployments_are_followed_too(tmp_path, monkeypatch):
    """With news as a server gives them, and one that is not heard."""
    pytest.importorskip("nvflare")
    commands = importlib.import_module("fedsolve.cli.deploy")
    monkeypatch.chdir(tmp_path)
    table = config.read("neyman-pearson")
    for change in ("problem.clients=3", "algorithm.participants=2", "run.seeds=[4, 5]"):
        table = config.override(table, change)
    table["run"] |= {"rounds": 7, "evaluate_every": 2}
    wanted = config.resolve("test", table)
    runs = [fs.solve(*wanted.cells[""], seed=seed, **wanted.options) for _, seed in wanted.runs]
    link = {"answered": ["a"], "milliseconds": 1.0, "wire_sent": 9, "wire_received": 9}
    link |= {"missing": {}, "clients": 3, "ended": 0.0}

    def deployed(experiment, sites, tell, running=None):
        tell({"note": "starting"})
        for cell, run in enumerate(runs):
            numbers = {name: v for name, v in run.history.items() if v.ndim == 1}
            for k in range(len(run.history["round"])):
                if (cell, k) != (1, 2):
                    row = {name: values[k].item() for name, values in numbers.items()}
                    tell({"cell": cell, "variant": "", "seed": run.seed} | row | link)
        return {"": runs}, {}, "finished"

    monkeypatch.setattr(commands, "deploy_local", deployed)
    assert commands.local(wanted, 2, "x", [f"{__name__}:Seen"]) == 0
    found = pd.read_csv(tmp_path / "x/history.csv")
    assert len(Seen.there) == 2
    for run, rows in zip(runs, Seen.there.values(), strict=True):
        told = pd.DataFrame(rows)
        assert told["round"].tolist() == [2, 4, 6, 7]
        own = found[found["seed"] == run.seed].drop(columns="seed").reset_index(drop=True)
        pd.testing.assert_frame_equal(told[list(own)], own, check_dtype=False)
    with pytest.raises(fs.InvalidInput, match="known: mlflow"):
        commands.local(wanted, 2, "y", ["wandb"])
    assert not (tmp_path / "y").exists()


@needs_mlflow
def test_addresses_are_as_mlflow_means_them(tmp_path, monkeypatch):
    """And the same once more, as a resumed run reads them from another folder."""
    from fedsolve.experiments.mlflow import MLflow

    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    for variable, given, expected in [
        ("", "", f"sqlite:///{tmp_path}/mlflow.db"),
        ("", "x.db", f"sqlite:///{tmp_path}/x.db"),
        ("", "sqlite:///x.db", f"sqlite:///{tmp_path}/x.db"),
        ("", "there", f"file://{tmp_path}/there"),
        ("", "databricks", "databricks"),
        ("databricks", "", "databricks"),
        ("databricks://profile", "", "databricks://profile"),
        ("./mlruns", "", f"file://{tmp_path}/mlruns"),
        ("x.db", "", f"sqlite:///{tmp_path}/x.db"),
        ("http://127.0.0.1:5000", "", "http://127.0.0.1:5000"),
    ]:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", variable)
        address = MLflow(given).address
        assert address == expected
        assert MLflow(address).address == expected


@needs_mlflow
@pytest.mark.filterwarnings("ignore")  # MLflow's own
def test_a_resumed_run_continues_in_the_same_database_file(fedsolve, tmp_path):
    (tmp_path / "x.toml").write_text(
        """
        problem = { kind = "neyman_pearson", clients = 6 }
        algorithm = { kind = "FedSGM", step_size = 0.1, tolerance = 0.05, participants = 3 }
        run = { rounds = 150, evaluate_every = 2 }
        [variants]
        hard = { "algorithm.switching" = "Hard" }
        soft = { "algorithm.switching" = { kind = "Soft", beta = 40.0 } }
        """
    )
    first = ["x.toml", "--track", "mlflow", "--out", "y"]
    for words in (first, ["--resume", "y", "--rounds", 160]):
        status, _, told = fedsolve("run", *words)
        assert (status, told.strip()) == (0, "")
        check(tmp_path / "mlflow.db", tmp_path / "y/history.csv")
    with sqlite3.connect(tmp_path / "mlflow.db") as base:
        runs = base.execute("select name, status from runs order by name").fetchall()
        assert runs == [(name, "FINISHED") for name in ("hard/seed-0", "soft/seed-0", "x")]
        kinds = base.execute("select value from params where key = 'algorithm.switching'")
        assert sorted(kinds.fetchall()) == [("Hard",), ("Soft",)]
        rounds = base.execute("select value from tags where key = 'fedsolve.rounds'").fetchall()
        assert rounds == [("160",)] * 2
    files = {path.name: path for path in (tmp_path / "mlruns/x").rglob("*.*")}
    assert files.keys() >= {"config.toml", "params.safetensors", "plot.png", "run.json"}
    assert files["history.csv"].read_bytes() == (tmp_path / "y/history.csv").read_bytes()


class Server:
    """A real MLflow server on loopback, that can be killed and started again."""

    def __init__(self, folder):
        self.folder, self.process = folder, None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"

    def start(self):
        words = ["server", "--backend-store-uri", f"sqlite:///{self.folder}/server.db"]
        words += ["--port", str(self.port), "--workers", "1"]
        quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", *words],
            cwd=self.folder,
            env=os.environ | quiet,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def kill(self):
        if self.process is not None and self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@needs_mlflow
@pytest.mark.slow
def test_a_server_that_comes_and_goes_has_everything_in_the_end(tmp_path):
    server, told = Server(tmp_path), tmp_path / "told"
    name = f"mlflow={server.address}"

    def wait_until(sentence, times):
        deadline = time.monotonic() + 200
        while " ".join(told.read_text().split()).count(f"{name} {sentence}") < times:
            assert run.poll() is None, told.read_text()
            assert time.monotonic() < deadline, told.read_text()
            time.sleep(0.1)

    words = ["run", "neyman-pearson", "--rounds", 10**7, "--set", "run.evaluate_every=500"]
    words += ["--checkpoint-every", 1000, "--out", "x", "--track", name]
    with open(told, "w") as errors:
        run = subprocess.Popen(
            [sys.executable, "-m", "fedsolve", *map(str, words)], cwd=tmp_path, stderr=errors
        )
    try:
        wait_until("does not answer ([Errno 111] Connection refused)", 1)
        server.start()
        wait_until("is back, and has everything up to now.", 1)
        server.kill()
        wait_until("does not answer", 2)
        wait_for_a_checkpoint(run, tmp_path / "x")  # the run goes on
        server.start()
        wait_until("is back", 2)
        run.terminate()
        assert run.wait(timeout=100) == 143, told.read_text()
        assert "did not get" not in told.read_text()
    finally:
        run.kill()
        run.wait()
        server.kill()
    check(tmp_path / "server.db", tmp_path / "x/history.csv")
    with sqlite3.connect(tmp_path / "server.db") as base:
        assert base.execute("select name, status from runs").fetchall() == [("seed-0", "KILLED")]
    stored = {path.name for path in (tmp_path / "mlartifacts").rglob("*.*")}
    assert stored >= {"config.toml", "history.csv", "params.safetensors"}


def test_entries_missed_at_the_end_are_sent_by_resume(fedsolve, tmp_path, monkeypatch):
    """With the tracker that the documents show; its folder is missing at first."""
    (tmp_path / "lines.py").write_text(blocks("docs/tracking.md")[0])
    monkeypatch.syspath_prepend(tmp_path)
    address = "lines:Lines=gone/rounds.jsonl"
    status, _, told = fedsolve(
        "run", "neyman-pearson", "--rounds", 7, "--out", "x", "--track", address
    )
    told = " ".join(told.split())
    assert status == 0
    assert f"{address} does not answer ([Errno 2] No such file" in told
    assert f"{address} did not get seed-0 after round 0, the files ([Errno 2] No such" in told
    again = "fedsolve run --resume x --allow lines:Lines"
    assert f"It is all in x; to send it: {again}" in told
    (tmp_path / "gone").mkdir()
    for words in ([], ["--rounds", 9]):
        status, _, told = fedsolve(*again.split()[1:], *words)
        assert (status, told.strip()) == (0, "")
        lines = list(map(json.loads, (tmp_path / "gone/rounds.jsonl").read_text().splitlines()))
        table = pd.read_csv(tmp_path / "x/history.csv")
        assert [line["round"] for line in lines] == table["round"].tolist()
        np.testing.assert_allclose([line["objective"] for line in lines], table["objective"])


def test_the_page_on_trackers_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in blocks("docs/tracking.md"):
        exec(block, names)
    assert names["missed"] == ""
    assert len((tmp_path / "rounds.jsonl").read_text().splitlines()) == 20
