"""Arrays and numbers on JAX's device, in the precision of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from fedsolve.problem.layout import as_device_array

Module = TypeVar("Module")


@contextlib.contextmanager
def precision_of(name: str | None) -> Iterator[np.dtype | None]:
    """Run a block in a precision.

    Args:
        name: `"float32"`, `"float64"`, or None for what JAX is set to.

    Yields:
        The type of floating-point numbers; None if no precision was given.
    """
    if name is None:
        yield None
    else:
        with jax.enable_x64(name == "float64"):
            yield jnp.dtype(name)


def numbers_on_device(module: Module, dtype: DTypeLike | None) -> Module:
    """Return an algorithm or options with numbers as arrays: a new value then compiles nothing."""
    return as_device_array(module, dtype)
