"""Real federations: real processes, real certificates, real losses."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

import fedsolve as fs
from fedsolve import config
from fedsolve.flare import engine
from fedsolve.flare.deploy import check_welcome, local_federation, run_on
from fedsolve.flare.jobs import experiment_of

pytestmark = [
    pytest.mark.xdist_group("flare"),
    pytest.mark.filterwarnings("ignore"),  # FLARE's own
]


def experiment(rounds, *changes):
    table = config.read("neyman-pearson")
    base = [f"run.rounds={rounds}", "run.precision=float64", "problem.clients=4"]
    for change in [*base, "algorithm.participants=3", *changes]:
        table = config.override(table, change)
    return config.resolve("test", table)


@pytest.fixture(scope="module")
def federation():
    with local_federation(4, 4, lambda news: None) as running:
        yield running


def test_one_command_deploys_and_leaves_nothing(tmp_path):
    place, scratch = tmp_path / "work", tmp_path / "scratch"
    place.mkdir()
    scratch.mkdir()
    words = ["deploy", "neyman-pearson", "--local", "2", "--rounds", "4", "--out", "x"]
    done = subprocess.run(
        [sys.executable, "-m", "fedsolve", *words],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"TMPDIR": str(scratch), "HOME": str(tmp_path / "home")},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert {p.name for p in (place / "x").iterdir()} >= {"history.csv", "params.safetensors"}
    assert list(scratch.iterdir()) == []
    assert not list((tmp_path / "home").rglob("*nvflare*"))
    for process in psutil.process_iter(["cmdline"]):
        assert str(scratch) not in " ".join(process.info["cmdline"] or [])


def simulated(wanted):
    ((problem, algorithm),) = wanted.cells.values()
    return fs.solve(problem, algorithm, seed=wanted.seeds[0], **wanted.options)


def assert_same(run, expected):
    np.testing.assert_allclose(run.params, expected.params, atol=1e-10)
    assert run.history.keys() == expected.history.keys()
    for name, values in expected.history.items():
        exact = "bytes" in name or name in ("round", "cohort")
        np.testing.assert_allclose(run.history[name], values, atol=0 if exact else 1e-10)


QUANTISED = [
    "algorithm.switching=Hard",
    "algorithm.uplink={kind='Compose', first={kind='TopK', fraction=0.5}, second={kind='Float8'}}",
    "algorithm.downlink=Float4",
]


@pytest.mark.parametrize("changes", [[], QUANTISED], ids=["Top-K", "quantised"])
def test_a_real_federation_follows_the_simulation(federation, changes):
    wanted = experiment(20, *changes)
    run = run_on(federation, wanted, f"same-{len(changes)}", lambda news: None)
    assert_same(run, simulated(wanted))


def job_processes(process):
    """The processes that a server's or site's process started for jobs."""
    return [p for p in psutil.Process(process.pid).children(recursive=True) if p.is_running()]


def kill_at(federation, name, run, round):
    """SIGKILLs a job's process once the run is that far."""
    path = federation.home(run) / "progress.jsonl"

    def watch():
        while not path.exists() or path.read_text().count('"round"') < round:
            time.sleep(0.05)
        for process in job_processes(federation.processes[name]):
            process.kill()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def test_a_killed_site_does_not_stop_the_others(federation):
    killer = kill_at(federation, "site-3", "site-killed", 5)
    told = []
    wanted = experiment(30, "algorithm.participants=4")
    run = run_on(federation, wanted, "site-killed", told.append, deadline=4.0)
    killer.join(timeout=1)
    assert run.rounds == 30
    rounds = [news for news in told if "round" in news]
    assert rounds[0]["answered"] == ["site-1", "site-2", "site-3", "site-4"]
    assert rounds[-1]["answered"] == ["site-1", "site-2", "site-4"]
    assert any("site-3" in news.get("note", "") for news in told)
    assert np.isfinite(run.history["objective"]).all()


def test_a_killed_server_goes_on_to_the_same_bits(federation):
    """The next job resumes from the checkpoint, and the sites from theirs: as if nothing was."""
    killer = kill_at(federation, "localhost", "server-killed", 6)
    wanted = experiment(15)
    told = []
    run = run_on(federation, wanted, "server-killed", told.append)
    killer.join(timeout=1)
    assert {"note": "going on with a new job"} in told
    assert_same(run, simulated(wanted))


def test_strangers_are_told_why_they_are_refused(federation, tmp_path):
    kit = federation.kits["site-1"]
    check_welcome(kit)
    port = int((kit / "startup/fed_client.json").read_text().split("localhost:")[1].split('"')[0])
    foreign = engine.make_kits(tmp_path / "foreign", "localhost", port, ["site-1"])["site-1"]
    began = time.monotonic()
    with pytest.raises(fs.InvalidInput, match="is not the one of this kit"):
        check_welcome(foreign)
    # the right root, and a certificate that another one signed
    own_root = (kit / "startup/rootCA.pem").read_bytes()
    (foreign / "startup/rootCA.pem").write_bytes(own_root)
    with pytest.raises(fs.InvalidInput, match="refuses this kit"):
        check_welcome(foreign)
    elsewhere = engine.make_kits(tmp_path / "elsewhere", "localhost", engine.free_port(), ["s"])[
        "s"
    ]
    with pytest.raises(fs.InvalidInput, match="No server at localhost"):
        check_welcome(elsewhere)
    assert time.monotonic() - began < 15
    for key in [*tmp_path.rglob("*.key"), *kit.parent.rglob("*.key")]:
        assert key.stat().st_mode & 0o077 == 0


def test_a_deployment_is_one_run():
    several = json.dumps(config.read("fedsgm-figure-1"))
    with pytest.raises(fs.InvalidInput, match="one variant with one seed"):
        experiment_of(several)


def test_a_sites_own_data(tmp_path):
    from fedsolve.flare.data import site_problem

    problem = fs.problems.neyman_pearson(clients=4)
    rows = {k: v[1:3] for k, v in problem.samples.values.items()}
    np.savez(tmp_path / "own.npz", **rows)
    (tmp_path / "a.toml").write_text('[data]\nloader = "npz"\npath = "own.npz"\n')
    (tmp_path / "b.toml").write_text("[data]\nshare = [1, 2]\n")
    for name in "ab":
        own = site_problem(problem, Path(tmp_path / f"{name}.toml"))
        assert own.n == 2
        np.testing.assert_array_equal(own.samples.values["minority"], rows["minority"])
    for text, sentence in [
        ("[data]\nshare = [3, 2]\n", "the problem has 4 clients, not 5"),
        ("[data]\nloader = 'npz'\npath = 'none.npz'\n", "Cannot load"),
        ("[data]\nloader = 'pickle'\n", "needs `share`"),
        ("nothing", "no table"),
    ]:
        (tmp_path / "bad.toml").write_text(text)
        with pytest.raises(fs.InvalidInput, match=sentence):
            site_problem(problem, tmp_path / "bad.toml")
