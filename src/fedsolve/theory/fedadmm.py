"""What FedADMM's theory asks for and promises (Zhou and Li, sections 3 to 5).

| here | paper |
|---|---|
| `kappa` | Theorem 3.1, (16): inner steps that are enough for the accuracy ε_i |
| `penalties_suffice` | Theorem 4.1: σ_i ≥ 3 α_i r_i for every client |
| `waiting` | Scheme 4.1, (21): the s_0 within which every client took part |
| `tolerance` | (30): when the experiments stop |
| `communication_rounds` | CR, (29) |
"""

from __future__ import annotations

import math
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Int, Shaped

from fedsolve.errors import InvalidInput
from fedsolve.federation.options import RoundOptions
from fedsolve.problem.problem import Problem
from fedsolve.runtimes.evaluation import client_values, combined

COUNTS = {"paper": 2, "code": 1}  # the upload and the broadcast, or the averaging


def kappa(
    smoothness: float,
    penalty: float,
    distance: float,
    accuracy: float,
    concavity: float = 0.0,
) -> int:
    """κ of Theorem 3.1: (15) from v = w meets ‖residual‖² ≤ ε_i after κ + 1 steps at most.

    `smoothness` is α_i r_i, `penalty` is σ_i, `distance` is ‖w − v*‖, `accuracy` is ε_i and
    `concavity` is α_i s_i, where ∇²f_i ⪰ −s_i I (0 for a convex f_i). It asks for
    ϱ = 2(σ_i − α_i s_i)/(α_i r_i) > 1.
    """
    rate = 2 * (penalty - concavity) / smoothness
    if not rate > 1:
        raise InvalidInput(
            f"Theorem 3.1 needs a penalty above {concavity + smoothness / 2:g}, got {penalty:g}."
        )
    ratio = math.ceil(2 * (smoothness**2 + penalty**2) * distance**2 / accuracy)
    return max(math.ceil(math.log(max(ratio, 1), rate)) - 1, 0)


def penalties_suffice(penalties: Any, lipschitz: Any) -> bool:
    """Whether σ_i ≥ 3 r_i / m for every client: then the method converges (Theorem 4.1)."""
    lipschitz = np.asarray(lipschitz)
    return bool(np.all(np.asarray(penalties) >= 3 * lipschitz / lipschitz.size))


def waiting(cohorts: Int[Shaped[np.ndarray, "..."], "rounds m"], clients: int) -> float:
    """s_0 of Scheme 4.1: in any s_0 rounds in a row every client takes part; infinite if one never
    does. `cohorts` is what a run's history has under that name."""
    rounds, worst = len(cohorts), 0
    for client in range(clients):
        turns = np.flatnonzero((np.asarray(cohorts) == client).any(axis=1))
        if not len(turns):
            return math.inf
        worst = max(worst, int(np.diff(np.concatenate([[-1], turns, [rounds]])).max()))
    return float(worst)


def tolerance(
    problem: Problem,
    accuracy: float = 1e-3,
    test: str = "paper",
    clients_at_once: int | None = None,
) -> float:
    """The tolerance of (30) for `Stationary(below=...)`: min(‖∇f(w_0)‖²/5, 5 ε n/(m d)), with n
    parameters, m clients and d samples. ε is 1e-3 in Example 5.1 and 1e-7 in Example 5.2.

    The authors' released code tests ‖∇f‖²/m² in place of ‖∇f‖²: `test="code"`.
    """
    _known(test)
    d = _samples(problem)
    start = _look(problem.on_device(), clients_at_once)["squared_gradient"]
    below = min(float(start) / 5, 5 * accuracy * problem.size / (problem.n * d))
    return below if test == "paper" else below * problem.n**2


def communication_rounds(averagings: int, count: str = "paper") -> int:
    """CR of so many averagings (`run.rounds`): two each by (29), one each in the authors' released
    code (`count="code"`)."""
    return COUNTS[_known(count)] * averagings


@eqx.filter_jit
def _look(problem: Problem, at_once: int | None) -> dict[str, Any]:
    w, setting = problem.start(), RoundOptions(clients_at_once=at_once)
    return combined(problem, w, client_values(problem, w, options=setting, gradient=True))


def _samples(problem: Problem) -> int:
    masks = jax.tree.leaves(problem.samples.mask)
    if masks:
        return int(max(np.sum(np.asarray(mask)) for mask in masks))
    return problem.n * max(leaf.shape[1] for leaf in jax.tree.leaves(problem.samples.values))


def _known(name: str) -> str:
    if name not in COUNTS:
        raise InvalidInput(f'It is "paper" or "code", got {name!r}.')
    return name
