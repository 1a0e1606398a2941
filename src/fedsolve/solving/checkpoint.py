"""Checkpoints: a whole run on disk, so that it continues to the same bits after a power cut.

A file is one line with a checksum, then safetensors (state, history) with a head that says which
run it is. It is written beside its place, forced to the disk and renamed; the one before is kept,
for the day on which the newest is damaged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from fedsolve.errors import InvalidInput
from fedsolve.federation.state import State
from fedsolve.fields import check_count
from fedsolve.runtimes.history import History, joined
from fedsolve.storage import arrays as codec
from fedsolve.storage.atomic import check_writable, write_atomically
from fedsolve.storage.client_store import Store
from fedsolve.types import PyTree, Table

FORMAT = 1
MAGIC = b"fedsolve checkpoint "
SECONDS = 30.0  # between checkpoints by default,
UNITS = {"s": 1, "min": 60, "h": 3600}
SHARE = 20  # and at least this many times what the last one took


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What was read from a file."""

    path: Path
    head: Table
    arrays: dict[str, np.ndarray]

    @property
    def round(self) -> int:
        """How many rounds were done."""
        return self.head["round"]

    @property
    def seconds(self) -> float:
        """How long they took."""
        return self.head["seconds"]

    @property
    def stopped(self) -> str:
        """The rule that ended the run, as `fingerprint` has it; empty if none did."""
        return self.head["stopped"]

    @property
    def history(self) -> History:
        """One entry for each evaluated round."""
        return History(
            {
                name: self.arrays[f"history/{name}.0"].view(jnp.dtype(dtype))
                for name, dtype in self.head["history"].items()
            }
        )

    @property
    def stores(self) -> list[tuple[str, np.ndarray]]:
        """What the store of a streamed run must hold.

        These are the rows of this checkpoint, and those of the one before, in case this one is
        damaged later.
        """
        both = [self, _good(_before(self.path))]
        return [(c.head["store"], c.arrays["store.0"]) for c in both if c and "store" in c.head]

    def of(self, path: Path) -> bool:
        """Whether it was read from there (or from the one before)."""
        return self.path in (path, _before(path))

    def check(self, identity: Table) -> None:
        """Raise if the checkpoint belongs to a different run."""
        version = _version()
        if self.head["version"] != version:
            raise InvalidInput(
                f"{self.path} is of fedsolve {self.head['version']}, and this is {version}."
            )
        others = [name for name, value in identity.items() if self.head["run"].get(name) != value]
        if others:
            raise InvalidInput(f"{self.path} belongs to another run: {', '.join(others)} differ.")

    def state(self, template: State) -> State:
        """Return the state, if it has the form of the template."""
        arrays = {k: v for k, v in self.arrays.items() if k.startswith("state.")}
        try:
            state = codec.take(arrays, "state", template, finite=False)
            codec.nothing_left(arrays)
        except codec.Refused as error:
            raise InvalidInput(f"{self.path} belongs to another run: {error}.") from None
        return jax.tree.map(jnp.asarray, state)


class Checkpoints:
    """Writes a run's checkpoints, after a number of rounds or seconds."""

    def __init__(self, path: str | Path, every: int | str | None, identity: Table, rule: str):
        self.store: Store | None = None  # of a streamed run
        self._path, self._identity, self._rule = Path(path), identity, rule
        self._every, self._seconds = how_often("checkpoint_every", every)
        self._due = time.perf_counter() + self._seconds
        self._writes = jax.process_index() == 0  # of several processes, the first one
        if self._writes:
            check_writable(self._path.parent)

    def at_most(self, budget: int, done: int) -> int:
        """Return the budget, or the rounds to the next checkpoint if these are fewer."""
        return budget if self._every is None else min(budget, self._every - done % self._every)

    def due(self, done: int) -> bool:
        if self._every is not None:
            return done % self._every == 0
        return time.perf_counter() >= self._due

    def write(self, state: State, chunks: list[History], seconds: float, stopped: bool) -> None:
        """Put the run on disk, with what a streamed run's store knows of its clients' rows.

        Where that cannot be done, what is there stays, and the run goes on with a warning.
        """
        if not self._writes:
            return
        history = joined(chunks)
        head = {
            "format": FORMAT,
            "version": _version(),
            "jax": jax.__version__,
            "run": self._identity,
            "round": int(state.round),
            "seconds": seconds,
            "stopped": self._rule if stopped else "",
            "history": {name: str(values.dtype) for name, values in history.items()},
        }
        began = time.perf_counter()
        named: dict[str, PyTree] = {f"history/{name}": v for name, v in history.items()}
        try:
            if self.store is not None:
                head["store"], named["store"] = self.store.save()
            data = codec.encode(head, {"state": state} | named)
            line = MAGIC + hashlib.sha256(data).hexdigest().encode() + b"\n"
            write_atomically(self._path, line, data, before=_before(self._path))
            if self.store is not None:
                self.store.saved()
        except OSError as error:
            message = f"No checkpoint after round {int(state.round)}: cannot write {self._path}"
            warnings.warn(f"{message}: {error.strerror}.", stacklevel=3)
        now = time.perf_counter()
        self._due = now + max(self._seconds, SHARE * (now - began))


