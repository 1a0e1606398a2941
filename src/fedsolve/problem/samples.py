"""Clients' samples: stacking clients of different sizes, exact averages over them, minibatches.

Clients live on a leading axis, so clients of different sizes are padded to the largest and carry a
mask. Padding must not change a loss. A loss that looks at `data["mask"]` takes care of that itself.
Any other loss is taken to be an average over samples, and is then evaluated sample by sample,

    f(w) = (1 / size) Σ_s mask_s f(w; sample s),

which is the same number for every such loss, written by its author as a plain `jnp.mean`. That it
is an average is checked when the problem is made, never assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import Array, Bool, Float, Int, Key, PyTree, Shaped

from fedsolve.errors import InvalidInput

Mask = Any  # None, a boolean array, or a dict of them, one for each set of samples


class Samples(eqx.Module):
    """Samples and their mask, of one client or, stacked on a leading axis, of all.

    The mask is None where every sample is real, a boolean array where all leaves have the same
    samples, and a dict where each entry of `values` is a set of samples of its own. `order`, of the
    structure of the mask, says which rows of `values` the samples are; None: all, as they are.
    """

    values: PyTree
    mask: Mask = None
    order: Mask = None

    @property
    def size(self) -> Int[Array, ""] | int:
        """How many real samples one client has."""
        if self.mask is not None:
            return sum(_count(mask) for mask in jax.tree.leaves(self.mask))
        return max(_length(leaf) for leaf in jax.tree.leaves(self.values))

    @property
    def is_one_set(self) -> bool:
        """Whether all leaves have the same samples (inputs and labels, not two classes)."""
        return len({_length(leaf) for leaf in jax.tree.leaves((self.values, self.mask))}) == 1

    def draw(self, key: Key[Array, ""], batch_size: int) -> Samples:
        """A minibatch: `batch_size` samples with replacement, so that every client has enough.

        One uniform draw serves all leaves, scaled by the leaf's own number of samples: leaves
        that belong together (inputs and labels) get the same rows.
        """
        draw = jax.random.uniform(key, (batch_size,), jnp.float32)

        def rows(leaf: Shaped[Array, " s *rest"], mask: Mask, order: Any) -> Shaped[Array, "..."]:
            if order is not None and not _has_rows(leaf, order):
                mask = order = None  # no samples, but something that the client has besides
            count = _length(leaf) if mask is None else _count(mask)
            index = jnp.minimum((draw * count).astype(jnp.int32), count - 1)
            return leaf[index if order is None else order[index]]

        return Samples(self._each(rows))

    def subset(self, key: Key[Array, ""], count: Any) -> Samples:
        """That many of the samples (from 1 to all), drawn without replacement. No others are looked
        at from here on: rows beyond `count` repeat one of them.

        Sets of samples of their own (two classes, say) keep their proportions, and one sample each
        at least. Without a mask, the leaves with most rows are the samples, others stay whole.
        """
        count = jnp.asarray(count, jnp.int32)
        if not isinstance(self.mask, dict):
            mask = self.mask
            if mask is None:
                mask = jnp.ones(max(_length(leaf) for leaf in jax.tree.leaves(self.values)), bool)
            order, kept = _some(key, mask, count, self.order)
            return Samples(self.values, kept, order)
        share = count / self.size
        kept, orders = {}, {}
        for position, (name, mask) in enumerate(self.mask.items()):
            own = jnp.maximum(jnp.round(share * _count(mask)).astype(jnp.int32), 1)
            before = None if self.order is None else self.order[name]
            orders[name], kept[name] = _some(jax.random.fold_in(key, position), mask, own, before)
        return Samples(self.values, kept, orders)

    def taken(self) -> Samples:
        """The same samples with their rows in place."""
        if self.order is None:
            return self

        def rows(leaf: Shaped[Array, "..."], mask: Mask, order: Any) -> Shaped[Array, "..."]:
            return leaf[order] if _has_rows(leaf, order) else leaf

        return Samples(self._each(rows), self.mask)

    def _each(self, function: Callable) -> PyTree:
        """`function(leaf, mask, order)` of every leaf with the mask and the order of its set."""
        if isinstance(self.mask, dict):
            order = self.order or dict.fromkeys(self.mask)
            return {
                name: jax.tree.map(
                    lambda leaf, name=name: function(leaf, self.mask[name], order[name]), entry
                )
                for name, entry in self.values.items()
            }
        return jax.tree.map(lambda leaf: function(leaf, self.mask, self.order), self.values)


class PerClient(eqx.Module):
    """A user's function of (params, one client's data), exact on padded samples."""

    function: Callable = eqx.field(static=True)
    sees_mask: bool = eqx.field(static=True)
    averages: str | None = eqx.field(static=True)  # the set of samples that it averages over

    def __call__(self, params: PyTree, samples: Samples) -> PyTree:
        samples = samples.taken()
        if self.sees_mask:
            return self.function(params, {**samples.values, "mask": _mask(samples)})
        if samples.mask is None:
            return self.function(params, samples.values)
        name = self.averages
        mask = samples.mask if name is None else samples.mask[name]
        sampled = samples.values if name is None else samples.values[name]

        leaves, structure = jax.tree.flatten(sampled)
        axes = [0 if _has_rows(leaf, mask) else None for leaf in leaves]  # None: no samples

        def one(*sample: Array) -> Float[Array, ""]:
            alone = structure.unflatten(
                leaf if axis is None else leaf[None]
                for leaf, axis in zip(sample, axes, strict=True)
            )
            return self.function(params, alone if name is None else {**samples.values, name: alone})

        values = jax.vmap(one, axes)(*leaves)
        return jnp.sum(jnp.where(mask, values, 0)) / jnp.sum(mask)


def stack_clients(clients: Sequence[PyTree]) -> Any:
    """Stacks clients' data on a leading axis; pads clients that have fewer samples.

    Each client's data are arrays with samples on their first axis: one array, or a tuple or dict
    of arrays. A dict comes back as a dict with one more entry, `"mask"`: true for real samples,
    of shape (clients, samples); where the entries of the dict have different numbers of samples
    (two classes, say), a dict of such masks. Other structures come back as `Samples`, whose mask
    Fedsolve applies by itself. Padding repeats a client's first sample, so it is never a value
    that the client does not have.
    """
    clients = list(clients)
    if not clients:
        raise InvalidInput("There are no clients: stack_clients needs at least one.")
    structures = {jax.tree.structure(client) for client in clients}
    if len(structures) > 1:
        raise InvalidInput("Every client's data must have the same structure (the same entries).")
    if isinstance(clients[0], Mapping) and "mask" in clients[0]:
        raise InvalidInput(
            'stack_clients adds an entry "mask"; the data must not have one already.'
        )
    arrays = [jax.tree.map(np.asarray, client) for client in clients]
    for index, client in enumerate(arrays):
        for path, leaf in jax.tree.leaves_with_path(client):
            name = jax.tree_util.keystr(path) or "its data"
            if leaf.ndim == 0:
                raise InvalidInput(f"Client {index}: {name} is a scalar; samples need an axis.")
            if len(leaf) == 0:
                raise InvalidInput(f"Client {index} has no samples in {name}.")
    lengths = [[len(leaf) for leaf in jax.tree.leaves(client)] for client in arrays]
    stacked = jax.tree.map(lambda *leaves: _pad(leaves), *arrays)
    if all(len(set(row)) == 1 for row in lengths):
        mask: Mask = _real([row[0] for row in lengths])
    elif isinstance(arrays[0], dict):
        mask = {}
        for name in arrays[0]:
            counts = [{len(leaf) for leaf in jax.tree.leaves(client[name])} for client in arrays]
            if any(len(count) != 1 for count in counts):
                raise InvalidInput(f"The arrays in {name!r} differ in their number of samples.")
            mask[name] = _real([count.pop() for count in counts])
    else:
        raise InvalidInput(
            "Arrays of one client differ in their number of samples; "
            "name each set of samples by an entry of a dict."
        )
    return {**stacked, "mask": mask} if isinstance(stacked, dict) else Samples(stacked, mask)


def pool(samples: Samples) -> Samples:
    """All clients' samples as those of one client; every leaf has clients and then samples first.

    The one client has a mask, of true only, where there was one: losses may look at it.
    """

    def join(leaf: Any, mask: Any) -> np.ndarray:
        leaf = np.asarray(leaf)
        if leaf.ndim < 2:
            raise InvalidInput("Only samples can be pooled: an array has one value a client.")
        rows = leaf.reshape(-1, *leaf.shape[2:]) if mask is None else leaf[np.asarray(mask)]
        return rows[None]

    mask = samples.mask
    if isinstance(mask, dict):
        values = {
            name: jax.tree.map(lambda leaf, name=name: join(leaf, mask[name]), entry)
            for name, entry in samples.values.items()
        }
    else:
        values = jax.tree.map(lambda leaf: join(leaf, mask), samples.values)
    return Samples(values, jax.tree.map(lambda real: join(real, real), mask))


def as_samples(clients: PyTree) -> Samples:
    """What the user gave as clients, as samples and mask."""
    if isinstance(clients, Samples):
        return clients
    if isinstance(clients, dict) and all(np.ndim(m) == 2 for m in _leaves(clients.get("mask"))):
        return Samples({k: v for k, v in clients.items() if k != "mask"}, clients["mask"])
    return Samples(clients)


def counts(stacked: Samples) -> Int[np.ndarray, " n"]:
    """How many samples each client has."""
    if stacked.mask is not None:
        masks = (np.sum(np.asarray(mask), axis=1) for mask in jax.tree.leaves(stacked.mask))
        return np.asarray(sum(masks), np.int64)
    leaves = jax.tree.leaves(stacked.values)
    most = max(np.shape(leaf)[1] if np.ndim(leaf) > 1 else 1 for leaf in leaves)
    return np.full(len(leaves[0]), most)


def per_client(
    name: str, function: Callable, params: PyTree, stacked: Samples, sums: bool = False
) -> PerClient:
    """Finds out how a user's function treats padding, and refuses what cannot be exact.

    `sums`: the function gives sums over samples, not an average, so it has to look at the mask.
    """
    if stacked.mask is None:
        return PerClient(function, sees_mask=False, averages=None)
    one = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), stacked)
    if isinstance(one.values, dict):
        used = _entries_used(function, params, {**one.values, "mask": _mask(one)})
        if "mask" in used:
            return PerClient(function, sees_mask=True, averages=None)
    else:
        used = set()
    if sums:
        raise InvalidInput(f'The {name} sums over padded samples; let it look at data["mask"].')
    averages = None
    if isinstance(stacked.mask, dict):
        if len(used) != 1:
            raise InvalidInput(
                f"The {name} uses several sets of samples ({', '.join(sorted(used)) or 'none'}) of "
                'clients that differ in size; let it look at data["mask"].'
            )
        averages = used.pop()
    wrapped = PerClient(function, sees_mask=False, averages=averages)
    _check_average(name, wrapped, params, stacked)
    return wrapped


def _check_average(name: str, wrapped: PerClient, params: PyTree, stacked: Samples) -> None:
    """The sample-by-sample average must be what the function gives on the samples unpadded."""
    masks = jax.tree.leaves(stacked.mask)
    real = sum(np.sum(np.asarray(mask), axis=1) for mask in masks)
    rng = np.random.default_rng(0)
    nearby = jax.tree.map(
        lambda p: p if callable(p) else jnp.asarray(p) + 0.1 * rng.standard_normal(np.shape(p)),
        params,
    )
    for index in {int(np.argmin(real)), int(np.argmax(real))}:
        one = jax.tree.map(lambda leaf, i=index: jnp.asarray(leaf[i]), stacked)
        if isinstance(one.mask, dict):
            bare = {
                key: jax.tree.map(lambda leaf, m=one.mask[key]: leaf[np.asarray(m)], entry)
                for key, entry in one.values.items()
            }
        else:
            keep = np.asarray(one.mask)
            bare = jax.tree.map(lambda leaf, keep=keep: leaf[keep], one.values)
        expected, got = wrapped.function(nearby, bare), wrapped(nearby, one)
        if not np.allclose(expected, got, rtol=1e-3, atol=1e-5):
            raise InvalidInput(
                f"The {name} is not an average over samples (client {index}: {float(expected):.6g} "
                f"on its samples, {float(got):.6g} as an average of single ones), so padding would "
                'change it; let it look at data["mask"].'
            )


def _entries_used(function: Callable, params: PyTree, data: dict) -> set[str]:
    """The entries of `data` that the function's value depends on."""
    numbers, rest = eqx.partition(params, eqx.is_array_like)  # a model may hold functions, too
    jaxpr = jax.make_jaxpr(lambda p, d: function(eqx.combine(p, rest), d))(numbers, data).jaxpr
    _, used = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    paths = [path for path, _ in jax.tree.leaves_with_path((numbers, data))]
    return {
        str(path[1].key)
        for path, is_used in zip(paths, used, strict=True)
        if is_used and path[0] == jax.tree_util.SequenceKey(1)
    }


