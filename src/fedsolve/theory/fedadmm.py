"""Assumptions and constants of FedADMM's theory (Zhou and Li, sections 3 to 5).

| here | paper |
|---|---|
| `kappa` | Theorem 3.1, (16): inner steps that are enough for the accuracy ε_i |
| `penalties_suffice` | Theorem 4.1: σ_i ≥ 3 α_i r_i for every client |
| `waiting` | Scheme 4.1, (21): the s_0 within which every client took part |
| `rate` | Theorem 4.3: c, (26) and (28) |
| `tolerance` | (30): when the experiments stop |
| `communication_rounds` | CR, (29) |

Theorem 4.3's proof adds (59) and (66) to (67). Three times (66) has 9m Σ ‖σ_i Δw_i‖², and (59) adds
m/3 to it: 28m/3, where (67) has 10m/3. With 28/3 the proof goes on as printed, and its sums over a
window of s_0 rounds give

    c = (560/3) s_0(s_0 + 1) m max σ_i (L̃⁰ − f*) + Σ 457 m s_0 ε_i/(1 − ν_i),

where the statement has 940/9 and 169. Of the decrease in Lemma 4.1 one part bounds the clients'
steps, the other the server's, so that the larger of their two coefficients, 56 s_0/3, counts once.
"""

from __future__ import annotations

import dataclasses
import math
import warnings

import equinox as eqx
import numpy as np
from jaxtyping import Float, Int, PyTree, Shaped

from fedsolve.errors import InvalidInput
from fedsolve.federation.options import RoundOptions
from fedsolve.fields import check_count, check_positive
from fedsolve.problem.problem import Problem
from fedsolve.problem.samples import counts
from fedsolve.runtimes.evaluation import client_values, combined
from fedsolve.types import ArrayLike

COUNTS = {"paper": 2, "code": 1}  # the upload and the broadcast, or the averaging
ACCURACY = {"paper": 1e-3, "code": 4e-4}  # ε of Example 5.1; the program has 2e-3 for 5ε

__all__ = [
    "Rate",
    "communication_rounds",
    "kappa",
    "penalties_suffice",
    "rate",
    "tolerance",
    "waiting",
]


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


def waiting(
    cohorts: Int[Shaped[np.ndarray, "..."], "rounds m"],
    clients: int,
    available: object = None,
) -> float:
    """Return s_0 of Scheme 4.1: in any s_0 successive rounds every client takes part.

    Args:
        cohorts: The clients of each round, as in a run's history under `"cohort"`.
        clients: The number of clients.
        available: Which of them answered, as in the history under `"available"`; None for all. A
            client that was selected and did not answer has not taken part.

    Returns:
        s_0; infinite if a client never takes part.

    Raises:
        InvalidInput: If `available` does not have the shape of `cohorts`.

    Example:
        >>> import numpy as np
        >>> import fedsolve as fs
        >>> cohorts = np.array([[0, 1], [2, 0], [1, 2]])
        >>> fs.theory.fedadmm.waiting(cohorts, clients=3)
        2.0
        >>> answered = np.array([[True, False], [True, True], [True, True]])
        >>> fs.theory.fedadmm.waiting(cohorts, clients=3, available=answered)
        3.0
    """
    cohorts, rounds, worst = np.asarray(cohorts), len(cohorts), 0
    taking = np.ones(cohorts.shape, bool) if available is None else np.asarray(available)
    if taking.shape != cohorts.shape:
        raise InvalidInput(
            f"available has the shape {taking.shape}, but the cohorts {cohorts.shape}."
        )
    for client in range(clients):
        turns = np.flatnonzero(((cohorts == client) & taking).any(axis=1))
        if not len(turns):
            return math.inf
        worst = max(worst, int(np.diff(np.concatenate([[-1], turns, [rounds]])).max()))
    return float(worst)


@dataclasses.dataclass(frozen=True)
class Rate:
    """The rate of Theorem 4.3: min ‖∇f(w)‖² ≤ c k_0/(k − s_0 k_0) after k iterations.

    Args:
        constant: c, as its proof gives it.
        printed: c as the theorem states it.
        waiting: s_0.
        local_iterations: k_0.

    Example:
        >>> import fedsolve as fs
        >>> rate = fs.theory.fedadmm.Rate(2.0, printed=1.0, waiting=3, local_iterations=10)
        >>> rate.bound(rate.iterations(1e-3)) <= 1e-3
        True
    """

    constant: float
    printed: float
    waiting: int
    local_iterations: int

    def bound(self, iterations: int) -> float:
        """Return the bound (26) on the least ‖∇f(w)‖² within the first k iterations.

        Args:
            iterations: k, k_0 times the number of averagings.

        Returns:
            c k_0/(k − s_0 k_0); infinite for k ≤ s_0 k_0.
        """
        after = iterations - self.waiting * self.local_iterations
        return self.constant * self.local_iterations / after if after > 0 else math.inf

    def iterations(self, accuracy: float) -> int:
        """Return the k of (28), after which ‖∇f(w)‖² ≤ ε has held once.

        Args:
            accuracy: ε.

        Returns:
            ⌈(c + ε s_0) k_0/ε⌉.
        """
        check_positive("accuracy", accuracy)
        within = self.constant + accuracy * self.waiting
        return math.ceil(within * self.local_iterations / accuracy)

    def communication_rounds(self, accuracy: float) -> int:
        """Return CR of (29) for that accuracy.

        Args:
            accuracy: ε.

        Returns:
            ⌈2k/k_0⌉, with k of (28).
        """
        return math.ceil(2 * self.iterations(accuracy) / self.local_iterations)


