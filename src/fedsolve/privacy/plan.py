"""What privacy means for one run: the rule through which answers go, and how large its noise is."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from scipy.stats import norm

from fedsolve.errors import InvalidInput
from fedsolve.federation.replies import Replies
from fedsolve.federation.rules import EVALUATION, Context, Rule, SumsOnly, Weights, sums_only
from fedsolve.fields import Scalar
from fedsolve.privacy.accounting import Ledger, Sampling
from fedsolve.problem.problem import Problem
from fedsolve.types import Info, PyTree

DROWNED = 10.0  # times the longest answer: noise that a run is warned of
TELLS_WHO = ("cohort", "available", "picks", "selection_skew")  # columns about who took part


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `Private` means for one run.

    Args:
        rule: The rule through which answers go.
        ledger: Counts what is spent.
        rounds: How many rounds the budget allows.
        noise: The multiplier z of each exchange.
        sampling: How a round's clients are drawn, as far as it counts.
        sizes: The length of a client's answer, by exchange.
        evaluations: How many evaluations those rounds have, as far as they cost.
    """

    rule: NoisySums
    ledger: Ledger
    rounds: int
    noise: dict[str, float]
    sampling: Sampling
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)
    evaluations: int = 0

    @property
    def applied(self) -> NoisySums | None:
        """The rule through which answers go in the run; None where clients add the noise."""
        return self.rule

    def problem_of(self, problem: Problem) -> Problem:
        """Return the problem as the run's clients see it."""
        return problem

    def sentences(self) -> list[str]:
        """Return what the run guarantees, with which clips, and how large its noise is.

        Example:
            >>> import fedsolve as fs
            >>> problem = fs.problems.linear_regression(clients=5, size=3)
            >>> privacy = fs.Private(noise=8.0, delta=0.01, evaluation="outside")
            >>> for sentence in privacy.plan(problem, fs.FedAvg(0.1), rounds=2).sentences():
            ...     print(sentence)
            Private for each of 5 clients: ε = 0.708 after 2 rounds, δ = 0.01.
            Norm of an answer and of the noise in their mean: improve 1, 2.77.
        """
        accountant = self.ledger.accountant
        epsilon = accountant.epsilon(self.rounds, self.evaluations)
        each = [
            f"{name} {float(self.rule.clips[name]):g}, {self.length(name):.3g}"
            for name in self.sizes
        ]
        found = [
            f"Private for each of {self.sampling.clients} clients: ε = {epsilon:.3g} after "
            f"{self.rounds} rounds, δ = {accountant.delta:.3g}.",
            f"Norm of an answer and of the noise in their mean: {'; '.join(each)}.",
        ]
        if "objective" in self.ledger.noise:
            found.append(f"f in the history has noise of ±{self.ledger.noise['objective']:.3g}.")
        return found

    def warning(self) -> str:
        """Return a sentence if the noise hides what clients answer; empty if it does not."""
        worst = max(self.sizes, key=lambda name: self.length(name) / float(self.rule.clips[name]))
        ratio = self.length(worst) / float(self.rule.clips[worst])
        if ratio < DROWNED:
            return ""
        return (
            f"With {self.sampling.expected:g} clients in a round the noise in the mean of "
            f"{worst!r} is {ratio:.0f} times as long as an answer may be, so the run learns little "
            "or nothing: more clients, fewer rounds or a larger epsilon would do."
        )

    def length(self, name: str) -> float:
        """Return the norm of the noise in an exchange's mean, over all of its numbers.

        Args:
            name: The exchange, such as `"improve"` for the update.
        """
        return self.deviation(name) * math.sqrt(self.sizes[name])

    def deviation(self, name: str) -> float:
        """Return the standard deviation of the noise in each number of an exchange's mean.

        Args:
            name: The exchange, such as `"measure"` for the constraint's values.
        """
        return self.noise[name] * float(self.rule.clips[name]) / self.sampling.expected

    def margin(self, name: str = "measure", confidence: float = 0.95) -> float:
        """Return a bound on the noise of an exchange's mean in all rounds of the run at once.

        FedSGM reduces the objective in rounds with Ĝ ≤ τ. With this confidence the constraint's
        mean over clients, of values within the clip, is at most τ + margin in all of these; for a
        convex constraint and everyone in the cohort, so is g at the mean of their parameters.

        Args:
            name: The exchange; its replies are single numbers.
            confidence: The probability with which the bound holds.

        Raises:
            InvalidInput: If the confidence is no probability between 0 and 1.
        """
        if not 0 < confidence < 1:
            raise InvalidInput(f"confidence must lie between 0 and 1, got {confidence}.")
        return self.deviation(name) * float(norm.isf((1 - confidence) / self.rounds))


class NoisySums(Rule):
    """The rule of a private run: clipped replies, of which only noisy sums can be had."""

    clips: Mapping[str, Scalar]
    noises: Mapping[str, Scalar]
    # The number over which means are taken, where it must not be told who took part
    size: float | None = eqx.field(static=True, default=None)
    evaluation: bool = eqx.field(static=True, default=True)
    default: Scalar | None = None  # the clip of exchanges that have none

    def clip_of(self, name: str) -> Scalar:
        clip = self.clips.get(name, self.default)
        if clip is None:
            raise InvalidInput(
                f"The exchange {name!r} has no clip, so what clients answer is not covered: give "
                f"clip={{{name!r}: ...}} the largest norm of an answer."
            )
        return clip

    def covers_evaluation(self) -> bool:
        return self.evaluation

    def receive(self, replies: Replies, context: Context) -> Replies:
        name, size = context.name, None if context.name == EVALUATION else self.size
        noise = self.noises.get(name, 1.0) * self.clip_of(name)
        plain = replies  # a secure sum, or the answers themselves
        if not isinstance(replies, SumsOnly):
            plain = Replies(replies.values, replies.arrived)
        known: list[tuple[Weights, PyTree]] = []  # each sum is computed, and paid for, once

        def released(weights: Weights) -> PyTree:
            for earlier, total in known:
                if earlier is weights:
                    return total
            if weights is not None and size is not None:
                raise InvalidInput(
                    "With clients drawn at random, privacy covers means with equal weights only: "
                    "ask everyone, or leave out weights."
                )
            context.release(name)
            mask = jnp.asarray(replies.arrived, jnp.result_type(float))
            most = jnp.max(jnp.abs(mask if weights is None else mask * weights))
            deviation = noise * (most if size is None else 1.0)
            total = jax.tree.map(lambda leaf: _noisy(leaf, deviation, context), plain.sum(weights))
            known.append((weights, total))
            return total

        def compute(weights: Weights, mean: bool) -> PyTree:
            total = released(weights)
            if not mean:
                return total
            if size is not None:
                over: Any = size
            elif weights is None:
                over = jnp.maximum(plain.count, 1)
            else:
                over = jnp.sum(jnp.where(replies.arrived, weights, 0))
                over = jnp.where(over > 0, over, 1)
            return jax.tree.map(lambda leaf: (leaf / over).astype(leaf.dtype), total)

        why = (
            f"The algorithm looks at single answers of {name!r}, which privacy does not cover: "
            "take an algorithm and a weighting that use sums only (weighting=None, uniform draws)."
        )
        return sums_only(replies, why, compute, size)

    def published(self, info: Info) -> Info:
        if self.size is None:
            return info
        return {column: value for column, value in info.items() if column not in TELLS_WHO}


def _noisy(leaf: Float[Array, "..."], deviation: Scalar, context: Context) -> Float[Array, "..."]:
    return leaf + (deviation * context.draw(jnp.shape(leaf))).astype(leaf.dtype)