def _leaves(mask: Mask) -> list:
    return jax.tree.leaves(mask) or [None]  # no mask at all has one leaf without axes


def _mask(samples: Samples) -> Mask:
    if samples.mask is not None:
        return samples.mask
    lengths = {name: _length(jax.tree.leaves(v)[0]) for name, v in samples.values.items()}
    if len(set(lengths.values())) == 1:
        return jnp.ones(next(iter(lengths.values())), bool)
    return {name: jnp.ones(length, bool) for name, length in lengths.items()}


def _pad(leaves: Sequence[np.ndarray]) -> np.ndarray:
    if len({(leaf.shape[1:], leaf.dtype) for leaf in leaves}) > 1:
        raise InvalidInput("Clients' samples must have the same shape and type.")
    longest = max(map(len, leaves))
    stacked = np.empty((len(leaves), longest, *leaves[0].shape[1:]), leaves[0].dtype)
    for row, leaf in zip(stacked, leaves, strict=True):
        row[: len(leaf)], row[len(leaf) :] = leaf, leaf[0]
    return stacked


def _real(counts: Sequence[int]) -> np.ndarray:
    return np.arange(max(counts)) < np.asarray(counts)[:, None]


def _some(
    key: Key[Array, ""], mask: Shaped[Array, " s"], count: Any, order: Any
) -> tuple[Int[Array, " s"], Bool[Array, " s"]]:
    """`count` of the rows that the mask names, in their order, then the first of them again."""
    length = len(mask)
    places = jnp.arange(length, dtype=jnp.int32)
    shuffled = jnp.argsort(jnp.where(mask, jax.random.uniform(key, (length,)), jnp.inf))
    count = jnp.minimum(count, _count(mask))
    chosen = jnp.sort(jnp.where(places < count, shuffled.astype(jnp.int32), length))
    chosen = jnp.where(places < count, chosen, chosen[0])
    return (chosen if order is None else order[chosen]), places < count


def _count(mask: Shaped[Array, " s"]) -> Int[Array, ""]:
    return jnp.sum(mask, dtype=jnp.int32)


def _has_rows(leaf: Any, mask: Any) -> bool:
    return leaf.ndim > 0 and len(leaf) == len(mask)


def _length(leaf: Any) -> int:
    return leaf.shape[0] if leaf.ndim else 1
