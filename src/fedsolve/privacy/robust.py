"""Aggregation that withstands some wrong answers, for `fs.solve(..., aggregation=...)`.

| rule | what the mean of m answers becomes | withstands f liars |
|---|---|---|
| `Trimmed(share)` | by coordinate, the mean without k values at each end | f ≤ k |
| `Median()` | by coordinate, the median | f < m/2 |
| `Clipped(norm)` | the mean of answers whose norm is cut to C | they move it by C·f/m |
| `Krum(liars)` | the mean of the answers that are close to others | f < (m − 2)/2 |

Papers: Yin, Chen, Ramchandran and Bartlett, "Byzantine-Robust Distributed Learning" (2018) for the
trimmed mean and the median; Blanchard, El Mhamdi, Guerraoui and Stainer, "Machine Learning with
Adversaries" (2017) for Krum. The rules hold for every exchange of a round, so constraint values are
protected as updates are. A sum is m times what replaces the mean.
"""

from __future__ import annotations

import abc
import functools
import math
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fedsolve.compression.clipping import dense, limit
from fedsolve.errors import InvalidInput
from fedsolve.federation.replies import Replies
from fedsolve.federation.rules import Context, Rule, SumsOnly, Weights, sums_only
from fedsolve.fields import Scalar, check_count, check_positive, scalar, static
from fedsolve.types import PyTree

Rows = Float[Array, "m ..."]
Heard = Bool[Array, " m"]


class Robust(Rule):
    """Base class of rules that replace the mean of the answers."""

    drops_broken: ClassVar[bool] = True
    weighs: ClassVar[bool] = False  # whether answers may have weights

    @abc.abstractmethod
    def center(self, rows: PyTree, heard: Heard, weights: Weights) -> PyTree:
        """Return what replaces the mean.

        Args:
            rows: The answers, each leaf with one row for each client.
            heard: Which of them arrived.
            weights: Their weights; None if all are equal.
        """

    def check(self, size: int, name: str) -> None:
        """Raise if the rule is not made for a cohort of that size."""

    def receive(self, replies: Replies, context: Context) -> Replies:
        if isinstance(replies, SumsOnly):
            raise InvalidInput("A robust aggregation must see the answers themselves.")
        size = len(replies.arrived)
        self.check(size, context.name)
        known = jax.vmap(dense)(replies.values)
        heard = jnp.asarray(replies.arrived) & _finite(known, size)
        # a row that did not arrive may hold anything
        rows = jax.tree.map(
            lambda leaf: jnp.where(heard.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, 0),
            known,
        )

        def total(weights: Weights, mean: bool) -> PyTree:
            if weights is not None and not self.weighs:
                raise InvalidInput(
                    f"{type(self).__name__} gives all answers the same weight, and "
                    f"{context.name!r} has weights: take Clipped(norm), or weighting=None."
                )
            center = self.center(rows, heard, weights)
            if mean:
                return center
            many = jnp.sum(heard) if weights is None else jnp.sum(jnp.where(heard, weights, 0))
            return jax.tree.map(lambda leaf: leaf * many.astype(leaf.dtype), center)

        why = (
            f"The algorithm looks at single answers of {context.name!r}, which "
            f"{type(self).__name__} cannot protect: take an algorithm and a weighting that use "
            "sums only."
        )
        return sums_only(replies, why, total)


