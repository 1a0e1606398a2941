"""Clients' samples with their masks, and draws from them.

Clients are stacked on a leading axis, so clients of different sizes are padded to the largest and
carry a mask; see `stacking` for the stacking and `padding` for losses on padded samples.
"""

from __future__ import annotations

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Shaped

from fedsolve.types import Number, PRNGKey, PyTree

Mask = PyTree  # None, a boolean array, or a dict of them, one for each set of samples
Order = PyTree  # of the structure of the mask: which rows the samples are; None: all
Leaf = Shaped[Array, "..."] | Shaped[np.ndarray, "..."]


class Pieces(eqx.Module):
    """Samples of very different length, cut into pieces of one shape.

    It stands where an array of samples would, beside leaves with one row for each sample. A sample
    has as many pieces as it needs. A piece of zeros must add nothing to any sample.

    Args:
        values: Arrays with one row for each piece (after the axis of clients).
        owner: The sample of each piece; the number of samples for a piece that only pads.
        most: The largest number of pieces of one sample.
    """

    values: PyTree
    owner: Int[Array, "..."] | Int[np.ndarray, "..."]
    most: int = eqx.field(static=True)

    def select(self, rows: Int[Array, " s"], real: Bool[Array, " s"]) -> Pieces:
        """Return the pieces of the samples `rows[real]`, which must differ, as samples 0, 1, ...

        The other pieces become padding: their values are not used.
        """
        count = len(rows)
        new = jnp.full(count, count, jnp.int32)
        new = new.at[jnp.where(real, rows, count)].set(jnp.arange(count), mode="drop")
        owner = new.at[self.owner].get(mode="fill", fill_value=count)
        return Pieces(_zero_unless(owner < count, self.values), owner, self.most)

    def pick(self, rows: Int[Array, " b"]) -> Pieces:
        """Return the pieces of these samples, which may repeat, as samples 0, 1, ..."""
        by_owner = jnp.argsort(self.owner, stable=True)
        owners = self.owner[by_owner]
        first, after = (jnp.searchsorted(owners, rows, side=side) for side in ("left", "right"))
        places = first[:, None] + jnp.arange(self.most)
        there = (places < after[:, None]).ravel()
        found = by_owner[jnp.minimum(places.ravel(), len(owners) - 1)]
        owner = jnp.repeat(jnp.arange(len(rows), dtype=jnp.int32), self.most)
        values = _zero_unless(there, jax.tree.map(lambda leaf: leaf[found], self.values))
        return Pieces(values, jnp.where(there, owner, len(rows)), self.most)


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
        return max(_length(leaf) for leaf in _arrays(self.values))

    @property
    def is_one_set(self) -> bool:
        """Whether all leaves have the same samples (inputs and labels, not two classes)."""
        return len({_length(leaf) for leaf in _arrays((self.values, self.mask))}) == 1

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

        def rows(leaf: Leaf | Pieces, mask: Mask, order: Order) -> Leaf | Pieces:
            if isinstance(leaf, Pieces):
                count = self.size if mask is None else _count(mask)
                index = jnp.minimum((draw * count).astype(jnp.int32), count - 1)
                return leaf.pick(index if order is None else order[index])
            if leaf.ndim == 0:
                return leaf  # one value for the client, not samples
            if order is not None and not has_rows(leaf, order):
                mask = order = None  # not samples, but something else that belongs to the client
            count = _length(leaf) if mask is None else _count(mask)
            index = jnp.minimum((draw * count).astype(jnp.int32), count - 1)
            return leaf[index if order is None else order[index]]

        return Samples(self._map(rows))

    def subset(self, key: PRNGKey, count: Number | int) -> Samples:
        """Draw some of one client's samples, without replacement.

        Later calls see only these: rows beyond `count` repeat one of them. All leaves of one set
        of samples keep the same samples. Of separate sets (two classes, say) each keeps its share,
        rounded up or down at random such that the shares add up to `count`, but one sample at
        least. So the mean of each set over subsets is that of all its samples; the mean of all
        sets together is so, too, where every share is at least 1. Without a mask, the leaves with
        most rows are the samples; the others belong to the client and stay whole.

        Args:
            key: Key of the draw.
            count: The number of samples to keep, from 1 (one of each set) to all.

        Returns:
            The samples with a mask and an order that select the drawn ones.
        """
        count = jnp.asarray(count, jnp.int32)
        if not isinstance(self.mask, dict):
            mask = self.mask
            if mask is None:
                if not any(leaf.ndim for leaf in _arrays(self.values)):
                    return self  # one value for the client is its only sample
                mask = jnp.ones(self.size, bool)
            order, kept = _choose_rows(key, mask, count, self.order)
            return Samples(self.values, kept, order)
        sizes = [_count(mask) for mask in self.mask.values()]
        shares = _shares(jax.random.fold_in(key, len(sizes)), jnp.stack(sizes), count)
        kept, orders = {}, {}
        for position, (name, mask) in enumerate(self.mask.items()):
            before = None if self.order is None else self.order[name]
            own_key = jax.random.fold_in(key, position)
            orders[name], kept[name] = _choose_rows(own_key, mask, shares[position], before)
        return Samples(self.values, kept, orders)

    def gathered(self) -> Samples:
        """Return the same samples with their rows gathered, so without an order."""
        if self.order is None:
            return self

        def rows(leaf: Leaf | Pieces, mask: Mask, order: Order) -> Leaf | Pieces:
            if isinstance(leaf, Pieces):
                return leaf.select(order, mask)
            return leaf[order] if has_rows(leaf, order) else leaf

        return Samples(self._map(rows), self.mask, None, self.noise, self.state)

    def _map(self, function: Callable[[PyTree, Mask, Order], PyTree]) -> PyTree:
        """Return `function(leaf, mask, order)` of every leaf, with mask and order of its set."""
        if isinstance(self.mask, dict):
            order = self.order or dict.fromkeys(self.mask)
            return {
                name: jax.tree.map(
                    lambda leaf, name=name: function(leaf, self.mask[name], order[name]),
                    entry,
                    is_leaf=is_pieces,
                )
                for name, entry in self.values.items()
            }
        return jax.tree.map(
            lambda leaf: function(leaf, self.mask, self.order), self.values, is_leaf=is_pieces
        )


