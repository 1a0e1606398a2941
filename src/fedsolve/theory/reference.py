"""Reference solutions of convex problems, with an accuracy that is proved and not hoped for.

    minimise f(y) + (ρ̂/2)‖y − w‖²   subject to   g(y) ≤ 0,   y in X            (ρ̂ = 0: the problem)

A point is found by sequential quadratic programming from exact gradients, in double precision. How
good it is follows from duality: for every λ ≥ 0, with L = f + (ρ̂/2)‖· − w‖² + λg convex,

    f* ≥ min_{y in X} L(y) ≥ L(ŷ) + min_{y in X} ∇L(ŷ)·(y − ŷ),

and the last minimum is known in closed form. The best λ is found by a search on the line. Where L
is κ-strongly convex, −‖∇L(ŷ)‖²/(2κ) is a lower bound of the last minimum as well.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from fedsolve.errors import InvalidInput
from fedsolve.fields import check_kind, check_positive
from fedsolve.problem.domains import Ball, Box, Simplex, WholeSpace
from fedsolve.problem.problem import Problem
from fedsolve.runtimes.evaluation import client_values
from fedsolve.theory.gradients import check_functions, totals

Vector = Float[np.ndarray, " d"]
ROUNDING = 1e-14  # of what double precision makes of f
MOST = 2000  # parameters: every step factors a matrix of that size


@dataclasses.dataclass(frozen=True)
class Optimum:
    """`value` is reached at the feasible `point`; f* ≥ `value` − `accuracy` if f, g are convex."""

    value: float
    accuracy: float
    point: PyTree


def optimum(
    problem: Problem, accuracy: float | int = 1e-6, distance: float | int | None = None
) -> Optimum:
    """f* of a convex problem, to an accuracy that duality proves.

    f and g should be smooth: kinks may keep the accuracy from being reached, which is then said.
    Where X is all of R^d, `distance` is a bound on ‖w_0 − w*‖, without which nothing can be proved.
    """
    check_kind("problem", problem, Problem)
    check_positive("accuracy", accuracy)
    if distance is not None:
        check_positive("distance", distance)
    if distance is None and isinstance(problem.domain, WholeSpace):
        raise InvalidInput("X is all of R^d: give distance, a bound on ‖w_0 − w*‖.")
    found = Search(problem, None, 0.0, 0.0, distance).solve(accuracy)
    point = problem.layout.unravel(found.point)
    return Optimum(found.value, found.accuracy, point)


def least(problem: Problem) -> float:
    """The least value of a smooth convex f over all of R^d, by a quasi-Newton method in double
    precision, however many parameters there are. Nothing is proved about it."""
    from scipy import optimize  # half a second of every start, where it is not needed

    check_functions(problem)
    if problem.constraint is not None or not isinstance(problem.domain, WholeSpace):
        raise InvalidInput("The least f is looked for without constraint only; give the optimum.")
    with jax.enable_x64(True):
        placed = problem.on_device()  # data keep their type: no second copy of them is made

        def look(y: Vector) -> tuple[float, Vector]:
            value, slope = _value_and_slope(placed, jnp.asarray(y))
            return float(value), np.asarray(slope)

        start = np.asarray(placed.start(), np.float64)
        options = {"maxiter": 5000, "maxfun": 10000, "maxcor": 30, "gtol": 1e-8, "ftol": 1e-15}
        found = optimize.minimize(look, start, jac=True, method="L-BFGS-B", options=options)
    return float(found.fun)


@dataclasses.dataclass(frozen=True)
class Search:
    """One proximal problem (37), or the problem itself where `weight` is 0."""

    problem: Problem
    center: Vector | None  # w
    weight: float  # ρ̂
    curvature: float  # κ: L is so strongly convex
    distance: float | None

    def solve(self, accuracy: float) -> Optimum:
        """The best point found, as a flat vector; refuses one that is not as accurate as asked."""
        problem = self.problem
        if problem.size > MOST:
            raise InvalidInput(
                f"A reference solution takes at most {MOST} parameters; this has {problem.size}."
            )
        with jax.enable_x64(True):
            placed = problem.on_device(jnp.float64)
            start = np.asarray(placed.project(placed.start()))
            center = start if self.center is None else np.asarray(self.center, np.float64)

            seen: dict[bytes, Any] = {}  # the solver asks four times about each point

            def look(y: Vector, only_constraint: bool = False) -> Any:
                place = y.tobytes()
                if place not in seen:
                    found = _look(
                        placed, jnp.asarray(y), jnp.asarray(center), jnp.asarray(self.weight)
                    )
                    seen.clear()
                    seen[place] = [np.asarray(part, np.float64) for part in found]
                f, g, df, dg = seen[place]
                return (g, -1.0, dg, 0 * dg) if only_constraint else (f, g, df, dg)

            best = Optimum(np.inf, np.inf, start)
            y = center
            for _ in range(6):  # a restart begins with a fresh estimate of curvature
                y = self._inside(placed, _minimise(look, y, problem.domain))
                y = self._feasible(look, placed, y)
                f, g, df, dg = look(y)
                gap = float(f) - self._lower(placed, y, f, g, df, dg, start)
                gap = max(gap, ROUNDING * (1 + abs(float(f))))
                if gap < best.accuracy:
                    best = Optimum(float(f), gap, y)
                if best.accuracy <= accuracy:
                    return best
        raise InvalidInput(
            f"No reference solution to an accuracy of {accuracy:g} was found: duality proves "
            f"{best.accuracy:.2g}. Is the problem convex and smooth?"
        )

    def _inside(self, placed: Problem, y: Vector) -> Vector:
        return np.asarray(placed.project(jnp.asarray(y)))

    def _feasible(self, look: Any, placed: Problem, y: Vector) -> Vector:
        """y, or a point between y and a strictly feasible one if g(y) > 0."""
        if look(y)[1] <= 0:
            return y
        inner = self._inside(
            placed, _minimise(lambda z: look(z, only_constraint=True), y, self.problem.domain)
        )
        low = look(inner)[1]
        if low >= 0:
            raise InvalidInput(
                f"No point with g < 0 was found: the smallest g is about {float(low):.3g}."
            )
        share = 0.0
        while (high := look(y + share * (inner - y))[1]) > 0:  # g is convex: the chord is above it
            share += (1 - share) * 1.01 * high / (high - low) + 1e-15
        return y + share * (inner - y)

    def _lower(
        self, placed: Problem, y: Vector, f: Any, g: Any, df: Vector, dg: Vector, start: Vector
    ) -> float:
        """The best lower bound of f* over λ. It is concave in λ: doubling and a search find it."""

        def bound(multiplier: float) -> float:
            slope = df + multiplier * dg
            least = float(placed.domain.lowest(jnp.asarray(slope))) - slope @ y  # type: ignore
            if self.distance is not None:
                ball = slope @ (start - y) - self.distance * np.linalg.norm(slope)
                least = max(least, ball)
            if self.curvature > 0:
                least = max(least, -(slope @ slope) / (2 * self.curvature))
            return float(f + multiplier * g + least)

        from scipy import optimize

        top = 1.0
        while bound(2 * top) > bound(top) and top < 1e12:
            top *= 2
        found = optimize.minimize_scalar(
            lambda x: -bound(x), bounds=(0, 2 * top), method="bounded", options={"xatol": 1e-13}
        )
        return max(bound(0.0), -float(found.fun))


@eqx.filter_jit
def _look(
    problem: Problem, y: Float[Array, " d"], center: Float[Array, " d"], weight: Any
) -> tuple[Any, Any, Any, Any]:
    """f with its proximal term, g, and their gradients."""

    def f(y: Float[Array, " d"]) -> Any:
        return totals(problem, y)[0] + weight / 2 * jnp.sum((y - center) ** 2)

    def g(y: Float[Array, " d"]) -> Any:
        return totals(problem, y)[1]

    (value, slope), (level, normal) = jax.value_and_grad(f)(y), jax.value_and_grad(g)(y)
    return value, level, slope, normal


@eqx.filter_jit
def _value_and_slope(problem: Problem, y: Float[Array, " d"]) -> tuple[Any, Any]:
    found = client_values(problem, y, gradient=True)
    return jnp.mean(found["objective"]), jnp.sum(found["gradient"], axis=0) / problem.n


def _minimise(look: Any, start: Vector, domain: Any) -> Vector:
    """Sequential quadratic programming under g ≤ 0 and the domain."""
    from scipy import optimize

    constraints: list[dict[str, Any]] = [
        {"type": "ineq", "fun": lambda y: -look(y)[1], "jac": lambda y: -look(y)[3]}
    ]
    bounds = None
    if isinstance(domain, Ball):
        center, radius = float(domain.center), float(domain.radius)  # type: ignore
        constraints.append(
            {
                "type": "ineq",
                "fun": lambda y: radius - (y - center) @ (y - center) / radius,
                "jac": lambda y: -2 * (y - center) / radius,
            }
        )
    elif isinstance(domain, Box):
        bounds = [(float(domain.lower), float(domain.upper))] * len(start)  # type: ignore
    elif isinstance(domain, Simplex):
        total = float(domain.total)  # type: ignore
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
        lambda y: look(y)[0],
        start,
        jac=lambda y: look(y)[2],
        method="SLSQP",
        bounds=bounds,
        constraints=constraints,
        options={"ftol": 1e-16, "maxiter": 500},
    )
    return found.x