class Trimmed(Robust):
    """The mean without the largest and the smallest values, in each coordinate.

    Args:
        share: The share of the answers that is left out at each end, rounded up; below 1/2.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.linear_regression(clients=5, size=3)
        >>> fs.solve(problem, fs.FedAvg(0.1), rounds=2, aggregation=fs.Trimmed(0.2)).rounds
        2
    """

    share: float = static()

    def __check_init__(self):
        if isinstance(self.share, bool) or not isinstance(self.share, int | float):
            raise InvalidInput(f"share must be a number, got {self.share!r}.")
        if not 0 < self.share < 0.5:
            raise InvalidInput(
                f"share must be above 0 and below 1/2, else nobody is left; got {self.share}."
            )

    def check(self, size: int, name: str) -> None:
        cut = _cut(self.share, size)
        if 2 * cut >= size:
            raise InvalidInput(
                f"Trimmed({self.share:g}) leaves nobody of the {size} answers of {name!r}: take a "
                "smaller share, or Median()."
            )

    def center(self, rows: PyTree, heard: Heard, weights: Weights) -> PyTree:
        count = jnp.sum(heard)
        cut = jnp.ceil(self.share * count - 1e-6).astype(jnp.int32)
        cut = jnp.clip(cut, 0, jnp.maximum(count - 1, 0) // 2)
        return jax.tree.map(lambda leaf: _middle(leaf, heard, cut, count - cut), rows)


class Median(Robust):
    """The median of each coordinate; of an even number of answers, the mean of the middle two.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.linear_regression(clients=5, size=3)
        >>> fs.solve(problem, fs.FedAvg(0.1), rounds=2, aggregation=fs.Median()).rounds
        2
    """

    def center(self, rows: PyTree, heard: Heard, weights: Weights) -> PyTree:
        count = jnp.sum(heard)
        first = jnp.maximum(count - 1, 0) // 2
        return jax.tree.map(lambda leaf: _middle(leaf, heard, first, count // 2 + 1), rows)


class Clipped(Robust):
    """The mean of answers whose norm is cut to a bound.

    A liar can move the mean by at most norm/m. Answers may have weights.

    Args:
        norm: The largest norm of an answer: one number, or one for each exchange by the name of the
            client's method; answers of other exchanges are left as they are.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.linear_regression(clients=5, size=3)
        >>> fs.solve(problem, fs.FedAvg(0.1), rounds=2, aggregation=fs.Clipped(1.0)).rounds
        2
    """

    weighs: ClassVar[bool] = True

    norm: Scalar | dict[str, Scalar] = eqx.field(converter=lambda value: _norms(value))

    def receive(self, replies: Replies, context: Context) -> Replies:
        bound = self._bound(context.name)
        if bound is None:
            return replies
        values = jax.vmap(lambda reply: limit(reply, bound))(replies.values)
        return super().receive(Replies(values, replies.arrived, replies.on_sum), context)

    def center(self, rows: PyTree, heard: Heard, weights: Weights) -> PyTree:
        return Replies(rows, heard).mean(weights)

    def _bound(self, name: str) -> Scalar | None:
        return self.norm.get(name) if isinstance(self.norm, dict) else self.norm


class Krum(Robust):
    """The mean of those answers that lie closest to their neighbours (Multi-Krum).

    An answer's score is the sum of its squared distances to the m − f − 2 answers nearest to it.
    The answers of lowest score are kept.

    Args:
        liars: f, how many answers may be wrong; a cohort must have at least 2f + 3.
        keep: How many answers are kept; 1 is Krum.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.linear_regression(clients=6, size=3)
        >>> fs.solve(problem, fs.FedAvg(0.1), rounds=2, aggregation=fs.Krum(1, keep=3)).rounds
        2
    """

    liars: int = static()
    keep: int = static(1)

    def __check_init__(self):
        check_count("liars", self.liars)
        check_count("keep", self.keep)

    def check(self, size: int, name: str) -> None:
        if size < 2 * self.liars + 3:
            raise InvalidInput(
                f"Krum({self.liars}) needs at least {2 * self.liars + 3} answers, and {name!r} has "
                f"{size}."
            )
        if self.keep > size - self.liars:
            raise InvalidInput(
                f"Krum({self.liars}, keep={self.keep}) keeps more answers than are right: at most "
                f"{size - self.liars} of {size}."
            )

    def center(self, rows: PyTree, heard: Heard, weights: Weights) -> PyTree:
        size = len(heard)
        flat = jnp.concatenate(
            [leaf.reshape(size, -1).astype(float) for leaf in jax.tree.leaves(rows)], axis=1
        )
        scores = krum_scores(flat, heard, self.liars)
        rank = jnp.argsort(jnp.argsort(scores))
        kept = (rank < self.keep) & heard
        return Replies(rows, kept).mean()


def krum_scores(rows: Float[Array, "m d"], heard: Heard, liars: int) -> Float[Array, " m"]:
    """Return Krum's scores of the answers; infinite for those that did not arrive.

    Args:
        rows: The answers.
        heard: Which of them arrived.
        liars: f.
    """
    size = len(rows)
    apart = jax.lax.map(lambda one: jnp.sum((rows - one) ** 2, axis=1), rows)
    apart = jnp.where(jnp.isnan(apart), jnp.inf, apart)
    others = heard & ~jnp.eye(size, dtype=bool)
    nearest = jnp.sort(jnp.where(others, apart, jnp.inf), axis=1)
    near = jnp.arange(size) < jnp.maximum(jnp.sum(heard) - liars - 2, 1)
    return jnp.where(heard, jnp.sum(jnp.where(near, nearest, 0), axis=1), jnp.inf)


def _middle(
    rows: Rows, heard: Heard, first: Int[Array, ""], end: Int[Array, ""]
) -> Float[Array, "..."]:
    """Return the mean of the sorted answers from place `first` up to `end`, by coordinate."""
    shape = -1, *[1] * (rows.ndim - 1)
    ordered = jnp.sort(jnp.where(heard.reshape(shape), rows, jnp.inf), axis=0)  # NaN comes last
    places = jnp.arange(len(rows)).reshape(shape)
    inside = (places >= first) & (places < end) & (places < jnp.sum(heard))
    count = jnp.maximum(jnp.sum(inside), 1)
    return jnp.sum(jnp.where(inside, ordered, 0), axis=0) / count.astype(rows.dtype)


def _finite(rows: PyTree, size: int) -> Heard:
    """Return whose answers are finite."""
    good = [jnp.all(jnp.isfinite(leaf).reshape(size, -1), axis=1) for leaf in jax.tree.leaves(rows)]
    return functools.reduce(jnp.logical_and, good, jnp.ones(size, bool))


def _cut(share: float, size: int) -> int:
    return math.ceil(share * size - 1e-6)


def _norms(value: object) -> Scalar | dict[str, Scalar]:
    if not isinstance(value, dict):
        number = scalar("norm")(value)
        check_positive("norm", number)
        return number
    found: dict[str, Scalar] = {}
    for name, each in value.items():
        found[str(name)] = scalar(f"norm.{name}")(each)
        check_positive(f"norm.{name}", found[str(name)])
    return found
