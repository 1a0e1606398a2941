"""Apply a function to every client of a cohort: all at once, in blocks, on several devices."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Int

from fedsolve.federation.options import RoundOptions
from fedsolve.runtimes.sharding import shared
from fedsolve.types import Cohort, Flags, Function, PyTree, Round

TOGETHER = 2**25  # bytes of clients' data up to which a cohort is computed in one piece,
BLOCK = 2**22  # and bytes of a block where there are more (benchmarks/fedadmm_scale.py)


def map_clients(
    function: Function,
    cohort: Cohort,
    data: PyTree,
    options: RoundOptions,
    rows: bool = False,
) -> PyTree:
    """Apply a function to every client of the cohort, all at once or in blocks.

    A block's data are fetched where they are used, so that what a client does with them more than
    once finds them in the processor's cache, and no copy of the cohort's data is made. By default
    that is done for data too large for the cache. On several devices, each computes its part.

    Args:
        function: `function(indices, *data)` of some clients, usually a `vmap`.
        cohort: The clients' indices.
        data: Trees of arrays with a leading axis for all clients.
        options: How many clients at once, on which devices.
        rows: Whether the data have the cohort's own rows, and not those of all clients.

    Returns:
        What the function returns, joined on the leading axis.
    """
    clients = jax.tree.leaves(data)[0].shape[0]
    rows = rows or (isinstance(cohort, np.ndarray) and len(cohort) == clients)
    if options.mesh is not None:
        size = options.clients_at_once or block_size(data, len(cohort))
        if not rows and size is not None and clients % options.mesh.size == 0:
            return _where_data_are(function, jnp.asarray(cohort), data, size, options.mesh)
        return _on_each_device(function, cohort, data, options, rows)
    size = options.clients_at_once
    if size is None:
        size = block_size(data, len(cohort))
    who = jnp.asarray(cohort)
    if size is None and rows:
        return function(who, *data)

    def some(who: Array, places: Array) -> PyTree:
        return function(who, *jax.tree.map(lambda leaf: leaf[places], data))

    both = who, jnp.arange(len(who)) if rows else who
    if size is None or size >= len(who):
        return some(*both)
    blocks = len(who) // size
    most = blocks * size
    found = lax.map(lambda b: some(*b), [x[:most].reshape(blocks, size) for x in both])
    found = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), found)
    if most == len(who):
        return found
    last = some(*(x[most:] for x in both))
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), found, last)


def _on_each_device(
    function: Function, cohort: Cohort, data: PyTree, options: RoundOptions, rows: bool
) -> PyTree:
    """Compute an equal part of the cohort on each device.

    The last client fills up the last part, under an index that no client has.
    """
    mesh, count = options.mesh, len(cohort)
    assert mesh is not None
    places = np.minimum(np.arange(count + -count % mesh.size), count - 1)
    who = jnp.asarray(cohort)[places]
    found = places if rows else who
    who = jnp.where(np.arange(len(places)) < count, who, np.iinfo(np.int32).max)
    if not rows or len(places) > count:
        data = jax.tree.map(lambda leaf: leaf[found], data)
    alone = dataclasses.replace(options, mesh=None)

    def part(who: Int[Array, " part"], data: PyTree) -> PyTree:
        return map_clients(function, who, data, alone, rows=True)

    def parts(leaf: Array) -> Array:
        return leaf.reshape(mesh.size, -1, *leaf.shape[1:])

    each = jax.vmap(part)(*shared(jax.tree.map(parts, (who, data)), mesh))
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:count], shared(each, mesh))


def _where_data_are(
    function: Function, cohort: Array, data: PyTree, size: int, mesh: Mesh
) -> PyTree:
    """Compute each client on the device that has its data, so that large data are not moved.

    All devices compute as many blocks as the one with most clients of the cohort.
    """
    devices, count = mesh.size, len(cohort)
    parts = jax.tree.map(lambda leaf: leaf.reshape(devices, -1, *leaf.shape[1:]), data)
    each = jax.tree.leaves(parts)[0].shape[1]
    device = np.arange(devices)
    owned = cohort // each == device[:, None]
    owners = owned.sum(axis=1)
    own_first = jnp.argsort(~owned, axis=1, stable=True)  # places in the cohort
    own_first = jnp.pad(own_first, ((0, 0), (0, size)), constant_values=count)

    def some(device: Round, places: Int[Array, " b"], real: Flags, data: PyTree) -> PyTree:
        who = cohort[jnp.minimum(places, count - 1)]
        rows = jnp.where(real, who - device * each, 0)
        return function(who, *jax.tree.map(lambda leaf: leaf[rows], data))

    def block(number: Round, found: PyTree) -> PyTree:
        def one(device: Round, places: Array, owners: Round, data: PyTree, found: PyTree) -> PyTree:
            first = number * size
            places = lax.dynamic_slice_in_dim(places, first, size)
            real = first + np.arange(size) < owners
            new, at = some(device, places, real, data), jnp.where(real, places, count)
            return jax.tree.map(lambda all, new: all.at[at].set(new), found, new)

        return shared(jax.vmap(one)(device, own_first, owners, parts, found), mesh)

    one_part = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), parts)
    shape = jax.eval_shape(some, 0, own_first[0, :size], own_first[0, :size] < count, one_part)
    nothing = jax.tree.map(lambda s: jnp.zeros((devices, count + 1, *s.shape[1:]), s.dtype), shape)
    parts = shared(parts, mesh)
    blocks = -(-jnp.max(owners) // size)
    found = lax.fori_loop(0, blocks, block, shared(nothing, mesh))
    return jax.tree.map(lambda leaf: leaf[cohort // each, np.arange(count)], found)


def block_size(data: PyTree, cohort: int) -> int | None:
    """Return how many clients fit into the cache; None where the whole cohort does."""
    leaves = jax.tree.leaves(data)
    each = sum(leaf.size * leaf.dtype.itemsize // leaf.shape[0] for leaf in leaves)
    if jax.default_backend() != "cpu" or each * cohort <= TOGETHER:
        return None
    return max(BLOCK // each, 1)
