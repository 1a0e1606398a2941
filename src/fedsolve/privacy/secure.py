"""Secure sums in a simulation: what the encoding and the protocol do to numbers and bytes.

A run with `aggregation=fs.SecureSum(...)` computes what the protocol in
`fedsolve.privacy.masking` gives: every answer is clipped and encoded in fixed point, sums are
taken in the ring of integers modulo 2^32, and the server gets nothing but the decoded sum over
those who answered. The masks cancel in such a sum, so a simulation leaves them out; their bytes
are counted.
"""

from __future__ import annotations

import math
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt32

from fedsolve.compression.clipping import Scaled, is_packet, spread, summand
from fedsolve.compression.packets import Packet, Sparse
from fedsolve.errors import InvalidInput
from fedsolve.federation.replies import Replies
from fedsolve.federation.rules import Context, Rule, Summed, Total, Weights, sums_only
from fedsolve.fields import Scalar, check_positive, scalar, static
from fedsolve.privacy.encoding import LEAST_MEMBERS, Words, check_threshold, costs
from fedsolve.types import Flags, PyTree, Reply

LARGEST = 2.0**31 * (1 - 1e-6)  # of a sum; the margin is for rounding
CLIP = 100.0


class SecureSum(Rule):
    """Sums of which the server sees no single term, for `fs.solve(..., aggregation=...)`.

    Answers are clipped to a norm, so that no sum can leave the ring in which it is computed. A
    round in which fewer than the threshold answer has no sum: it is as if nobody had answered.

    Args:
        clip: The largest norm of an answer: a number, or one for each exchange by the name of the
            client's method (`"evaluation"` for objective and constraint).
        threshold: The share of a cohort (in a deployment, of its sites) that must answer, more than
            1/2.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.linear_regression(clients=5, size=3)
        >>> secure = fs.SecureSum(clip=100.0)
        >>> fs.solve(problem, fs.FedAvg(0.1), rounds=2, aggregation=secure).rounds
        2
    """

    hides: ClassVar[bool] = True

    clip: Scalar | dict[str, Scalar] = eqx.field(
        converter=lambda value: _clips(value), default=CLIP
    )
    threshold: float = static(2 / 3)

    def __check_init__(self):
        if not 0.5 < self.threshold <= 1:
            raise InvalidInput(
                f"threshold must be more than 1/2 and at most 1, got {self.threshold}: two halves "
                "could be asked for two sums that differ in one client."
            )

    def clip_of(self, name: str) -> Scalar:
        if not isinstance(self.clip, dict):
            return self.clip
        if name not in self.clip:
            raise InvalidInput(
                f"The exchange {name!r} has no clip, so its sums could overflow: give "
                f"clip={{{name!r}: ...}} the largest norm of an answer."
            )
        return self.clip[name]

    def covers_evaluation(self) -> bool:
        return True

    def needed(self, size: int) -> int:
        """Return how many of a cohort must answer."""
        return max(math.ceil(self.threshold * size - 1e-9), size // 2 + 1, LEAST_MEMBERS)

    def arriving(self, arrived: Flags) -> Flags:
        needed = self.needed(len(arrived))
        if isinstance(arrived, np.ndarray):
            return arrived & (arrived.sum() >= needed)
        return arrived & (jnp.sum(arrived) >= needed)

    def cost(self, replies: Reply, size: int) -> tuple[int, int]:
        rows = replies.words if isinstance(replies, Summed) else _dense(replies)
        words = sum(math.prod(np.shape(leaf)[1:]) for leaf in jax.tree.leaves(rows))
        return costs(size, words)

    def bound(self, name: str, size: int) -> Float[Array, ""]:
        """Return the largest number that a sum over a cohort can have."""
        return size * jnp.asarray(self.clip_of(name), jnp.result_type(float))

    def scale(self, name: str, size: int) -> Float[Array, ""]:
        """Return the scale of the encoding where all answers of a cohort have the same weight."""
        return (LARGEST - size) / self.bound(name, size)

    def words(self, name: str, rows: PyTree, size: int, threshold: int) -> Words:
        """Return the sum of some clients' answers as ring elements, as a site masks it.

        Args:
            name: The exchange.
            rows: The dense answers, stacked on a leading axis.
            size: The number of clients of the whole cohort.
            threshold: How many sites are in the sum at least.
        """
        return np.asarray(words_of(rows, self.scale(name, size)))

    def receive(self, replies: Replies, context: Context) -> Replies:
        name, size = context.name, len(replies.arrived)
        check_threshold(self.needed(size), size)
        heard = jnp.asarray(replies.arrived)
        why = (
            f"The algorithm looks at single answers of {name!r}, which a secure sum hides: take an "
            "algorithm and a weighting that use sums only (weighting=None, uniform draws)."
        )
        if isinstance(replies.values, Summed):
            return sums_only(replies, why, self._of_total(replies.values, heard, name))
        _check_dense(replies.values, name)
        rows = _dense(replies.values)
        clip = jnp.asarray(self.clip_of(name), jnp.result_type(float))

        def total(weights: Weights, mean: bool) -> PyTree:
            given = jnp.ones(size) if weights is None else weights
            most = jnp.max(jnp.abs(given))
            bound = clip * jnp.where(most > 0, most, 1)
            scale = (LARGEST - size) / (size * bound)
            found = jax.tree.map(lambda leaf: ring_sum(leaf, given, heard, scale), rows)
            found = spread(found, jax.tree.map(lambda leaf: leaf[0], replies.values))
            if not mean:
                return found
            over = jnp.sum(jnp.where(heard, given, 0))
            over = jnp.where(over > 0, over, 1)
            return jax.tree.map(lambda leaf: leaf / over.astype(leaf.dtype), found)

        return sums_only(replies, why, total)

    def _of_total(self, known: Summed, heard: Flags, name: str) -> Total:
        """Return what reads a sum that the clients have computed among themselves."""

        def total(weights: Weights, mean: bool) -> PyTree:
            if weights is not None:
                raise InvalidInput(
                    f"The algorithm gives the answers of {name!r} weights, and a deployment's "
                    "secure sum counts all of them alike: take an algorithm and a weighting "
                    "without weights."
                )
            scale = self.scale(name, len(heard))
            over = jnp.maximum(jnp.sum(heard), 1) if mean else 1
            found = jax.tree.map(lambda words: decoded(words[0], scale) / over, known.words)
            return found if known.like is None else spread(found, known.like, known.key)

        return total


def ring_sum(
    rows: Float[Array, "m ..."],
    weights: Float[Array, " m"],
    heard: Flags,
    scale: Float[Array, ""],
) -> Float[Array, "..."]:
    """Return Σ weights_j · rows_j over those heard, computed in the ring modulo 2^32."""
    shape = -1, *[1] * (rows.ndim - 1)
    terms = jnp.where(heard.reshape(shape), rows * weights.reshape(shape).astype(rows.dtype), 0)
    whole = jnp.sum(encoded(terms, scale), axis=0, dtype=jnp.uint32)
    return decoded(whole, scale.astype(rows.dtype))


def encoded(rows: Float[Array, "..."], scale: Float[Array, ""]) -> UInt32[Array, "..."]:
    """Return numbers as elements of the ring."""
    return jnp.rint(rows * scale.astype(rows.dtype)).astype(jnp.int32).astype(jnp.uint32)


def decoded(words: UInt32[Array, "..."], scale: Float[Array, ""]) -> Float[Array, "..."]:
    """Return the numbers that elements of the ring stand for."""
    return words.astype(jnp.int32).astype(scale.dtype) / scale


@jax.jit
def words_of(rows: PyTree, scale: Float[Array, ""]) -> UInt32[Array, " words"]:
    """Return the sum of some clients' dense answers in the ring, as one vector."""
    parts = [
        jnp.sum(encoded(leaf, scale), axis=0, dtype=jnp.uint32).reshape(-1)
        for leaf in jax.tree.leaves(rows)
    ]
    return jnp.concatenate(parts)


def dense_shapes(reply: Reply) -> PyTree:
    """Return the shapes of what is added up of an answer, given those of the answer."""
    return jax.eval_shape(summand, reply)


def unflattened(words: UInt32[np.ndarray, " words"], template: PyTree) -> PyTree:
    """Return a vector of ring elements in the form of a tree, with a leading axis of 1."""
    leaves, structure = jax.tree.flatten(template)
    ends = np.cumsum([math.prod(leaf.shape) for leaf in leaves])[:-1]
    parts = np.split(words, ends)
    return jax.tree.unflatten(
        structure,
        [part.reshape(1, *leaf.shape) for part, leaf in zip(parts, leaves, strict=True)],
    )


def _dense(replies: Reply) -> PyTree:
    return jax.vmap(summand)(replies)


def _check_dense(values: Reply, name: str) -> None:
    """Raise if answers have indices of their own, of which there is no sum."""
    for leaf in jax.tree.leaves(values, is_leaf=is_packet):
        inner: Packet | Array = leaf.packet if isinstance(leaf, Scaled) else leaf
        if isinstance(inner, Sparse):
            raise InvalidInput(
                f"The packets of {name!r} say which entries they keep, which differ from client to "
                "client and would not be hidden: take uplink=Identity(), a quantiser such as QSGD, "
                "or RandK(shared=True), which keeps the same ones at all clients."
            )


def _clips(value: object) -> Scalar | dict[str, Scalar]:
    if value is None:
        raise InvalidInput("A secure sum needs a clip, from which its encoding follows.")
    if not isinstance(value, dict):
        number = scalar("clip")(value)
        check_positive("clip", number)
        return number
    found: dict[str, Scalar] = {}
    for name, each in value.items():
        found[str(name)] = scalar(f"clip.{name}")(each)
        check_positive(f"clip.{name}", found[str(name)])
    return found
