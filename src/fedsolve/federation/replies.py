"""What came back from an exchange."""

from __future__ import annotations

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from fedsolve.compression.packets import Packet, weighted_sum
from fedsolve.types import PyTree


class Replies(eqx.Module):
    """The answers of a cohort, and which of them arrived.

    Sums and means are over those that did. Packets among the answers are unpacked as they are
    added, sparse ones without ever being dense.

    Args:
        values: The answers, stacked on a leading axis.
        arrived: One flag for each client of the cohort.
        on_sum: Function that is told the weights of a sum.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> import fedsolve as fs
        >>> float(fs.Replies(jnp.array([1.0, 2.0, 9.0]), np.array([True, True, False])).mean())
        1.5
    """

    values: PyTree
    arrived: Bool[Array, " m"] | Bool[np.ndarray, " m"]
    on_sum: Callable[[Float[Array, " m"]], None] | None = eqx.field(static=True, default=None)

    @property
    def count(self) -> Int[Array, ""] | int | float:
        """The number of answers that arrived."""
        known = isinstance(self.arrived, np.ndarray)
        return int(self.arrived.sum()) if known else jnp.sum(self.arrived, dtype=jnp.int32)

    def any(self) -> Bool[Array, ""] | bool:
        """Return whether any arrived: a `bool` where that is known before the program runs."""
        return bool(self.arrived.any()) if isinstance(self.arrived, np.ndarray) else self.count > 0

    def pick(self, part: str | int) -> Replies:
        """Return the part of the answers with that name or position."""
        return Replies(self.values[part], self.arrived, self.on_sum)

    def sum(self, weights: Float[Array, " m"] | None = None) -> PyTree:
        """Return Σ weight_j · reply_j over those that arrived.

        Args:
            weights: One for each client of the cohort; 1 by default.

        Returns:
            A tree of arrays in the form of one reply.
        """
        if self.on_sum is not None and weights is not None:
            self.on_sum(weights)

        def add(value: Packet | Array) -> Array:
            if isinstance(value, Packet):
                return value.weighted_sum(self._weights(weights, jnp.result_type(float)))
            kept = self._weights(weights, value.dtype)
            return weighted_sum(kept, value.astype(kept.dtype))

        return jax.tree.map(add, self.values, is_leaf=lambda node: isinstance(node, Packet))

    def mean(self, weights: Float[Array, " m"] | None = None) -> PyTree:
        """Return the mean over those that arrived; zero where none did.

        Args:
            weights: One for each client of the cohort; all the same by default.

        Returns:
            A tree of arrays in the form of one reply.
        """
        if weights is None:
            return self.sum(jnp.full(self.arrived.shape, 1.0) / jnp.maximum(self.count, 1))
        total = jnp.sum(jnp.where(self.arrived, weights, 0))
        return self.sum(weights / jnp.where(total > 0, total, 1))

    def _weights(self, weights: Float[Array, " m"] | None, dtype: DTypeLike) -> Float[Array, " m"]:
        if not jnp.issubdtype(dtype, jnp.floating):
            dtype = jnp.result_type(float)
        weights = jnp.ones(self.arrived.shape) if weights is None else weights
        return jnp.where(self.arrived, weights, 0).astype(dtype)
