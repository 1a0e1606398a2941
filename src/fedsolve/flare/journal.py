"""An append-only journal on disk: a base record and the records appended since."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

from fedsolve.storage.atomic import sync_folder, write_atomically

Parts = Sequence[bytes | memoryview]  # the pieces of a record, written one after the other
HEADER = struct.Struct("<QI")  # a record's length and checksum
PARENTS = 3  # folders above a journal that are synced with it
LONG = 2**24  # bytes of records from which a new base can be worth writing


class Journal:
    """A base record and the records appended since, in a folder of one process.

    Every record is on the disk when `append` returns. A record that was cut short by a crash was
    not yet used by anyone, and is dropped by `load`.
    """

    def __init__(self, home: Path):
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        for folder in home.parents[:PARENTS]:  # the run's new folders must survive a power failure
            sync_folder(folder)
        self._home, self._number = home, _newest(home)
        self._base_size = self._records_size = 0  # in bytes

    def load(self) -> tuple[bytes | None, list[bytes]]:
        """Return the base, if any, and the records after it, and open the journal for `append`."""
        base, records = read(self._home)
        self._base_size = len(base or b"")
        self._records_size = sum(HEADER.size + len(record) for record in records)
        path = self._records_path()
        if path.exists():
            os.truncate(path, self._records_size)
        self._open()
        return base, records

    def _open(self) -> None:
        self._file = open(self._records_path(), "ab")  # noqa: SIM115 (open as long as the journal)
        sync_folder(self._home)

    def __del__(self):
        if hasattr(self, "_file"):
            self._file.close()

    def append(self, record: Parts) -> None:
        """Append a record, given in pieces, and wait until it is on the disk."""
        size, checksum = sum(map(len, record)), 0
        for part in record:
            checksum = zlib.crc32(part, checksum)
        for part in (HEADER.pack(size, checksum), *record):
            self._file.write(part)
        self._file.flush()
        os.fdatasync(self._file.fileno())
        self._records_size += HEADER.size + size

    def is_long(self) -> bool:
        """Return whether replacing base and records by a new base would save much space."""
        return self._records_size > LONG + 8 * self._base_size

    def restart(self, base: Parts) -> None:
        """Replace everything by a new base, which must contain all that is still needed."""
        old = [self._base_path(), self._records_path()]
        self._number += 1
        self._base_size, self._records_size = sum(map(len, base)), 0
        write_atomically(self._base_path(), *base)
        self._file.close()
        self._open()
        for path in old:
            path.unlink(missing_ok=True)

    def _base_path(self) -> Path:
        return _base_path(self._home, self._number)

    def _records_path(self) -> Path:
        return _records_path(self._home, self._number)


def read(home: Path) -> tuple[bytes | None, list[bytes]]:
    """Return a journal's base, if any, and the records after it, without changing anything.

    The journal may belong to another process. Reading stops at the first incomplete record.
    """
    number = _newest(home)
    base, path = _base_path(home, number), _records_path(home, number)
    data, position, records = path.read_bytes() if path.exists() else b"", 0, []
    while len(data) >= position + HEADER.size:
        size, checksum = HEADER.unpack_from(data, position)
        start = position + HEADER.size
        record = data[start : start + size]
        if len(record) < size or zlib.crc32(record) != checksum:
            break
        records.append(record)
        position = start + size
    return base.read_bytes() if base.exists() else None, records


def _newest(home: Path) -> int:
    """Return the number of a journal's newest base, or 0 if it has none."""
    numbers = [int(path.stem.split("-")[1]) for path in home.glob("base-*.safetensors")]
    return max(numbers, default=0)


def _base_path(home: Path, number: int) -> Path:
    return home / f"base-{number}.safetensors"


def _records_path(home: Path, number: int) -> Path:
    return home / f"records-{number}.log"
