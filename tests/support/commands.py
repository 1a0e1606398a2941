"""The command line in tests."""

import logging
import os
import sys
import time

import pytest

from fedsolve.cli import main as cli


@pytest.fixture
def fedsolve(monkeypatch, capsys, tmp_path):
    """Runs a command in an empty folder: (exit status, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "_exit", sys.exit)  # by which `deploy` ends its process

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["fedsolve", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        captured = capsys.readouterr()
        return end.value.code or 0, captured.out, captured.err

    yield call
    logging.disable(logging.NOTSET)


def newest(folder):
    """What the newest checkpoint in there looks like from outside."""
    return max((p.stat().st_mtime_ns for p in folder.glob("checkpoints/run-*[0-9]")), default=0)


def wait_for_a_checkpoint(process, folder):
    before, deadline = newest(folder), time.monotonic() + 120
    while newest(folder) == before and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
