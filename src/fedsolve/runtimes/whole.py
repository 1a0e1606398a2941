"""Losses whose intermediate results are small beside the data, which need no blocks.

Blocks of clients bound the memory of intermediate results. Where these are small anyway, as for
linear models, one product over all clients reads the data with all cores, and a loop over blocks is
slower (benchmarks/fedadmm_scale.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend import core

from fedsolve.types import Function, PyTree

SHARE = 8  # the largest result may be this fraction of the data (1/8)


def is_light(function: Function, *arguments: PyTree) -> bool:
    """Return whether no array that a function makes has more than an eighth of its arguments' size.

    Args:
        function: The function.
        arguments: Its arguments, or their shapes.
    """
    program = jax.make_jaxpr(function)(*arguments).jaxpr
    given = sum(_size(var) for var in program.invars)
    return all(SHARE * size <= given for size in _sizes(program))


def _sizes(program: core.Jaxpr) -> Iterator[int]:
    """Return the number of entries of every array that a program makes, also inside its parts."""
    for equation in program.eqns:
        parts = list(jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program))
        for part in filter(_is_program, parts):
            yield from _sizes(getattr(part, "jaxpr", part))
        yield from (_size(var) for var in equation.outvars)


def _size(atom: Any) -> int:
    return math.prod(atom.aval.shape)


def _is_program(part: object) -> bool:
    return isinstance(part, core.Jaxpr | core.ClosedJaxpr)
