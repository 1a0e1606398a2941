"""The table of operators: what each ATen operator computes, in JAX.

An operator is registered under its name, `aten.add`, for all of its overloads, or under the name of
one overload, `aten.max.dim`. Functions have the parameters of the ATen schema in their order; what
concerns memory alone (`layout`, `pin_memory`, ...) is not passed on. Results are cast to PyTorch's
type afterwards, so functions need not follow its rules of promotion in the type of their result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Shaped

if TYPE_CHECKING:  # what a graph hands over is known when it is run, and checked then
    Tensor = Number = Operand = Maybe = Sizes = Any
else:
    Tensor = Shaped[Array, "..."]
    Number = float | int | bool
    Operand = Tensor | Number  # where ATen takes a tensor or a Python number
    Maybe = Tensor | None
    Sizes = Sequence[int]

NAMED: dict[str, Operator] = {}


class DrawsRandom(Exception):
    """An operator needs a key, and there is none."""


@dataclasses.dataclass(frozen=True)
class Operator:
    """What an operator computes, and how it treats images with their channels last.

    Args:
        function: The function of the operator's arguments.
        layout: `"first"`: the function takes images with channels on axis 1, as PyTorch does;
            `"any"`: it works element by element, in whichever layout; `"own"`: it takes `Last` and
            arrays, and returns either.
        random: Whether the function takes a JAX key before its other arguments.
    """

    function: Callable
    layout: str = "first"
    random: bool = False


@dataclasses.dataclass(frozen=True)
class Last:
    """Images of shape (batch, channels, height, width), stored with their channels last."""

    array: Shaped[Array, "batch height width channels"]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that PyTorch sees."""
        batch, height, width, channels = self.array.shape
        return batch, channels, height, width

    @property
    def dtype(self) -> jnp.dtype:
        """The type of the numbers."""
        return self.array.dtype


def operator(*names: str, layout: str = "first", random: bool = False) -> Callable:
    """Register a function as the operators of these names."""

    def register(function: Callable) -> Callable:
        for name in names:
            assert name not in NAMED, name
            NAMED[name] = Operator(function, layout, random)
        return function

    return register


def find(name: str) -> Operator | None:
    """Return the operator of the name of an overload, `aten.add.Tensor`; None if there is none."""
    return NAMED.get(name) or NAMED.get(name.rsplit(".", 1)[0])


def first(value: Any) -> Any:
    """Return images with their channels on axis 1, and other values as they are."""
    return value.array.transpose(0, 3, 1, 2) if isinstance(value, Last) else value


def last(image: Last | Tensor) -> Tensor:
    """Return images with their channels on the last axis."""
    return image.array if isinstance(image, Last) else image.transpose(0, 2, 3, 1)


def axes(dim: int | Sizes | None, ndim: int) -> tuple[int, ...]:
    """Return the axes that PyTorch's `dim` names; none named are all."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(ndim))
    named = [dim] if isinstance(dim, int) else dim
    return tuple(axis % ndim for axis in named) if ndim else ()


def pair(sizes: int | Sizes, count: int = 2) -> tuple[int, ...]:
    """Return one number for each axis."""
    given = [sizes] if isinstance(sizes, int) else list(sizes)
    return tuple(given * count if len(given) == 1 else given)


def at_least_float(x: Tensor) -> Tensor:
    """Return the numbers as floating-point ones."""
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.result_type(float))


Mask = Bool[Array, "..."]
