"""Assumptions and constants of FedADMM's theory (Zhou and Li, sections 3 to 5).

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

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Int, PyTree, Shaped

from fedsolve.errors import InvalidInput
from fedsolve.federation.options import RoundOptions
from fedsolve.problem.problem import Problem
from fedsolve.runtimes.evaluation import client_values, combined
from fedsolve.types import ArrayLike

COUNTS = {"paper": 2, "code": 1}  # the upload and the broadcast, or the averaging

__all__ = ["communication_rounds", "kappa", "penalties_suffice", "tolerance", "waiting"]


def kappa(
    smoothness: float,
    penalty: float,
    distance: float,
    accuracy: float,
    concavity: float = 0.0,
) -> int:
    """Return κ of Theorem 3.1: the inner steps that are enough for the accuracy ε_i.

    (15) from v = w meets ‖residual‖² ≤ ε_i after κ + 1 steps at most. The theorem needs
    ϱ = 2(σ_i − α_i s_i)/(α_i r_i) > 1.

    Args:
        smoothness: α_i r_i.
        penalty: σ_i.
        distance: ‖w − v*‖.
        accuracy: ε_i.
        concavity: α_i s_i, where ∇²f_i ⪰ −s_i I; 0 for a convex f_i.

    Returns:
        κ.

    Raises:
        InvalidInput: If the penalty is too small for ϱ > 1.

    Example:
        >>> import fedsolve as fs
        >>> fs.theory.fedadmm.kappa(smoothness=1.0, penalty=2.0, distance=3.0, accuracy=1e-3)
        8
    """
    rate = 2 * (penalty - concavity) / smoothness
    if not rate > 1:
        raise InvalidInput(
            f"Theorem 3.1 needs a penalty above {concavity + smoothness / 2:g}, got {penalty:g}."
        )
    ratio = math.ceil(2 * (smoothness**2 + penalty**2) * distance**2 / accuracy)
    return max(math.ceil(math.log(max(ratio, 1), rate)) - 1, 0)


def penalties_suffice(penalties: ArrayLike, lipschitz: ArrayLike) -> bool:
    """Return whether σ_i ≥ 3 r_i / m for every client, so that Theorem 4.1 proves convergence.

    Args:
        penalties: σ_i, one number for all clients or one for each.
        lipschitz: r_i, the Lipschitz constant of ∇f_i, one for each of the m clients.

    Returns:
        Whether all penalties are large enough.

    Example:
        >>> import fedsolve as fs
        >>> fs.theory.fedadmm.penalties_suffice([1.5, 3.0], lipschitz=[1.0, 2.0])
        True
    """
    lipschitz = np.asarray(lipschitz)
    return bool(np.all(np.asarray(penalties) >= 3 * lipschitz / lipschitz.size))


def waiting(cohorts: Int[Shaped[np.ndarray, "..."], "rounds m"], clients: int) -> float:
    """Return s_0 of Scheme 4.1: in any s_0 successive rounds every client takes part.

    Args:
        cohorts: The clients of each round, as in a run's history under `"cohort"`.
        clients: The number of clients.

    Returns:
        s_0; infinite if a client never takes part.

    Example:
        >>> import numpy as np
        >>> import fedsolve as fs
        >>> fs.theory.fedadmm.waiting(np.array([[0, 1], [2, 0], [1, 2]]), clients=3)
        2.0
    """
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
    """Return the tolerance of (30) for `Stationary(below=...)`.

    It is min(‖∇f(w_0)‖²/5, 5 ε n/(m d)), with n parameters, m clients and d samples. ε is 1e-3 in
    Example 5.1 and 1e-7 in Example 5.2. The authors' released code tests ‖∇f‖²/m² in place of
    ‖∇f‖².

    Args:
        problem: The problem to be solved.
        accuracy: ε.
        test: `"paper"` for (30), `"code"` for the released code's test.
        clients_at_once: How many clients to evaluate together; None for all.

    Returns:
        The value that ‖∇f‖² must fall below.

    Raises:
        InvalidInput: If `test` is neither `"paper"` nor `"code"`.

    Example:
        >>> import numpy as np
        >>> import fedsolve as fs
        >>> problem = fs.Problem(
        ...     objective=lambda w, data: 0.5 * ((data["x"] - w) ** 2).sum(axis=1).mean(),
        ...     clients={"x": np.array([[[0.0, 0.0]], [[2.0, 1.0]]])},
        ...     params=np.zeros(2),
        ... )
        >>> fs.theory.fedadmm.tolerance(problem)
        0.0025
    """
    _check_choice(test)
    d = _samples(problem)
    start = _initial_values(problem.on_device(), clients_at_once)["squared_gradient"]
    below = min(float(start) / 5, 5 * accuracy * problem.size / (problem.n * d))
    return below if test == "paper" else below * problem.n**2


def communication_rounds(averagings: int, count: str = "paper") -> int:
    """Return CR, the communication rounds of a number of averagings (`run.rounds`).

    Args:
        averagings: How many times the server averaged.
        count: `"paper"` for two each, by (29); `"code"` for one each, as in the authors' released
            code.

    Returns:
        CR.

    Raises:
        InvalidInput: If `count` is neither `"paper"` nor `"code"`.

    Example:
        >>> import fedsolve as fs
        >>> fs.theory.fedadmm.communication_rounds(7)
        14
    """
    return COUNTS[_check_choice(count)] * averagings


@eqx.filter_jit
def _initial_values(problem: Problem, clients_at_once: int | None) -> dict[str, PyTree]:
    """Evaluate the problem, with ‖∇f‖², at the initial parameters."""
    w, options = problem.start(), RoundOptions(clients_at_once=clients_at_once)
    return combined(problem, w, client_values(problem, w, options=options, gradient=True))


def _samples(problem: Problem) -> int:
    """Return d, the number of samples of all clients."""
    masks = jax.tree.leaves(problem.samples.mask)
    if masks:
        return int(max(np.sum(np.asarray(mask)) for mask in masks))
    return problem.n * max(leaf.shape[1] for leaf in jax.tree.leaves(problem.samples.values))


def _check_choice(name: str) -> str:
    if name not in COUNTS:
        raise InvalidInput(f'Choose "paper" or "code", got {name!r}.')
    return name
