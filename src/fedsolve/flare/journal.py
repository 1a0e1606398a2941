"""An append-only journal on disk: a base record and the records appended since."""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedsolve.errors import InvalidInput
from fedsolve.storage.atomic import sync_folder, write_atomically

Parts = Sequence[bytes | memoryview]  # the pieces of a record, written one after the other
HEADER = struct.Struct("<QI")  # a record's length and checksum
PARENTS = 3  # folders above a journal that are synced with it
LONG = 2**24  # bytes of records from which a new base can be worth writing


class JournalError(InvalidInput):
    """Raised if a journal cannot be read or written; `why` says so without its path."""

    def __init__(self, place: Path, why: str):
        self.why = why
        super().__init__(f"{place}: {why}.")


class CannotWrite(JournalError):
    """Raised if a journal cannot be written to; nothing of the record is kept."""

    def __init__(self, place: Path, error: OSError):
        super().__init__(place, f"cannot write its journal: {error.strerror or error}")


class Damaged(JournalError):
    """Raised if acknowledged records lie behind one that is not whole."""


class Journal:
    """A base record and the records appended since, in a folder of one process.

    A record is on the disk when `append` returns, and not there at all when `append` raises. A
    record that was cut short by a crash was not yet used by anyone, and is dropped by `load`.
    """

    def __init__(self, home: Path):
        self._home = home
        try:
            home.mkdir(parents=True, exist_ok=True, mode=0o700)
            for folder in home.parents[:PARENTS]:  # new folders must survive a power failure
                sync_folder(folder)
            self._number = _newest(home)
        except OSError as error:
            raise CannotWrite(home, error) from error
        self._base_size = self._records_size = 0  # in bytes
        self._file, self._sound = -1, True  # whether the file ends with a whole record

    def load(self) -> tuple[bytes | None, list[bytes]]:
        """Return the base, if any, and the records after it, and open the journal for `append`."""
        base, records = read(self._home)
        self._base_size = len(base or b"")
        self._records_size = sum(HEADER.size + len(record) for record in records)
        try:
            self._file = self._opened(self._number)
            self._cut()
            sync_folder(self._home)
        except OSError as error:
            raise CannotWrite(self._home, error) from error
        return base, records

    def _opened(self, number: int, flags: int = 0) -> int:
        path = _records_path(self._home, number)
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | flags, 0o600)

    def __del__(self):
        if getattr(self, "_file", -1) >= 0:
            os.close(self._file)

    def append(self, record: Parts) -> None:
        """Append a record, given in pieces, and wait until it is on the disk.

        Raises:
            CannotWrite: If it cannot be written. The journal is as before, and takes further
                records once it could be brought back to that state.
        """
        size, checksum = sum(map(len, record)), 0
        for part in record:
            checksum = zlib.crc32(part, checksum)
        try:
            if not self._sound:
                self._repair()
            self._sound = False
            for part in (HEADER.pack(size, checksum), *record):
                _write_all(self._file, part)
            os.fdatasync(self._file)
        except OSError as error:
            with contextlib.suppress(OSError):  # else at the next `append`
                self._repair()
            raise CannotWrite(self._home, error) from error
        self._sound = True
        self._records_size += HEADER.size + size

    def _repair(self) -> None:
        """Bring the files back to where the last success left them."""
        new = _base_path(self._home, self._number + 1)
        if new.exists():
            new.unlink()
            sync_folder(self._home)
        self._cut()
        self._sound = True

    def _cut(self) -> None:
        """Remove what follows the last whole record."""
        if os.fstat(self._file).st_size != self._records_size:
            os.ftruncate(self._file, self._records_size)
        os.fsync(self._file)

    def is_long(self) -> bool:
        """Return whether replacing base and records by a new base would save much space."""
        return self._records_size > LONG + 8 * self._base_size

    def restart(self, base: Parts) -> None:
        """Replace everything by a new base, which must contain all that is still needed.

        Raises:
            CannotWrite: If that cannot be written; the journal is as before.
        """
        old = [_base_path(self._home, self._number), _records_path(self._home, self._number)]
        number, file = self._number + 1, -1
        try:
            if not self._sound:
                self._repair()
            self._sound = False
            file = self._opened(number, os.O_TRUNC)
            write_atomically(_base_path(self._home, number), *base)
        except OSError as error:
            if file >= 0:
                os.close(file)
            with contextlib.suppress(OSError):  # else at the next `append`
                self._repair()
            raise CannotWrite(self._home, error) from error
        os.close(self._file)
        self._file, self._number, self._sound = file, number, True
        self._base_size, self._records_size = sum(map(len, base)), 0
        for path in old:
            with contextlib.suppress(OSError):  # nobody reads them any more
                path.unlink(missing_ok=True)


