"""Fields of algorithms and their parts: numbers, schedules, static choices, and their checks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Shaped

from fedsolve.errors import InvalidInput

Scalar = float | Shaped[Array, ""] | Shaped[np.ndarray, ""] | np.number
Schedule = Callable[[Any], Any]  # round (from 0) -> value


def static(default: Any = None) -> Any:
    """A field that is part of the program: a new value is a new compilation."""
    return eqx.field(static=True, default=default)


def at(value: Scalar | Schedule, round: Any) -> Any:
    """The value in this round of a number that may be a schedule."""
    return value(round) if callable(value) else value


def scalar(name: str) -> Callable[[Any], Any]:
    """A converter for a field that holds a number (and stays as it is when JAX maps over it)."""

    def convert(value: Any) -> Any:
        if isinstance(value, bool | str) or value is None:
            raise InvalidInput(f"{name} must be a number, got {value!r}.")
        return float(value) if isinstance(value, int) else value

    return convert


def check_positive(name: str, value: Any, zero: bool = False) -> None:
    """Refuses a number that is not positive (or not non-negative); schedules and traced numbers
    cannot be looked at."""
    if callable(value) or isinstance(value, Tracer):
        return
    numbers = np.asarray(value)
    if not np.all(np.isfinite(numbers) & ((numbers > 0) | (zero & (numbers == 0)))):
        raise InvalidInput(f"{name} must be {'at least 0' if zero else 'positive'}, got {value}.")


def check_count(name: str, value: Any, most: int | None = None) -> None:
    """Refuses a count that is not a whole number from 1 to `most`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise InvalidInput(f"{name} must be a whole number from 1 up, got {value!r}.")
    if most is not None and value > most:
        raise InvalidInput(f"{name} is {value}, but there are only {most} clients.")


def read_table(name: str, path: str | Path) -> Shaped[np.ndarray, "rows columns"]:
    """Numbers in a file: `.npy`, or text with commas."""
    path = Path(path)
    try:
        table = np.load(path) if path.suffix == ".npy" else np.loadtxt(path, delimiter=",")
        table = np.atleast_2d(np.asarray(table, float))
    except (OSError, ValueError) as error:
        reason = str(error).rstrip(".")
        raise InvalidInput(f"Cannot read {name} from {path}: {reason}.") from error
    if table.ndim != 2 or not table.size:
        raise InvalidInput(f"{name} in {path} must be a table: a row a round, a column a client.")
    return table


def check_kind(name: str, value: Any, kind: type) -> None:
    """Refuses a part of another kind, such as a compressor's name in place of a compressor."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise InvalidInput(f"{name} must be {article} {kind.__name__}, got {value!r}.")
