"""`fedsolve deploy`: a federation on this machine in one command, or a command for each machine."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import math
import signal
import socket
import ssl
import subprocess
import time
import tomllib
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from fedsolve.errors import InvalidInput
from fedsolve.experiments.config import Experiment
from fedsolve.flare import admin as engine
from fedsolve.flare.provisioning import ADMIN, AUTHORITY, kit_name, make_kits
from fedsolve.flare.server import FOLDER, saved_run
from fedsolve.solving.result import Run

Tell = Callable[[dict[str, Any]], None]
WAIT = 0.3  # seconds between two looks at a run's progress
REJOIN = 60.0  # a job runs at least so long before it makes room for a site that is back
STARTING = 180.0  # a job may take so long before it is heard for the first time
GONE = 30.0  # and is over when it falls silent for so long
TOGETHER = 6.0  # sites that come back within so long of each other get one job
FUTILE = 3  # so many jobs in a row without a single round are enough
Runs = dict[str, list[Run]]


@dataclasses.dataclass(frozen=True)
class Local:
    """A federation of processes on this machine."""

    folder: Path
    kits: dict[str, Path]
    processes: dict[str, subprocess.Popen]
    admin: engine.Admin

    def start_site(self, name: str) -> None:
        """Starts a site (again)."""
        self.processes[name] = engine.start_site(self.kits[name], self.kits[name] / "site.toml")

    def start_server(self) -> None:
        """Starts the server (again)."""
        kit = self.kits["localhost"]
        self.processes["localhost"] = engine.start_server(kit, kit / "owner.toml")

    def home(self, run: str) -> Path:
        """Where the server keeps a run."""
        return self.kits["localhost"] / "fedsolve" / "runs" / run


@contextlib.contextmanager
def local_federation(
    clients: int, sites: int, tell: Tell, allow: Sequence[str] = ()
) -> Iterator[Local]:
    """Provisions with fresh certificates, starts a server and sites, and leaves nothing: no
    process, no port, no file. The problem's own clients are dealt to the sites in order."""
    names = [f"site-{number + 1}" for number in range(sites)]
    ends = [clients * number // sites for number in range(sites + 1)]
    processes: dict[str, subprocess.Popen] = {}
    with engine.temporary_folder() as folder:
        try:
            tell({"note": "making certificates"})
            kits = make_kits(folder / "kits", "localhost", engine.free_port(), names)
            tell({"note": f"starting a server and {sites} sites"})
            allowed = tomli_w.dumps({"allow": {"problems": list(allow)}})
            owned = kits["localhost"] / "owner.toml"
            owned.write_text(allowed, encoding="utf-8")
            processes["localhost"] = engine.start_server(kits["localhost"], owned)
            for name, first, end in zip(names, ends, ends[1:], strict=False):
                file = kits[name] / "site.toml"
                data = f"[data]\nshare = [{first}, {end - first}]\n\n"
                file.write_text(data + allowed, encoding="utf-8")
                processes[name] = engine.start_site(kits[name], file)
            admin = engine.Admin(kits[ADMIN])
            try:
                yield Local(folder, kits, processes, admin)
            finally:
                admin.close()
        finally:
            engine.stop(list(processes.values()))


def deploy_local(experiment: Experiment, sites: int, tell: Tell) -> tuple[Runs, str]:
    """An experiment over a federation on this machine: its runs, and how it ended."""
    fewest = min(problem.n for problem, _ in experiment.cells.values())
    if not 1 <= sites <= fewest:
        raise InvalidInput(f"{fewest} clients cannot be dealt to {sites} sites.")
    status = "finished"
    own = _imports(experiment.resolved)
    with local_federation(fewest, sites, tell, own) as federation:
        try:
            run_on(federation, experiment, "local", tell)
        except KeyboardInterrupt:
            status = "interrupted"
        return saved_runs(experiment, federation.home("local")), status


def _imports(table: Any) -> list[str]:
    """What an experiment names of other packages; its user may run that on this machine."""
    if not isinstance(table, dict):
        return []
    found = [name for value in table.values() for name in _imports(value)]
    kind = table.get("kind")
    return [*found, kind] if isinstance(kind, str) and ":" in kind else found


def run_on(federation: Local, experiment: Experiment, run: str, tell: Tell) -> Runs:
    """Runs an experiment on a federation of this machine, through as many jobs as it takes."""
    sites = len(federation.processes) - 1
    supervise(federation.admin, experiment, run, tell, sites)
    return saved_runs(experiment, federation.home(run))


def saved_runs(experiment: Experiment, home: Path, suffix: str = f"/{FOLDER}") -> Runs:
    """The runs as far as the server's journals have them, by variant."""
    found: dict[str, list[Run]] = {variant: [] for variant in experiment.cells}
    for cell, (variant, seed) in enumerate(experiment.runs):
        path = Path(f"{home}/{cell}{suffix}")
        if path.exists():
            problem, algorithm = experiment.cells[variant]
            precision = experiment.options.get("precision")
            run = saved_run(path, problem, algorithm, seed, precision)
            found[variant] += [] if run is None else [run]
    return found


def supervise(
    admin: engine.Admin, experiment: Experiment, run: str, tell: Tell, sites: int = 1
) -> str:
    """A run is a series of disposable jobs over durable state. When one ends early the next goes
    on from the checkpoint, once enough sites are there; when a lost site is back, the job makes
    room for one that has it. The server may go away and come back. Returns the last job."""
    fewest, barren = sites, 0
    last = Followed()
    job = patiently(lambda: admin.running(run), tell)
    while True:
        if job is None:
            here, waited = _gather(admin, fewest, last.missed, tell)
            # Sites that were away for a while are no reason to give up.
            barren = 0 if last.rounds or waited > 2 * engine.SILENT else barren + 1
            if barren > FUTILE:
                raise InvalidInput(f"{FUTILE} jobs in a row did nothing: {last.why}.")
            with engine.temporary_folder() as folder:
                path = engine.write_job(folder, experiment.resolved, run, here)
                job = patiently(lambda path=path: admin.submit(path), tell)
            tell({"note": f"starting a job with {len(here)} sites"})
        last = _follow(admin, job, tell)
        if last.ended:
            return job
        fewest = max(1, math.ceil(float(experiment.deploy.get("quorum", 0.0)) * sites))
        tell({"note": "going on with a new job"})
        job = None


@dataclasses.dataclass
class Followed:
    """What came of a job: its rounds in which somebody answered, whether the run has ended, the
    sites that it lost and last missed (with their last signs of life), its last complaint."""

    rounds: int = 0
    ended: bool = False
    lost: dict[str, float] = dataclasses.field(default_factory=dict)
    missed: dict[str, float] = dataclasses.field(default_factory=dict)
    why: str = "see the logs"


def _follow(admin: engine.Admin, job: str, tell: Tell) -> Followed:
    """Until a job ends."""
    told, found = 0, Followed()
    began = heard = time.monotonic()
    look_again, over, patience = 0.0, False, STARTING
    while True:
        try:
            if time.monotonic() > look_again:
                over, look_again = admin.is_over(job), time.monotonic() + 2
            alive = admin.sites() if found.lost and time.monotonic() > began + REJOIN else {}
            answer = admin.news(job, told, make_room=bool(_back(found.lost, alive)))
        except engine.NoServer as error:
            tell({"note": f"{error} Waiting for it."})
            patiently(admin.sites, tell)
            answer = None
        news: list[dict[str, Any]] = answer["news"] if answer is not None else []
        if answer is not None:
            heard, patience, found.rounds = time.monotonic(), GONE, answer["rounds"]
        elif time.monotonic() > heard + patience:
            over = True  # a server that was away says for ever that its old job runs
        for entry in news:
            tell(entry)
            found.why = entry.get("note", found.why)
            if "lost" in entry:
                now = patiently(admin.sites, tell)
                found.lost[entry["lost"]] = max(now.values(), default=0.0)
            found.missed |= {site: found.lost.get(site, 0.0) for site in entry.get("missed", [])}
            if "error" in entry:
                raise InvalidInput(entry["error"])
            if "done" in entry:
                with contextlib.suppress(engine.NoServer):  # it need not wait for us any more
                    admin.news(job, told + len(news))
                found.ended = True
                return found
        told += len(news)
        if over and not news:
            return found
        time.sleep(0 if news else WAIT)


def _back(lost: dict[str, float], alive: dict[str, float]) -> list[str]:
    """Sites with signs of life from long after they were lost."""
    return [site for site in lost if alive.get(site, 0.0) > lost[site] + engine.SILENT]


def _gather(
    admin: engine.Admin, fewest: int, missed: dict[str, float], tell: Tell
) -> tuple[list[str], float]:
    """Waits until that many sites are there, and one of those that were missed, however long it
    takes, and says so: who is there, and how long that took. Those that were away together come
    back one after the other: while they do, a job would begin without the last of them."""
    said, began, known, newest = "", time.monotonic(), set(), 0.0
    while True:
        here = patiently(admin.sites, tell)
        if here.keys() - known:
            known, newest = known | here.keys(), time.monotonic()
        if len(here) >= fewest and (not missed or _back(missed, here)):
            if not missed or time.monotonic() > newest + TOGETHER:
                return sorted(here), time.monotonic() - began
            text = said
        elif len(here) >= fewest:
            text = f"waiting for one of {', '.join(sorted(missed))}"
        else:
            known &= here.keys()
            text = f"waiting for sites: {len(here)} of {fewest} are there"
        if text != said:
            said = text
            tell({"note": text})
        time.sleep(WAIT)


def patiently(command: Callable[[], Any], tell: Tell) -> Any:
    """A command to the server, as soon as it answers."""
    while True:
        try:
            return command()
        except engine.NoServer as error:
            tell({"note": str(error)})
            time.sleep(1.0)


def init(file: Path, out: Path) -> dict[str, Path]:
    """Kits for the machines that a federation's file names: `server`, `port`, `sites`. Given a
    folder that has some of them, those that are new or to be renewed."""
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise InvalidInput(f"Cannot read {file}: {error}.") from error
    missing = [key for key in ("server", "sites") if key not in table]
    if missing:
        raise InvalidInput(f"{file} needs `server` (a host name) and `sites` (a list of names).")
    names = table["sites"]
    if not isinstance(names, list) or not names or not all(isinstance(n, str) and n for n in names):
        raise InvalidInput(f"{file}: sites must be a list of names, got {names!r}.")
    if out.exists() and not (out / AUTHORITY).exists():
        raise InvalidInput(f"{out} exists, and is no folder of kits.")
    return make_kits(out, str(table["server"]), table.get("port", 8002), names)


def keep_running(
    start: Callable[[], subprocess.Popen], log: Path, show: Callable[[str], None]
) -> int:
    """Starts a process and shows its log until it ends, or until Ctrl-C (or the end of the
    terminal) ends it: its exit status."""
    place = log.stat().st_size if log.exists() else 0

    def follow() -> None:
        nonlocal place
        with open(log, encoding="utf-8", errors="replace") as file:
            file.seek(place)
            for line in file:
                show(line.rstrip())
            place = file.tell()

    ends = (signal.SIGTERM, signal.SIGHUP)
    previous = [signal.signal(s, lambda *_: signal.raise_signal(signal.SIGINT)) for s in ends]
    process = start()
    try:
        while process.poll() is None:
            follow()
            time.sleep(WAIT)
        follow()
        return int(process.returncode)
    except KeyboardInterrupt:
        return 0
    finally:
        for each, handler in zip(ends, previous, strict=True):
            signal.signal(each, handler)
        engine.stop([process])


def check_certificate(kit: Path) -> None:
    """Says in a sentence if this kit's certificate cannot be used any more, or is another's."""
    from cryptography import x509

    role = "server" if (kit / "startup/server.crt").exists() else "client"
    try:
        data = (kit / "startup" / f"{role}.crt").read_bytes()
        certificate = x509.load_pem_x509_certificate(data)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{kit} has no certificate that can be read: {error}.") from error
    end = certificate.not_valid_after_utc
    if end < datetime.datetime.now(datetime.UTC):
        raise InvalidInput(
            f"The certificate of {kit_name(kit)} expired on {end:%Y-%m-%d}: make a new kit."
        )
    name = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)[0].value
    if name != (own := kit_name(kit)):
        raise InvalidInput(f"This kit is that of {own}, but its certificate is that of {name}.")


