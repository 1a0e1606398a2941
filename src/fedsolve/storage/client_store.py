"""Clients' states on disk or in a user's mapping: one row for each client, in versions.

A row lies in a slot. Clients get slots when they are first written, so clients that were never
asked take no space. Rows of a version that is held (for a checkpoint, or to go back to) are not
overwritten: a client whose state changes gets another slot until the version is released.

A store and its checkpoints share marks, so that a checkpoint is never combined with the rows of
another run or another round.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import MutableMapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt8

from fedsolve.errors import InvalidInput
from fedsolve.storage.atomic import lock_file, write_atomically

Clients = Sequence[int] | Int[np.ndarray, " m"]
Index = Int[np.ndarray, " n"]  # a client's slot, -1 for none
Pairs = Int[np.ndarray, "_ 2"]  # clients and their slots, of those that have one
GROWTH = 2**24  # bytes by which the file grows at least
MARKS = -1  # the number under which a mapping has its marks


class _File:
    """Slots in a memory-mapped file, which is never read as a whole."""

    def __init__(self, folder: Path, dtype: np.dtype):
        self._folder, self._dtype, self._map = folder, dtype, np.zeros(0, dtype)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(folder / "rows", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise self._refused(error) from None
        if not lock_file(self._file):
            os.close(self._file)
            raise InvalidInput(f"{folder} is the store of a run that is still going on.")

    def open(self) -> None:
        self._grow(os.fstat(self._file).st_size // self._dtype.itemsize)

    def clear(self) -> None:
        os.truncate(self._file, 0)

    def _grow(self, slots: int) -> None:
        slots = max(slots, 1)
        try:
            # Room for all of it: where a page of the map found none, the process would be killed.
            os.posix_fallocate(self._file, 0, slots * self._dtype.itemsize)
        except OSError as error:
            raise self._refused(error) from None
        self._map = np.memmap(self._folder / "rows", self._dtype, "r+", shape=(slots,))

    def _refused(self, error: OSError) -> InvalidInput:
        return InvalidInput(f"Cannot write to the store {self._folder}: {error.strerror}.")

    def read(self, slots: np.ndarray) -> np.ndarray:
        return np.asarray(self._map[slots])

    def write(self, slots: np.ndarray, rows: np.ndarray) -> None:
        if (most := int(slots.max(initial=-1))) >= len(self._map):
            self._grow(max(most + 1, len(self._map) + -(-GROWTH // self._dtype.itemsize)))
        self._map[slots] = rows

    def has(self, slots: int) -> bool:
        return len(self._map) >= slots

    def flush(self) -> None:
        if isinstance(self._map, np.memmap):
            self._map.flush()

    @property
    def marks(self) -> list[str]:
        try:
            return json.loads((self._folder / "marks.json").read_bytes())
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            raise InvalidInput(f"{self._folder / 'marks.json'} cannot be read: {error}.") from None

    @marks.setter
    def marks(self, marks: list[str]) -> None:
        write_atomically(self._folder / "marks.json", json.dumps(marks).encode())

    def close(self) -> None:
        os.close(self._file)  # and with it the lock


class _Given:
    """Slots in a mapping from numbers to bytes that the user brings."""

    def __init__(self, mapping: MutableMapping[int, bytes], dtype: np.dtype):
        self._mapping, self._dtype = mapping, dtype

    def open(self) -> None:
        """Do nothing: the mapping is open."""

    def clear(self) -> None:
        """Do nothing: old rows are overwritten."""

    def read(self, slots: np.ndarray) -> np.ndarray:
        data = b"".join(self._mapping[int(slot)] for slot in slots)
        return np.frombuffer(data, self._dtype)

    def write(self, slots: np.ndarray, rows: np.ndarray) -> None:
        for slot, row in zip(slots, rows, strict=True):
            self._mapping[int(slot)] = row.tobytes()

    def has(self, slots: int) -> bool:
        """Return whether there are rows; released slots may be missing."""
        return slots == 0 or len(self._mapping) > 1

    def flush(self) -> None:
        """Do nothing: the mapping is the user's."""

    @property
    def marks(self) -> list[str]:
        return json.loads(self._mapping[MARKS]) if MARKS in self._mapping else []

    @marks.setter
    def marks(self, marks: list[str]) -> None:
        self._mapping[MARKS] = json.dumps(marks).encode()

    def close(self) -> None:
        """Do nothing: the mapping is the user's."""


