"""How stationary a point is where f is only weakly convex (FedSGM, Appendix E).

The measure is ‖w − ŵ(w)‖, where ŵ(w) solves the proximal problem (37),

    minimise f(y) + (ρ̂/2)‖y − w‖²   subject to   g(y) ≤ 0,   y in X,

which is (ρ̂ − ρ)-strongly convex: a point that is within `gap` of its least value is within
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
from fedsolve.theory.reference import Search


@dataclasses.dataclass(frozen=True)
class Stationarity:
    """‖w − ŵ(w)‖ is within `accuracy` of `distance`; `nearest` is ŵ(w), as exactly."""

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
    """‖w − ŵ(w)‖ at `params`, with the proximal problem (37) solved to a stated accuracy.

    `rho_hat` is ρ̂, and f must be `rho`-weakly convex with `rho` < `rho_hat`; by default `rho` is
    half of it, the largest that Theorem 10 allows. The error stated rests on that and on g being
    convex.
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
    found = Search(problem, w, rho_hat, curvature, None).solve(curvature * accuracy**2 / 2)
    return Stationarity(
        distance=float(np.linalg.norm(w - found.point)),
        accuracy=float(np.sqrt(2 * found.accuracy / curvature)),
        nearest=problem.layout.unravel(found.point),
    )