def how_often(name: str, every: int | str | None) -> tuple[int | None, float]:
    """Return the rounds between checkpoints (None where time is counted) and the seconds."""
    if isinstance(every, str):
        found = re.fullmatch(rf"([\d.]+) *({'|'.join(UNITS)})", every.strip())
        with contextlib.suppress(ValueError):
            if found and (seconds := float(found[1]) * UNITS[found[2]]) > 0:
                return None, seconds
        raise InvalidInput(
            f'{name} must be a whole number of rounds, or a time such as "90 s" or "5 min", got'
            f" {every!r}."
        )
    if every is not None:
        check_count(name, every)
    return every, SECONDS


def load(path: str | Path) -> Checkpoint:
    """Load the newest good checkpoint of a name; set a damaged one aside, with a warning."""
    path, damaged = Path(path), []
    for place in (path, _before(path)):
        try:
            found = _read(place)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise InvalidInput(f"Cannot read {place}: {error.strerror}.") from None
        if found is not None:
            if damaged:
                with contextlib.suppress(OSError):  # never rotated into the good one's place
                    os.replace(path, path.with_name(path.name + ".damaged"))
                message = f"{path} is damaged; going on from the one before, round {found.round}."
                warnings.warn(message, stacklevel=2)
            if (theirs := found.head.get("jax")) != jax.__version__:
                warnings.warn(
                    f"{place} is of JAX {theirs}, and this is {jax.__version__}: the same numbers"
                    " up to rounding, not the same bits.",
                    stacklevel=2,
                )
            return found
        damaged.append(place)
    if damaged:
        raise InvalidInput(f"{' and '.join(map(str, damaged))}: no good checkpoint.")
    raise InvalidInput(f"There is no checkpoint {path}.")


def exists(path: Path) -> bool:
    """Whether there is something to go on from, good or not."""
    return path.exists() or _before(path).exists()


def fingerprint(*things: object) -> str:
    """Return a text that is the same in every process for the same problem, algorithm or rule.

    Numbers and data are included; of functions only the name is.
    """
    digest = hashlib.sha256()
    _feed(digest.update, things)
    return digest.hexdigest()[:16]


def _feed(update: Callable[[bytes], None], thing: object) -> None:
    if isinstance(thing, np.ndarray | jax.Array | np.generic):
        array = np.asarray(thing)
        update(f"{array.dtype}{array.shape}".encode())
        update(np.ascontiguousarray(array).tobytes())
    elif dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        update(type(thing).__qualname__.encode())
        for field in dataclasses.fields(thing):
            _feed(update, (field.name, getattr(thing, field.name, None)))
    elif isinstance(thing, dict):
        _feed(update, sorted(thing.items(), key=lambda item: str(item[0])))  # in any order the same
    elif isinstance(thing, list | tuple):
        update(f"[{len(thing)}".encode())
        for part in thing:
            _feed(update, part)
    elif isinstance(thing, functools.partial):
        _feed(update, (thing.func, thing.args, thing.keywords))
    elif callable(thing):
        update(getattr(thing, "__qualname__", type(thing).__qualname__).encode())
    elif isinstance(thing, str | int | float | bool | None):
        update(repr(thing).encode())
    else:
        update(type(thing).__qualname__.encode())


def _read(path: Path) -> Checkpoint | None:
    """None if it is damaged."""
    line, _, data = path.read_bytes().partition(b"\n")
    if line != MAGIC + hashlib.sha256(data).hexdigest().encode():
        return None
    head, arrays = codec.decode(data, None)
    if head["format"] != FORMAT:
        raise InvalidInput(f"{path} has a form that this version of fedsolve does not read.")
    return Checkpoint(path, head, arrays)


def _good(path: Path) -> Checkpoint | None:
    try:
        return _read(path)
    except (OSError, InvalidInput):
        return None


def _before(path: Path) -> Path:
    return path.with_name(path.name + ".before")


def _version() -> str:
    import fedsolve

    return fedsolve.__version__
