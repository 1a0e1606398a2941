"""Exact counters of bytes and messages."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32


class Bytes(eqx.Module):
    """An exact count below 2^48 in two parts, since JAX has no 64-bit integers by default."""

    high: UInt32[Array, ...]  # in units of 2^16
    low: UInt32[Array, ...]

    @classmethod
    def zero(cls) -> Bytes:
        return cls(jnp.uint32(0), jnp.uint32(0))

    def plus(self, count: Any, each: int) -> Bytes:
        """`count` more messages of `each` bytes."""
        count = jnp.asarray(count, jnp.uint32)
        high, low = np.uint32(each >> 16), np.uint32(each & 0xFFFF)
        few, many = count & 0xFFFF, count >> 16
        return self._carry(few * high + many * low + (many * high << 16), few * low)

    def plus_all(self, amounts: UInt32[Array, " m"]) -> Bytes:
        """The amounts (at most 2^24 of them), added up."""
        high, middle, low = (
            jnp.sum(part, dtype=jnp.uint32)
            for part in (amounts >> 16, (amounts >> 8) & 0xFF, amounts & 0xFF)
        )
        return self._carry(
            high + (middle >> 8) + (low >> 16), ((middle & 0xFF) << 8) + (low & 0xFFFF)
        )

    def __add__(self, other: Bytes) -> Bytes:
        return self._carry(other.high, other.low)

    def minus(self, less: Bytes, at_most: int) -> UInt32[Array, ...]:
        """The difference, or `at_most` (less than 2^31) where it is more."""
        high, limit = self.high - less.high, np.uint32(at_most)
        exact = (high << 16) + self.low - less.low
        return jnp.where(high > 2**15, limit, jnp.minimum(exact, limit))

    def _carry(self, high: Any, low: Any) -> Bytes:
        low = self.low + low
        return Bytes(self.high + high + (low >> 16), low & 0xFFFF)

    def exact(self) -> Any:
        """On the host: the count as 64-bit integers."""
        return np.asarray(self.high, np.int64) * 2**16 + np.asarray(self.low, np.int64)
