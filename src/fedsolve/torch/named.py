"""Constraints of `fs.constraints` on modules: their scores and losses of samples, in JAX.

Such a constraint has one function of the user's, which returns a number for each sample. That
function alone is compiled; what is made of its values (counts, surrogates, gaps) is in JAX already.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax

from fedsolve.constraints.sample_means import SampleMeans, Tally
from fedsolve.errors import InvalidInput
from fedsolve.types import Function

AnyConstraint = TypeVar("AnyConstraint")


def with_values(constraint: AnyConstraint, change: Callable[[Function], Function]) -> AnyConstraint:
    """Return a constraint with other functions of the samples' values.

    Args:
        constraint: The constraint, which may be made of several.
        change: Function of a function of (model, data) that returns a number for each sample.
    """

    def changed(part: object) -> object:
        if not isinstance(part, SampleMeans):
            return part
        return dataclasses.replace(part, values=change(part.values))

    return jax.tree.map(changed, constraint, is_leaf=_is_named)


def check_no_named(constraint: object) -> None:
    """Raise if a constraint has parts of `fs.constraints`, which callbacks cannot compute."""
    parts = jax.tree.leaves(constraint, is_leaf=_is_named)
    for part in filter(_is_named, parts):
        raise InvalidInput(
            f"{part.name} needs functions that can be compiled; in callbacks, give an "
            "fs.Statistics of sums, or a function."
        )


def is_tally(function: Function) -> bool:
    """Return whether this makes counts, in JAX, of the values of samples."""
    return isinstance(function, Tally)


def _is_named(part: object) -> bool:
    return isinstance(part, SampleMeans)
