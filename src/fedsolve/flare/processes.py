"""Start, follow and stop the processes of FLARE servers and sites on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from fedsolve.data.download import OFFLINE
from fedsolve.errors import InvalidInput
from fedsolve.flare import guarded
from fedsolve.flare.provisioning import kit_name, prepare
from fedsolve.solving.interrupt import interrupted_by
from fedsolve.storage.atomic import open_locked, write_atomically

HOME = "FEDSOLVE_HOME"  # environment variable: the folder for what this machine must not lose
OWNER = "FEDSOLVE_OWNER"  # environment variable: the owner's file, with data and an allow-list
HEARTBEAT = 2.0  # seconds between two heartbeats of a site
LONGEST_LOG = 10_000_000  # bytes of a log before it begins anew
MACHINE = Path("/etc/machine-id")  # absent or empty in most containers
IN_USE = 2.0  # seconds in which a process that was just killed gives its kit and port back
LOG_INTERVAL = 0.3  # seconds between two looks at a process's log
ENVIRONMENT = {  # without the first two every reply leaves a thread behind for a minute
    "NVFLARE_STREAMING_RETRY_TIMEOUT": "3",
    "NVFLARE_STREAMING_RETRY_WAIT": "1",
    "NVFLARE_NP_DOWNLOAD_CHUNK_SIZE": "0",
}
# Every message is newly allocated memory; with huge pages allocation is four times as fast.
MEMORY = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def start_server(kit: Path, owners_file: Path | None = None) -> subprocess.Popen:
    """Start a server; `owners_file` has its owner's allow-list, if there is one."""
    return _start(kit, "server", owners_file)


def start_site(kit: Path, owners_file: Path) -> subprocess.Popen:
    """Start a site; `owners_file` names its data and its allow-list."""
    return _start(kit, "client", owners_file)


def _start(kit: Path, role: str, owners_file: Path | None) -> subprocess.Popen:
    """Start a process that ends with this one, and that nothing else runs beside with its kit."""
    kit = kit.resolve()
    home = kit / "fedsolve"
    with contextlib.ExitStack() as held:
        try:
            home.mkdir(exist_ok=True, mode=0o700)
            lock = open_locked(home / "lock", IN_USE)
            if lock is None:
                raise InvalidInput(
                    f"{kit_name(kit)} is running already on this machine, from {kit}."
                )
            held.enter_context(lock)
            _check_machine(kit)
            prepare(kit)
            shorten(kit / "output.log")
        except OSError as error:
            place = error.filename or home
            raise InvalidInput(f"Cannot write to {place}: {error.strerror}.") from error
        if role == "server":
            _check_port(kit)
        own = {HOME: str(home), OFFLINE: "1"}  # jobs make no machine look up anything
        environment = MEMORY | os.environ | ENVIRONMENT | own
        if owners_file is not None:
            environment[OWNER] = str(owners_file.resolve())
        module = f"nvflare.private.fed.app.{role}.{role}_train"
        arguments = ["-m", str(kit), "-s", f"fed_{role}.json", "--set", "secure_train=true"]
        if role == "client":
            arguments += [f"uid={kit_name(kit)}", f"heart_beat_interval={HEARTBEAT}"]
        arguments += ["org=fedsolve", "config_folder="]
        program = [sys.executable, "-u", guarded.__file__, str(lock.fileno()), module]
        with open(kit / "output.log", "ab") as output:
            return subprocess.Popen(
                [*program, *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.PIPE,  # whose end is the end of this process
                env=environment,
                start_new_session=True,
                pass_fds=[lock.fileno()],
            )


def _check_machine(kit: Path) -> None:
    """Raise if a kit was used on another machine: two of them get in each other's way."""
    here = MACHINE.read_text().strip() if MACHINE.exists() else ""
    path = kit / "fedsolve" / "machine"
    there, _, name = (path.read_text() if path.exists() else "").partition(" ")
    if here and there and there != here:
        raise InvalidInput(
            f"The kit of {kit_name(kit)} was used on another machine, {name}. Two machines with the"
            f" same kit get in each other's way; if it was moved here for good, remove {path}."
        )
    if here and not there:
        write_atomically(path, f"{here} {socket.gethostname()}".encode())


def shorten(log: Path) -> None:
    """Begin a log anew if it is long; the last part is kept beside it.

    Its writer need not know: it always appends.
    """
    if log.exists() and log.stat().st_size > LONGEST_LOG:
        shutil.copyfile(log, log.with_name(log.name + ".1"))
        os.truncate(log, 0)


def _check_port(kit: Path) -> None:
    """Raise if something listens on a server's port: two servers would share its connections."""
    servers = json.loads((kit / "startup/fed_server.json").read_text())["servers"]
    port = int(servers[0]["service"]["target"].rpartition(":")[2])
    end = time.monotonic() + IN_USE
    while True:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
                return
            except OSError as error:
                if time.monotonic() > end:
                    raise InvalidInput(
                        f"Cannot serve at port {port} of this machine: {error.strerror}."
                    ) from error
        time.sleep(LOG_INTERVAL)


def stop(processes: list[subprocess.Popen]) -> None:
    """Kill processes and everything that they started."""
    family: list[psutil.Process] = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(process.pid)
            family += [*parent.children(recursive=True), parent]
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family, timeout=10)
    for process in processes:
        process.wait(timeout=10)
        if process.stdin is not None:
            process.stdin.close()


def keep_running(
    start: Callable[[], subprocess.Popen], log: Path, show: Callable[[str], None]
) -> int:
    """Start a process, show its log until it ends, and return its exit status.

    Ctrl-C, SIGTERM and the end of the terminal stop it; the status is then 0. (Where the shell had
    Ctrl-C or the end of the terminal ignored, as for `nohup` and `&`, these are still ignored.)
    """
    position = log.stat().st_size if log.exists() else 0

    def follow() -> None:
        nonlocal position
        with open(log, encoding="utf-8", errors="replace") as file:
            file.seek(position)
            for line in file:
                show(line.rstrip())
            position = file.tell()
        if position > LONGEST_LOG:
            with contextlib.suppress(OSError):
                shorten(log)
                position = 0

    started: list[subprocess.Popen] = []
    try:
        with interrupted_by(signal.SIGTERM, signal.SIGHUP):
            started.append(process := start())
            while process.poll() is None:
                follow()
                time.sleep(LOG_INTERVAL)
            follow()
            return int(process.returncode)
    except KeyboardInterrupt:
        return 0
    finally:
        stop(started)


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder and remove it afterwards, even after an error."""
    folder = Path(tempfile.mkdtemp(prefix="fedsolve-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
