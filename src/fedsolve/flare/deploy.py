"""`fedsolve deploy`: a federation on this machine in one command, or a command for each machine."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import socket
import ssl
import subprocess
import time
import tomllib
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fedsolve.config import Experiment
from fedsolve.errors import InvalidInput
from fedsolve.flare import engine
from fedsolve.flare.jobs import experiment_of
from fedsolve.flare.server import saved_run
from fedsolve.runs import Run

Tell = Callable[[dict[str, Any]], None]
WAIT = 0.2  # seconds between two looks at a run's progress


@dataclasses.dataclass(frozen=True)
class Local:
    """A federation of processes on this machine."""

    folder: Path
    kits: dict[str, Path]
    processes: dict[str, subprocess.Popen]
    admin: engine.Admin

    def home(self, run: str) -> Path:
        """Where the server keeps a run."""
        return self.kits["localhost"] / "fedsolve" / "runs" / run


@contextlib.contextmanager
def local_federation(clients: int, sites: int, tell: Tell) -> Iterator[Local]:
    """Provisions with fresh certificates, starts a server and sites, and leaves nothing: no
    process, no port, no file. The problem's own clients are dealt to the sites in order."""
    names = [f"site-{number + 1}" for number in range(sites)]
    ends = [clients * number // sites for number in range(sites + 1)]
    processes: dict[str, subprocess.Popen] = {}
    with engine.temporary_folder() as folder:
        try:
            tell({"note": "making certificates"})
            kits = engine.make_kits(folder / "kits", "localhost", engine.free_port(), names)
            tell({"note": f"starting a server and {sites} sites"})
            processes["localhost"] = engine.start_server(kits["localhost"])
            for name, first, end in zip(names, ends, ends[1:], strict=False):
                file = kits[name] / "site.toml"
                file.write_text(f"[data]\nshare = [{first}, {end - first}]\n")
                processes[name] = engine.start_site(kits[name], file)
            admin = engine.Admin(kits[engine.ADMIN])
            try:
                admin.wait_for_sites(sites)
                yield Local(folder, kits, processes, admin)
            finally:
                admin.close()
        finally:
            engine.stop(list(processes.values()))


def deploy_local(experiment: Experiment, sites: int, tell: Tell, deadline: float = 30.0) -> Run:
    """One run over a federation on this machine."""
    experiment = experiment_of(json.dumps(experiment.resolved))
    ((problem, _),) = experiment.cells.values()
    if not 1 <= sites <= problem.n:
        raise InvalidInput(f"{problem.n} clients cannot be dealt to {sites} sites.")
    with local_federation(problem.n, sites, tell) as federation:
        return run_on(federation, experiment, "local", tell, deadline)


def run_on(
    federation: Local, experiment: Experiment, run: str, tell: Tell, deadline: float = 30.0
) -> Run:
    """Runs an experiment, through as many jobs as it takes."""
    ((problem, algorithm),) = experiment.cells.values()
    home, jobs = federation.home(run), federation.folder / "jobs" / run
    supervise(federation.admin, jobs, experiment.resolved, run, home, deadline, tell)
    precision = experiment.options.get("precision")
    return saved_run(home, problem, algorithm, experiment.seeds[0], precision)


def supervise(
    admin: engine.Admin,
    jobs: Path,
    experiment: dict[str, Any],
    run: str,
    home: Path,
    deadline: float,
    tell: Tell,
    tries: int = 5,
) -> None:
    """A run is a series of disposable jobs over durable state: when one ends early, the next goes
    on from the checkpoint."""
    told = 0
    for attempt in range(tries):
        job = admin.submit(engine.write_job(jobs / str(attempt), experiment, run, deadline))
        tell({"note": "waiting for the sites" if attempt == 0 else "going on with a new job"})
        over, look_again = False, 0.0
        while not over:
            if time.monotonic() > look_again:
                over, look_again = "FINISHED" in admin.status(job), time.monotonic() + 2
            told = _tell_news(home / "progress.jsonl", told, tell)
            if (home / "done").exists():
                return
            time.sleep(WAIT)
    raise InvalidInput(f"The run did not end in {tries} jobs; see the logs of the server's kit.")


def _tell_news(path: Path, told: int, tell: Tell) -> int:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    whole = [line for line in lines if line.endswith("\n")]
    for line in whole[told:]:
        tell(json.loads(line))
    return len(whole)


def init(file: Path, out: Path) -> dict[str, Path]:
    """Kits for the machines that a federation's file names: `server`, `port`, `sites`."""
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise InvalidInput(f"Cannot read {file}: {error}.") from error
    missing = [key for key in ("server", "sites") if key not in table]
    if missing:
        raise InvalidInput(f"{file} needs `server` (a host name) and `sites` (a list of names).")
    if out.exists():
        raise InvalidInput(f"{out} exists; certificates are never overwritten.")
    return engine.make_kits(out, table["server"], table.get("port", 8002), table["sites"])


def keep_running(process: subprocess.Popen, log: Path, show: Callable[[str], None]) -> int:
    """Shows a process's log until it ends, or until Ctrl-C ends it: its exit status."""
    previous = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    place = 0
    try:
        while process.poll() is None:
            with open(log, encoding="utf-8", errors="replace") as file:
                file.seek(place)
                for line in file:
                    show(line.rstrip())
                place = file.tell()
            time.sleep(WAIT)
        return int(process.returncode)
    except KeyboardInterrupt:
        return 0
    finally:
        signal.signal(signal.SIGTERM, previous)
        engine.stop([process])


def check_welcome(kit: Path, timeout: float = 8.0) -> None:
    """Says in a sentence why a server would not take this kit; FLARE itself waits silently."""
    startup = kit / "startup"
    try:
        target = json.loads((startup / "fed_client.json").read_text())["servers"][0]["service"][
            "target"
        ]
    except (OSError, KeyError, IndexError, ValueError) as error:
        raise InvalidInput(f"{kit} is not a site's kit: {error}.") from error
    host, _, port = target.rpartition(":")
    try:
        context = ssl.create_default_context(cafile=str(startup / "rootCA.pem"))
        context.load_cert_chain(startup / "client.crt", startup / "client.key")
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection((host, int(port)), timeout) as plain,
            context.wrap_socket(plain, server_hostname=host) as secure,
        ):
            secure.settimeout(1.0)  # a server that refuses the certificate says so at once
            try:
                if secure.recv(1) == b"":
                    raise InvalidInput(f"The server at {target} refuses this kit's certificate.")
            except TimeoutError:
                pass
    except ssl.SSLCertVerificationError as error:
        reason = error.verify_message
        raise InvalidInput(
            f"The server at {target} is not the one of this kit: {reason}."
        ) from error
    except ssl.SSLError as error:
        reason = (error.reason or "TLS failed").lower().replace("_", " ")
        raise InvalidInput(f"The server at {target} refuses this kit: {reason}.") from error
    except OSError as error:
        raise InvalidInput(f"No server at {target}: {error.strerror or error}.") from error


def new_run() -> str:
    return f"run-{uuid.uuid4().hex[:8]}"
