"""Run a module as a program that ends, with all that it started, when its starter ends.

Called with the number of a file that only this process keeps open (the lock of a kit), a module's
name and its arguments. Standard input is a pipe whose other end the starter has: it is closed
however the starter ends. (PR_SET_PDEATHSIG would follow the thread that started this process.)
Nothing else of Fedsolve is imported here.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import sys
import threading

import psutil


def _end_with_starter() -> None:
    """Wait until the starter has ended; then kill all that was started here, and this process."""
    with contextlib.suppress(OSError):
        while os.read(0, 1024):
            pass
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Run the module that the command line names."""
    lock, *sys.argv = sys.argv[1:]
    os.set_inheritable(int(lock), False)
    sys.path[0] = os.getcwd()  # as for `python -m`
    threading.Thread(target=_end_with_starter, daemon=True).start()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
