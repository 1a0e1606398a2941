"""What owners and the administrator are told, and what their commands change."""

import json
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.flare_api.flare_api import Session

import fedsolve as fs
from fedsolve.cli import deploy as commands
from fedsolve.flare import admin as module
from fedsolve.flare import jobs, launcher
from fedsolve.flare.admin import Admin
from fedsolve.flare.processes import HOME, OWNER, free_port
from fedsolve.flare.provisioning import ADMIN, make_kits
from fedsolve.storage.arrays import decode, encode
from tests.support.deployment import experiment

pytestmark = pytest.mark.filterwarnings("ignore")  # FLARE's own


class Server(Session):
    """A server with one running job, as the administrator's session sees it."""

    def __init__(self, jobs=(), news=()):
        self.jobs, self.entries, self.disabled, self.wishes = list(jobs), list(news), [], []

    def get_system_info(self):
        here = SimpleNamespace(name="north", last_connect_time=100.0)
        alive = [SimpleNamespace(job_id=job["job_id"]) for job in self.jobs if job.get("alive")]
        return SimpleNamespace(client_info=[here], job_info=alive)

    def list_jobs(self):
        return self.jobs

    def do_app_command(self, job, topic, wish):
        self.wishes.append(wish)
        return {"news": self.entries[wish["since"] :], "rounds": 1}

    def disable_client(self, name):
        self.disabled.append(name)

    def download_job_result(self, job, folder):
        return folder


def admin_of(server, kit=None):
    admin = Admin.__new__(Admin)
    admin._kit = kit or module.Path("no-kit")
    admin._session, admin._clock = server, module._ServerClock()
    return admin


def job(status, run="trial", number="1", **more):
    return {"job_id": number, "job_name": run, "status": status, "submit_time": number, **more}


ROUND = {"round": 7, "objective": 0.5, "answered": ["north"], "missing": {"va": "no answer"}}


@pytest.mark.parametrize(
    ("jobs", "news", "told"),
    [
        ([job("SUBMITTED")], [], "handed over"),
        ([job("DISPATCHED", alive=True)], [], "handed over"),
        ([job("RUNNING", alive=True)], [], "running, before its first evaluation"),
        (
            [job("RUNNING", alive=True)],
            [{"note": "x"}, ROUND],
            "running, round 7, f 0.5, answered by north; without va (no answer)",
        ),
        (
            [job("RUNNING", alive=True)],
            [ROUND | {"missing": {}}, {"note": "x", "waiting": ["va"]}],
            "waiting for va; round 7, f 0.5, answered by north",
        ),
        ([job("RUNNING")], [], "ended early, as the server went away"),
        ([job("FINISHED:ABORTED")], [], "ended early, as it was stopped"),
        ([job("FINISHED:EXECUTION_EXCEPTION")], [], "ended early"),
        ([job("FINISHED:COMPLETED")], [], "waiting to be continued"),
        (
            [job("FINISHED:COMPLETED"), job("SUBMITTED", number="2")],
            [],
            "handed over",  # a run is as its newest job is
        ),
        (
            [job("RUNNING", alive=True)],
            [{"error": "Round 3: no.", "refused": False}],
            "stopped: Round 3: no.",
        ),
        (  # a job that only has the name of a run says nothing about it
            [job("RUNNING", alive=True), job("RUNNING", number="2", alive=True)],
            [{"error": "another", "refused": True}],
            "refused",
        ),
    ],
)
def test_a_status_in_our_words(jobs, news, told):
    lines = admin_of(Server(jobs, news)).overview()
    assert lines == ["site north", f"run trial: {told}"]


REFUSED = {module.STOPPED: {"error": "trial belongs to another experiment", "refused": True}}


