"""What a theorem promised, beside what a run reached."""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from fedsolve.algorithms.guarantee import Guarantee
from fedsolve.errors import InvalidInput
from fedsolve.problem.domains import WholeSpace
from fedsolve.theory.fedsgm import constants
from fedsolve.theory.gradients import totals
from fedsolve.theory.reference import optimum as reference


@dataclasses.dataclass(frozen=True)
class Certificate:
    """A promise and what came of it.

    - `gap`: f(w̄) − f*, at most (f* is taken as low as it may be); promised: `guarantee.bound`.
    - `constraint`: g(w̄); promised: `guarantee.constraint_bound`. Both are infinite where no round
      was feasible, so that there is no w̄.
    - `optimum`, `accuracy`: f* and how exactly it is known; `source` says where from.
    """

    guarantee: Guarantee
    gap: float
    constraint: float
    optimum: float
    accuracy: float
    source: str

    @property
    def holds(self) -> bool:
        """Whether the run kept the promise."""
        promise = self.guarantee
        return self.gap <= promise.bound and self.constraint <= promise.constraint_bound

    def __str__(self) -> str:
        promise = self.guarantee
        return "\n".join(
            [
                f"{promise.theorem}: {'kept' if self.holds else 'BROKEN'}",
                f"  f(w̄) − f*  {self.gap:12.6g}  promised {promise.bound:.6g}",
                f"  g(w̄)       {self.constraint:12.6g}  promised {promise.constraint_bound:.6g}",
                f"  f* = {self.optimum:.8g} ± {self.accuracy:.1g} ({self.source})",
                "  unchecked",
                *(f"  - {sentence}" for sentence in promise.unchecked),
            ]
        )


def certificate(
    run: Any,
    guarantee: Guarantee | None = None,
    optimum: float | int | None = None,
    accuracy: float | int = 1e-6,
) -> Certificate:
    """Compares a run with what the theorem behind its algorithm promised.

    f* is `optimum` if given, else the problem's own `optimum`, else a reference solution to
    `accuracy` (`fs.theory.optimum`), for which f and g must be convex. Where X is all of R^d, that
    is the least f within the guarantee's D of the start.
    """
    promise = _promise(run, guarantee)
    problem = run.problem
    if optimum is not None or problem.optimum is not None:
        value = problem.optimum if optimum is None else float(optimum)
        exactness, source = 0.0, "given" if optimum is not None else "the problem's own"
    else:
        distance = promise.distance if isinstance(problem.domain, WholeSpace) else None
        found = reference(problem, accuracy, distance)
        value, exactness, source = found.value, found.accuracy, "reference solution"
    gap = level = np.inf
    if run.average is not None:
        with jax.enable_x64(True):
            placed = problem.on_device(jnp.float64)
            w = jnp.asarray(problem.layout.ravel(run.average), jnp.float64)
            f, g = map(float, _totals(placed, w))
        gap, level = f - (value - exactness), g if problem.constraint is not None else -np.inf
    return Certificate(promise, gap, level, value, exactness, source)


_totals = eqx.filter_jit(totals)


def _promise(run: Any, guarantee: Guarantee | None) -> Guarantee:
    """The guarantee that this run is to be held to, if it did what the theorem asks for."""
    algorithm = run.algorithm
    promise = getattr(algorithm, "guarantee", None) if guarantee is None else guarantee
    if promise is None:
        raise InvalidInput(
            "Nothing was promised: make the algorithm by FedSGM.from_theory, and change none of "
            "its numbers."
        )
    if promise.is_stationarity:
        raise InvalidInput(
            f"{promise.theorem} is about ‖w_t − ŵ(w_t)‖ in every feasible round and not about w̄; "
            "see fs.theory.stationarity."
        )
    from fedsolve.algorithms.fedsgm import FedSGM  # which makes itself from theory

    if getattr(type(algorithm), "direction", None) is not FedSGM.direction:
        raise InvalidInput(f"{promise.theorem} is not about {type(algorithm).__name__}.")
    asked = {
        "rounds": (promise.rounds, run.rounds),
        "clients": (promise.clients, run.problem.n),
        "participants": (promise.participants, algorithm.participants or run.problem.n),
        "local_steps": (promise.local_steps, algorithm.local_steps),
        "step_size": (promise.step_size, algorithm.step_size),
        "tolerance": (promise.tolerance, algorithm.tolerance),
        "beta": (promise.beta, getattr(algorithm.switching, "beta", None)),
        "local_optimizer": (None, algorithm.local_optimizer),
        "weighting": ("Uniform", type(algorithm.weighting).__name__),
        "selection": (None, algorithm.selection),
        "availability": (None, algorithm.availability),
    }
    if not promise.stochastic:
        asked["batch_size"] = (None, run.problem.batch_size)
    for name, (wanted, got) in asked.items():
        if wanted != got:
            raise InvalidInput(f"{promise.theorem} asks for {name} = {wanted}, the run has {got}.")
    _check_compressors(promise, algorithm, run.problem.size)
    return promise


def _check_compressors(promise: Guarantee, algorithm: Any, size: int) -> None:
    """Refuses a run whose compressors lose more than the theorem was told; less is all right."""
    q, q_0, q_u, is_random = constants(algorithm.uplink, algorithm.downlink, size)
    told = {"q": (promise.q, q), "q_0": (promise.q_0, q_0), "q_u": (-promise.q_u, -q_u)}
    for name, (wanted, got) in told.items():
        if got < wanted - 1e-12 * abs(wanted):
            raise InvalidInput(
                f"{promise.theorem} is about compressors with {name} = {abs(wanted):g}; the run's "
                f"have {name} = {abs(got):g}."
            )
    if is_random and promise.participants < promise.clients:
        raise InvalidInput(f"{promise.theorem} needs deterministic compressors; the run's are not.")
