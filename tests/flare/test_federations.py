"""Real federations: processes, certificates and failures as in a deployment."""

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time

import numpy as np
import pandas as pd
import psutil
import pytest
from safetensors.numpy import load_file

import fedsolve as fs
from fedsolve.experiments import config
from fedsolve.experiments.audit import read_audits
from fedsolve.flare import processes
from fedsolve.flare.admin import NoServer
from fedsolve.flare.job_files import write_job
from fedsolve.flare.kit_checks import check_certificate, check_connection
from fedsolve.flare.local_federation import local_federation, run_on
from fedsolve.flare.provisioning import ADMIN, make_kits
from tests.support.conformance import ALGORITHMS, KINDS
from tests.support.deployment import (
    ALGORITHM,
    PROBLEM,
    as_from_a_shell,
    certificate_for,
    experiment,
    wait_until,
)
from tests.support.mlflow_database import check

pytestmark = [
    pytest.mark.xdist_group("flare"),
    pytest.mark.filterwarnings("ignore"),  # FLARE's own
]


@pytest.fixture(scope="module")
def federation():
    allow = [PROBLEM, ALGORITHM]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        with local_federation(6, 4, lambda news: None, allow) as running:
            wait_until(lambda: len(running.admin.sites()) == 4)
            yield running


@pytest.mark.parametrize(
    "stopped",
    [
        pytest.param(False, id="to the end"),
        pytest.param(True, id="until Ctrl-C", marks=pytest.mark.slow),
    ],
)
def test_one_command_deploys_and_leaves_no_files_or_processes(tmp_path, fedsolve, stopped):
    place, scratch = tmp_path / "work", tmp_path / "scratch"
    place.mkdir()
    scratch.mkdir()
    rounds = "100000" if stopped else "4"
    words = ["deploy", "neyman-pearson", "--local", "3", "--rounds", rounds, "--out", "x"]
    process = subprocess.Popen(
        as_from_a_shell([sys.executable, "-m", "fedsolve", *words]),
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"TMPDIR": str(scratch), "HOME": str(tmp_path / "home")},
    )
    if stopped:
        wait_until(lambda: any(lines(p) > 3 for p in scratch.rglob("progress.jsonl")))
        process.send_signal(signal.SIGINT)
    told, _ = process.communicate(timeout=240)
    assert process.returncode == (130 if stopped else 0), told[-2000:]
    assert {p.name for p in (place / "x").iterdir()} >= {"history.csv", "params.safetensors"}
    status = json.loads((place / "x/run.json").read_text())["status"]
    assert status == ("interrupted" if stopped else "finished")
    assert list(scratch.iterdir()) == []
    assert not list((tmp_path / "home").rglob("*nvflare*"))
    for other in psutil.process_iter(["cmdline"]):
        assert str(scratch) not in " ".join(other.info["cmdline"] or [])
    if not stopped:
        simulated = fs.experiments.run("neyman-pearson", rounds=4, out=tmp_path / "here").folder
        one, other = (pd.read_csv(folder / "history.csv") for folder in (place / "x", simulated))
        for name in ("objective", "constraint", "bytes_up"):
            np.testing.assert_allclose(one[name], other[name], rtol=1e-4, err_msg=name)
        assert_three_sites_audit(fedsolve, place / "x")


def assert_three_sites_audit(fedsolve, run):
    """Each site counts on its own held-out data; the verdicts are on all of them."""
    held_out = {k: np.asarray(v) for k, v in fs.problems.neyman_pearson().test.items()}
    w = load_file(run / "params.safetensors")["seed-0/params"]
    words, values = ["--range", "0,20"], []
    for site in range(3):
        own = {name: rows[None, site::3] for name, rows in held_out.items()}
        values.append(np.logaddexp(0, -(own["minority"][0] @ w)).mean())
        np.savez(run.parent / f"{site}.npz", **own)
        counts = run.parent / f"{site}.json"
        told = ["--data", run.parent / f"{site}.npz", "--site", f"hospital {site}"]
        assert fedsolve("audit", run, *told, "--range", "0,20", "--counts", counts)[0] == 0
        words += ["--merge", counts]
    status, told, _ = fedsolve("audit", run, *words)
    assert status == 0
    assert "hospital 2" in told
    found = read_audits(run)["seed-0"]
    assert found["g"].value == pytest.approx(np.mean(values), rel=1e-5)
    assert found["g", "hospital 1"].value == pytest.approx(values[1], rel=1e-5)