@pytest.mark.parametrize(
    ("results", "told"),
    [
        ([{module.WITHOUT: {}}], "finished"),
        ([{module.WITHOUT: {"va": "no answer"}}], "finished without va"),
        ([{module.STOPPED: {"error": "Too far.", "refused": False}}], "stopped: Too far."),
        ([{}], "waiting to be continued"),
        ([{module.WITHOUT: {}}, REFUSED], "finished"),  # the newer job had its name only
        ([REFUSED], "refused"),
    ],
)
def test_a_run_that_is_over_says_how_it_ended(results, told):
    def download(job, folder):
        for name, content in results[int(job)].items():
            module.Path(folder, name).write_text(json.dumps(content))
        return folder

    server = Server([job("FINISHED:COMPLETED", number=str(i)) for i in range(len(results))])
    server.download_job_result = download
    assert admin_of(server).overview()[-1] == f"run trial: {told}"


def test_a_job_that_only_has_the_name_of_a_run_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv(HOME, str(tmp_path))
    home = jobs._run_folder("trial")
    coordinator = jobs.Coordinator(json.dumps(experiment(1).resolved), "trial")
    (home / "experiment.json").write_text("{}")
    with pytest.raises(jobs._NameTaken, match="belongs to a different experiment"):
        coordinator._all_runs()
    monkeypatch.setattr(jobs, "_results", lambda: tmp_path)
    coordinator._stop("No.", refused=True)
    kept = json.loads((tmp_path / jobs.STOPPED).read_text())
    assert [kept] == coordinator._news == [{"error": "No.", "refused": True}]


def test_a_revoked_site_is_asked_no_more(monkeypatch):
    server = Server([job("RUNNING", alive=True)])
    admin = admin_of(server)
    admin.revoke("va")
    assert server.disabled == ["va"]
    assert server.wishes[-1]["revoke"] == "va"
    for name in ("", "a b", ADMIN):
        with pytest.raises(fs.InvalidInput, match="is not the name of a site"):
            admin.revoke(name)
    # In the job that goes on:
    coordinator = jobs.Coordinator(json.dumps(experiment(1).resolved), "trial")
    coordinator._command("", server.wishes[-1], None)
    collab = SimpleNamespace(clients=[SimpleNamespace(name="va")], is_aborted=False, context=None)
    monkeypatch.setattr(jobs, "collab", collab)
    monkeypatch.setattr(jobs, "set_call_context", lambda context: None)
    transport = jobs.CollabTransport(1.0, lambda entry: None, coordinator._revoked)
    head, _ = decode(transport(0, {"va": b""})["va"], 0)
    assert head == {"status": "refused", "reason": "its kit was revoked"}


def test_only_sites_that_exist_are_revoked(tmp_path):
    server = Server()
    admin = admin_of(server, make_kits(tmp_path / "kits", "localhost", 8123, ["va", "ohio"])[ADMIN])
    with pytest.raises(fs.InvalidInput, match=r"no site 'ohoi'; the sites are north, ohio, va\."):
        admin.revoke("ohoi")
    assert server.disabled == []
    for name in ("ohio", "north"):  # in the kit's list; connected
        admin.revoke(name)
    assert server.disabled == ["ohio", "north"]


def test_a_server_that_is_not_there_is_named(tmp_path, monkeypatch):
    """FLARE's own session would only say that it cannot connect."""
    port = free_port()
    kits = make_kits(tmp_path / "kits", "localhost", port, ["va"])

    def fails(kit, timeout):
        raise fs.InvalidInput("Cannot connect.")

    monkeypatch.setattr(commands, "Admin", fails)
    with pytest.raises(fs.InvalidInput, match=f"No server at localhost:{port}"):
        commands.cancel("trial", str(kits[ADMIN]))


def test_nobody_is_revoked_without_being_asked():
    with pytest.raises(fs.InvalidInput, match="to revoke it, add --yes"):
        commands.revoke("va", "kit", yes=False)


