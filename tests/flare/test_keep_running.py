"""A command and the process that it starts: its log and its end."""

import signal
import subprocess
import sys

import psutil
import pytest

from fedsolve.flare.processes import keep_running
from tests.support.deployment import wait_until


def test_a_log_is_shown_from_the_start_of_its_process_to_the_end(tmp_path):
    log, shown = tmp_path / "output.log", []
    log.write_text("of an earlier process\n")
    code = "import time; print('first', flush=True); time.sleep(0.5); print('last'); exit(3)"

    def start():
        with open(log, "ab") as file:
            return subprocess.Popen([sys.executable, "-c", code], stdout=file)

    assert keep_running(start, log, shown.append) == 3
    assert shown == ["first", "last"]


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGHUP])
def test_the_end_of_a_command_is_the_end_of_its_process(tmp_path, end):
    """A service manager's stop, a terminal that is closed: it ends, with all that it started."""
    log, started = tmp_path / "output.log", tmp_path / "started"
    code = (
        "import os, subprocess, sys, time; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
        f"open({str(started)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}'); time.sleep(60)"
    )
    command = (
        "import subprocess, sys; from pathlib import Path; "
        "from fedsolve.flare.processes import keep_running; "
        f"start = lambda: subprocess.Popen([sys.executable, '-c', {code!r}]); "
        f"log = Path({str(log)!r}); log.touch(); sys.exit(keep_running(start, log, print))"
    )
    process = subprocess.Popen([sys.executable, "-c", command])
    wait_until(lambda: started.exists() and len(started.read_text().split()) == 2)
    family = [int(number) for number in started.read_text().split()]
    process.send_signal(end)
    assert process.wait(30) == 0
    left = [each for each in psutil.process_iter(["status"]) if each.pid in family]
    assert all(each.info["status"] == psutil.STATUS_ZOMBIE for each in left)
