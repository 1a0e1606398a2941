"""Calls from a compiled JAX program to functions on NumPy arrays, one client at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax import lax
from jaxtyping import Array, PyTree

from fedsolve.problem.samples import Leaf


def call(function: Callable, shapes: Sequence[tuple[int, ...]], *inputs: PyTree) -> list[Array]:
    """Call a host function as `jax.pure_callback` does, with numbers of 8 bytes as pairs of words.

    JAX converts arrays in a thread where a local `enable_x64` does not apply, and would round
    float64 to float32 there without a warning.
    """
    leaves, structure = jax.tree.flatten(inputs)
    dtypes = tuple(leaf.dtype for leaf in leaves)
    words = [lax.bitcast_convert_type(x, np.uint32) if _is_wide(x) else x for x in leaves]
    expected = [
        jax.ShapeDtypeStruct((*shape, 2), np.uint32)
        if _is_wide(leaves[0])
        else jax.ShapeDtypeStruct(shape, dtypes[0])
        for shape in shapes
    ]
    found = jax.pure_callback(
        _Host(function, dtypes), expected, *structure.unflatten(words), vmap_method="expand_dims"
    )
    return [lax.bitcast_convert_type(leaf, dtypes[0]) for leaf in found]


@dataclasses.dataclass(frozen=True)
class _Host:
    """The function that JAX calls, which applies a function to each client.

    Two instances for the same function are equal, so that the program is compiled once.
    """

    function: Callable
    dtypes: tuple[np.dtype, ...]

    def __call__(self, *words: PyTree) -> list[np.ndarray]:
        leaves, structure = jax.tree.flatten(words)
        arrays = [np.asarray(leaf) for leaf in leaves]
        for i, dtype in enumerate(self.dtypes):
            if dtype.itemsize == 8:
                arrays[i] = np.ascontiguousarray(arrays[i]).view(dtype)[..., 0]
        extra = arrays[0].ndim - 1  # axes that vmap put in front, of size 1 where shared
        sizes = np.broadcast_shapes(*(array.shape[:extra] for array in arrays))
        spread = [np.broadcast_to(array, sizes + array.shape[extra:]) for array in arrays]
        rows = [
            self.function(*structure.unflatten([array[index] for array in spread]))
            for index in np.ndindex(sizes)
        ]
        found = [np.stack(row).reshape(sizes + row[0].shape) for row in zip(*rows, strict=True)]
        return [x[..., None].view(np.uint32) if _is_wide(x) else x for x in found]


def _is_wide(array: Leaf) -> bool:
    """Return whether the array has numbers of 8 bytes."""
    return array.dtype.itemsize == 8
