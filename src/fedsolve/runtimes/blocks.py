"""A cohort's clients, computed: all together, so many at a time, on the devices that have them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from fedsolve.federation.options import RoundOptions
from fedsolve.runtimes.sharding import shared
from fedsolve.types import Cohort

TOGETHER = 2**25  # bytes: so much of clients' data is worked on in one piece,
BLOCK = 2**22  # and of more than that only so much at a time (benchmarks/fedadmm_scale.py)


def map_clients(
    together: Callable, cohort: Cohort, data: PyTree, options: RoundOptions, rows: bool = False
) -> PyTree:
    """`together(indices, *their data)`, mostly a `vmap`, of a cohort: of all in one piece, or of so
    many at a time, and on each device of its part; what it finds is joined on the leading axis.
    With `rows`, the data are the cohort's own and not all clients'.

    A block's data are fetched where they are used, so that what a client does with them more than
    once finds them in the processor's cache, and no copy of the cohort's data is made. Where
    nothing is said, that is done for data too large for the cache.
    """
    clients = jax.tree.leaves(data)[0].shape[0]
    rows = rows or (isinstance(cohort, np.ndarray) and len(cohort) == clients)
    if options.mesh is not None:
        at_once = options.clients_at_once or _block(data, len(cohort))
        if not rows and at_once is not None and clients % options.mesh.size == 0:
            return _where_they_are(together, jnp.asarray(cohort), data, at_once, options.mesh)
        return _on_each_device(together, cohort, data, options, rows)
    at_once = options.clients_at_once
    if at_once is None:
        at_once = _block(data, len(cohort))
    who = jnp.asarray(cohort)
    if at_once is None and rows:
        return together(who, *data)

    def some(who: Array, places: Array) -> PyTree:
        return together(who, *jax.tree.map(lambda leaf: leaf[places], data))

    both = who, jnp.arange(len(who)) if rows else who
    if at_once is None or at_once >= len(who):
        return some(*both)
    blocks = len(who) // at_once
    most = blocks * at_once
    found = lax.map(lambda b: some(*b), [x[:most].reshape(blocks, at_once) for x in both])
    found = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), found)
    if most == len(who):
        return found
    last = some(*(x[most:] for x in both))
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), found, last)


def _on_each_device(
    together: Callable, cohort: Cohort, data: PyTree, options: RoundOptions, rows: bool
) -> PyTree:
    """An equal part of the cohort on each device. The last client fills up the last part, under a
    number that no client has."""
    mesh, count = options.mesh, len(cohort)
    assert mesh is not None
    places = np.minimum(np.arange(count + -count % mesh.size), count - 1)
    who = jnp.asarray(cohort)[places]
    found = places if rows else who
    who = jnp.where(np.arange(len(places)) < count, who, np.iinfo(np.int32).max)
    if not rows or len(places) > count:
        data = jax.tree.map(lambda leaf: leaf[found], data)
    alone = dataclasses.replace(options, mesh=None)

    def part(who: Any, data: PyTree) -> PyTree:
        return map_clients(together, who, data, alone, rows=True)

    def parts(leaf: Array) -> Array:
        return leaf.reshape(mesh.size, -1, *leaf.shape[1:])

    each = jax.vmap(part)(*shared(jax.tree.map(parts, (who, data)), mesh))
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:count], shared(each, mesh))


def _where_they_are(
    together: Callable, cohort: Array, data: PyTree, at_once: int, mesh: Mesh
) -> PyTree:
    """Each client of a cohort on the device that has its data: large data stay where they are. All
    devices make as many blocks as the one with most clients of the cohort."""
    devices, count = mesh.size, len(cohort)
    parts = jax.tree.map(lambda leaf: leaf.reshape(devices, -1, *leaf.shape[1:]), data)
    each = jax.tree.leaves(parts)[0].shape[1]
    device = np.arange(devices)
    owned = cohort // each == device[:, None]
    owners = owned.sum(axis=1)
    own_first = jnp.argsort(~owned, axis=1, stable=True)  # places in the cohort
    own_first = jnp.pad(own_first, ((0, 0), (0, at_once)), constant_values=count)

    def some(device: Any, places: Array, real: Array, data: PyTree) -> PyTree:
        who = cohort[jnp.minimum(places, count - 1)]
        rows = jnp.where(real, who - device * each, 0)
        return together(who, *jax.tree.map(lambda leaf: leaf[rows], data))

    def block(number: Any, found: PyTree) -> PyTree:
        def one(device: Any, places: Array, owners: Any, data: PyTree, found: PyTree) -> PyTree:
            first = number * at_once
            places = lax.dynamic_slice_in_dim(places, first, at_once)
            real = first + np.arange(at_once) < owners
            new, at = some(device, places, real, data), jnp.where(real, places, count)
            return jax.tree.map(lambda all, new: all.at[at].set(new), found, new)

        return shared(jax.vmap(one)(device, own_first, owners, parts, found), mesh)

    shape = jax.eval_shape(
        some, 0, own_first[0, :at_once], own_first[0, :at_once] < count, _first(parts)
    )
    nothing = jax.tree.map(lambda s: jnp.zeros((devices, count + 1, *s.shape[1:]), s.dtype), shape)
    parts = shared(parts, mesh)
    blocks = -(-jnp.max(owners) // at_once)
    found = lax.fori_loop(0, blocks, block, shared(nothing, mesh))
    return jax.tree.map(lambda leaf: leaf[cohort // each, np.arange(count)], found)


def _first(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), tree)


def _block(data: PyTree, cohort: int) -> int | None:
    """How many clients fit into the cache; None where the whole cohort does."""
    leaves = jax.tree.leaves(data)
    each = sum(leaf.size * leaf.dtype.itemsize // leaf.shape[0] for leaf in leaves)
    if jax.default_backend() != "cpu" or each * cohort <= TOGETHER:
        return None
    return max(BLOCK // each, 1)
