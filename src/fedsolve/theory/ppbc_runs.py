"""PPBC's theorems for a given problem, and certificates of runs."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedsolve.algorithms.guarantee import PPBCGuarantee
from fedsolve.algorithms.ppbc import PPBC
from fedsolve.errors import InvalidInput
from fedsolve.fields import check_kind
from fedsolve.problem.domains import WholeSpace
from fedsolve.problem.problem import Problem
from fedsolve.theory.gradients import check_functions, totals
from fedsolve.theory.heterogeneity import Heterogeneity, heterogeneity
from fedsolve.theory.ppbc import ppbc
from fedsolve.theory.reference import Point, minimiser
from fedsolve.types import PyTree, Table, Vector

if TYPE_CHECKING:
    from fedsolve.solving.result import Run

OF_THE_RUN = ("clients", "participants", "cap", "availability", "epochs", "accuracy", "epoch_end")
CONSTANTS = [name for name in inspect.signature(ppbc).parameters if name not in OF_THE_RUN]


@dataclasses.dataclass(frozen=True)
class PPBCCertificate:
    """A guarantee and what runs reached at the starts of their epochs.

    Args:
        guarantee: The guarantee that the runs are compared with.
        reached: The mean over runs of what `guarantee.bound` bounds.
        each: The value of each run. One may be above the bound, which is on the expectation.

    Example:
        >>> import fedsolve as fs
        >>> guarantee = fs.theory.ppbc(clients=4, smoothness=1.0, gap=0.5, epochs=100)
        >>> fs.theory.PPBCCertificate(guarantee, 0.1, (0.1,)).holds
        True
    """

    guarantee: PPBCGuarantee
    reached: float
    each: tuple[float, ...]

    @property
    def holds(self) -> bool:
        """Whether the mean is within the bound."""
        return self.reached <= self.guarantee.bound

    def __str__(self) -> str:
        promise, runs = self.guarantee, len(self.each)
        over = "" if runs == 1 else f", mean of {runs} runs"
        return "\n".join(
            [
                f"{promise.theorem}: {'kept' if self.holds else 'BROKEN'}",
                f"  {promise.quantity}  {self.reached:.6g}  promised {promise.bound:.6g}{over}",
                "  unchecked",
                *(f"  - {sentence}" for sentence in promise.unchecked),
            ]
        )


def ppbc_for(
    problem: Problem,
    algorithm: PPBC,
    *,
    epochs: int | None = None,
    accuracy: float | int | None = None,
    epoch_end: float | int | None = None,
    strongly_convex: bool = False,
    points: int = 64,
    seed: int = 0,
    **known: Any,
) -> PPBCGuarantee:
    """Call `ppbc` with M, C, α and q of an algorithm, and estimates of the constants not given.

    Of the (δ1, δ2) that the points seen allow, the pair with the least bound (or the fewest epochs)
    is taken.
    """
    check_kind("problem", problem, Problem)
    check_functions(problem)
    _check_covered(problem, algorithm)
    for name in known:
        if name not in CONSTANTS:
            raise InvalidInput(
                f"{name!r} is not a constant of the theorems: {', '.join(CONSTANTS)}."
            )
    given = {name: value for name, value in known.items() if value is not None}
    convex = strongly_convex or "strong_convexity" in given
    estimated: list[str] = []
    found: Heterogeneity | None = None

    def estimates() -> Heterogeneity:
        nonlocal found
        found = heterogeneity(problem, points, seed=seed) if found is None else found
        return found

    def take(name: str, value: float) -> None:
        given[name] = value
        estimated.append(
            f"{name} = {value:.6g} is an estimate: the extreme of what was seen at {points} points."
        )

    if "smoothness" not in given:
        take("smoothness", estimates().smoothness)
    if convex and "strong_convexity" not in given:
        if estimates().convexity <= 0:
            raise InvalidInput(
                f"f is not strongly convex: ∇²f has the eigenvalue {estimates().convexity:.3g}."
            )
        take("strong_convexity", estimates().convexity)
    if problem.batch_size is None:
        given.setdefault("noise", 0.0)
    elif "noise" not in given:
        take("noise", estimates().noise)
    _add_start(problem, given, convex)
    pairs = [(given.get("delta_1", 0.0), given.get("delta_2", 0.0))]
    if "delta_2" not in given:
        pairs = list(estimates().pairs)
        if "delta_1" in given:
            pairs = [(given["delta_1"], estimates().delta_2(given["delta_1"]))]
        estimated.append(
            f"δ1 and δ2 are estimates: they hold at the {points} points that were looked at."
        )
    rates = None if algorithm.availability is None else algorithm.availability.rates(problem.n)
    promises = [
        ppbc(
            clients=problem.n,
            participants=algorithm.senders(problem.n),
            cap=algorithm.largest_weight(problem.n),
            availability=rates,
            epochs=epochs,
            accuracy=accuracy,
            epoch_end=epoch_end,
            **given | {"delta_1": first, "delta_2": second},
        )
        for first, second in pairs
    ]
    best = min(promises, key=lambda each: (each.epochs, each.bound))
    return dataclasses.replace(best, unchecked=best.unchecked + tuple(estimated))


def _check_covered(problem: Problem, algorithm: PPBC) -> None:
    """Raise if the theorems are not about this problem, or this form of the algorithm."""
    if problem.constraint is not None or not isinstance(problem.domain, WholeSpace):
        raise InvalidInput(
            "PPBC's theorems are about problems on all of R^d, without a constraint."
        )
    if problem.objective.is_random:
        raise InvalidInput(
            "PPBC's theorems need unbiased gradients; those of a random loss need not be."
        )
    if not algorithm.is_as_published:
        raise InvalidInput(
            "PPBC's theorems are about Algorithms 1 and 2: one local gradient step, epochs that "
            "end with probability p, the correction by the previous epoch, and equal clients."
        )
    if algorithm.availability is not None and algorithm.availability.rates(problem.n) is None:
        raise InvalidInput(
            "Theorems E.2 and E.6 are about clients that are up with a probability of their own, "
            "independently in every round: give availability as a number, or one for each client."
        )


def _add_start(problem: Problem, given: Table, convex: bool) -> None:
    """Add f(x⁰) − f* or ‖x⁰ − x*‖ if it is not given, as a bound that can be computed."""
    name = "distance" if convex else "gap"
    if name in given:
        return
    value, slope = _objective(problem)
    if convex:  # ‖∇f(x⁰)‖ ≥ μ‖x⁰ − x*‖
        given[name] = float(np.linalg.norm(slope)) / given["strong_convexity"]
    elif problem.optimum is not None:
        given[name] = max(value - problem.optimum, 0.0)
    else:
        raise InvalidInput(
            "Give gap, f(x⁰) − f* or a bound on it, or make the problem with its optimum."
        )


def _objective(problem: Problem, w: Point | None = None) -> tuple[float, Point]:
    """Return f and ∇f in double precision, by default at the initial parameters."""
    with jax.enable_x64(True):
        placed = problem.on_device(jnp.float64)
        value, slope = _value_and_gradient(placed, placed.start() if w is None else jnp.asarray(w))
        return float(value), np.asarray(slope)


@eqx.filter_jit
def _value_and_gradient(problem: Problem, w: Vector) -> tuple[Float[Array, ""], Vector]:
    return jax.value_and_grad(lambda w: totals(problem, w)[0])(w)


def ppbc_certificate(
    runs: Run | Sequence[Run],
    guarantee: PPBCGuarantee | None = None,
    minimum: PyTree = None,
) -> PPBCCertificate:
    """Compare runs of PPBC with a theorem's guarantee, at the starts of epochs.

    The runs must be made with `stop=guarantee.stop` and evaluated after every round. A bound is on
    an expectation: give several runs that differ by their seeds.

    Args:
        runs: A run, or several of the same problem and algorithm.
        guarantee: The guarantee; by default the one of the runs' algorithm, which
            `PPBC.from_theory` sets.
        minimum: x*, in the structure of the problem's parameters, for the strongly convex theorems;
            None to compute it.

    Returns:
        The guarantee, the values reached, and whether the guarantee holds.

    Raises:
        InvalidInput: If there is no guarantee, it does not apply to the runs, or a run has not
            recorded what is needed.

    Example:
        >>> import numpy as np
        >>> import fedsolve as fs
        >>> problem = fs.Problem(
        ...     objective=lambda w, data: 0.5 * ((w - data["x"][0]) ** 2).sum(),
        ...     clients={"x": np.array([[[0.0, 0.0]], [[2.0, 1.0]]])},
        ...     params=np.ones(2),
        ... )
        >>> algorithm = fs.PPBC.from_theory(problem, epochs=20, strongly_convex=True)
        >>> promise = algorithm.guarantee
        >>> run = fs.solve(problem, algorithm, promise.rounds, stop=promise.stop)
        >>> fs.theory.ppbc_certificate(run).holds
        True
    """
    each = list(runs) if isinstance(runs, Sequence) else [runs]
    if not each:
        raise InvalidInput("There are no runs to certify.")
    first = each[0]
    promise = getattr(first.algorithm, "guarantee", None) if guarantee is None else guarantee
    if not isinstance(promise, PPBCGuarantee):
        raise InvalidInput(
            "Nothing was promised: create the algorithm with PPBC.from_theory, and do not change "
            "its numbers."
        )
    for run in each:
        _check_applies(promise, run)
    if promise.strongly_convex:
        least, error = _minimum(first.problem, promise, minimum)
        found = [_squared_distance(run, promise, least, error) for run in each]
    else:
        found = [_mean_squared_gradient(run, promise) for run in each]
    return PPBCCertificate(promise, float(np.mean(found)), tuple(found))


def _check_applies(promise: PPBCGuarantee, run: Run) -> None:
    """Raise if a run does not meet the conditions of the theorem."""
    problem, algorithm = run.problem, run.algorithm
    if not isinstance(algorithm, PPBC):
        raise InvalidInput(f"{promise.theorem} is not about {type(algorithm).__name__}.")
    _check_covered(problem, algorithm)
    rates = None if algorithm.availability is None else algorithm.availability.rates(problem.n)
    conditions = {
        "clients": (promise.clients, problem.n),
        "step_size": (promise.step_size, algorithm.step_size),
        "epoch_end": (promise.epoch_end, algorithm.epoch_end),
        "availability": (promise.availability, None if rates is None else float(rates.min())),
    }
    if not promise.stochastic:
        conditions["batch_size"] = (None, problem.batch_size)
    for name, (wanted, got) in conditions.items():
        if wanted != got:
            raise InvalidInput(f"{promise.theorem} asks for {name} = {wanted}, the run has {got}.")
    limits = {
        "momentum": (promise.momentum, algorithm.momentum),
        "cap": (promise.cap, algorithm.largest_weight(problem.n)),
    }
    for name, (most, got) in limits.items():
        if not isinstance(got, float | int) or got > most * (1 + 1e-9):
            raise InvalidInput(f"{promise.theorem} asks for {name} ≤ {most:g}, the run has {got}.")
    ended = int(run.history["epochs"][-1]) if run.evaluated else 0
    if ended < promise.epochs:
        raise InvalidInput(
            f"{promise.theorem} is about {promise.epochs} epochs, of which the run has ended "
            f"{ended}: give it more rounds (guarantee.rounds is enough)."
        )


def _mean_squared_gradient(run: Run, promise: PPBCGuarantee) -> float:
    """Return (1/K) Σ ‖∇f(x^{k,0})‖² over the epochs' starts."""
    history = run.history
    if "squared_gradient" not in history:
        raise InvalidInput("The run has not recorded ‖∇f‖²: give it stop=guarantee.stop.")
    starts = np.asarray(history["epoch_end"]) & (history["epochs"] < promise.epochs)
    if np.count_nonzero(starts) != promise.epochs - 1:
        raise InvalidInput("Some epochs' starts were not evaluated: leave evaluate_every at 1.")
    slope = _objective(run.problem)[1]
    squares = [float(slope @ slope), *history["squared_gradient"][starts].tolist()]
    return float(np.mean(squares))


def _minimum(problem: Problem, promise: PPBCGuarantee, minimum: PyTree) -> tuple[Point, float]:
    """Return x*, and a bound on the distance to the true one."""
    if minimum is not None:
        with jax.enable_x64(True):
            return np.asarray(problem.layout.ravel(minimum), np.float64), 0.0
    assert promise.strong_convexity is not None
    _, point = minimiser(problem)
    _, slope = _objective(problem, point)
    return point, float(np.linalg.norm(slope)) / promise.strong_convexity


def _squared_distance(run: Run, promise: PPBCGuarantee, least: Point, error: float) -> float:
    """Return an upper bound on ‖x^{K,0} − x*‖²."""
    if int(run.history["epochs"][-1]) != promise.epochs or not run.history["epoch_end"][-1]:
        raise InvalidInput(
            f"{promise.theorem} is about the start of the epoch after {promise.epochs}: give the "
            "run stop=guarantee.stop, and leave evaluate_every at 1."
        )
    here = np.asarray(run.state.w, np.float64)
    if least.shape != here.shape:
        raise InvalidInput("minimum must have the structure of the problem's parameters.")
    return float((np.linalg.norm(here - least) + error) ** 2)