def lines(path):
    return path.read_text().count('"round"') if path.exists() else 0


def simulated(wanted, variant=""):
    problem, algorithm = wanted.cells[variant]
    return fs.solve(problem, algorithm, seed=wanted.seeds[0], **wanted.options)


def assert_same(run, expected):
    np.testing.assert_allclose(run.params, expected.params, atol=1e-10)
    # What clients hold back is the sites' own: the server does not know it.
    assert run.history.keys() == expected.history.keys() - {"uplink_error"}
    for name in run.history:
        values = expected.history[name]
        exact = "bytes" in name or name in ("round", "cohort")
        np.testing.assert_allclose(
            run.history[name], values, atol=0 if exact else 1e-10, err_msg=name
        )


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(KINDS, id="one of each kind", marks=pytest.mark.slow),
        pytest.param(tuple(ALGORITHMS), id="all", marks=pytest.mark.slow),
    ],
)
def test_a_real_federation_follows_the_simulation(federation, names):
    """All in one job."""
    table = {
        "problem": {"kind": PROBLEM},
        "algorithm": {"kind": ALGORITHM, "name": "FedSGM hard"},
        "run": {"rounds": 20, "precision": "float64"},
        "variants": {name: {"algorithm.name": name} for name in names},
    }
    wanted = config.resolve("same", table, [PROBLEM, ALGORITHM])
    runs = run_on(federation, wanted, f"same-{len(names)}", lambda news: None)
    assert list(runs) == list(names)
    for variant, (run,) in runs.items():
        assert_same(run, simulated(wanted, variant))


def job_processes(process):
    """The processes that a server's or site's process started for jobs."""
    return [p for p in psutil.Process(process.pid).children(recursive=True) if p.is_running()]


def when(federation, run, round, act):
    """Does something once the run is that far."""
    path = federation.home(run) / "0/progress.jsonl"

    def watch():
        wait_until(lambda: lines(path) >= round)
        act()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def kill_job(federation, name):
    for process in job_processes(federation.processes[name]):
        process.kill()


@pytest.mark.slow  # a job of its own; test_protocol kills sites, too
def test_a_killed_site_does_not_stop_the_others(federation):
    when(federation, "site-killed", 5, lambda: kill_job(federation, "site-3"))
    told = []
    wanted = experiment(30, "algorithm.participants=6", "deploy.deadline=10.0")
    ((run,),) = run_on(federation, wanted, "site-killed", told.append).values()
    assert run.rounds == 30
    rounds = [news for news in told if "round" in news]
    assert rounds[0]["answered"] == ["site-1", "site-2", "site-3", "site-4"]
    # Where the rest takes more than a minute, the next job has the lost site again.
    assert ["site-1", "site-2", "site-4"] in [news["answered"] for news in rounds]
    assert any("site-3" in news.get("note", "") for news in told)
    assert np.isfinite(run.history["objective"]).all()


@pytest.mark.slow
def test_secure_sums_are_those_of_the_simulation_and_go_on_without_a_killed_site(federation):
    changes = ["algorithm.uplink=Identity", "algorithm.participants=6", "deploy.deadline=10.0"]
    changes += ["run.aggregation=SecureSum"]
    whole = experiment(6, *changes)
    ((run,),) = run_on(federation, whole, "secure", lambda news: None).values()
    assert_same(run, simulated(whole))
    when(federation, "secure-killed", 5, lambda: kill_job(federation, "site-3"))
    told = []
    wanted = experiment(20, *changes)
    ((run,),) = run_on(federation, wanted, "secure-killed", told.append).values()
    assert run.rounds == 20
    rounds = [news for news in told if "round" in news]
    assert rounds[0]["answered"] == ["site-1", "site-2", "site-3", "site-4"]
    assert ["site-1", "site-2", "site-4"] in [news["answered"] for news in rounds]
    assert np.isfinite(run.history["objective"]).all()


