"""How a structure of parameters lies in one flat vector."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a structure of parameters lies in one flat vector.

    Floating-point arrays are parameters. Whatever else a model has among its leaves (an activation
    function, say) has no shape here and is kept as it is.
    """

    structure: Any
    shapes: tuple[tuple[int, ...] | None, ...]
    fixed: tuple[Any, ...]

    @classmethod
    def of(cls, params: PyTree) -> Layout:
        leaves, structure = jax.tree.flatten(params)
        shapes = tuple(np.shape(leaf) if is_parameter(leaf) else None for leaf in leaves)
        fixed = tuple(None if is_parameter(leaf) else leaf for leaf in leaves)
        return cls(structure, shapes, fixed)

    @property
    def size(self) -> int:
        return sum(int(np.prod(shape)) for shape in self.shapes if shape is not None)

    def ravel(self, params: PyTree) -> Float[Array, " d"]:
        leaves = filter(is_parameter, jax.tree.leaves(params))
        return jnp.concatenate([jnp.ravel(leaf) for leaf in leaves])

    def unravel(self, w: Float[Array | np.ndarray, " d"]) -> PyTree:
        leaves, start = [], 0
        for shape, fixed in zip(self.shapes, self.fixed, strict=True):
            stop = start + (0 if shape is None else int(np.prod(shape)))
            leaves.append(fixed if shape is None else w[start:stop].reshape(shape))
            start = stop
        return jax.tree.unflatten(self.structure, leaves)


def is_parameter(leaf: Any) -> bool:
    """Whether a leaf is an array (or a plain number) of floating-point type."""
    if not (eqx.is_array(leaf) or isinstance(leaf, np.ndarray | np.floating | float)):
        return False
    return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.floating))


def as_device_array(tree: PyTree, dtype: Any = None, make: Callable = jnp.asarray) -> PyTree:
    """Arrays and plain floating-point numbers as JAX arrays, floating ones in `dtype` if given."""

    def place(leaf: Any) -> Any:
        if is_parameter(leaf):
            return make(leaf, dtype)
        return make(leaf) if isinstance(leaf, np.ndarray) else leaf

    return jax.tree.map(place, tree)