class Store:
    """Rows by client; `first` is the row of those that have none yet.

    A new run takes a place in which nobody holds anything. Where a run goes on, `load` takes what
    its checkpoint has.
    """

    def __init__(self, place: object, first: np.ndarray, clients: int):
        if isinstance(place, str | Path):
            self._slots: _File | _Given = _File(Path(place), first.dtype)
        elif isinstance(place, MutableMapping):
            self._slots = _Given(place, first.dtype)
        else:
            raise InvalidInput(f"store must be a folder or a mutable mapping, got {place!r}.")
        self._name = str(place) if isinstance(place, str | Path) else "this mapping"
        self._first = first
        self._index: Index = np.full(clients, -1, np.int64)
        self._held: dict[str, Index] = {}
        self._marks: dict[str, str] = {}  # of held versions that checkpoints have
        self._new = ""  # the mark of a checkpoint that is being written
        # How many versions have the slot, the present one included.
        self._count: UInt8[np.ndarray, " slots"] = np.zeros(0, np.uint8)
        self._free: Int[np.ndarray, " free"] = np.zeros(0, np.int64)

    def __len__(self) -> int:
        """How many clients have a row."""
        return int(np.sum(self._index >= 0))

    @property
    def row(self) -> int:
        """The bytes of one."""
        return self._first.dtype.itemsize

    def take(self, clients: Clients) -> np.ndarray:
        """Return the clients' rows."""
        slots = self._index[np.asarray(clients, np.int64)]
        rows = np.broadcast_to(self._first, slots.shape).copy()
        if (known := slots >= 0).any():
            rows[known] = self._slots.read(slots[known])
        return rows

    def put(self, clients: Clients, rows: np.ndarray) -> None:
        """Replace the clients' rows; the last one counts for a client that is given twice."""
        who, last = np.unique(np.asarray(clients, np.int64)[::-1], return_index=True)
        if not len(who):
            return
        slots = self._index[who]
        old = slots >= 0
        shared = old.copy()
        shared[old] = self._count[slots[old]] > 1
        new = shared | ~old
        slots[new] = self._unused(int(np.sum(new)))
        self._slots.write(slots, rows[::-1][last])
        self._count[self._index[who[shared]]] -= 1
        self._count[slots[new]] = 1
        self._index[who] = slots

    def _unused(self, number: int) -> Int[np.ndarray, " number"]:
        if (more := number - len(self._free)) > 0:
            more = max(more, len(self._count) // 4)
            fresh = np.arange(len(self._count), len(self._count) + more)
            self._count = np.append(self._count, np.zeros(more, np.uint8))
            self._free = np.append(fresh[::-1], self._free)
        self._free, found = np.split(self._free, [len(self._free) - number])
        return found[::-1]

    def hold(self, name: str) -> None:
        """Hold this version under a name, in place of the last one of that name."""
        self._hold(name, self._index)

    def go_back(self, name: str) -> None:
        """Every client has the row of that version again."""
        self._become(self._index, self._held[name])

    def begin(self) -> None:
        """Begin a new run in this place."""
        if self._slots.marks:
            raise InvalidInput(
                f"The store {self._name} has the states of another run; go on from that run's"
                " checkpoint with resume, or choose another store."
            )
        self._slots.clear()
        self._slots.open()

    def save(self) -> tuple[str, Pairs]:
        """Return this version for a checkpoint: a mark, and clients with their slots.

        It is not held before `saved` is called, once the checkpoint is on disk.
        """
        self._slots.flush()
        self._new = uuid.uuid4().hex
        self._slots.marks = [*self._marks.values(), self._new]
        known = np.flatnonzero(self._index >= 0)
        return self._new, np.stack([known, self._index[known]], axis=1)

    def saved(self) -> None:
        """Hold the version of the last `save`, whose checkpoint is on disk, and the one before."""
        if "saved" in self._held:
            self._hold("saved before", self._held["saved"])
            self._marks["saved before"] = self._marks["saved"]
        self._hold("saved", self._index)
        self._marks["saved"] = self._new
        self._slots.marks = list(self._marks.values())  # before a row of others is written over

    def load(self, versions: Sequence[tuple[str, Pairs]]) -> None:
        """Load the version of a checkpoint, and that of the one before, if there is one."""
        marks = self._slots.marks
        there = [(mark, pairs) for mark, pairs in versions if mark in marks]
        if versions[0][0] not in marks:
            raise InvalidInput(
                f"The store {self._name} does not have the states of this checkpoint."
            )
        self._slots.open()
        used = max(int(pairs[:, 1].max(initial=-1)) + 1 for _, pairs in there)
        if not self._slots.has(used):
            raise InvalidInput(f"The store {self._name} is not whole: rows are missing.")
        self._count = np.zeros(used, np.uint8)
        for name, (mark, pairs) in zip(("saved", "saved before"), there, strict=False):
            version = np.full_like(self._index, -1)
            version[pairs[:, 0]] = pairs[:, 1]
            self._hold(name, version)
            self._marks[name] = mark
        self.go_back("saved")
        self._free = np.flatnonzero(self._count == 0)

    def close(self) -> None:
        self._slots.close()

    def _hold(self, name: str, version: Index) -> None:
        if name not in self._held:
            self._held[name] = np.full_like(version, -1)
        self._become(self._held[name], version)

    def _become(self, version: Index, wanted: Index) -> None:
        """Change a version into the wanted one, slot by slot: most slots are the same."""
        moved = np.flatnonzero(version != wanted)
        new, old = wanted[moved], version[moved]
        self._count[new[new >= 0]] += 1
        old = old[old >= 0]
        self._count[old] -= 1
        self._free = np.append(self._free, old[self._count[old] == 0])
        version[moved] = new
