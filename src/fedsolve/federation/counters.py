"""Exact counters of bytes and messages."""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped, UInt32

from fedsolve.types import Flag

Integers = Int[np.ndarray, "..."]


class Count(eqx.Module):
    """An exact count below 2^48 in two parts, since JAX has no 64-bit integers by default."""

    high: UInt32[Array, "..."]  # in units of 2^16
    low: UInt32[Array, "..."]

    @classmethod
    def zero(cls) -> Count:
        """Return a count of nothing."""
        return cls(jnp.uint32(0), jnp.uint32(0))

    def plus(self, count: Shaped[Array, ""] | Flag | int, each: int) -> Count:
        """Add `count` times `each`."""
        count = jnp.asarray(count, jnp.uint32)
        high, low = np.uint32(each >> 16), np.uint32(each & 0xFFFF)
        few, many = count & 0xFFFF, count >> 16
        return self._carry(few * high + many * low + (many * high << 16), few * low)

    def plus_all(self, amounts: UInt32[Array, " m"]) -> Count:
        """Add up to 2^24 amounts."""
        high, middle, low = (
            jnp.sum(part, dtype=jnp.uint32)
            for part in (amounts >> 16, (amounts >> 8) & 0xFF, amounts & 0xFF)
        )
        return self._carry(
            high + (middle >> 8) + (low >> 16), ((middle & 0xFF) << 8) + (low & 0xFFFF)
        )

    def __add__(self, other: Count) -> Count:
        return self._carry(other.high, other.low)

    def minus(self, less: Count, at_most: int) -> UInt32[Array, "..."]:
        """Return the difference, or `at_most` (less than 2^31) where it is more."""
        high, limit = self.high - less.high, np.uint32(at_most)
        exact = (high << 16) + self.low - less.low
        return jnp.where(high > 2**15, limit, jnp.minimum(exact, limit))

    def remainder(self, divisor: UInt32[Array, ""]) -> UInt32[Array, "..."]:
        """Return the remainder of a division by a number of at most 2^31."""
        rest = self.high % divisor
        for bit in range(15, -1, -1):
            rest = (2 * rest + ((self.low >> bit) & 1)) % divisor
        return rest

    def _carry(self, high: UInt32[Array, "..."], low: UInt32[Array, "..."]) -> Count:
        low = self.low + low
        return Count(self.high + high + (low >> 16), low & 0xFFFF)

    def exact(self) -> Integers:
        """Return the count as 64-bit integers, on the host."""
        return np.asarray(np.asarray(self.high, np.int64) * 2**16 + np.asarray(self.low, np.int64))