def _write_all(file: int, data: bytes | memoryview) -> None:
    """Write all of it; a call may write a part."""
    left = memoryview(data).cast("B")
    while len(left):
        left = left[os.write(file, left) :]


def read(home: Path) -> tuple[bytes | None, list[bytes]]:
    """Return a journal's base, if any, and the records after it, without changing anything.

    The journal may belong to another process. Reading stops at a last record that is not whole.

    Raises:
        Damaged: If whole records follow one that is not: they were acknowledged, and cannot be
            used without it.
    """
    base, data = _files(home)
    records, position = _records(data, 0)
    behind = _next_record(data, position + 1)
    if behind is not None:
        lost, _ = _records(data, behind)
        raise Damaged(
            home,
            f"the journal is damaged at byte {position}: {len(records)} records before it are"
            f" whole, and {len(lost)} behind it cannot be used; put back a copy of the folder, or"
            " begin a new run",
        )
    return base, records


def _files(home: Path) -> tuple[bytes | None, bytes]:
    """Return the bytes of the newest base, if any, and of the records after it."""
    while True:
        number = _newest(home)
        base, path = _base_path(home, number), _records_path(home, number)
        found = base.read_bytes() if base.exists() else None
        data = path.read_bytes() if path.exists() else b""
        if number == _newest(home):  # else another process has replaced them meanwhile
            return found, data


def _records(data: bytes, position: int) -> tuple[list[bytes], int]:
    """Return the whole records from a position on, and where the last one ends."""
    found = []
    while (record := _record(data, position)) is not None:
        found.append(record)
        position += HEADER.size + len(record)
    return found, position


def _record(data: bytes, position: int) -> bytes | None:
    """Return the record at a position, if there is a whole one; no record is empty."""
    if len(data) < position + HEADER.size:
        return None
    size, checksum = HEADER.unpack_from(data, position)
    start = position + HEADER.size
    if not 0 < size <= len(data) - start:
        return None
    record = data[start : start + size]
    return record if zlib.crc32(record) == checksum else None


def _next_record(data: bytes, position: int) -> int | None:
    """Return where the first whole record at or after a position begins, if there is one."""
    last = len(data) - HEADER.size  # the last place where a header can begin
    places = []
    for offset in range(8):
        count = (last - position - offset) // 8 + 1
        if count > 0:
            sizes = np.frombuffer(data, "<u8", count, position + offset)
            here = np.arange(count) * 8 + position + offset
            fits = (sizes > 0) & (sizes <= (last - here).astype(np.uint64))
            places += here[fits].tolist()
    return next((place for place in sorted(places) if _record(data, place) is not None), None)


def _newest(home: Path) -> int:
    """Return the number of a journal's newest base, or 0 if it has none."""
    numbers = [int(path.stem.split("-")[1]) for path in home.glob("base-*.safetensors")]
    return max(numbers, default=0)


def _base_path(home: Path, number: int) -> Path:
    return home / f"base-{number}.safetensors"


def _records_path(home: Path, number: int) -> Path:
    return home / f"records-{number}.log"
