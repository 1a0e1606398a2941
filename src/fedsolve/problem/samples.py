"""Clients' samples with their masks, and draws from them.

Clients are stacked on a leading axis, so clients of different sizes are padded to the largest and
carry a mask; see `stacking` for the stacking and `padding` for losses on padded samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Shaped

from fedsolve.types import Number, PRNGKey, PyTree

Mask = PyTree  # None, a boolean array, or a dict of them, one for each set of samples
Order = PyTree  # of the structure of the mask: which rows the samples are; None: all
Leaf = Shaped[Array, "..."] | Shaped[np.ndarray, "..."]


class Samples(eqx.Module):
    """Samples and their mask, of one client or, stacked on a leading axis, of all.

    Args:
        values: Arrays in any structure, with samples on their first axis (after that of clients).
        mask: Which samples are real: None if all are, a boolean array if all leaves have the same
            samples, a dict if each entry of `values` is a separate set of samples.
        order: The row of `values` of each sample, in the structure of the mask; None if the samples
            are the rows as they are.
        noise: The key of a random loss; None in evaluation.
        state: What the loss keeps besides parameters, such as running statistics, as it is now.
    """

    values: PyTree
    mask: Mask = None
    order: Order = None
    noise: PRNGKey | None = None
    state: PyTree = None

    @property
    def size(self) -> Int[Array, ""] | int:
        """The number of real samples of one client."""
        if self.mask is not None:
            return sum(_count(mask) for mask in jax.tree.leaves(self.mask))
        return max(_length(leaf) for leaf in jax.tree.leaves(self.values))

    @property
    def is_one_set(self) -> bool:
        """Whether all leaves have the same samples (inputs and labels, not two classes)."""
        return len({_length(leaf) for leaf in jax.tree.leaves((self.values, self.mask))}) == 1

    def draw(self, key: PRNGKey, batch_size: int) -> Samples:
        """Draw a minibatch of one client's samples, with replacement.

        One uniform draw serves all leaves, scaled by the leaf's number of samples: leaves that
        belong together (inputs and labels) get the same rows.

        Args:
            key: Key of the draw.
            batch_size: The number of samples to draw; it may exceed those of the client.

        Returns:
            The drawn samples, without a mask.
        """
        draw = jax.random.uniform(key, (batch_size,), jnp.float32)

        def rows(leaf: Leaf, mask: Mask, order: Order) -> Leaf:
            if order is not None and not has_rows(leaf, order):
                mask = order = None  # not samples, but something else that belongs to the client
            count = _length(leaf) if mask is None else _count(mask)
            index = jnp.minimum((draw * count).astype(jnp.int32), count - 1)
            return leaf[index if order is None else order[index]]

        return Samples(self._map(rows))

    def subset(self, key: PRNGKey, count: Number | int) -> Samples:
        """Draw some of one client's samples, without replacement.

        Later calls see only these: rows beyond `count` repeat one of them. Separate sets of samples
        (two classes, say) keep their proportions, and one sample each at least. Without a mask, the
        leaves with most rows are the samples; the others stay whole.

        Args:
            key: Key of the draw.
            count: The number of samples to keep, from 1 to all.

        Returns:
            The samples with a mask and an order that select the drawn ones.
        """
        count = jnp.asarray(count, jnp.int32)
        if not isinstance(self.mask, dict):
            mask = self.mask
            if mask is None:
                mask = jnp.ones(max(_length(leaf) for leaf in jax.tree.leaves(self.values)), bool)
            order, kept = _choose_rows(key, mask, count, self.order)
            return Samples(self.values, kept, order)
        share = count / self.size
        kept, orders = {}, {}
        for position, (name, mask) in enumerate(self.mask.items()):
            own = jnp.maximum(jnp.round(share * _count(mask)).astype(jnp.int32), 1)
            before = None if self.order is None else self.order[name]
            own_key = jax.random.fold_in(key, position)
            orders[name], kept[name] = _choose_rows(own_key, mask, own, before)
        return Samples(self.values, kept, orders)

    def gathered(self) -> Samples:
        """Return the same samples with their rows gathered, so without an order."""
        if self.order is None:
            return self

        def rows(leaf: Leaf, mask: Mask, order: Order) -> Leaf:
            return leaf[order] if has_rows(leaf, order) else leaf

        return Samples(self._map(rows), self.mask, None, self.noise, self.state)

    def _map(self, function: Callable[[Leaf, Mask, Order], Leaf]) -> PyTree:
        """Return `function(leaf, mask, order)` of every leaf, with mask and order of its set."""
        if isinstance(self.mask, dict):
            order = self.order or dict.fromkeys(self.mask)
            return {
                name: jax.tree.map(
                    lambda leaf, name=name: function(leaf, self.mask[name], order[name]), entry
                )
                for name, entry in self.values.items()
            }
        return jax.tree.map(lambda leaf: function(leaf, self.mask, self.order), self.values)


def as_samples(clients: PyTree) -> Samples:
    """Return the data that a user gave for all clients as samples with their mask."""
    if isinstance(clients, Samples):
        return clients
    if isinstance(clients, dict) and all(np.ndim(m) == 2 for m in _leaves(clients.get("mask"))):
        return Samples({k: v for k, v in clients.items() if k != "mask"}, clients["mask"])
    return Samples(clients)


def counts(stacked: Samples) -> Int[np.ndarray, " n"]:
    """Return the number of samples of each client."""
    if stacked.mask is not None:
        masks = (np.sum(np.asarray(mask), axis=1) for mask in jax.tree.leaves(stacked.mask))
        return np.asarray(sum(masks), np.int64)
    leaves = jax.tree.leaves(stacked.values)
    most = max(np.shape(leaf)[1] if np.ndim(leaf) > 1 else 1 for leaf in leaves)
    return np.full(len(leaves[0]), most)


def full_mask(samples: Samples) -> Mask:
    """Return the mask of one client's samples; all true if they have none."""
    if samples.mask is not None:
        return samples.mask
    lengths = {name: _length(jax.tree.leaves(v)[0]) for name, v in samples.values.items()}
    if len(set(lengths.values())) == 1:
        return jnp.ones(next(iter(lengths.values())), bool)
    return {name: jnp.ones(length, bool) for name, length in lengths.items()}