def check_welcome(kit: Path, timeout: float = 8.0) -> None:
    """Says in a sentence why a server would not take this kit; FLARE itself waits silently."""
    startup = kit / "startup"
    try:
        servers = json.loads((startup / "fed_client.json").read_text())["servers"]
        target = servers[0]["service"]["target"]
    except (OSError, KeyError, IndexError, ValueError) as error:
        raise InvalidInput(f"{kit} is not a site's kit: {error}.") from error
    host, _, port = target.rpartition(":")
    refused = f"The server at {target} refuses this kit"
    try:
        context = ssl.create_default_context(cafile=str(startup / "rootCA.pem"))
        context.load_cert_chain(startup / "client.crt", startup / "client.key")
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection((host, int(port)), timeout) as plain,
            context.wrap_socket(plain, server_hostname=host) as secure,
        ):
            secure.settimeout(1.0)  # a server that refuses the certificate says so at once
            with contextlib.suppress(TimeoutError):
                if secure.recv(1) == b"":
                    raise InvalidInput(f"{refused}'s certificate.")
    except ssl.SSLCertVerificationError as error:
        reason = error.verify_message.rstrip(".")
        raise InvalidInput(
            f"The server at {target} is not the one of this kit: {reason}."
        ) from error
    except ssl.SSLError as error:
        reason = (error.reason or "TLS failed").lower().replace("_", " ")
        raise InvalidInput(f"{refused}: {reason}.") from error
    except TimeoutError as error:
        raise InvalidInput(f"The server at {target} does not speak TLS.") from error
    except OSError as error:
        raise InvalidInput(f"No server at {target}: {error.strerror or error}.") from error


def new_run() -> str:
    return f"run-{uuid.uuid4().hex[:8]}"
