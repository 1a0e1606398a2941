"""Start, follow and stop the processes of FLARE servers and sites on this machine."""

from __future__ import annotations

import contextlib
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
from fedsolve.flare.provisioning import kit_name, prepare

HOME = "FEDSOLVE_HOME"  # environment variable: the folder for what this machine must not lose
OWNER = "FEDSOLVE_OWNER"  # environment variable: the owner's file, with data and an allow-list
HEARTBEAT = 2.0  # seconds between two heartbeats of a site
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
    kit = kit.resolve()
    prepare(kit)
    own = {HOME: str(kit / "fedsolve"), OFFLINE: "1"}  # jobs make no machine look up anything
    environment = MEMORY | os.environ | ENVIRONMENT | own
    if owners_file is not None:
        environment[OWNER] = str(owners_file.resolve())
    module = f"nvflare.private.fed.app.{role}.{role}_train"
    arguments = ["-m", str(kit), "-s", f"fed_{role}.json", "--set", "secure_train=true"]
    if role == "client":
        arguments += [f"uid={kit_name(kit)}", f"heart_beat_interval={HEARTBEAT}"]
    arguments += ["org=fedsolve", "config_folder="]
    with open(kit / "output.log", "ab") as output:
        return subprocess.Popen(
            [sys.executable, "-u", "-m", module, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )


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


def keep_running(
    start: Callable[[], subprocess.Popen], log: Path, show: Callable[[str], None]
) -> int:
    """Start a process, show its log until it ends, and return its exit status.

    Ctrl-C, SIGTERM and the end of the terminal stop it; the status is then 0.
    """
    position = log.stat().st_size if log.exists() else 0

    def follow() -> None:
        nonlocal position
        with open(log, encoding="utf-8", errors="replace") as file:
            file.seek(position)
            for line in file:
                show(line.rstrip())
            position = file.tell()

    signals = (signal.SIGTERM, signal.SIGHUP)
    previous = [signal.signal(s, lambda *_: signal.raise_signal(signal.SIGINT)) for s in signals]
    process = start()
    try:
        while process.poll() is None:
            follow()
            time.sleep(LOG_INTERVAL)
        follow()
        return int(process.returncode)
    except KeyboardInterrupt:
        return 0
    finally:
        for each, handler in zip(signals, previous, strict=True):
            signal.signal(each, handler)
        stop([process])


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
