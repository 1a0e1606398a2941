"""Packets: compressed vectors. Their arrays are what is sent; `dense()` decompresses them."""

from __future__ import annotations

import abc
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

FEW = 16  # rows that are added one by one


class Packet(eqx.Module):
    """Base class of packets: what is sent in place of a vector.

    The array leaves are sent. Static fields are known to both ends and cost no bytes.

    Example:
        >>> import fedsolve as fs
        >>> import jax.numpy as jnp
        >>> packet = fs.TopK(0.5)(jnp.asarray([3.0, -1.0, 0.5, 2.0]))
        >>> packet.dense().tolist(), packet.nbytes
        ([3.0, 0.0, 0.0, 2.0], 10)
    """

    @abc.abstractmethod
    def dense(self) -> Float[Array, " d"]:
        """Return the vector that the packet stands for."""

    @property
    def nbytes(self) -> int:
        """The size of what is sent, in bytes; of stacked packets, of all together."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    def weighted_sum(self, weights: Float[Array, " m"]) -> Float[Array, " d"]:
        """Return Σᵢ weightsᵢ · packetᵢ.dense(), where self is m packets stacked by `jax.vmap`.

        Args:
            weights: One for each packet; 0 for one that did not arrive.
        """
        return weighted_sum(weights, jax.vmap(lambda packet: packet.dense())(self))


def weighted_sum(weights: Float[Array, " m"], rows: Float[Array, "m ..."]) -> Float[Array, "..."]:
    """Return Σᵢ weightsᵢ · rowsᵢ, without the rows of weight 0, which may hold anything.

    XLA's own sum over a leading axis is 15 to 70 times as slow on a CPU if rows are long. A few
    rows are added one by one, in one pass; many are a matrix product, which copies them.
    """
    if len(rows) <= FEW:
        terms = [jnp.where(weights[i] != 0, weights[i] * row, 0) for i, row in enumerate(rows)]
        return functools.reduce(jnp.add, terms)
    return jnp.tensordot(weights, _heard(weights, rows), axes=1, precision="highest")


def _heard(weights: Float[Array, " m"], rows: Float[Array, "m ..."]) -> Float[Array, "m ..."]:
    """Replace rows of weight 0 by zeros: 0 · NaN is NaN."""
    return jnp.where(weights.reshape(-1, *[1] * (rows.ndim - 1)) != 0, rows, 0)


class Dense(Packet):
    """The uncompressed vector."""

    vector: Float[Array, " d"]

    def dense(self) -> Float[Array, " d"]:
        return self.vector


class Sparse(Packet):
    """Some entries of a vector; their values are a packet in turn.

    The vector is divided into blocks of `block` entries, and each sends `share` of them (a short
    last block perhaps fewer). An index counts from the start of its block: few bits are enough.
    """

    indices: UInt[Array, " kept"]
    values: Packet
    size: int = eqx.field(static=True)
    block: int = eqx.field(static=True)
    share: int = eqx.field(static=True)

    def positions(self) -> Int[Array, "*m kept"]:
        """Return indices into the whole vector, of one packet or of a stack."""
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


class Common(Packet):
    """Some entries of a vector, the same ones of every client that has the key.

    The values alone are of one client: packets with one key can be added up without their indices.
    """

    values: Float[Array, " kept"]
    key: UInt[Array, " words"]  # the data of the random key from which the entries follow
    size: int = eqx.field(static=True)

    def positions(self) -> Int[Array, " kept"]:
        """Return which entries they are."""
        key = jax.random.wrap_key_data(self.key)
        return jax.random.choice(key, self.size, self.values.shape, replace=False)

    def dense(self) -> Float[Array, " d"]:
        nothing = jnp.zeros(self.size, self.values.dtype)
        return nothing.at[self.positions()].set(self.values)
