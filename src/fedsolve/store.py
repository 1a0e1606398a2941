"""Clients' states outside of memory: a row for each client that has one, in versions.

A row lies in a slot. Clients get slots when they are first written, so those that were never asked
take no room. Rows of a version that is held (for a checkpoint, or to go back to) are not written
over: a client that moves on gets another slot until the version is let go.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from fedsolve.errors import InvalidInput

Clients = Sequence[int] | Int[np.ndarray, " m"]
Index = dict[int, int]  # client -> slot
GROWTH = 2**24  # bytes by which the file grows at least


class _File:
    """Slots in a memory-mapped file, which grows with holes and is never read as a whole."""

    def __init__(self, folder: Path, dtype: np.dtype):
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._dtype = folder / "rows", dtype
        self._path.touch()
        self._map = self._mapped(self._path.stat().st_size // dtype.itemsize)

    def _mapped(self, slots: int) -> Any:
        slots = max(slots, 1)
        if self._path.stat().st_size < slots * self._dtype.itemsize:
            os.truncate(self._path, slots * self._dtype.itemsize)
        return np.memmap(self._path, self._dtype, "r+", shape=(slots,))

    def read(self, slots: np.ndarray) -> np.ndarray:
        return np.asarray(self._map[slots])

    def write(self, slots: np.ndarray, rows: np.ndarray) -> None:
        if (most := int(slots.max(initial=-1))) >= len(self._map):
            least = len(self._map) + -(-GROWTH // self._dtype.itemsize)
            self._map = self._mapped(max(most + 1, least))
        self._map[slots] = rows

    def flush(self) -> None:
        self._map.flush()


class _Given:
    """Slots in a mapping from numbers to bytes that the user brings."""

    def __init__(self, mapping: MutableMapping, dtype: np.dtype):
        self._mapping, self._dtype = mapping, dtype

    def read(self, slots: np.ndarray) -> np.ndarray:
        data = b"".join(self._mapping[int(slot)] for slot in slots)
        return np.frombuffer(data, self._dtype)

    def write(self, slots: np.ndarray, rows: np.ndarray) -> None:
        for slot, row in zip(slots, rows, strict=True):
            self._mapping[int(slot)] = row.tobytes()

    def flush(self) -> None:
        """The user's own affair."""


class Store:
    """Rows by client; `first` is the row of those that have none yet."""

    def __init__(self, place: Any, first: np.ndarray):
        if isinstance(place, str | Path):
            self._slots: _File | _Given = _File(Path(place), first.dtype)
        elif isinstance(place, MutableMapping):
            self._slots = _Given(place, first.dtype)
        else:
            raise InvalidInput(f"store must be a folder or a mutable mapping, got {place!r}.")
        self._first = first
        self._index: Index = {}
        self._held: dict[str, Index] = {}
        self._fixed: set[int] = set()  # slots of held versions
        self._free: list[int] = []
        self._used = 0

    def __len__(self) -> int:
        """How many clients have a row."""
        return len(self._index)

    @property
    def row(self) -> int:
        """The bytes of one."""
        return self._first.dtype.itemsize

    def take(self, clients: Clients) -> np.ndarray:
        """The clients' rows."""
        slots = np.asarray([self._index.get(int(client), -1) for client in clients], np.int64)
        rows = np.broadcast_to(self._first, slots.shape).copy()
        if (known := slots >= 0).any():
            rows[known] = self._slots.read(slots[known])
        return rows

    def put(self, clients: Clients, rows: np.ndarray) -> None:
        """Replaces the clients' rows."""
        slots = np.asarray([self._slot(int(client)) for client in clients], np.int64)
        if slots.size:
            self._slots.write(slots, rows)

    def _slot(self, client: int) -> int:
        slot = self._index.get(client)
        if slot is None or slot in self._fixed:
            if self._free:
                slot = self._free.pop()
            else:
                slot, self._used = self._used, self._used + 1
            self._index[client] = slot
        return slot

    def hold(self, name: str) -> None:
        """Keeps this version under that name, in place of the last one of that name."""
        self._held[name] = dict(self._index)
        self._sort_out()

    def go_back(self, name: str) -> None:
        """Every client has the row of that version again."""
        self._index = dict(self._held[name])
        self._sort_out()

    def save(self) -> np.ndarray:
        """This version as clients and their slots, for a checkpoint. It is held until the next but
        one is saved, as checkpoints are."""
        if "saved" in self._held:
            self._held["saved before"] = self._held["saved"]
        self.hold("saved")
        self._slots.flush()
        return np.asarray(list(self._index.items()), np.int64).reshape(-1, 2)

    def load(self, saved: np.ndarray) -> None:
        """The version that was saved."""
        self._held["saved"] = dict(saved.tolist())
        self._used = int(saved[:, 1].max(initial=-1)) + 1
        self.go_back("saved")

    def _sort_out(self) -> None:
        self._fixed = {slot for version in self._held.values() for slot in version.values()}
        taken = self._fixed | set(self._index.values())
        self._free = [slot for slot in range(self._used) if slot not in taken]
