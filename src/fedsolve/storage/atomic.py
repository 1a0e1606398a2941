"""Files that survive a power cut, and files that belong to one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path
from typing import Any

from fedsolve.errors import InvalidInput


def write_atomically(path: Path, *parts: bytes | memoryview, before: Path | None = None) -> None:
    """The file has the old content or the new one, whenever the power fails; the old one is kept
    as `before`, if asked for."""
    beside = path.with_name(path.name + ".new")
    try:
        with open(beside, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        if before is not None and path.exists():
            os.replace(path, before)
        os.replace(beside, path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
    keep_names(path.parent)


def keep_names(folder: Path) -> None:
    """Forces to the disk which files a folder has: a new file's content alone is not enough."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # not all file systems know this; the file is there
            os.fsync(handle)
    finally:
        os.close(handle)


def check_writable(folder: Path) -> None:
    """Refuses a folder in which no file can be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / ".fedsolve", b"Can this folder be written to?\n")
        (folder / ".fedsolve").unlink()
    except OSError as error:
        raise InvalidInput(f"Cannot write to {folder}: {error.strerror}.") from None


def locked(path: Path, patience: float = 0.0) -> Any:
    """Holds a file for this process alone, until it ends; None if another has it for longer than
    that."""
    file = open(path, "w")  # noqa: SIM115 (held until the process ends)
    end = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except OSError:
            if time.monotonic() > end:
                file.close()
                return None
            time.sleep(0.1)
