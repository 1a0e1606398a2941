"""What came back from an exchange."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from fedsolve.compression.packets import Packet, weighted_sum


class Replies(eqx.Module):
    """The answers of a cohort, stacked on a leading axis, and which of them arrived.

    Sums and means are over those that did. Packets among the answers are unpacked as they are
    added, sparse ones without ever being dense.
    """

    values: PyTree
    arrived: Bool[Array, " m"] | Bool[np.ndarray, " m"]

    @property
    def count(self) -> Int[Array, ""] | int:
        """How many arrived."""
        known = isinstance(self.arrived, np.ndarray)
        return int(self.arrived.sum()) if known else jnp.sum(self.arrived, dtype=jnp.int32)

    def any(self) -> Bool[Array, ""] | bool:
        """Whether any arrived: a plain `bool` where that is known before the program runs."""
        return bool(self.arrived.any()) if isinstance(self.arrived, np.ndarray) else self.count > 0

    def pick(self, part: Any) -> Replies:
        """The replies' part of that name or position."""
        return Replies(self.values[part], self.arrived)

    def sum(self, weights: Float[Array, " m"] | None = None) -> PyTree:
        """Σ weight_j · reply_j over those that arrived (weights 1 unless given)."""

        def add(value: Any) -> Array:
            if isinstance(value, Packet):
                return value.weighted_sum(self._weights(weights, jnp.result_type(float)))
            kept = self._weights(weights, value.dtype)
            return weighted_sum(kept, value.astype(kept.dtype))

        return jax.tree.map(add, self.values, is_leaf=lambda node: isinstance(node, Packet))

    def mean(self, weights: Float[Array, " m"] | None = None) -> PyTree:
        """The mean over those that arrived, weighted if weights are given; zero where none did."""
        if weights is None:
            return self.sum(jnp.full(self.arrived.shape, 1.0) / jnp.maximum(self.count, 1))
        total = jnp.sum(jnp.where(self.arrived, weights, 0))
        return self.sum(weights / jnp.where(total > 0, total, 1))

    def _weights(self, weights: Float[Array, " m"] | None, dtype: Any) -> Float[Array, " m"]:
        if not jnp.issubdtype(dtype, jnp.floating):
            dtype = jnp.result_type(float)
        weights = jnp.ones(self.arrived.shape) if weights is None else weights
        return jnp.where(self.arrived, weights, 0).astype(dtype)
