"""Clipping: scale what a client sends so that its norm is at most a bound.

clip(v) = v · min(1, C/‖v‖), with ‖v‖ over all arrays of a reply together. A reply that is not
finite becomes zero, so that the bound holds whatever a client computes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedsolve.compression.packets import Common, Dense, Packet
from fedsolve.fields import Scalar
from fedsolve.types import PyTree

MARGIN = 1e-6  # by how much a clipped norm stays below the bound, for rounding


class Scaled(Packet):
    """A packet times a factor, which is sent with it."""

    packet: Packet
    factor: Float[Array, ""]

    def dense(self) -> Float[Array, " d"]:
        return jnp.where(self.factor > 0, self.factor * self.packet.dense(), 0)

    def weighted_sum(self, weights: Float[Array, " m"]) -> Float[Array, " d"]:
        return self.packet.weighted_sum(weights * self.factor)


def is_packet(node: object) -> bool:
    """Return whether this is a packet, which is one leaf of a reply."""
    return isinstance(node, Packet)


def dense(reply: PyTree) -> PyTree:
    """Return a reply with its packets as vectors and its numbers as floating-point numbers."""

    def one(leaf: Packet | Array) -> Array:
        values = leaf.dense() if isinstance(leaf, Packet) else jnp.asarray(leaf)
        exact = jnp.issubdtype(values.dtype, jnp.floating)
        return values if exact else values.astype(jnp.result_type(float))

    return jax.tree.map(one, reply, is_leaf=is_packet)


def summand(reply: PyTree) -> PyTree:
    """Return what is added up of a reply: of packets with a common key their values alone."""

    def one(leaf: Packet | Array) -> Array:
        inner = leaf.packet if isinstance(leaf, Scaled) else leaf
        if not isinstance(inner, Common):
            return dense(leaf)
        if not isinstance(leaf, Scaled):
            return inner.values
        return jnp.where(leaf.factor > 0, leaf.factor * inner.values, 0)

    return jax.tree.map(one, reply, is_leaf=is_packet)


def spread(total: PyTree, reply: PyTree, key: Array | None = None) -> PyTree:
    """Return a sum of `summand`s as a sum of dense replies.

    Args:
        total: The sum.
        reply: A reply whose packets say where values belong, or its shapes.
        key: The data of their common key; None for that of the reply.
    """

    def one(leaf: Packet | Array | jax.ShapeDtypeStruct, added: Array) -> Array:
        inner = leaf.packet if isinstance(leaf, Scaled) else leaf
        if not isinstance(inner, Common):
            return added
        return Common(added, inner.key if key is None else key, inner.size).dense()

    return jax.tree.map(one, reply, total, is_leaf=is_packet)


def norm_of(reply: PyTree) -> Float[Array, ""]:
    """Return the Euclidean norm of a reply, over all of its arrays."""
    leaves = jax.tree.leaves(dense(reply))
    return jnp.sqrt(sum((jnp.sum(leaf**2) for leaf in leaves), jnp.zeros(())))


def limit(reply: PyTree, bound: Scalar) -> PyTree:
    """Return a reply scaled to a norm of at most `bound`; zero if it is not finite.

    Args:
        reply: Arrays and packets in any structure.
        bound: The bound C.
    """
    norm = norm_of(reply)
    most = bound * (1 - MARGIN)
    factor = jnp.where(norm > most, most / jnp.where(norm > 0, norm, 1), 1)
    factor = jnp.where(jnp.isfinite(norm), factor, 0)

    def one(leaf: Packet | Array) -> Packet | Array:
        if isinstance(leaf, Scaled):
            return Scaled(leaf.packet, leaf.factor * factor.astype(leaf.factor.dtype))
        if isinstance(leaf, Dense):
            return Dense(_times(leaf.vector, factor))
        if isinstance(leaf, Packet):
            return Scaled(leaf, factor)
        return _times(dense(leaf), factor)

    return jax.tree.map(one, reply, is_leaf=is_packet)


def _times(values: Array, factor: Array) -> Array:
    return jnp.where(factor > 0, values * factor.astype(values.dtype), 0)
