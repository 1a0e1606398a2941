"""Calls from a compiled JAX program to functions on NumPy arrays, all clients in one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax import lax
from jaxtyping import Array, PyTree

from fedsolve.problem.samples import Leaf
from fedsolve.torch.pool import Clients


def call(
    function: Clients, results: Sequence[jax.ShapeDtypeStruct], *inputs: PyTree
) -> list[Array]:
    """Call a host function as `jax.pure_callback` does, with numbers of 8 bytes as pairs of words.

    JAX converts arrays in a thread where a local `enable_x64` does not apply, and would round
    float64 to float32 there without a warning.

    Args:
        function: The function of one client's NumPy arrays, which returns a list of arrays.
        results: Shapes and types of what it returns for one client.
        *inputs: Its arguments. Under `vmap`, those of all clients go to one call.
    """
    leaves, structure = jax.tree.flatten(inputs)
    dtypes = tuple(np.dtype(leaf.dtype) for leaf in leaves)
    words = [lax.bitcast_convert_type(x, np.uint32) if _is_wide(x) else x for x in leaves]
    expected = [
        jax.ShapeDtypeStruct((*result.shape, 2), np.uint32) if _is_wide(result) else result
        for result in results
    ]
    found = jax.pure_callback(
        _Host(function, dtypes, tuple(np.dtype(result.dtype) for result in results)),
        expected,
        *structure.unflatten(words),
        vmap_method="expand_dims",
    )
    return [
        lax.bitcast_convert_type(leaf, result.dtype) if _is_wide(result) else leaf
        for leaf, result in zip(found, results, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class _Host:
    """The function that JAX calls, which applies a function to every client.

    Two instances for the same function are equal, so that the program is compiled once.
    """

    function: Clients
    given: tuple[np.dtype, ...]
    returned: tuple[np.dtype, ...]

    def __call__(self, *words: PyTree) -> list[np.ndarray]:
        leaves, structure = jax.tree.flatten(words)
        arrays = [np.asarray(leaf) for leaf in leaves]
        for i, dtype in enumerate(self.given):
            if dtype.itemsize == 8:
                arrays[i] = np.ascontiguousarray(arrays[i]).view(dtype)[..., 0]
        extra = arrays[0].ndim - 1  # axes that vmap put in front, of size 1 where shared
        sizes = np.broadcast_shapes(*(array.shape[:extra] for array in arrays))
        spread = [np.broadcast_to(array, sizes + array.shape[extra:]) for array in arrays]
        places = np.ndindex(sizes)
        rows = self.function(
            [structure.unflatten([np.asarray(array[at]) for array in spread]) for at in places]
        )
        found = []
        for column, dtype in zip(zip(*rows, strict=True), self.returned, strict=True):
            stacked = np.stack(column).reshape(sizes + column[0].shape).astype(dtype, copy=False)
            wide = dtype.itemsize == 8
            found.append(stacked[..., None].view(np.uint32) if wide else stacked)
        return found


def _is_wide(array: Leaf | jax.ShapeDtypeStruct) -> bool:
    """Return whether the array has numbers of 8 bytes."""
    return array.dtype.itemsize == 8
