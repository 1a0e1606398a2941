"""Sums of answers that do not depend on the order of the clients, nor on how they are grouped.

Floating-point addition depends on the order. An algorithm that amplifies rounding, such as FedSGM
with a steep switch, then ends elsewhere if clients are numbered otherwise. Here every answer is cut
into pieces on grids that are fixed by the largest answer of each coordinate. The pieces on one grid
add up without rounding, in whatever order: so the sum is a function of the set of answers.

Method: Demmel and Nguyen, "Fast Reproducible Floating-Point Summation" (2013).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedsolve.compression.clipping import dense, is_packet
from fedsolve.compression.packets import weighted_sum
from fedsolve.errors import InvalidInput
from fedsolve.federation.replies import Replies
from fedsolve.federation.rules import Context, Rule, SumsOnly
from fedsolve.types import PyTree


class ExactSum(Rule):
    """Sums that are the same to the last bit in whatever order clients are added.

    Single answers stay as they are, so every algorithm can be used. Sparse answers become dense.
    Sums that an algorithm computes by itself are not covered.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.linear_regression(clients=5, size=3)
        >>> fs.solve(problem, fs.FedAvg(0.1), rounds=2, aggregation=fs.ExactSum()).rounds
        2
    """

    def receive(self, replies: Replies, context: Context) -> Replies:
        if isinstance(replies, SumsOnly):
            raise InvalidInput("ExactSum must see the answers themselves.")
        return ExactReplies(replies.values, replies.arrived, replies.on_sum)


class ExactReplies(Replies):
    """Answers whose sums do not depend on their order."""

    def pick(self, part: str | int) -> Replies:
        return ExactReplies(self.values[part], self.arrived, self.on_sum)

    def sum(self, weights: Float[Array, " m"] | None = None) -> PyTree:
        if self.on_sum is not None and weights is not None:
            self.on_sum(weights)

        def add(rows: Array) -> Array:
            kept = self._weights(weights, rows.dtype).reshape(-1, *[1] * (rows.ndim - 1))
            return exact_sum(jnp.where(kept != 0, kept * rows.astype(kept.dtype), 0))

        known = jax.vmap(dense)(self.values) if _has_packets(self.values) else self.values
        return jax.tree.map(add, known)

    def mean(self, weights: Float[Array, " m"] | None = None) -> PyTree:
        if weights is None:
            return super().mean()
        total = exact_sum(jnp.where(self.arrived, weights, 0))
        return self.sum(weights / jnp.where(total > 0, total, 1))


def exact_sum(terms: Float[Array, "m ..."]) -> Float[Array, "..."]:
    """Return the sum over the leading axis, to the same bits in any order of the terms.

    Args:
        terms: The terms. There may be 2²¹ of them in float32, and 2⁵⁰ in float64.
    """
    digits = jnp.finfo(terms.dtype).nmant  # of a whole number that is exact, and one more
    room = math.ceil(math.log2(max(len(terms), 2)))  # for the digits of a sum
    kept = digits - room  # digits of a piece
    if kept < 2:
        raise InvalidInput(f"{len(terms)} answers are too many for exact sums in {terms.dtype}.")
    # A product that became part of a later addition would be rounded once less.
    rest, sums = jax.lax.optimization_barrier(terms), []
    ones = jnp.ones(len(terms), terms.dtype)
    for _ in range(math.ceil((digits + 1 + room) / kept)):
        _, exponent = jnp.frexp(_largest(rest))
        grid = jnp.ldexp(jnp.full(exponent.shape, 1.5, terms.dtype), exponent + room)
        piece = (rest + grid) - grid  # rounded to the last digit of the grid
        sums.append(weighted_sum(ones, piece))
        rest = rest - piece
    total = sums.pop()
    while sums:
        total = sums.pop() + total
    return total


def _largest(rows: Float[Array, "m ..."]) -> Float[Array, "..."]:
    """Return the largest magnitude in each place.

    XLA's own maximum over a leading axis is slow on a CPU; this halves the rows again and again.
    """
    rows = jnp.abs(rows)
    while len(rows) > 1:
        half = (len(rows) + 1) // 2
        rows = jnp.maximum(rows[:half], rows[-half:])
    return rows[0]


def _has_packets(values: PyTree) -> bool:
    return any(is_packet(leaf) for leaf in jax.tree.leaves(values, is_leaf=is_packet))
