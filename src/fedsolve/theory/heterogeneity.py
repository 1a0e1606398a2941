"""How different clients are: estimates of L, μ, δ1, δ2 and σ, the constants of PPBC's theorems.

    (1/M) Σ ‖∇f_m(x) − ∇f(x)‖² ≤ δ1‖∇f(x)‖² + δ2   (Assumption 2.3)

holds for many pairs: a larger δ1 allows a smaller δ2. `Heterogeneity.pairs` are the corners of
what the points seen allow.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedsolve.errors import InvalidInput
from fedsolve.fields import check_count, check_kind, check_positive
from fedsolve.problem.problem import Problem
from fedsolve.theory.estimates import minibatch_gradients
from fedsolve.theory.gradients import check_functions, client_gradients, totals
from fedsolve.types import PRNGKey, Vector

Seen = Float[np.ndarray, " points"]
DENSE = 200  # parameters up to which all eigenvalues of a Hessian are computed


@dataclasses.dataclass(frozen=True)
class Heterogeneity:
    """Constants of a problem's clients, estimated at points around and along a descent of f.

    Args:
        smoothness: L, the largest eigenvalue of ∇²f seen, by absolute value.
        convexity: The smallest eigenvalue of ∇²f seen: μ, if that is positive.
        pairs: (δ1, δ2) that hold at all points, from δ1 = 0 upwards.
        noise: σ, the largest deviation of a client's minibatch gradient seen, as the root of its
            mean square; 0 without minibatches.
        points: How many points were looked at.

    Example:
        >>> import fedsolve as fs
        >>> found = fs.theory.Heterogeneity(2.0, 0.5, ((0.0, 3.0), (1.5, 0.2)), 0.0, points=64)
        >>> found.delta_2(1.5), found.delta_2(0.75)
        (0.2, 3.0)
    """

    smoothness: float
    convexity: float
    pairs: tuple[tuple[float, float], ...]
    noise: float
    points: int

    def delta_2(self, delta_1: float | int) -> float:
        """Return a δ2 that holds with this δ1, or with one of `pairs` below it.

        Args:
            delta_1: δ1.
        """
        return min(second for first, second in self.pairs if first <= delta_1)


def heterogeneity(
    problem: Problem,
    points: int = 64,
    draws: int = 16,
    seed: int = 0,
    radius: float | int | None = None,
) -> Heterogeneity:
    """Estimate L, μ, δ1, δ2 and σ of a problem.

    Half of the points lie on the path of gradient descent on f, where runs go; the others at random
    within `radius` of the initial parameters.

    Args:
        problem: A problem without a constraint, with a smooth f.
        points: How many points to look at.
        draws: How many minibatches to draw at each, if the problem has a `batch_size`.
        seed: The seed of the points and minibatches.
        radius: How far from the start to look; by default as far as the descent went.

    Returns:
        The estimates. The true constants may be larger (μ: smaller).

    Raises:
        InvalidInput: If the problem has a constraint or draws its own data.

    Example:
        >>> import numpy as np
        >>> import fedsolve as fs
        >>> problem = fs.Problem(
        ...     objective=lambda w, data: 0.5 * ((w - data["x"][0]) ** 2).sum(),
        ...     clients={"x": np.array([[[0.0, 0.0]], [[2.0, 0.0]]])},
        ...     params=np.ones(2),
        ... )
        >>> found = fs.theory.heterogeneity(problem, points=8)
        >>> round(found.smoothness, 6), round(found.delta_2(0), 6)
        (1.0, 1.0)
    """
    check_kind("problem", problem, Problem)
    check_count("points", points)
    check_count("draws", draws)
    if radius is not None:
        check_positive("radius", radius)
    check_functions(problem)
    if problem.constraint is not None:
        raise InvalidInput("PPBC's theorems are about problems without a constraint.")
    with jax.enable_x64(True):
        placed = problem.on_device(jnp.float64)
        start = placed.start()
        top = _eigenvalues(placed, start)[1]
        path = _descend(placed, start, 1 / max(top, 1e-300), max(points // 2, 1))
        reach = float(jnp.linalg.norm(path[-1] - start)) if radius is None else float(radius)
        to_place, to_draw = jax.random.split(jax.random.key(seed))
        places = [*path, *_around(start, to_place, reach or 1.0, points - len(path))]
        seen = [_at(placed, w, jax.random.fold_in(to_draw, i), draws) for i, w in enumerate(places)]
        curves = np.asarray([_eigenvalues(placed, w) for w in places])
    squares, spreads, noises = (np.asarray(each, float) for each in zip(*seen, strict=True))
    return Heterogeneity(
        smoothness=float(np.abs(curves).max()),
        convexity=float(curves.min()),
        pairs=corners(squares, spreads),
        noise=float(np.sqrt(noises.max())),
        points=len(places),
    )


def corners(squares: Seen, spreads: Seen) -> tuple[tuple[float, float], ...]:
    """Return the (δ1, δ2) with `spreads` ≤ δ1 `squares` + δ2 where neither can be made smaller.

    These are the corners only: between two of them lies a line.
    """
    slope, found = 0.0, []
    top = max(range(len(squares)), key=lambda i: (spreads[i], -squares[i]))  # decides δ2 at δ1 = 0
    while True:
        rest = max(float(spreads[top] - slope * squares[top]), 0.0)
        found.append((slope, rest))
        if rest <= 0 or squares[top] <= 0:
            return tuple(found)
        lower = np.flatnonzero(squares < squares[top])
        meets = (spreads[top] - spreads[lower]) / (squares[top] - squares[lower])
        at_zero = float(spreads[top] / squares[top])
        slope = min([at_zero, *meets.tolist()])
        if slope == at_zero:
            found.append((slope, 0.0))
            return tuple(found)
        ties = lower[meets <= slope * (1 + 1e-12)]
        top = ties[np.argmin(squares[ties])]


@eqx.filter_jit
def _at(
    problem: Problem, w: Vector, key: PRNGKey, draws: int
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """Return ‖∇f‖², (1/M) Σ ‖∇f_m − ∇f‖², and the largest variance of a minibatch gradient."""
    grads, _ = client_gradients(problem, w)
    mean = grads.mean(axis=0)
    spread = jnp.mean(jnp.sum((grads - mean) ** 2, axis=1))
    noise = jnp.zeros(())
    if problem.batch_size is not None:

        def deviation(key: PRNGKey) -> Float[Array, " n"]:
            return jnp.sum((minibatch_gradients(problem, w, key) - grads) ** 2, axis=1)

        noise = jax.lax.map(deviation, jax.random.split(key, draws)).mean(axis=0).max()
    return jnp.sum(mean**2), spread, noise


@eqx.filter_jit
def _descend(
    problem: Problem, start: Vector, step: float | Float[Array, ""], count: int
) -> Float[Array, "count d"]:
    """Return points of gradient descent from the start, after 0, 1, 3, 6, 10 steps and so on."""

    def once(_: object, w: Vector) -> Vector:
        return w - step * jax.grad(lambda w: totals(problem, w)[0])(w)

    def further(w: Vector, steps: Array) -> tuple[Vector, Vector]:
        return jax.lax.fori_loop(0, steps + 1, once, w), w

    return jax.lax.scan(further, start, jnp.arange(count))[1]


def _around(start: Vector, key: PRNGKey, reach: float, count: int) -> Float[Array, "count d"]:
    """Return random points of the ball around the start, half of them on its surface."""
    to_turn, to_stretch = jax.random.split(key)
    away = jax.random.normal(to_turn, (count, start.size))
    away /= jnp.linalg.norm(away, axis=1, keepdims=True)
    stretch = jnp.where(jnp.arange(count) % 2 == 0, 1, jax.random.uniform(to_stretch, (count,)))
    return start + reach * stretch[:, None] * away


@eqx.filter_jit
def _curve(problem: Problem, w: Vector, v: Vector) -> Vector:
    """Return ∇²f(w) v."""
    return jax.jvp(jax.grad(lambda w: totals(problem, w)[0]), (w,), (v,))[1]


@eqx.filter_jit
def _hessian(problem: Problem, w: Vector) -> Float[Array, "d d"]:
    return jax.hessian(lambda w: totals(problem, w)[0])(w)


def _eigenvalues(problem: Problem, w: Vector) -> tuple[float, float]:
    """Return the smallest and the largest eigenvalue of ∇²f(w)."""
    if w.size <= DENSE:
        found = np.linalg.eigvalsh(np.asarray(_hessian(problem, w)))
        return float(found[0]), float(found[-1])
    from scipy.sparse import linalg  # slow to import

    solver: Any = linalg  # its stubs know neither `matvec` nor small tolerances

    def times(v: np.ndarray) -> np.ndarray:
        return np.asarray(_curve(problem, w, jnp.asarray(v, float).ravel()))

    operator = solver.LinearOperator((w.size, w.size), matvec=times)
    both = solver.eigsh(operator, k=2, which="BE", tol=1e-3, return_eigenvectors=False)
    return float(both.min()), float(both.max())
