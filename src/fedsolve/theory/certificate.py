"""Certificates: what a theorem guarantees compared with what a run reached."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from fedsolve.algorithms.fedsgm import FedSGM
from fedsolve.algorithms.guarantee import Guarantee, PPBCGuarantee
from fedsolve.algorithms.ppbc import PPBC
from fedsolve.errors import InvalidInput
from fedsolve.problem.domains import WholeSpace
from fedsolve.problem.several import Several
from fedsolve.theory.fedsgm import constants
from fedsolve.theory.gradients import totals
from fedsolve.theory.ppbc_runs import PPBCCertificate, ppbc_certificate
from fedsolve.theory.reference import optimum as reference

if TYPE_CHECKING:
    from fedsolve.solving.result import Run


@dataclasses.dataclass(frozen=True)
class Certificate:
    """A guarantee and the values that a run reached.

    `gap` and `constraint` are infinite where no round was feasible, because w̄ does not exist then.
    `print` shows both values beside their bounds, and the assumptions that were not checked.

    Args:
        guarantee: The guarantee that the run is compared with.
        gap: An upper bound on f(w̄) − f*, where f* is taken as low as its accuracy allows; to be
            compared with `guarantee.bound`.
        constraint: g(w̄), to be compared with `guarantee.constraint_bound`.
        optimum: f*.
        accuracy: The accuracy of `optimum`.
        source: Where `optimum` comes from.

    Example:
        >>> import fedsolve as fs
        >>> guarantee = fs.theory.fedsgm(distance=1.0, lipschitz=2.0, rounds=100)
        >>> found = fs.theory.Certificate(guarantee, 0.01, -0.2, 0.5, 0.0, "given")
        >>> found.holds
        True
    """

    guarantee: Guarantee
    gap: float
    constraint: float
    optimum: float
    accuracy: float
    source: str

    @property
    def holds(self) -> bool:
        """Whether both values are within their bounds."""
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
    run: Run,
    guarantee: Guarantee | PPBCGuarantee | None = None,
    optimum: float | int | None = None,
    accuracy: float | int = 1e-6,
) -> Certificate | PPBCCertificate:
    """Compare a run with the guarantee of its algorithm; for PPBC, see `ppbc_certificate`.

    f* is `optimum` if given, else the `optimum` of the problem, else a reference solution
    (`fs.theory.optimum`), for which f and g must be convex. Where X is all of R^d, the reference
    solution is the least f within the guarantee's D of the initial parameters.

    Args:
        run: The result of `fs.solve`.
        guarantee: The guarantee to compare with; by default the one of the run's algorithm, which
            `FedSGM.from_theory` sets.
        optimum: f*, if it is known.
        accuracy: The accuracy to which a reference solution is computed.

    Returns:
        The guarantee, the values reached, and whether the guarantee holds.

    Raises:
        InvalidInput: If there is no guarantee, if the guarantee does not apply to the run (for
            example because of another step size or number of rounds), or if no reference solution
            of the accuracy was found.

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
        >>> algorithm = fs.FedSGM.from_theory(problem, rounds=100, lipschitz=4.5)
        >>> run = fs.solve(problem, algorithm, rounds=100, evaluate_every=100)
        >>> found = fs.theory.certificate(run)
        >>> found.holds, round(found.optimum, 4)
        (True, 0.6875)
    """
    if isinstance(guarantee, PPBCGuarantee) or (
        guarantee is None and isinstance(run.algorithm, PPBC)
    ):
        if optimum is not None:
            raise InvalidInput("PPBC's theorems are not about f(w) − f*; leave out the optimum.")
        return ppbc_certificate(run, guarantee if isinstance(guarantee, PPBCGuarantee) else None)
    promise = _applicable_guarantee(run, guarantee)
    problem = run.problem
    known = problem.optimum if optimum is None else float(optimum)
    if known is not None:
        value, exactness = known, 0.0
        source = "the problem's own" if optimum is None else "given"
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


def _applicable_guarantee(run: Run, guarantee: Guarantee | None) -> Guarantee:
    """Return the guarantee to compare with, or raise if the run does not meet its conditions."""
    algorithm = run.algorithm
    promise = getattr(algorithm, "guarantee", None) if guarantee is None else guarantee
    if promise is None:
        raise InvalidInput(
            "Nothing was promised: create the algorithm with FedSGM.from_theory, and do not change "
            "its numbers."
        )
    if promise.is_stationarity:
        raise InvalidInput(
            f"{promise.theorem} is about ‖w_t − ŵ(w_t)‖ in every feasible round and not about w̄; "
            "see fs.theory.stationarity."
        )
    # A subclass that follows another direction, such as PenaltyFedAvg, is another method.
    if not isinstance(algorithm, FedSGM) or type(algorithm).direction is not FedSGM.direction:
        raise InvalidInput(f"{promise.theorem} is not about {type(algorithm).__name__}.")
    conditions = {
        "rounds": (promise.rounds, run.rounds),
        "clients": (promise.clients, run.problem.n),
        "participants": (promise.participants, algorithm.participants or run.problem.n),
        "local_steps": (promise.local_steps, algorithm.local_steps),
        "local_epochs": (None, algorithm.local_epochs),
        "step_size": (promise.step_size, algorithm.step_size),
        "tolerance": (promise.tolerance, algorithm.tolerance),
        "beta": (promise.beta, getattr(algorithm.switching, "beta", None)),
        "local_optimizer": (None, algorithm.local_optimizer),
        "weighting": ("Uniform", type(algorithm.weighting).__name__),
        "selection": (None, algorithm.selection),
        "availability": (None, algorithm.availability),
    }
    if isinstance(run.problem.constraint, Several):
        conditions["among"] = ("steepest", algorithm.among)
    if not promise.stochastic:
        conditions["batch_size"] = (None, run.problem.batch_size)
        conditions["a random loss"] = (False, run.problem.objective.is_random)
    for name, (wanted, got) in conditions.items():
        if wanted != got:
            raise InvalidInput(f"{promise.theorem} asks for {name} = {wanted}, the run has {got}.")
    _check_compressors(promise, algorithm, run.problem.size)
    return promise


def _check_compressors(promise: Guarantee, algorithm: FedSGM, size: int) -> None:
    """Raise if the run's compressors lose more than those of the theorem; they may lose less."""
    q, q_0, q_u, is_random = constants(algorithm.uplink, algorithm.downlink, size)
    compared = {"q": (promise.q, q), "q_0": (promise.q_0, q_0), "q_u": (-promise.q_u, -q_u)}
    for name, (wanted, got) in compared.items():
        if got < wanted - 1e-12 * abs(wanted):
            raise InvalidInput(
                f"{promise.theorem} is about compressors with {name} = {abs(wanted):g}; the run's "
                f"have {name} = {abs(got):g}."
            )
    if is_random and promise.participants < promise.clients:
        raise InvalidInput(f"{promise.theorem} needs deterministic compressors; the run's are not.")
