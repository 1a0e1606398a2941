"""Differential privacy without a server to trust: noise that sites add before a secure sum.

Each of at least t sites in a sum adds N(0, (z C)²/t · I) to the sum over its clients, so that the
sum has noise of at least the deviation z C, and nobody has seen anything with less. Sums of a
round, their clips and what they cost are those of `fedsolve.privacy.private`; everyone, the server
included, may know who took part, so sampling counts for nothing.

Answers are rounded to the ring before noise, which is rounded, too. The first makes the sensitivity
C + √d/s for d numbers at the scale s, and the deviation grows with it.
"""

from __future__ import annotations

import dataclasses
import math
import secrets

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float
from scipy.special import ndtri

from fedsolve.algorithms.base import Algorithm
from fedsolve.errors import InvalidInput
from fedsolve.fields import Scalar
from fedsolve.privacy.accounting import Ledger
from fedsolve.privacy.encoding import Refused, Words
from fedsolve.privacy.masking import stream
from fedsolve.privacy.private import Private
from fedsolve.privacy.secure import SecureSum
from fedsolve.problem.problem import Problem
from fedsolve.types import PyTree

COARSEST = 16.0  # ring elements in the deviation of a site's noise, for it to be Gaussian
TAIL = 17.0  # deviations of noise for which the ring has room: 12·√2, exceeded once in 10^32


class PrivateSum(SecureSum):
    """A secure sum to which those who are in it add noise.

    Args:
        deviations: By exchange, the standard deviation of the noise in each number of a sum.
    """

    deviations: dict[str, Scalar] = eqx.field(kw_only=True)

    def bound(self, name: str, size: int) -> Float[Array, ""]:
        return super().bound(name, size) + TAIL * self.deviations[name]

    def words(self, name: str, rows: PyTree, size: int, threshold: int) -> Words:
        scale = float(self.scale(name, size))
        leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(rows)]
        total = np.concatenate([leaf.sum(0).reshape(-1) for leaf in leaves])
        rounding = math.sqrt(total.size) / scale
        clip = float(self.clip_of(name))
        deviation = float(self.deviations[name]) * (1 + rounding / clip) / math.sqrt(threshold)
        if deviation * scale < COARSEST:
            raise Refused(
                f"The ring is too coarse for the noise of {name!r} in a sum over {size} clients."
            )
        noise = deviation * scale * normal(total.size)
        return (np.rint(total * scale) + np.rint(noise)).astype(np.int64).astype(np.uint32)


def normal(size: int) -> Float[np.ndarray, " size"]:
    """Return standard normal numbers from the operating system's randomness."""
    words = stream(secrets.token_bytes(32), 2 * size).astype(np.uint64)
    whole = (words[:size] >> np.uint64(6)) * np.uint64(2**26) + (words[size:] >> np.uint64(6))
    return ndtri((whole.astype(np.float64) + 0.5) / 2.0**52)  # never 0 and never 1


@dataclasses.dataclass(frozen=True)
class Terms:
    """What both ends of a deployment know of a private run before they know its clients.

    Args:
        secure: The run's aggregation.
        private: Its privacy.
        rounds: Its rounds.
        evaluate_every: The rounds between two evaluations.
    """

    secure: SecureSum
    private: Private
    rounds: int
    evaluate_every: int = 1

    def __post_init__(self):
        if self.private.evaluation == "outside":
            raise InvalidInput(
                'evaluation="outside" tells f and g without noise, for studies in simulation: a '
                "deployment needs run.privacy.evaluation=private."
            )
        if self.private.delta is None:
            raise InvalidInput(
                "A deployment needs run.privacy.delta: a site cannot know how many clients there "
                "are, from which it would follow."
            )

    def agreed(
        self, problem: Problem, algorithm: Algorithm, clients: int
    ) -> tuple[PrivateSum, Ledger]:
        """Return the rule of the run, and what counts its spending.

        Args:
            problem: The problem.
            algorithm: The algorithm.
            clients: The number of clients of all sites.

        Raises:
            InvalidInput: If the budget does not last for all rounds.
        """
        private, secure = self.private, self.secure
        plan = private.plan(problem, algorithm, self.rounds, self.evaluate_every, clients)
        if plan.rounds < self.rounds:
            raise InvalidInput(
                f"The budget is spent after {plan.rounds} of {self.rounds} rounds: give a "
                "deployment more noise or fewer rounds."
            )
        clips: dict[str, Scalar] = {}
        for name, clip in plan.rule.clips.items():
            clips[name] = min(float(clip), float(secure.clip_of(name)))
        deviations: dict[str, Scalar] = {name: plan.noise[name] * clips[name] for name in clips}
        return PrivateSum(clips, secure.threshold, deviations=deviations), plan.ledger
