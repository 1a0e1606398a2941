"""Write files that survive a power failure, and lock files against other processes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import time
from pathlib import Path

from fedsolve.errors import InvalidInput

LOST = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE)  # what was written may not be there
LOCK_RETRY = 0.1  # seconds between two attempts to lock a file


def write_atomically(path: Path, *parts: bytes | memoryview, before: Path | None = None) -> None:
    """Replace the content of a file, or create it, in one step.

    After a power failure the file has either its old or its new content. With `before`, the old
    file is kept under that path.
    """
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
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Write a folder's list of files to the disk; a new file's content alone is not enough."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno in LOST:  # others say that the file system cannot sync a folder
            raise
    finally:
        os.close(handle)


def check_writable(folder: Path) -> None:
    """Raise if no file can be created in the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / ".fedsolve", b"Can this folder be written to?\n")
        (folder / ".fedsolve").unlink()
    except OSError as error:
        raise InvalidInput(f"Cannot write to {folder}: {error.strerror}.") from None


def lock_file(file: int | io.IOBase, timeout: float = 0.0) -> bool:
    """Lock an open file for this process; return False if another process holds the lock.

    Attempts are repeated for `timeout` seconds. The lock is released when the file is closed, at
    the latest when the process ends.
    """
    end = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(LOCK_RETRY)


def open_locked(path: Path, timeout: float = 0.0) -> io.TextIOWrapper | None:
    """Create or empty a file and lock it as `lock_file` does; None if another process holds it."""
    file = open(path, "w")  # noqa: SIM115 (the caller keeps it open as long as it needs the lock)
    if lock_file(file, timeout):
        return file
    file.close()
    return None