def rate(
    penalties: ArrayLike,
    gap: float,
    accuracy: ArrayLike,
    waiting: int,
    local_iterations: int,
    decay: ArrayLike = 0.95,
    lipschitz: ArrayLike | None = None,
) -> Rate:
    """Compute the constant c of Theorem 4.3.

    The theorem is for σ_i ≥ 3α_i r_i, ν_i in [1/2, 1), and for clients whose residual (6) is within
    ε_i at the start: π_i^0 = −α_i∇f_i(w^0) as in Algorithm 1 (`dual_start="gradient"`), or
    ε_i ≥ ‖α_i∇f_i(w^0)‖². Inner steps must reach (6) (`inner_steps=None`).

    Args:
        penalties: σ_i, one for each client.
        gap: f(w^0) − f*, or a bound on it.
        accuracy: ε_i^0, one number or one for each client.
        waiting: s_0 of Scheme 4.1.
        local_iterations: k_0.
        decay: ν_i, one number or one for each client.
        lipschitz: r_i, to check σ_i ≥ 3 r_i/m; there is a warning for a penalty below that. None
            for no check.

    Returns:
        The rate, with the bound (26) and the number of iterations (28).

    Raises:
        InvalidInput: If a number is out of range.

    Example:
        >>> import fedsolve as fs
        >>> found = fs.theory.fedadmm.rate([0.5, 0.5], 1.0, 1e-6, waiting=2, local_iterations=5)
        >>> round(found.constant), round(found.printed)
        (1123, 628)
    """
    sigma = np.atleast_1d(np.asarray(penalties, float))
    eps, nu = np.asarray(accuracy, float), np.asarray(decay, float)
    for name, value in (("penalties", sigma), ("accuracy", eps)):
        check_positive(name, value)
    check_positive("gap", float(gap), zero=True)
    check_count("waiting", waiting)
    check_count("local_iterations", local_iterations)
    if (nu < 0.5).any() or (nu >= 1).any():
        raise InvalidInput(f"Theorem 4.3 needs ν_i from 1/2 to below 1, got {decay}.")
    if lipschitz is not None:
        _warn_of_small(sigma, np.broadcast_to(np.asarray(lipschitz, float), sigma.shape))
    m, each = len(sigma), eps / (1 - nu) * np.ones(len(sigma))
    start = float(gap) + float(np.sum(29 * each / sigma))  # L̃⁰ − f*, (22) with w_i⁰ = w⁰
    window = waiting * (waiting + 1) * m * float(sigma.max()) * start
    late = m * waiting * float(each.sum())
    return Rate(
        constant=560 / 3 * window + 457 * late,
        printed=940 / 9 * window + 169 * late,
        waiting=waiting,
        local_iterations=local_iterations,
    )


def _warn_of_small(penalties: Float[np.ndarray, " m"], lipschitz: Float[np.ndarray, " m"]) -> None:
    """Warn if a penalty is below what Theorems 4.1 and 4.3 ask for."""
    least = 3 * lipschitz / len(lipschitz)
    worst = int(np.argmin(penalties / least))
    if penalties[worst] < least[worst] * (1 - 1e-12):
        warnings.warn(
            f"Theorem 4.3 needs penalties of at least 3 r_i/m: client {worst} has "
            f"{penalties[worst]:.4g}, and needs {least[worst]:.4g}.",
            stacklevel=3,
        )


def tolerance(
    problem: Problem,
    accuracy: float | None = None,
    test: str = "paper",
    clients_at_once: int | None = None,
) -> float:
    """Return the tolerance of (30) for `Stationary(below=...)`.

    It is min(‖∇f(w_0)‖²/5, 5 ε n/(m d)), with n parameters, m clients and d samples. The authors'
    released program tests ‖∇f(w)‖²/m² < min(‖∇f(w_0)‖²/(5m²), 5 ε n/(m d)) instead, which is
    ‖∇f(w)‖² < min(‖∇f(w_0)‖²/5, 5 ε m n/d).

    Args:
        problem: The problem to be solved.
        accuracy: ε. By default that of Example 5.1: 1e-3 in the paper, 4e-4 in the program. In
            Example 5.2 it is 1e-7 in both.
        test: `"paper"` for (30), `"code"` for the released program's test.
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
    accuracy = ACCURACY[test] if accuracy is None else accuracy
    n, m, d = problem.dimension, problem.n, int(counts(problem.samples).sum())
    start = _initial_values(problem.on_device(), clients_at_once)["squared_gradient"]
    absolute = 5 * accuracy * n / (m * d) * (1 if test == "paper" else m**2)
    return min(float(start) / 5, absolute)


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


def _check_choice(name: str) -> str:
    if name not in COUNTS:
        raise InvalidInput(f'Choose "paper" or "code", got {name!r}.')
    return name
