"""A command and the process that it starts: its log and its end."""

import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import fedsolve as fs
from fedsolve.flare import processes
from fedsolve.flare.processes import keep_running
from fedsolve.flare.provisioning import make_kits
from tests.support.deployment import as_from_a_shell, wait_until


def test_a_log_is_shown_from_the_start_of_its_process_to_the_end(tmp_path):
    log, shown = tmp_path / "output.log", []
    log.write_text("of an earlier process\n")
    code = "import time; print('first', flush=True); time.sleep(0.5); print('last'); exit(3)"

    def start():
        with open(log, "ab") as file:
            return subprocess.Popen([sys.executable, "-c", code], stdout=file)

    assert keep_running(start, log, shown.append) == 3
    assert shown == ["first", "last"]


def command(tmp_path, ignored):
    """A process that runs `keep_running`, with SIGINT and SIGHUP as a shell has them, and the
    numbers of what it started."""
    log, started = tmp_path / "output.log", tmp_path / "started"
    code = (
        "import os, subprocess, sys, time; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
        f"open({str(started)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}'); time.sleep(60)"
    )
    text = (
        "import subprocess, sys; from pathlib import Path; "
        "from fedsolve.flare.processes import keep_running; "
        f"start = lambda: subprocess.Popen([sys.executable, '-c', {code!r}]); "
        f"log = Path({str(log)!r}); log.touch(); sys.exit(keep_running(start, log, print))"
    )
    process = subprocess.Popen(as_from_a_shell([sys.executable, "-c", text], ignored))
    wait_until(lambda: started.exists() and len(started.read_text().split()) == 2)
    return process, [int(number) for number in started.read_text().split()]


def alive(numbers):
    found = [each for each in psutil.process_iter(["status"]) if each.pid in numbers]
    return [each for each in found if each.info["status"] != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_the_end_of_a_command_is_the_end_of_its_process(tmp_path, end):
    """A service manager's stop, a terminal that is closed, Ctrl-C: it ends, with all that it
    started."""
    process, family = command(tmp_path, ignored=False)
    process.send_signal(end)
    assert process.wait(30) == 0
    assert not alive(family)


def test_sigterm_ends_a_command_where_other_signals_are_ignored(tmp_path):
    """As after `nohup`, or `&` in a script: a closed terminal does not end it, SIGTERM does."""
    process, family = command(tmp_path, ignored=True)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    assert len(alive(family)) == 2
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert not alive(family)


def listening(port):
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) == 0


def deploy(tmp_path, *words, ignored=False):
    """Start a command as a shell does it in the foreground, or with `nohup ... &`."""
    return subprocess.Popen(
        as_from_a_shell([sys.executable, "-m", "fedsolve", "deploy", *words], ignored),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.mark.slow
def test_a_server_ends_with_its_command_and_runs_once(tmp_path):
    """A second server with the kit, or with a copy of it on the same machine, is refused at once;
    SIGTERM ends the server and gives the port back, and so does SIGKILL of its command."""
    port = processes.free_port()
    kit = make_kits(tmp_path / "kits", "localhost", port, ["site-1"])["localhost"]
    copy = shutil.copytree(kit, tmp_path / "copy/localhost")
    for end, status in [(signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)]:
        server = deploy(tmp_path, "server", kit, ignored=True)
        try:
            wait_until(lambda: listening(port), 60)
            family = {each.pid for each in psutil.Process(server.pid).children(recursive=True)}
            assert family
            if end == signal.SIGTERM:
                for place, why in [(kit, "is running already"), (copy, f"serve at port {port}")]:
                    second = deploy(tmp_path, "server", place)
                    told, _ = second.communicate(timeout=30)
                    assert (second.returncode, why in told) == (2, True), told
                    assert len(told.splitlines()) == 2
            server.send_signal(end)
            server.communicate(timeout=30)
            assert server.returncode == status
            wait_until(lambda family=family: not listening(port) and not alive(family), 10)
        finally:
            processes.stop([server])


def test_a_kit_of_another_machine_is_refused_and_named(tmp_path, monkeypatch):
    """Each machine would take the other's place at the server. Containers have no such number."""
    monkeypatch.setattr(processes, "MACHINE", tmp_path / "machine-id")
    monkeypatch.setattr(processes, "kit_name", lambda kit: "north")
    (tmp_path / "fedsolve").mkdir()
    processes._check_machine(tmp_path)
    assert not (tmp_path / "fedsolve/machine").exists()
    (tmp_path / "machine-id").write_text("one\n")
    processes._check_machine(tmp_path)
    processes._check_machine(tmp_path)
    (tmp_path / "machine-id").write_text("two\n")
    with pytest.raises(fs.InvalidInput, match="kit of north was used on another machine, "):
        processes._check_machine(tmp_path)
    (tmp_path / "fedsolve/machine").unlink()
    processes._check_machine(tmp_path)


def test_a_long_log_begins_anew(tmp_path, monkeypatch):
    """While it is written, and shown to its end."""
    monkeypatch.setattr(processes, "LONGEST_LOG", 1000)
    monkeypatch.setattr(processes, "LOG_INTERVAL", 0.01)
    log, shown = tmp_path / "output.log", []
    log.touch()
    code = (
        "import time\nfor number in range(60):\n"
        "    print(f'{number:050}', flush=True)\n    time.sleep(0.02)"
    )

    def start():
        with open(log, "ab") as file:
            return subprocess.Popen([sys.executable, "-c", code], stdout=file)

    assert keep_running(start, log, shown.append) == 0
    assert log.stat().st_size < 2000
    assert (tmp_path / "output.log.1").stat().st_size < 2000
    assert len(shown) > 50  # a line that is written while the log begins anew may be missing
    assert int(shown[-1]) == 59


@pytest.mark.parametrize("read_only", ["fedsolve", "local"])
def test_a_kit_that_cannot_be_written_to_is_named(tmp_path, monkeypatch, read_only):
    """A disk that was made read-only, a kit of another user."""
    kit = make_kits(tmp_path / "kits", "localhost", 1, ["north"])["north"]
    write = Path.write_text if read_only == "local" else Path.mkdir

    def fails(path, *words, **options):
        if path.is_relative_to(kit):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return write(path, *words, **options)

    monkeypatch.setattr(Path, write.__name__, fails)
    with pytest.raises(fs.InvalidInput, match=f"Cannot write to {kit}/{read_only}.*: Read-only"):
        processes.start_site(kit, tmp_path / "site.toml")