def sets_of(stacked: Samples) -> int:
    """Return the number of separate sets of samples, of which a subset keeps one sample each."""
    return len(stacked.mask) if isinstance(stacked.mask, dict) else 1


def counts(stacked: Samples) -> Int[np.ndarray, " n"]:
    """Return the number of samples of each client."""
    if stacked.mask is not None:
        masks = (np.sum(np.asarray(mask), axis=1) for mask in jax.tree.leaves(stacked.mask))
        return np.asarray(sum(masks), np.int64)
    leaves = _arrays(stacked.values)
    most = max(np.shape(leaf)[1] if np.ndim(leaf) > 1 else 1 for leaf in leaves)
    return np.full(len(leaves[0]), most)


def full_mask(samples: Samples) -> Mask:
    """Return the mask of one client's samples; all true if they have none."""
    if samples.mask is not None:
        return samples.mask
    lengths = {name: _length(own[0]) for name, v in samples.values.items() if (own := _arrays(v))}
    if len(set(lengths.values())) == 1:
        return jnp.ones(next(iter(lengths.values())), bool)
    return {name: jnp.ones(length, bool) for name, length in lengths.items()}


def has_rows(leaf: Leaf, mask: Shaped[Array, " s"] | Shaped[np.ndarray, " s"]) -> bool:
    """Return whether the leaf has one row for each entry of the mask (or order)."""
    return leaf.ndim > 0 and len(leaf) == len(mask)


def is_pieces(node: object) -> bool:
    """Return whether a node of a tree of samples stands for cut samples."""
    return isinstance(node, Pieces)


def _arrays(tree: PyTree) -> list[PyTree]:
    """Return the leaves with one row for each sample: all but pieces."""
    leaves = jax.tree.leaves(tree, is_leaf=is_pieces)
    return [leaf for leaf in leaves if not is_pieces(leaf)]


def _zero_unless(kept: Bool[Array, " p"], values: PyTree) -> PyTree:
    """Replace the rows that are not kept by zeros."""

    def zero(leaf: Leaf) -> Array:
        return jnp.where(kept.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, 0)

    return jax.tree.map(zero, values)


def _shares(key: PRNGKey, sizes: Int[Array, " k"], count: Int[Array, ""]) -> Int[Array, " k"]:
    """Divide `count` samples among sets of these sizes, each its share rounded up or down.

    One uniform draw rounds all shares (systematic sampling), so that each is right on average and
    they add up. A set whose share is rounded to 0 gets one sample of the set with most.
    """
    total = jnp.sum(sizes)
    count = jnp.minimum(count, total)
    until = jnp.cumsum(sizes).astype(jnp.float32) * count.astype(jnp.float32) / total
    rounded = jnp.floor(until + jax.random.uniform(key)).astype(jnp.int32)
    shares = jnp.diff(jnp.minimum(rounded, count).at[-1].set(count), prepend=0)
    spare = jnp.sum(shares == 0)
    return jnp.maximum(shares.at[jnp.argmax(shares)].add(-spare), 1)


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
