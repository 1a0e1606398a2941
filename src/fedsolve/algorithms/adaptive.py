"""A tolerance that allows for the error of a sampled constraint.

In a round the server sees Ĝ, the constraint over m of n clients, and compares it with ε. Where Ĝ is
below g by chance, a violated constraint is taken for satisfied, so that g stays above ε. With a
tolerance ε − k·s, where s estimates the standard deviation of Ĝ over cohorts, that happens less
often: Ĝ + k·s ≤ ε is a one-sided bound on g.

s comes from the cohort itself. For a mean over clients, drawn without replacement,

    s² = (1 − m/n) · (1/m) · Σ (g_j − Ĝ)² / (m − 1),

and for a function of sums over clients it is the jackknife, which is the same for a mean. With
everyone in the cohort s is 0, and the tolerance is ε.
"""

from __future__ import annotations

import equinox as eqx

from fedsolve.fields import Scalar, check_positive, scalar


class Adaptive(eqx.Module):
    """A tolerance of ε less `deviations` estimated standard deviations of Ĝ.

    Give it to `FedSGM` or `PenaltyFedAvg` as the `tolerance`. A round in which fewer than two
    clients answer has no estimate, and follows the constraint. A point is feasible if g(w) ≤ ε. The
    history has `margin`, what was subtracted (of several constraints, the largest).

    Args:
        tolerance: ε.
        deviations: k, how many standard deviations to subtract.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.neyman_pearson(clients=10)
        >>> algorithm = fs.FedSGM(0.3, fs.Adaptive(0.05), participants=3)
        >>> run = fs.solve(problem, algorithm, rounds=3)
        >>> bool((run.history["margin"] > 0).all())
        True
    """

    tolerance: Scalar = eqx.field(converter=scalar("tolerance"))
    deviations: Scalar = eqx.field(converter=scalar("deviations"), default=1.0)

    def __check_init__(self):
        check_positive("tolerance", self.tolerance, zero=True)
        check_positive("deviations", self.deviations, zero=True)

    def __float__(self) -> float:
        return float(self.tolerance)
