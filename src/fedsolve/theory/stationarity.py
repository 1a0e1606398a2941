"""Distance from stationarity where f is only weakly convex (FedSGM, Appendix E).

The measure is ‖w − ŵ(w)‖, where ŵ(w) solves the proximal problem (37),

    minimise f(y) + (ρ̂/2)‖y − w‖²   subject to   g(y) ≤ 0,   y in X,

which is (ρ̂ − ρ)-strongly convex: a point within `gap` of its least value is within
√(2 gap / (ρ̂ − ρ)) of ŵ(w). It is zero exactly where w satisfies the first-order conditions.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from jaxtyping import PyTree

from fedsolve.errors import InvalidInput
from fedsolve.fields import check_kind, check_positive
from fedsolve.problem.problem import Problem
from fedsolve.theory.reference import ProximalProblem


@dataclasses.dataclass(frozen=True)
class Stationarity:
    """The distance of a point from stationarity.

    Args:
        distance: ‖w − ŵ(w)‖.
        accuracy: The error of `distance` and of `nearest`, at most.
        nearest: ŵ(w), in the problem's own structure.

    Example:
        >>> import numpy as np
        >>> import fedsolve as fs
        >>> fs.theory.Stationarity(0.1, 1e-6, np.zeros(2)).distance
        0.1
    """

    distance: float
    accuracy: float
    nearest: PyTree


def stationarity(
    problem: Problem,
    params: PyTree,
    rho_hat: float | int,
    rho: float | int | None = None,
    accuracy: float | int = 1e-4,
) -> Stationarity:
    """Compute ‖w − ŵ(w)‖ at `params`, by solving the proximal problem (37).

    The stated error holds if f is `rho`-weakly convex and g is convex.

    Args:
        problem: A problem with at most 2000 parameters, over a domain of this package.
        params: w, in the problem's own structure.
        rho_hat: ρ̂, the proximal weight.
        rho: ρ, less than ρ̂; by default half of it, the largest that Theorem 10 allows.
        accuracy: The largest error of the distance.

    Returns:
        The distance, its error, and ŵ(w).

    Raises:
        InvalidInput: If ρ̂ does not exceed ρ, `params` do not fit the problem, or the proximal
            problem was not solved to the accuracy.

    Example:
        >>> import numpy as np
        >>> import fedsolve as fs
        >>> problem = fs.Problem(
        ...     objective=lambda w, data: 0.5 * ((data["x"] - w) ** 2).sum(axis=1).mean(),
        ...     clients={"x": np.array([[[0.0, 0.0]], [[2.0, 1.0]]])},
        ...     params=np.zeros(2),
        ...     constraint=lambda w, data: w.sum() - 1.0,
        ...     domain=fs.Ball(2.0),
        ... )
        >>> found = fs.theory.stationarity(problem, np.ones(2), rho_hat=1.0)
        >>> round(found.distance, 4), found.nearest.round(3)
        (0.7289, array([0.625, 0.375]))
    """
    check_kind("problem", problem, Problem)
    check_positive("rho_hat", rho_hat)
    check_positive("accuracy", accuracy)
    rho = rho_hat / 2 if rho is None else rho
    check_positive("rho", rho, zero=True)
    if not rho < rho_hat:
        raise InvalidInput(f"rho_hat must exceed rho = {rho:g}, got {rho_hat}.")
    curvature = rho_hat - rho
    with jax.enable_x64(True):
        w = np.asarray(problem.layout.ravel(params), np.float64)
    if w.shape != (problem.size,):
        raise InvalidInput(f"params has {w.size} numbers, and the problem {problem.size}.")
    proximal = ProximalProblem(problem, w, rho_hat, curvature, None)
    found = proximal.solve(curvature * accuracy**2 / 2)
    return Stationarity(
        distance=float(np.linalg.norm(w - found.point)),
        accuracy=float(np.sqrt(2 * found.accuracy / curvature)),
        nearest=problem.params_at(found.point),
    )
