"""Field helpers for algorithms and their parts: schedules, static fields, and checks of values."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import equinox as eqx
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Shaped

from fedsolve.errors import InvalidInput
from fedsolve.types import Round

Scalar = float | Shaped[Array, ""] | Shaped[np.ndarray, ""] | np.number
Numbers = Shaped[Array, "..."] | Shaped[np.ndarray, "..."]  # one for each client, or for each round
Schedule = Callable[..., Scalar]  # round (from 0) -> value
Value = TypeVar("Value")


def static(default: Any = None) -> Any:
    """Declare a field that is part of the compiled program: a new value needs a new compilation.

    Use it for what decides shapes or the sequence of operations, such as a number of steps. Other
    fields are leaves of the pytree, and JAX can map over them.

    Args:
        default: The default value of the field.

    Returns:
        A dataclass field.

    Example:
        >>> import fedsolve as fs
        >>> class Descent(fs.Algorithm):
        ...     step_size: float
        ...     local_steps: int = fs.static(1)
    """
    return eqx.field(static=True, default=default)


def at(value: Scalar | Schedule, round: Round) -> Scalar:
    """Return the value in this round of a number that may be a schedule."""
    return value(round) if callable(value) else value


def scalar(name: str) -> Callable[[object], Any]:
    """Make a converter for a field that holds a number; arrays and schedules stay as they are."""

    def convert(value: object) -> object:
        if isinstance(value, bool | str) or value is None:
            raise InvalidInput(f"{name} must be a number, got {value!r}.")
        if isinstance(value, list | tuple | dict):
            raise InvalidInput(f"{name} must be one number, got {value!r}.")
        return float(value) if isinstance(value, int) else value

    return convert


def optional(convert: Callable[[object], Value]) -> Callable[[object], Value | None]:
    """Make a converter that leaves None as it is."""
    return lambda value: None if value is None else convert(value)


def check_positive(name: str, value: object, zero: bool = False) -> None:
    """Raise if a number is not positive (with `zero`: if it is negative).

    Schedules and traced numbers have no value yet and are not checked.
    """
    if callable(value) or isinstance(value, Tracer):
        return
    numbers = np.asarray(value)
    if not np.all(np.isfinite(numbers) & ((numbers > 0) | (zero & (numbers == 0)))):
        raise InvalidInput(f"{name} must be {'at least 0' if zero else 'positive'}, got {value}.")


def check_probability(name: str, value: object) -> None:
    """Raise if a number is not above 0 and at most 1. Traced numbers are not checked."""
    if not isinstance(value, Tracer):
        number = np.asarray(value)
        if not np.all((number > 0) & (number <= 1)):
            raise InvalidInput(f"{name} must be above 0 and at most 1, got {value}.")


def check_momentum(name: str, value: object) -> None:
    """Raise if a number is negative, 1 or more. Traced numbers are not checked."""
    if not isinstance(value, Tracer):
        number = np.asarray(value)
        if not np.all((number >= 0) & (number < 1)):
            raise InvalidInput(f"{name} must be at least 0 and below 1, got {value}.")


def check_count(name: str, value: object, most: int | None = None) -> None:
    """Raise if a count is not a whole number from 1 to `most`, the number of clients."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise InvalidInput(f"{name} must be a whole number from 1 up, got {value!r}.")
    if most is not None and value > most:
        raise InvalidInput(f"{name} is {value}, but there are only {most} clients.")


def check_flag(name: str, value: object) -> None:
    """Raise if the value is not True or False."""
    if not isinstance(value, bool):
        raise InvalidInput(f"{name} must be True or False, got {value!r}.")


def check_seed(value: object) -> None:
    """Raise if a seed is not a whole number."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InvalidInput(f"seed must be a whole number, got {value!r}.")


def read_table(name: str, path: str | Path) -> Shaped[np.ndarray, "rows columns"]:
    """Read a table of numbers from a file: `.npy`, or text with commas."""
    path = Path(path)
    try:
        table = np.load(path) if path.suffix == ".npy" else np.loadtxt(path, delimiter=",")
        table = np.atleast_2d(np.asarray(table, float))
    except (OSError, ValueError) as error:
        reason = str(error).rstrip(".")
        raise InvalidInput(f"Cannot read {name} from {path}: {reason}.") from error
    if table.ndim != 2 or not table.size:
        raise InvalidInput(f"{name} in {path} must be a table with a row for each round.")
    return table


def check_kind(name: str, value: object, kind: type[Value]) -> Value:
    """Return the value if it is an instance of `kind`, or raise."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise InvalidInput(f"{name} must be {article} {kind.__name__}, got {value!r}.")
    return value


def html_table(title: str, rows: Mapping[str, str], note: str = "") -> str:
    """Return a small table for notebooks, with a title and a note below it."""
    lines = [
        f'<tr><th style="text-align:left">{html.escape(k)}</th><td>{html.escape(v)}</td></tr>'
        for k, v in rows.items()
    ]
    end = f"<p>{html.escape(note)}</p>" if note else ""
    return f"<b>{html.escape(title)}</b><table>{''.join(lines)}</table>{end}"
