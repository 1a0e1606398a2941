"""Shuffled passes over one client's samples, in minibatches without replacement."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from fedsolve.errors import InvalidInput
from fedsolve.problem.samples import Leaf, Pieces, Samples, has_rows, is_pieces
from fedsolve.types import PRNGKey, PyTree, Round


@dataclasses.dataclass(frozen=True)
class Passes:
    """The minibatches of passes over one client's samples.

    A batch that is not full has a static shape if all clients have equally many samples; otherwise
    it is padded and has a mask.

    Args:
        samples: The client's samples.
        batch_size: The size of a minibatch; None for all samples at once.
        drop_last: Whether a last batch that is not full is left out.
    """

    samples: Samples
    batch_size: int | None
    drop_last: bool

    @property
    def _rows(self) -> int:
        """The number of rows of the samples' arrays, padding included."""
        return rows_of(self.samples)

    @property
    def _ragged(self) -> bool:
        return self.samples.mask is not None

    @property
    def size(self) -> int:
        """The number of samples of a full batch."""
        return min(self.batch_size or self._rows, self._rows)

    @property
    def full_count(self) -> Int[Array, ""] | int:
        """The number of full batches of a pass."""
        return self.samples.size // self.size

    @property
    def partial_size(self) -> Int[Array, ""] | int:
        """The number of samples in the batch that is not full; 0 if there is none."""
        return self.samples.size % self.size

    @property
    def has_partial(self) -> bool:
        """Whether some client may have a batch that is not full."""
        return not self.drop_last and (self._ragged or bool(self.partial_size > 0))

    @property
    def count(self) -> Int[Array, ""] | int:
        """The number of batches of a pass."""
        if self.drop_last:
            return self.full_count
        return -(-self.samples.size // self.size)

    def shuffled(self, key: PRNGKey) -> Int[Array, " s"]:
        """Return the order of a pass: the rows of the samples, those of the padding last."""
        draw, mask = jax.random.uniform(key, (self._rows,)), self.samples.mask
        return jnp.argsort(draw if mask is None else jnp.where(mask, draw, jnp.inf))

    def full(self, order: Int[Array, " s"], batch: Round | int) -> Samples:
        """Return a full batch of the pass."""
        return self._take(lax.dynamic_slice_in_dim(order, batch * self.size, self.size))

    def partial(self, order: Int[Array, " s"]) -> Samples:
        """Return the batch of the pass that is not full."""
        if not self._ragged:
            return self._take(order[self.full_count * self.size :])
        places = self.full_count * self.size + jnp.arange(self.size)
        real = places < self.samples.size
        chosen = jnp.where(real, order[jnp.minimum(places, self._rows - 1)], order[0])
        return dataclasses.replace(self._take(chosen), mask=real)

    def _take(self, chosen: Int[Array, " b"]) -> Samples:
        order = self.samples.order
        index = chosen if order is None else order[chosen]
        rows = jnp.empty(self._rows)

        def take(leaf: Leaf | Pieces) -> PyTree:
            if isinstance(leaf, Pieces):
                return leaf.pick(index)
            return leaf[index] if has_rows(leaf, rows) else leaf

        return Samples(jax.tree.map(take, self.samples.values, is_leaf=is_pieces))


def rows_of(samples: Samples) -> int:
    """Return the rows of one client's samples; raise if they are not one set of samples."""
    if isinstance(samples.mask, dict):
        raise InvalidInput("Passes over the data need one set of samples, not several.")
    nodes = jax.tree.leaves(samples.values, is_leaf=is_pieces)
    lengths = {len(leaf) for leaf in nodes if not is_pieces(leaf) and leaf.ndim > 0}
    if samples.mask is not None:
        return len(samples.mask)
    if len(lengths) != 1:
        raise InvalidInput(
            "Passes over the data need one set of samples: arrays of a client have "
            f"{', '.join(map(str, sorted(lengths)))} rows."
        )
    return lengths.pop()
