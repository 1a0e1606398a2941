"""Packets: a packet's arrays are its bytes on the wire, and `dense()` is the vector they mean."""

from __future__ import annotations

import abc
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

FEW = 16  # rows that are added one by one


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
        return weighted_sum(weights, jax.vmap(lambda packet: packet.dense())(self))


def weighted_sum(weights: Float[Array, " m"], rows: Float[Array, "m ..."]) -> Float[Array, "..."]:
    """Σᵢ weightsᵢ · rowsᵢ. Weight 0 means no answer: the row may hold anything, and 0 · NaN is NaN.

    XLA's own sum over a leading axis is 15 to 70 times as slow on a CPU where rows are long. Few
    are added one by one, in one pass over them; many are a matrix product, of a copy."""
    if len(rows) <= FEW:
        terms = [jnp.where(weights[i] != 0, weights[i] * row, 0) for i, row in enumerate(rows)]
        return functools.reduce(jnp.add, terms)
    return jnp.tensordot(weights, _heard(weights, rows), axes=1, precision="highest")


def _heard(weights: Float[Array, " m"], rows: Float[Array, "m ..."]) -> Float[Array, "m ..."]:
    """With zeros for those who were not heard."""
    return jnp.where(weights.reshape(-1, *[1] * (rows.ndim - 1)) != 0, rows, 0)


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
        values = jax.vmap(lambda packet: packet.dense())(self.values)
        terms = weights[:, None] * _heard(weights, values)
        return jnp.zeros(self.size, terms.dtype).at[self.positions()].add(terms)