def has_rows(leaf: Leaf, mask: Shaped[Array, " s"] | Shaped[np.ndarray, " s"]) -> bool:
    """Return whether the leaf has one row for each entry of the mask (or order)."""
    return leaf.ndim > 0 and len(leaf) == len(mask)


def _leaves(mask: Mask) -> list[Any]:
    """Return the mask's leaves; for no mask, one leaf without axes."""
    return jax.tree.leaves(mask) or [None]


def _choose_rows(
    key: PRNGKey,
    mask: Shaped[Array, " s"],
    count: Int[Array, ""],
    order: Int[Array, " s"] | None,
) -> tuple[Int[Array, " s"], Bool[Array, " s"]]:
    """Draw `count` of the rows that the mask names, in their order, then repeat the first."""
    length = len(mask)
    places = jnp.arange(length, dtype=jnp.int32)
    shuffled = jnp.argsort(jnp.where(mask, jax.random.uniform(key, (length,)), jnp.inf))
    count = jnp.minimum(count, _count(mask))
    chosen = jnp.sort(jnp.where(places < count, shuffled.astype(jnp.int32), length))
    chosen = jnp.where(places < count, chosen, chosen[0])
    return (chosen if order is None else order[chosen]), places < count


def _count(mask: Shaped[Array, " s"] | Shaped[np.ndarray, " s"]) -> Int[Array, ""]:
    """Return the number of real samples."""
    return jnp.sum(mask, dtype=jnp.int32)


def _length(leaf: Leaf) -> int:
    """Return the number of rows; a scalar counts as one."""
    return leaf.shape[0] if leaf.ndim else 1