@pytest.mark.slow
def test_a_killed_server_resumes_to_the_same_bits(federation):
    """First its job, then the whole server, which is started again: as if nothing was."""

    def kill_server():
        processes.stop([federation.processes["localhost"]])
        federation.start_server()

    when(federation, "server-killed", 6, lambda: kill_job(federation, "localhost"))
    when(federation, "server-killed", 10, kill_server)
    wanted = experiment(15)
    told = []
    ((run,),) = run_on(federation, wanted, "server-killed", told.append).values()
    assert told.count({"note": "continuing with a new job"}) >= 2
    assert_same(run, simulated(wanted))


@pytest.mark.slow
def test_all_sites_killed_and_back(federation):
    """One site of four is lost: the run goes on. Then all: it waits and says so. They come back,
    the lost one too: it ends well."""
    sites = [name for name in federation.kits if name.startswith("site")]

    def kill(*names):
        processes.stop([federation.processes[name] for name in names])

    def come_back():
        kill(*sites[1:])
        wait_until(lambda: any("waiting for sites: 0 of 2" in n.get("note", "") for n in told))
        for name in sites:
            federation.start_site(name)

    when(federation, "all-killed", 4, lambda: kill(sites[0]))
    when(federation, "all-killed", 12, come_back)
    told = []
    changes = ["algorithm.participants=6", "deploy.deadline=3.0", "deploy.quorum=0.5"]
    ((run,),) = run_on(federation, experiment(24, *changes), "all-killed", told.append).values()
    assert run.rounds == 24
    answered = [len(news["answered"]) for news in told if "round" in news]
    assert answered[0] == 4
    assert 3 in answered
    assert answered[-1] == 4
    assert np.isfinite(run.history["objective"]).all()


