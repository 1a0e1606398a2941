"""What a job may do on a site: only what its owner allows."""

import inspect
import json
import sys
import typing
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.cli import deploy as commands
from fedsolve.experiments import registry as kinds
from fedsolve.experiments.allowed import Allowed
from fedsolve.flare import jobs
from fedsolve.flare.job_files import write_job
from fedsolve.flare.jobs import built
from fedsolve.flare.processes import HOME, OWNER
from fedsolve.storage.arrays import decode, encode
from tests.support.deployment import PROBLEM, experiment

pytestmark = pytest.mark.filterwarnings("ignore")  # FLARE's own


def test_only_what_an_owner_allows(tmp_path, monkeypatch):
    table = json.dumps(experiment(1).resolved | {"problem": {"kind": "os:getcwd"}})
    with pytest.raises(fs.InvalidInput, match="'os:getcwd' is not on this machine's allow-list"):
        built(table)
    (tmp_path / "own.toml").write_text(f'[allow]\nproblems = ["{PROBLEM}"]\n')
    monkeypatch.setenv(OWNER, str(tmp_path / "own.toml"))
    with pytest.raises(fs.InvalidInput, match="'os:getcwd' is not on"):
        built(table)
    allowed = built(table.replace("os:getcwd", PROBLEM))
    assert allowed.cells[""][0].n == 6
    for text, sentence in [
        ("[allow]\npaths = []\n", "takes `problems` and `algorithms`"),
        ("[allowed]\n", r"no table \[allowed\]"),
    ]:
        (tmp_path / "own.toml").write_text(text)
        with pytest.raises(fs.InvalidInput, match=sentence):
            built(table)


class Opened:
    """The files that this process opens while it is told to watch."""

    def __init__(self):
        self.watching, self.paths = False, []
        sys.addaudithook(self._see)

    def _see(self, event, arguments):
        if self.watching and event == "open":
            self.paths.append(str(arguments[0]))


OPENED = Opened()
LIMITED = Allowed(files=False)


def no_network(*_, **__):
    raise OSError("no network here")


def test_a_job_cannot_name_a_file(tmp_path, monkeypatch):
    """Of all that a configuration can build, whatever takes text: a file of that name is not
    opened, and what is said does not depend on whether it is there."""
    digits = {"x": np.zeros((40, 28, 28), np.uint8), "y": np.arange(40) % 10}
    (tmp_path / "mnist").mkdir()
    parts = {f"{k}_{part}": v for part in ("train", "test") for k, v in digits.items()}
    np.savez(tmp_path / "mnist/mnist.npz", **parts)
    monkeypatch.setenv("FEDSOLVE_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(
        urllib.request, "urlopen", lambda *_, **__: (_ for _ in ()).throw(OSError())
    )
    there, missing = str(tmp_path / "there.npy"), str(tmp_path / "gone!.npy")
    np.save(there, np.ones((3, 6)))
    seen, files = [], []
    registries = [kinds.PROBLEMS, kinds.ALGORITHMS, kinds.PARTS, kinds.RULES, {"Clock": fs.Clock}]
    for registry in registries:
        for kind, make in registry.items():
            hints = typing.get_type_hints(make)
            for name in inspect.signature(make).parameters:
                takes = (hints.get(name, Any), *typing.get_args(hints.get(name)))
                if not {str, Path, Any} & set(takes):
                    continue
                told = []
                for path in (there, missing):
                    OPENED.watching = True
                    try:
                        kinds.described({"kind": kind, name: path}, registry, "x", LIMITED)[0]()
                        told.append("built")
                    except Exception as error:
                        told.append(f"{type(error).__name__} {error}".replace(path, "it"))
                    finally:
                        OPENED.watching = False
                seen.append(f"{kind}.{name}")
                files += [seen[-1]] if "which only its owner names" in told[0] else []
                assert told[0] == told[1], seen[-1]
                assert there not in OPENED.paths, seen[-1]
    assert {"images.weights", "sparse_logistic.source", "Trace.rounds", "Clock.up"} <= {*files}
    assert {"images.dataset", "images.partition", "adult.constraint"} <= {*seen} - {*files}
    # A machine's own user names files as before.
    fs.Clock(up=there)
    trace, _ = kinds.build({"kind": "Trace", "rounds": there}, kinds.PARTS, "x", Allowed())
    assert isinstance(trace, fs.participation.Trace)
    assert trace.check(6) is None