def test_kits_are_hardened_when_they_are_made(tmp_path):
    kits = make_kits(tmp_path / "kits", "localhost", 8123, ["va"])
    for name, words in [
        ("localhost", "deploy server KIT"),
        ("va", "deploy site KIT --data site.toml"),
        (ADMIN, "deploy revoke SITE"),
    ]:
        kit = kits[name]
        assert words in (kit / "README.txt").read_text()
        left = [path.name for path in kit.rglob("*") if path.suffix in (".sh", ".ipynb")]
        assert (left, [*kit.rglob("readme.txt")]) == ([], [])
        if name == ADMIN:
            continue
        resources = json.loads((kit / "local/resources.json").read_text())
        assert "fedsolve.flare.jobs.Coordinator" in resources["class_allow_list"]
        rights = json.loads((kit / "local/authorization.json").read_text())["permissions"]
        assert rights["project_admin"]["byoc"] == "none"
        logs = json.loads((kit / "local/log_config.json").read_text())
        assert logs["handlers"]["consoleHandler"]["level"] == "CRITICAL"
        assert all(h["maxBytes"] < 10**7 for h in logs["handlers"].values() if "maxBytes" in h)
        channel = json.loads((kit / "local/comm_config.json").read_text())
        assert channel["internal"]["resources"]["connection_security"] == "mtls"


def test_the_server_says_which_runs_are_unfinished(tmp_path, monkeypatch, capsys):
    for run, mark in [("first", "done"), ("second", "cancelled"), ("third", ""), ("fourth", "")]:
        home = tmp_path / "fedsolve/runs" / run
        home.mkdir(parents=True)
        (home / "experiment.json").write_text("{}")
        if mark:
            (home / mark).touch()
    monkeypatch.setattr(commands, "_kit", lambda kit, needs: tmp_path)
    monkeypatch.setattr(commands, "check_certificate", lambda kit: None)
    monkeypatch.setattr(commands, "keep_running", lambda start, log, show: 0)
    assert commands.server("kit", None, None) == 0
    told = capsys.readouterr().out
    assert "Not finished: fourth, third. To go on, start the server with --kit" in told


def test_a_lost_job_process_is_told_once(monkeypatch, capsys):
    class Handle(launcher.JobHandleSpec):
        codes = iter([0, *[launcher.JobReturnCode.EXECUTION_ERROR] * 2])

        def poll(self):
            return next(self.codes)

        def terminate(self):
            """As the base class wants it."""

        def wait(self):
            """The same."""

    monkeypatch.setattr(
        launcher.ClientProcessJobLauncher, "launch_job", lambda self, meta, context: Handle()
    )
    handle = object.__new__(launcher.TolerantLauncher).launch_job({}, FLContext())
    assert [handle.poll() for _ in range(3)] == [0, *[launcher.JobReturnCode.UNKNOWN] * 2]
    assert capsys.readouterr().err.count("killed, or out of memory") == 1


def test_a_question_that_takes_too_long_ends_the_process(tmp_path, monkeypatch, capsys):
    """A compiled program cannot be stopped; nothing was answered, so nothing is lost."""
    monkeypatch.setenv(HOME, str(tmp_path))
    monkeypatch.setenv(OWNER, str(tmp_path / "site.toml"))
    ended = []
    monkeypatch.setattr(jobs.os, "_exit", ended.append)
    (tmp_path / "site.toml").write_text("[data]\nshare = [0, 2]\n[limits]\nseconds = 0.05\n")
    site = jobs.SiteJob(json.dumps(experiment(1).resolved), "trial")
    site.start()
    monkeypatch.setattr(site, "_share", lambda cell: time.sleep(0.5))
    site.answer(0, encode({"kind": "hello", "total": 0}, {}))
    assert ended == [1]
    assert "a question took more than 0.05 s" in capsys.readouterr().err
    monkeypatch.setattr(site, "_share", lambda cell: None)
    site.answer(0, b"")
    time.sleep(0.2)
    assert ended == [1]


def test_too_little_address_space_gets_a_sentence():
    """It ended in an abort of the compiler's threads."""
    done = subprocess.run(
        ["bash", "-c", f"ulimit -v 3000000; {sys.executable} -m fedsolve list"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "2.9 GiB of addresses (`ulimit -v`), and Fedsolve takes 4 or more" in done.stderr
