"""What must not be lost, on disk, and folders that belong to one process at a time."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

from fedsolve.storage.atomic import keep_names, write_atomically

Parts = Sequence[bytes | memoryview]  # bytes, one after the other
HEADER = struct.Struct("<QI")  # a record's length and checksum


class Journal:
    """Records on disk, one after the other: a base, and what was appended since. One write to the
    disk for each; what was cut short at the end was never told anybody."""

    def __init__(self, home: Path):
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        for folder in home.parents[:3]:  # a power cut must not take the run's folders, either
            keep_names(folder)
        self._home, self._number = home, _newest(home)
        self._base = self._length = 0  # bytes of the base, and of what follows

    def load(self) -> tuple[bytes | None, list[bytes]]:
        """The base, if there is one, and the records after it; more can be appended then."""
        base, records = read(self._home)
        self._base = len(base or b"")
        self._length = sum(HEADER.size + len(record) for record in records)
        path = self._path("records", ".log")
        if path.exists():
            os.truncate(path, self._length)
        self._begin()
        return base, records

    def _begin(self) -> None:
        self._file = open(self._path("records", ".log"), "ab")  # noqa: SIM115 (held all the time)
        keep_names(self._home)

    def __del__(self):
        if hasattr(self, "_file"):
            self._file.close()

    def append(self, record: Parts) -> None:
        """A record, in parts."""
        size, checksum = sum(map(len, record)), 0
        for part in record:
            checksum = zlib.crc32(part, checksum)
        for part in (HEADER.pack(size, checksum), *record):
            self._file.write(part)
        self._file.flush()
        os.fdatasync(self._file.fileno())
        self._length += HEADER.size + size

    def is_long(self) -> bool:
        """Whether a new base would be much shorter."""
        return self._length > 2**24 + 8 * self._base

    def restart(self, base: Parts) -> None:
        """Begins anew from a base that has everything."""
        old = [self._path("base", ".safetensors"), self._path("records", ".log")]
        self._number, self._base, self._length = self._number + 1, sum(map(len, base)), 0
        write_atomically(self._path("base", ".safetensors"), *base)
        self._file.close()
        self._begin()
        for path in old:
            path.unlink(missing_ok=True)

    def _path(self, name: str, suffix: str) -> Path:
        return _path(self._home, self._number, name, suffix)


def read(home: Path) -> tuple[bytes | None, list[bytes]]:
    """What a journal has, which may be another process's: its base, and the records after it."""
    number = _newest(home)
    base, path = (
        _path(home, number, *name) for name in (("base", ".safetensors"), ("records", ".log"))
    )
    data, here, records = path.read_bytes() if path.exists() else b"", 0, []
    while len(data) >= here + HEADER.size:
        size, checksum = HEADER.unpack_from(data, here)
        start = here + HEADER.size
        record = data[start : start + size]
        if len(record) < size or zlib.crc32(record) != checksum:
            break
        records.append(record)
        here = start + size
    return base.read_bytes() if base.exists() else None, records


def _newest(home: Path) -> int:
    numbers = [int(path.stem.split("-")[1]) for path in home.glob("base-*.safetensors")]
    return max(numbers, default=0)


def _path(home: Path, number: int, name: str, suffix: str) -> Path:
    return home / f"{name}-{number}{suffix}"