@pytest.mark.slow
def test_the_commands_of_an_owner(tmp_path):
    """init, server, site, submit, status, stop: as three machines would use them."""
    (tmp_path / "federation.toml").write_text(
        f'server = "localhost"\nport = {processes.free_port()}\nsites = ["north", "south"]\n'
    )
    environment = os.environ | {
        "HOME": str(tmp_path / "home"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    (tmp_path / "clinic.py").write_text(
        "import fedsolve as fs\n\n\ndef screening(clients: int = 4) -> fs.Problem:\n"
        "    return fs.problems.neyman_pearson(clients=clients)\n"
    )
    allow = '[allow]\nproblems = ["clinic:screening"]\n'
    problem = fs.problems.neyman_pearson(clients=4)
    np.savez(tmp_path / "north.npz", **{k: v[:3] for k, v in problem.samples.values.items()})
    limits = "[limits]\ndigits = 17\n"  # values as in the simulation
    (tmp_path / "north.toml").write_text(
        f'[data]\nloader = "npz"\npath = "north.npz"\n{allow}{limits}'
    )
    (tmp_path / "south.toml").write_text(f"[data]\nshare = [3, 1]\n{allow}{limits}")
    (tmp_path / "server.toml").write_text(allow)
    started = []

    def start(*words):
        process = subprocess.Popen(
            as_from_a_shell([sys.executable, "-m", "fedsolve", "deploy", *words]),
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    def done(*words):
        process = start(*words)
        told, _ = process.communicate(timeout=200)
        return process.returncode, told

    try:
        assert done("init", "federation.toml")[0] == 0
        kits = tmp_path / "kits/fedsolve/prod_00"
        admin = str(kits / ADMIN)
        assert "kits has kits for all of these" in done("init", "federation.toml")[1]
        status, told = done("site", str(kits / "north"), "--data", "north.toml")
        assert (status, "No server at localhost" in told) == (2, True), told
        server = start("server", str(kits / "localhost"), "--data", "server.toml")
        wait_until(lambda: done("status", "--kit", admin)[0] == 0)
        sites = [start("site", str(kits / n), "--data", f"{n}.toml") for n in ("north", "south")]
        words = ["--set", "problem.kind=clinic:screening", "--set", "problem.clients=4"]
        words += ["--set", "algorithm.participants=3", "--set", "deploy.sites=2"]
        words += ["--allow", "clinic:screening", "--set", "run.precision=float64"]
        words += ["--rounds", "5", "--kit", admin]
        status, told = done(
            "submit", "neyman-pearson", *words, "--run", "first", "--out", "x", "--track", "mlflow"
        )
        assert status == 0, told
        check(tmp_path / "mlflow.db", tmp_path / "x/history.csv")
        history = np.genfromtxt(tmp_path / "x/history.csv", delimiter=",", names=True)
        expected = simulated(experiment(5, "problem.clients=4")).history
        np.testing.assert_allclose(history["objective"], expected["objective"], atol=1e-10)
        np.testing.assert_array_equal(history["bytes_up_total"], expected["bytes_up_total"])
        status, told = done("submit", "neyman-pearson", *words[:-4], *words[-2:], "--run", "first")
        assert (status, "first belongs to a different experiment" in told) == (2, True), told
        status, told = done("status", "--kit", admin)
        assert status == 0
        assert "site north" in told
        # The refused job had only the name of the run; it may not have quite ended yet.
        wait_until(lambda: "run first: finished" in done("status", "--kit", admin)[1], 30)
        # The server's machine goes down in the middle of a run: one command goes on with it, and
        # does not wait for a job that FLARE still believes to run.
        words[words.index("5")] = "80"
        follower = start("submit", "neyman-pearson", *words, "--run", "second", "--out", "y")
        home = kits / "localhost/fedsolve/runs/second"
        wait_until(lambda: lines(home / "0/progress.jsonl") > 3)
        follower.send_signal(signal.SIGINT)
        told, _ = follower.communicate(timeout=60)
        assert (follower.returncode, "--run second" in told) == (130, True), told
        processes.stop([server])
        assert not (home / "done").exists()
        server = start("server", str(kits / "localhost"), "--data", "server.toml", "--kit", admin)
        wait_until((home / "done").exists, 150)
        told = map(json.loads, (home / "0/progress.jsonl").read_text().splitlines())
        assert {entry["round"] for entry in told if "round" in entry} == {*range(1, 81)}
        words[words.index("80")] = "100000"
        status, told = done("stop", "--kit", admin)
        assert (status, "north, south" in told, "add --yes" in told) == (2, True, True), told
        follower = start("submit", "neyman-pearson", *words, "--run", "third", "--out", "z")
        home = kits / "localhost/fedsolve/runs/third"
        wait_until(lambda: lines(home / "0/progress.jsonl") > 3)
        status, told = done("cancel", "third", "--kit", admin)
        assert (status, "third was cancelled." in told) == (0, True), told
        told, _ = follower.communicate(timeout=60)
        assert (follower.returncode, "third was cancelled." in told) == (2, True), told
        assert not (home / "done").exists()
        status, told = done("submit", "neyman-pearson", *words, "--run", "third", "--out", "zz")
        assert (status, "was cancelled; choose another" in told) == (2, True), told
        status, told = done("cancel", "third", "--kit", admin)
        assert (status, "third has no job now." in told) == (2, True), told
        told = "run third: stopped: third was cancelled."
        wait_until(lambda: told in done("status", "--kit", admin)[1], 30)
        status, told = done("stop", "--kit", admin, "--yes")
        assert status == 0, told
        for process in [server, *sites]:
            process.communicate(timeout=60)
    finally:
        processes.stop([process for process in started if process.poll() is None])
        for process in started:
            process.stdout.close()


@pytest.mark.parametrize("where", [pytest.param("server", marks=pytest.mark.slow), "site-1"])
def test_a_job_with_code_is_refused(federation, tmp_path, where):
    """FLARE would let such a job run whatever it names. Each machine refuses it by itself."""
    path = write_job(tmp_path, experiment(1).resolved, f"code-{where}", ["site-1"])
    shutil.copytree(path / "app", path / "own")
    (path / "own/custom").mkdir()
    mark = tmp_path / "ran"
    (path / "own/custom/own.py").write_text(f"open({str(mark)!r}, 'w')\nclass Own: pass\n")
    for role in ("server", "client"):
        file = path / f"own/config/config_fed_{role}.json"
        table = json.loads(file.read_text())
        table["components"].append({"id": "own", "path": "own.Own", "args": {}})
        file.write_text(json.dumps(table))
    meta = json.loads((path / "meta.json").read_text())
    others = [name for name in meta["deploy_map"]["app"] if name != where]
    meta["deploy_map"] = {"own": [where], "app": others}
    (path / "meta.json").write_text(json.dumps(meta))
    admin = federation.admin
    job = admin.submit(path)
    wait_until(lambda: admin.is_over(job), 60)
    found = admin._do(lambda session: session.get_job_meta(job))
    (refusal,) = [text for text in found["job_deploy_detail"] if text.startswith(where)]
    assert "BYOC not permitted" in refusal
    assert not mark.exists()


@pytest.mark.parametrize("where", ["server", "site-1"])
def test_files_cannot_be_read_remotely(federation, where):
    with pytest.raises(NoServer, match="uthoriz"):
        federation.admin._do(lambda session: session.cat_target(where, file="x.log"))


def test_invalid_certificates_and_servers_are_refused_with_a_reason(federation, tmp_path):
    kits = federation.folder / "kits"
    kit = federation.kits["site-1"]
    check_certificate(kit)
    check_connection(kit)
    port = int((kit / "startup/fed_client.json").read_text().split("localhost:")[1].split('"')[0])
    foreign = make_kits(tmp_path / "foreign", "localhost", port, ["site-1"])["site-1"]
    refusals = {}

    def refused(who, check, place):
        began = time.monotonic()
        with pytest.raises(fs.InvalidInput) as caught:
            check(place)
        assert time.monotonic() - began < 10
        refusals[who] = str(caught.value)

    refused("another authority", check_connection, foreign)
    own_root = (kit / "startup/rootCA.pem").read_bytes()
    (foreign / "startup/rootCA.pem").write_bytes(own_root)
    refused("a certificate of another authority", check_connection, foreign)
    certificate_for(kits, foreign, "site-1", days=-1)
    refused("an expired certificate, seen here", check_certificate, foreign)
    refused("an expired certificate, seen by the server", check_connection, foreign)
    certificate_for(kits, foreign, "site-2", days=1)
    refused("another site's certificate", check_certificate, foreign)
    config_file = foreign / "startup/fed_client.json"
    config_file.write_text(config_file.read_text().replace("localhost:", "127.0.0.1:"))
    refused("a server under another name", check_connection, foreign)
    nobody = make_kits(tmp_path / "n", "localhost", processes.free_port(), ["s"])["s"]
    refused("nobody there", check_connection, nobody)
    with socket.create_server(("localhost", 0)) as plain:
        text = (nobody / "startup/fed_client.json").read_text()
        old = text.split("localhost:")[1].split('"')[0]
        new = text.replace(f"localhost:{old}", f"localhost:{plain.getsockname()[1]}")
        (nobody / "startup/fed_client.json").write_text(new)
        refused("a server without TLS", lambda k: check_connection(k, timeout=1.0), nobody)
    with socket.create_connection(("localhost", port), 5) as raw:  # plain TCP to our server
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
        raw.settimeout(10)
        assert b"HTTP" not in raw.recv(1000)
    anyone = ssl.create_default_context(cafile=str(kit / "startup/rootCA.pem"))
    anyone.set_alpn_protocols(["h2"])
    with socket.create_connection(("localhost", port), 5) as raw:  # TLS without a certificate
        try:
            heard = anyone.wrap_socket(raw, server_hostname="localhost").recv(1)
        except ssl.SSLError:
            heard = b""
        assert heard == b""
    for who, why in refusals.items():
        print(f"{who}: {why}")
    expected = [
        "is not this kit's server: unable to get local issuer",
        "rejects this kit's certificate",
        "certificate of site-1 expired on",
        "rejects this kit's certificate",
        "belongs to site-1, but its certificate belongs to site-2",
        "is not this kit's server: IP address mismatch",
        "No server at localhost",
        "does not speak TLS",
    ]
    for why, part in zip(refusals.values(), expected, strict=True):
        assert part in why
    secrets = [*tmp_path.rglob("*.key"), *kit.parent.rglob("*.key"), *kits.rglob("cert.json")]
    assert len(secrets) > 8
    for key in secrets:
        assert key.stat().st_mode & 0o077 == 0


def no_such_command(session):
    session.close()
    raise OSError("no such command")


def test_a_lost_server_raises_and_the_next_command_reconnects(federation):
    """Whatever a session says of it, in the middle of whatever command; the next one connects."""
    with pytest.raises(fs.InvalidInput, match="The server does not answer: no such command"):
        federation.admin._do(no_such_command)
    assert federation.admin.sites()
