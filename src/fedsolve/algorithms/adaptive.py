"""A tolerance that allows for the error of a sampled constraint.

In a round the server sees Ĝ, the constraint over m of n clients, and compares it with ε. Where Ĝ is
below g by chance, a violated constraint is taken for satisfied, so that g stays above ε. Here
Ĝ + k·s is compared with ε, where s estimates the standard deviation of Ĝ over cohorts, and k is
Student's quantile with m − 1 degrees of freedom. If the g_j are normal, g ≤ Ĝ + k·s with the given
confidence.

s comes from the cohort itself. For a mean over clients, drawn without replacement,

    s² = (1 − m/n) · (1/m) · Σ (g_j − Ĝ)² / (m − 1),

and for a function of sums over clients it is the jackknife, which is the same for a mean. With
everyone in the cohort s is 0, and the tolerance is ε.
"""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fedsolve.errors import InvalidInput
from fedsolve.fields import Scalar, check_positive, scalar


class Adaptive(eqx.Module):
    """A tolerance of ε less the estimated error of Ĝ.

    Give it to `FedSGM` or `PenaltyFedAvg` as the `tolerance`. A round in which fewer than two
    clients answer has no estimate, and follows the constraint. A point is feasible if g(w) ≤ ε. The
    history has `margin`, what was subtracted (of several constraints, the largest).

    Args:
        tolerance: ε.
        confidence: The confidence of the one-sided bound on g, above 0.5 and below 1.

    Raises:
        InvalidInput: If ε is negative, or the confidence is not a probability of that kind.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.neyman_pearson(clients=10)
        >>> algorithm = fs.FedSGM(0.3, fs.Adaptive(0.05), participants=3)
        >>> run = fs.solve(problem, algorithm, rounds=3)
        >>> bool(run.history["margin"][-1] > 0)
        True
    """

    tolerance: Scalar = eqx.field(converter=scalar("tolerance"))
    confidence: float = eqx.field(static=True, default=0.95)

    def __check_init__(self):
        check_positive("tolerance", self.tolerance, zero=True)
        if not 0.5 < self.confidence < 1:
            raise InvalidInput(f"confidence must be above 0.5 and below 1, got {self.confidence}.")

    def __float__(self) -> float:
        return float(self.tolerance)

    def margin(
        self, deviation: Float[Array, "..."], heard: Int[Array, ""] | int | float, cohort: int
    ) -> Float[Array, "..."]:
        """Return k·s.

        Args:
            deviation: s, of one constraint or of several.
            heard: m, how many clients answered.
            cohort: How many were asked, the largest m.
        """
        from scipy.stats import t  # slow to import

        freedom = np.maximum(np.arange(cohort + 1) - 1, 1)
        quantiles = jnp.asarray(t.ppf(self.confidence, freedom), deviation.dtype)
        return jnp.where(deviation > 0, deviation * quantiles[heard], 0)
