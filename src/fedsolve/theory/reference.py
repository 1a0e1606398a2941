"""Reference solutions of convex problems, with a proved accuracy.

    minimise f(y) + (ρ̂/2)‖y − w‖²   subject to   g(y) ≤ 0,   y in X            (ρ̂ = 0: the problem)

A point is found by sequential quadratic programming from exact gradients, in double precision. How
good it is follows from duality: for every λ ≥ 0, with L = f + (ρ̂/2)‖· − w‖² + λg convex,

    f* ≥ min_{y in X} L(y) ≥ L(ŷ) + min_{y in X} ∇L(ŷ)·(y − ŷ),

and the last minimum is known in closed form. The best λ is found by a line search. Where L
is κ-strongly convex, −‖∇L(ŷ)‖²/(2κ) is a lower bound of the last minimum as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from fedsolve.errors import InvalidInput
from fedsolve.fields import check_kind, check_positive
from fedsolve.problem.domains import Ball, Box, Domain, Simplex, WholeSpace
from fedsolve.problem.problem import Problem
from fedsolve.runtimes.evaluation import client_values
from fedsolve.theory.gradients import check_functions, totals
from fedsolve.types import Vector

Point = Float[np.ndarray, " d"]  # on the host, for SciPy
ROUNDING = 1e-14  # relative error of f in double precision
MAX_SIZE = 2000  # parameters: every step factors a matrix of that size


class Evaluation(NamedTuple):
    """f with its proximal term and g at a point, and their gradients."""

    objective: Float[np.ndarray, ""]
    constraint: Float[np.ndarray, ""]
    gradient: Point
    constraint_gradient: Point


Evaluate = Callable[[Point], Evaluation]


@dataclasses.dataclass(frozen=True)
class Optimum:
    """A reference solution: a feasible point and how far it may be from optimal.

    Args:
        value: The objective at `point`; f* ≥ `value` − `accuracy` if f and g are convex.
        accuracy: The proved accuracy of `value`.
        point: The feasible point, in the problem's own structure.

    Example:
        >>> import numpy as np
        >>> import fedsolve as fs
        >>> fs.theory.Optimum(0.5, 1e-9, np.zeros(2)).value
        0.5
    """

    value: float
    accuracy: float
    point: PyTree


def optimum(
    problem: Problem, accuracy: float | int = 1e-6, distance: float | int | None = None
) -> Optimum:
    """Compute f* of a convex problem, to an accuracy that duality proves.

    f and g should be smooth: with kinks the accuracy may not be reached.

    Args:
        problem: A convex problem with at most 2000 parameters, over a domain of this package.
        accuracy: The accuracy of f* that must be proved.
        distance: A bound on ‖w_0 − w*‖; needed where X is all of R^d.

    Returns:
        The solution, its value and the proved accuracy.

    Raises:
        InvalidInput: If the accuracy was not reached, no strictly feasible point was found, the
            problem is too large or its domain is unknown, or `distance` is missing.

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
        >>> found = fs.theory.optimum(problem)
        >>> round(found.value, 4), found.point.round(3)
        (0.6875, array([0.75, 0.25]))
    """
    check_kind("problem", problem, Problem)
    check_positive("accuracy", accuracy)
    if distance is not None:
        check_positive("distance", distance)
    if distance is None and isinstance(problem.domain, WholeSpace):
        raise InvalidInput("X is all of R^d: give distance, a bound on ‖w_0 − w*‖.")
    found = ProximalProblem(problem, None, 0.0, 0.0, distance).solve(accuracy)
    point = problem.params_at(found.point)
    return Optimum(found.value, found.accuracy, point)


def least(problem: Problem) -> float:
    """Return the least value of a smooth convex f over R^d, as `minimiser` finds it."""
    return minimiser(problem)[0]


def minimiser(problem: Problem) -> tuple[float, Point]:
    """Return the least value of a smooth convex f over R^d and where, by L-BFGS in float64.

    It takes any number of parameters; its accuracy is not proved.
    """
    from scipy import optimize  # slow to import

    check_functions(problem)
    if problem.constraint is not None or not isinstance(problem.domain, WholeSpace):
        raise InvalidInput("The least f is computed only without a constraint; give the optimum.")
    with jax.enable_x64(True):
        placed = problem.on_device()  # data keep their type: no second copy of them is made

        def evaluate(y: Point) -> tuple[float, Point]:
            value, slope = _value_and_gradient(placed, jnp.asarray(y))
            return float(value), np.asarray(slope)

        start = np.asarray(placed.start(), np.float64)
        options = {"maxiter": 5000, "maxfun": 10000, "maxcor": 30, "gtol": 1e-8, "ftol": 1e-15}
        found = optimize.minimize(evaluate, start, jac=True, method="L-BFGS-B", options=options)
    return float(found.fun), found.x


@dataclasses.dataclass(frozen=True)
class ProximalProblem:
    """One proximal problem (37), or the problem itself where `weight` is 0."""

    problem: Problem
    center: Point | None  # w
    weight: float | int  # ρ̂
    curvature: float | int  # κ: L is κ-strongly convex
    distance: float | int | None

    def solve(self, accuracy: float | int) -> Optimum:
        """Return the best point found, as a flat vector, or raise if it is not accurate enough."""
        problem = self.problem
        if problem.size > MAX_SIZE:
            raise InvalidInput(
                f"A reference solution takes at most {MAX_SIZE} parameters; this has "
                f"{problem.size}."
            )
        with jax.enable_x64(True):
            placed = problem.on_device(jnp.float64)
            start = np.asarray(placed.project(placed.start()))
            center = start if self.center is None else np.asarray(self.center, np.float64)
            evaluate = self._evaluator(placed, center)
            best = Optimum(np.inf, np.inf, start)
            y = center
            for _ in range(6):  # a restart begins with a fresh estimate of curvature
                y = _project(placed, _minimise(evaluate, y, problem.domain))
                y = self._feasible(evaluate, placed, y)
                found = evaluate(y)
                value = float(found.objective)
                gap = value - self._lower_bound(placed, y, found, start)
                gap = max(gap, ROUNDING * (1 + abs(value)))
                if gap < best.accuracy:
                    best = Optimum(value, gap, y)
                if best.accuracy <= accuracy:
                    return best
        raise InvalidInput(
            f"No reference solution to an accuracy of {accuracy:g} was found: duality proves "
            f"{best.accuracy:.2g}. Is the problem convex and smooth?"
        )

    def _evaluator(self, placed: Problem, center: Point) -> Evaluate:
        """Return a function that evaluates f and g, and keeps the last evaluation."""
        last: dict[bytes, Evaluation] = {}  # the solver asks four times about each point

        def evaluate(y: Point) -> Evaluation:
            point = y.tobytes()
            if point not in last:
                found = _evaluate(
                    placed, jnp.asarray(y), jnp.asarray(center), jnp.asarray(self.weight)
                )
                last.clear()
                last[point] = Evaluation(*(np.asarray(part, np.float64) for part in found))
            return last[point]

        return evaluate

    def _feasible(self, evaluate: Evaluate, placed: Problem, y: Point) -> Point:
        """Return y, or a point between y and a strictly feasible one if g(y) > 0."""
        if evaluate(y).constraint <= 0:
            return y

        def only_constraint(z: Point) -> Evaluation:
            """Minimise g itself, under a constraint that always holds."""
            _, value, _, slope = evaluate(z)
            return Evaluation(value, np.asarray(-1.0), slope, 0 * slope)

        inner = _project(placed, _minimise(only_constraint, y, self.problem.domain))
        low = evaluate(inner).constraint
        if low >= 0:
            raise InvalidInput(
                f"No point with g < 0 was found: the smallest g is about {float(low):.3g}."
            )
        share = 0.0
        # g is convex: the chord is above it
        while (high := evaluate(y + share * (inner - y)).constraint) > 0:
            share += (1 - share) * 1.01 * high / (high - low) + 1e-15
        return y + share * (inner - y)

    def _lower_bound(self, placed: Problem, y: Point, found: Evaluation, start: Point) -> float:
        """Return the best lower bound of f* over λ.

        It is concave in λ: doubling and a search find it.
        """
        from scipy import optimize

        f, g, df, dg = found
        domain = placed.domain
        assert isinstance(domain, Domain)  # `_minimise` has raised for any other

        def bound(multiplier: float) -> float:
            slope = df + multiplier * dg
            lowest = float(domain.lowest(jnp.asarray(slope))) - slope @ y
            if self.distance is not None:
                ball = slope @ (start - y) - self.distance * np.linalg.norm(slope)
                lowest = max(lowest, ball)
            if self.curvature > 0:
                lowest = max(lowest, -(slope @ slope) / (2 * self.curvature))
            return float(f + multiplier * g + lowest)

        top = 1.0
        while bound(2 * top) > bound(top) and top < 1e12:
            top *= 2
        searched = optimize.minimize_scalar(
            lambda x: -bound(x), bounds=(0, 2 * top), method="bounded", options={"xatol": 1e-13}
        )
        return max(bound(0.0), -float(searched.fun))


def _project(placed: Problem, y: Point) -> Point:
    return np.asarray(placed.project(jnp.asarray(y)))


@eqx.filter_jit
def _evaluate(
    problem: Problem, y: Vector, center: Vector, weight: Float[Array, ""]
) -> tuple[Float[Array, ""], Float[Array, ""], Vector, Vector]:
    """Return f with its proximal term, g, and their gradients."""

    def f(y: Vector) -> Float[Array, ""]:
        return totals(problem, y)[0] + weight / 2 * jnp.sum((y - center) ** 2)

    def g(y: Vector) -> Float[Array, ""]:
        return totals(problem, y)[1]

    (value, slope), (level, normal) = jax.value_and_grad(f)(y), jax.value_and_grad(g)(y)
    return value, level, slope, normal


@eqx.filter_jit
def _value_and_gradient(problem: Problem, y: Vector) -> tuple[Float[Array, ""], Vector]:
    found = client_values(problem, y, gradient=True)
    return jnp.mean(found["objective"]), jnp.sum(found["gradient"], axis=0) / problem.n


def _minimise(evaluate: Evaluate, start: Point, domain: Domain | Callable) -> Point:
    """Minimise f under g ≤ 0 and the domain, by sequential quadratic programming."""
    from scipy import optimize

    constraints: list[dict[str, str | Callable]] = [
        {
            "type": "ineq",
            "fun": lambda y: -evaluate(y).constraint,
            "jac": lambda y: -evaluate(y).constraint_gradient,
        }
    ]
    bounds = None
    if isinstance(domain, Ball):
        center, radius = float(domain.center), float(domain.radius)
        constraints.append(
            {
                "type": "ineq",
                "fun": lambda y: radius - (y - center) @ (y - center) / radius,
                "jac": lambda y: -2 * (y - center) / radius,
            }
        )
    elif isinstance(domain, Box):
        bounds = [(float(domain.lower), float(domain.upper))] * len(start)
    elif isinstance(domain, Simplex):
        total = float(domain.total)
        bounds = [(0.0, total)] * len(start)
        constraints.append(
            {"type": "eq", "fun": lambda y: y.sum() - total, "jac": lambda y: np.ones_like(y)}
        )
    elif not isinstance(domain, WholeSpace):
        raise InvalidInput(
            "A reference solution needs a domain of this package (Ball, Box, Simplex or none): of "
            "another only its projection is known."
        )
    found = optimize.minimize(
        lambda y: evaluate(y).objective,
        start,
        jac=lambda y: evaluate(y).gradient,
        method="SLSQP",
        bounds=bounds,
        constraints=constraints,
        options={"ftol": 1e-16, "maxiter": 500},
    )
    return found.x
