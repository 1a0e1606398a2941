"""Packets: a packet's arrays are its bytes on the wire, and `dense()` is the vector they mean."""

from __future__ import annotations

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt


class Packet(eqx.Module):
    """What is sent: its array leaves. Both ends know shapes and formats, which cost nothing."""

    @abc.abstractmethod
    def dense(self) -> Float[Array, " d"]:
        """The vector that this packet stands for."""

    @property
    def nbytes(self) -> int:
        """The size on the wire; of stacked packets, of all together."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    def weighted_sum(self, weights: Float[Array, " m"]) -> Float[Array, " d"]:
        """Σᵢ weightsᵢ · packetᵢ.dense(), where self is m packets stacked by `jax.vmap`."""
        return jnp.tensordot(weights, _rows(self, weights), axes=1, precision="highest")


def _rows(stacked: Packet, weights: Float[Array, " m"]) -> Float[Array, "m d"]:
    """The m vectors. Weight 0 means no answer: the packet may hold anything, and 0 · NaN is NaN."""
    rows = jax.vmap(lambda packet: packet.dense())(stacked)
    return jnp.where(weights[:, None] != 0, rows, 0)


class Dense(Packet):
    """The vector itself."""

    vector: Float[Array, " d"]

    def dense(self) -> Float[Array, " d"]:
        return self.vector


class Sparse(Packet):
    """Some entries of a vector; their values are a packet in turn.

    The vector is cut into blocks of `block` entries, and each sends `share` of them (a short last
    one perhaps fewer). An index counts from the start of its block, so that it stays narrow.
    """

    indices: UInt[Array, " kept"]
    values: Packet
    size: int = eqx.field(static=True)
    block: int = eqx.field(static=True)
    share: int = eqx.field(static=True)

    def positions(self) -> Int[Array, "*m kept"]:
        """Indices into the whole vector, of one packet or of a stack."""
        slots = jnp.arange(self.indices.shape[-1], dtype=jnp.int32)
        return self.indices.astype(jnp.int32) + self.block * (slots // self.share)

    def dense(self) -> Float[Array, " d"]:
        values = self.values.dense()
        return jnp.zeros(self.size, values.dtype).at[self.positions()].set(values)

    def weighted_sum(self, weights: Float[Array, " m"]) -> Float[Array, " d"]:
        # One scatter of what was sent: m dense vectors never exist.
        terms = weights[:, None] * _rows(self.values, weights)
        return jnp.zeros(self.size, terms.dtype).at[self.positions()].add(terms)