def test_a_site_does_not_reveal_the_contents_of_its_files(tmp_path, monkeypatch, capfd):
    """That they are wrong, not what they hold; its owner reads the rest in the log."""
    monkeypatch.setenv(HOME, str(tmp_path / "home"))
    monkeypatch.setenv(OWNER, str(tmp_path / "site.toml"))
    (tmp_path / "site.toml").write_text('[data]\nloader = "npz"\npath = "own.npz"\n')
    hello = encode({"kind": "hello", "total": 0}, {})

    def said(**changes):
        site = jobs.SiteJob(json.dumps(experiment(1).resolved | changes), "trial")
        site.start()
        head, _ = decode(site.answer(0, hello), 0)
        return head["status"], head.get("reason", "")

    (tmp_path / "own.npz").write_text("patient 4711")
    told = said()
    assert told == (
        "refused",
        "Its data or its owner's file is not valid; see its log.",
    )
    assert "Cannot load" in capfd.readouterr().err
    (tmp_path / "site.toml").write_text("patient 4711")
    assert said() == told
    (tmp_path / "site.toml").write_text("[data]\nshare = [0, 2]\n")
    status, reason = said(problem={"kind": "sparse_logistic", "source": __file__})
    assert (status, "would be a path on this machine" in reason) == ("refused", True)
    monkeypatch.setattr(jobs, "built", lambda text: {}["patient-4711"])
    assert said() == ("refused", "KeyError; see this site's log")


@pytest.mark.parametrize("run", ["/etc/x", "../../x", "a/b", ".hidden", "", "x" * 65, "a\n"])
def test_a_run_name_is_not_a_path(tmp_path, monkeypatch, run):
    monkeypatch.setenv(HOME, str(tmp_path / "a/b/home"))
    monkeypatch.setenv(OWNER, str(tmp_path / "site.toml"))
    (tmp_path / "site.toml").write_text("[data]\nshare = [0, 2]\n")
    before = sorted(tmp_path.rglob("*"))
    wanted = experiment(1)
    text = json.dumps(wanted.resolved)
    site = jobs.SiteJob(text, run)
    site.start()
    head, _ = decode(site.answer(0, encode({"kind": "hello", "total": 0}, {})), 0)
    assert "A run's name has letters" in head["reason"]
    refused = pytest.raises(fs.InvalidInput, match="A run's name has letters")
    with refused:
        jobs.Coordinator(text, run)._all_runs()
    with refused:
        write_job(tmp_path, wanted.resolved, run, ["site-1"])
    with refused:
        commands.submit(wanted, "", run, None, [])
    assert sorted(tmp_path.rglob("*")) == before


def test_one_job_at_a_time_has_a_sites_folder(tmp_path, monkeypatch):
    monkeypatch.setenv(HOME, str(tmp_path))
    monkeypatch.setenv(OWNER, str(tmp_path / "site.toml"))
    monkeypatch.setattr(jobs, "PATIENCE", 0.0)
    (tmp_path / "site.toml").write_text("[data]\nshare = [0, 2]\n")
    hello = encode({"kind": "hello", "total": 0}, {})

    def said(site):
        site.start()
        return decode(site.answer(0, hello), 0)[0]

    text = json.dumps(experiment(1).resolved)
    old, new = jobs.SiteJob(text, "trial"), jobs.SiteJob(text, "trial")
    assert said(old) == {"status": "ok", "clients": 2}
    assert said(new)["reason"] == "An older job of this run is still running here."
    old._alone.close()  # as the end of its process does
    assert said(new) == {"status": "ok", "clients": 2}
    new._alone.close()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("deploy.deadline=abc", "deploy.deadline must be a number, got 'abc'"),
        ("deploy.deadline=0", "deploy.deadline must be positive"),
        ("deploy.quorum=2.0", "deploy.quorum is a part of the clients asked"),
        ("deploy.quorum=-0.5", "deploy.quorum must be at least 0"),
        ("deploy.sites=1.5", "deploy.sites must be a whole number"),
        ("deploy.alarms=loud", "deploy.alarms is one of refuse, clip, note, got 'loud'"),
    ],
)
def test_a_deployments_own_numbers(change, sentence):
    with pytest.raises(fs.InvalidInput, match=sentence):
        experiment(1, change)
