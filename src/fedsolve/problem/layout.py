"""The layout of a structure of parameters in one flat vector."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from fedsolve.types import PyTree, Vector


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a structure of parameters is laid out in one flat vector.

    Floating-point arrays are parameters. Other leaves of a model (an activation function, say) have
    no shape here and are kept as they are.

    Args:
        structure: The structure of the parameters' tree.
        shapes: For each leaf its shape; None for a leaf that is not a parameter.
        fixed: For each leaf the value of one that is not a parameter; None for a parameter.
    """

    structure: PyTree  # a `jax.tree_util.PyTreeDef`
    shapes: tuple[tuple[int, ...] | None, ...]
    fixed: tuple[object, ...]

    @classmethod
    def of(cls, params: PyTree) -> Layout:
        """Return the layout of these parameters."""
        leaves, structure = jax.tree.flatten(params)
        shapes = tuple(np.shape(leaf) if is_parameter(leaf) else None for leaf in leaves)
        fixed = tuple(None if is_parameter(leaf) else leaf for leaf in leaves)
        return cls(structure, shapes, fixed)

    @property
    def size(self) -> int:
        """The length of the vector, d."""
        return sum(int(np.prod(shape)) for shape in self.shapes if shape is not None)

    def ravel(self, params: PyTree) -> Vector:
        """Return the parameters as one vector."""
        leaves = filter(is_parameter, jax.tree.leaves(params))
        return jnp.concatenate([jnp.ravel(leaf) for leaf in leaves])

    def unravel(self, w: Float[Array | np.ndarray, " d"]) -> PyTree:
        """Return the vector as parameters in their structure."""
        leaves, start = [], 0
        for shape, fixed in zip(self.shapes, self.fixed, strict=True):
            stop = start + (0 if shape is None else int(np.prod(shape)))
            leaves.append(fixed if shape is None else w[start:stop].reshape(shape))
            start = stop
        return jax.tree.unflatten(self.structure, leaves)


def is_parameter(leaf: object) -> bool:
    """Return whether a leaf is an array (or a plain number) of floating-point type."""
    if not (eqx.is_array(leaf) or isinstance(leaf, np.ndarray | np.floating | float)):
        return False
    return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.floating))


def as_device_array(
    tree: PyTree, dtype: DTypeLike | None = None, make: Callable[..., Any] = jnp.asarray
) -> PyTree:
    """Return arrays and floating-point numbers as JAX arrays, floating ones in `dtype` if given."""

    def place(leaf: PyTree) -> PyTree:
        if is_parameter(leaf):
            return make(leaf, dtype)
        return make(leaf) if isinstance(leaf, np.ndarray) else leaf

    return jax.tree.map(place, tree)
