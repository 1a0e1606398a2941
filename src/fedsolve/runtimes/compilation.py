"""Compiled programs: a cache that outlives the process, and programs for many short calls."""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from fedsolve.types import Function, PyTree


def keep_compiled_programs() -> None:
    """Switch on JAX's persistent cache of compiled programs, in the user's cache folder.

    A user who chose a folder by JAX's own setting keeps it.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "fedsolve", "programs")
    with contextlib.suppress(OSError):  # no place for them: compile every time
        folder.mkdir(parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


class _Fixed:
    """The static part of a program. Its hash is computed once, as every call asks for it."""

    def __init__(self, *parts: Any):
        self.parts, self._hash = parts, hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Fixed) and self.parts == other.parts)


@functools.partial(jax.jit, static_argnums=0)
def _program(fixed: _Fixed, arrays: list[Array], *arguments: PyTree) -> PyTree:
    function, structure, others, places = fixed.parts
    leaves = list(others)
    for place, array in zip(places, arrays, strict=True):
        leaves[place] = array
    return function(*jax.tree.unflatten(structure, leaves), *arguments)


def prepared(function: Function, *fixed: PyTree) -> Function:
    """Compile `function(*fixed, *arguments)` for many short calls.

    The fixed arguments are flattened once, where `eqx.filter_jit` would do so in each call. Arrays
    among them are arguments of the program.
    """
    leaves, structure = jax.tree.flatten(fixed)
    places = tuple(i for i, x in enumerate(leaves) if isinstance(x, jax.Array | np.ndarray))
    others = tuple(None if i in places else x for i, x in enumerate(leaves))
    arrays = [leaves[i] for i in places]
    return functools.partial(_program, _Fixed(function, structure, others, places), arrays)
