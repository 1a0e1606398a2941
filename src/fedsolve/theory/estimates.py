"""Estimates of the constants that theorems need, from values at sampled points.

| here | papers | how |
|---|---|---|
| `distance` | D | sup ‖w_0 − w‖ over X, exact for the domains of this package |
| `diameter` | D | of X, likewise |
| `lipschitz` | G | largest ‖∇f_j‖ or ‖∇g_j‖ seen |
| `sigma` | σ | largest half range of the g_j(w) seen: Hoeffding's proxy for their means |
| `gradient_noise` | σ_ξ | largest distance seen of a minibatch gradient from the whole one |
| `constraint_noise` | σ_b/√N_b | likewise, of a minibatch constraint value |
| `lowest_constraint` | g(w_feas) | smallest g seen |

Values at some points prove nothing about all points: the true suprema may be larger.
"""

from __future__ import annotations

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fedsolve.errors import InvalidInput
from fedsolve.fields import check_count, check_positive
from fedsolve.problem.client import Client
from fedsolve.problem.constraints import Maximum, Mean
from fedsolve.problem.domains import Domain
from fedsolve.problem.problem import Problem
from fedsolve.problem.samples import Samples
from fedsolve.problem.several import Several
from fedsolve.runtimes.evaluation import client_values
from fedsolve.theory.gradients import Rows, check_functions, client_gradients
from fedsolve.types import PRNGKey, Vector

Evaluations = tuple[Rows, Rows, Float[Array, " n"]]  # ∇f_j(w), ∇g_j(w) and g_j(w)


@dataclasses.dataclass(frozen=True)
class Estimates:
    """Constants of a problem, estimated at sampled points of X.

    Args:
        distance: D, the largest distance from the initial parameters within X, or the `radius`
            of the search where that is smaller.
        diameter: The diameter of X, or of the ball that was searched.
        lipschitz: G, the largest ‖∇f_j‖ or ‖∇g_j‖ seen.
        sigma: σ, the largest half range of the g_j(w) seen.
        gradient_noise: σ_ξ, the largest error of a minibatch gradient seen; None without
            minibatches.
        constraint_noise: σ_b/√N_b, the largest error of a minibatch constraint value seen; None
            without minibatches.
        lowest_constraint: The smallest g seen.
        points: How many points were drawn.
        draws: How many minibatches were drawn at each point.

    Example:
        >>> import fedsolve as fs
        >>> found = fs.theory.Estimates(1.0, 2.0, 4.5, 0.1, None, None, -0.3, points=64, draws=8)
        >>> found.lipschitz
        4.5
    """

    distance: float
    diameter: float
    lipschitz: float
    sigma: float
    gradient_noise: float | None
    constraint_noise: float | None
    lowest_constraint: float
    points: int
    draws: int


def estimate(
    problem: Problem,
    points: int = 64,
    draws: int = 8,
    seed: int = 0,
    radius: float | int | None = None,
) -> Estimates:
    """Estimate D, G, σ and the noise of minibatches at points drawn from X.

    Half of the points are as far from the initial parameters as X allows, half at random
    distances, and four more lie along ±∇f and ±∇g.

    Args:
        problem: The problem, whose constraint, if any, must be a mean over clients.
        points: How many points to draw.
        draws: How many minibatches to draw at each point, if the problem has a `batch_size`.
        seed: The seed of the points and minibatches.
        radius: How far from the initial parameters to search; needed where X is unbounded.

    Returns:
        The estimates; the true constants may be larger.

    Raises:
        InvalidInput: If X is unbounded and no `radius` is given, if the constraint is not a mean
            over clients, or if the problem draws its own data.

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
        >>> found = fs.theory.estimate(problem, points=16)
        >>> found.distance, round(found.lipschitz, 3)
        (2.0, 4.236)
    """
    check_count("points", points)
    check_count("draws", draws)
    if radius is not None:
        check_positive("radius", radius)
    check_mean(problem)
    with jax.enable_x64(True):
        placed = problem.on_device(jnp.float64)
        distance, diameter = extent(placed)
        if radius is None and not np.isfinite(distance):
            raise InvalidInput(
                "X is unbounded: give a radius around the start to search, or a bounded domain "
                "such as Ball."
            )
        reach = distance if radius is None else min(distance, radius)
        found = _extremes(placed, jax.random.key(seed), jnp.float64(reach), points, draws)
    numbers = {name: float(value) for name, value in found.items()}
    return Estimates(
        distance=reach,
        diameter=min(diameter, 2 * reach),
        lipschitz=numbers["lipschitz"],
        sigma=numbers["sigma"],
        gradient_noise=numbers.get("gradient_noise"),
        constraint_noise=numbers.get("constraint_noise"),
        lowest_constraint=numbers["lowest"],
        points=points,
        draws=draws,
    )


def extent(problem: Problem) -> tuple[float, float]:
    """Return sup ‖w_0 − w‖ over X and the diameter of X; infinite where unbounded or unknown."""
    if not isinstance(problem.domain, Domain):
        return np.inf, np.inf
    farthest = problem.domain.farthest(problem.start())
    return float(farthest), float(problem.domain.diameter(problem.size))


def mean_parts(problem: Problem) -> list[Problem]:
    """Return the problem with each constraint of a maximum alone; raise unless each is a mean.

    The maximum of convex functions is convex, and the gradient of the largest one is a subgradient
    of it. A round follows one of them, so a proof that uses convexity of g_j along the round's
    gradient holds with G a bound on the gradients of all of them.
    """
    constraint = problem.constraint
    if not isinstance(constraint, Maximum | Several):
        check_mean(problem)
        return [problem]
    found = [eqx.tree_at(lambda p: p.constraint, problem, part) for part in constraint.parts]
    for each in found:
        check_mean(each)
    return found


def check_mean(problem: Problem) -> None:
    """Raise unless the constraint is a mean of clients' g_j, as the theorems assume."""
    check_functions(problem)
    if problem.constraint is not None and not isinstance(problem.constraint, Mean):
        kind = type(problem.constraint).__name__
        raise InvalidInput(
            f"The theorems need a constraint that is a mean over clients; this is a {kind}."
        )


@eqx.filter_jit
def _extremes(
    problem: Problem, key: PRNGKey, reach: Float[Array, ""], points: int, draws: int
) -> dict[str, Float[Array, ""]]:
    """Return the largest (for `lowest`, the smallest) value of each quantity over the points."""
    to_draw, to_place, to_stretch = jax.random.split(key, 3)
    start = problem.start()
    places = _places(problem, start, to_place, to_stretch, reach, points)

    def at(w: Vector, key: PRNGKey) -> dict[str, Float[Array, ""]]:
        grads, slopes, values = _full_batch(problem, w)
        longest = jnp.maximum(_norms(grads), _norms(slopes))
        found = {
            "lipschitz": jnp.max(longest),
            "sigma": (jnp.max(values) - jnp.min(values)) / 2,
            "lowest": -jnp.mean(values),
        }
        if problem.batch_size is None:
            return found

        def deviation(key: PRNGKey) -> tuple[Float[Array, ""], Float[Array, ""]]:
            noisy = _minibatch(problem, w, key)
            off = jnp.maximum(_norms(noisy[0] - grads), _norms(noisy[1] - slopes))
            return jnp.max(off), jnp.max(jnp.abs(noisy[2] - values))

        of_gradients, of_values = jax.lax.map(deviation, jax.random.split(key, draws))
        noise = {"gradient_noise": of_gradients.max(), "constraint_noise": of_values.max()}
        return found | noise

    keys = jax.random.split(to_draw, len(places) + 1)
    found = jax.lax.map(lambda one: at(*one), (jnp.vstack([start, places]), keys))
    largest = jax.tree.map(jnp.max, found)
    return largest | {"lowest": -largest["lowest"]}


def _places(
    problem: Problem,
    start: Vector,
    to_place: PRNGKey,
    to_stretch: PRNGKey,
    reach: Float[Array, ""],
    points: int,
) -> Float[Array, "places d"]:
    """Return points of X: random directions at full or random distance, then ±∇f and ±∇g."""
    here, there, _ = _full_batch(problem, start)
    slopes = jnp.stack([here.mean(0), -here.mean(0), there.mean(0), -there.mean(0)])
    random = jax.random.normal(to_place, (points, problem.size))
    away = jnp.concatenate([random, slopes])
    away /= jnp.maximum(jnp.linalg.norm(away, axis=1, keepdims=True), 1e-300)
    stretch = (
        jnp.where(jnp.arange(len(away)) % 2 == 0, 1, jax.random.uniform(to_stretch, (len(away),)))
        .at[points:]
        .set(1)
    )
    return jax.vmap(problem.project)(start + reach * stretch[:, None] * away)


def _full_batch(problem: Problem, w: Vector) -> Evaluations:
    """Return ∇f_j(w), ∇g_j(w) and g_j(w) from all samples."""
    values = client_values(problem, w).get("constraint", jnp.zeros(problem.n))
    return *client_gradients(problem, w), values


def _minibatch(problem: Problem, w: Vector, key: PRNGKey) -> Evaluations:
    """Return the same from one minibatch of each client."""

    def client(
        index: Int[Array, ""], samples: Samples, key: PRNGKey
    ) -> tuple[Vector, Vector, Float[Array, ""]]:
        one = Client(problem, samples, w, jnp.int32(0), index, key)
        if one.unconstrained:
            return one.grad(w), jnp.zeros_like(w), jnp.zeros(())
        return one.grad(w), one.constraint_grad(w), one.constraint(w)

    keys = jax.random.split(key, problem.n)
    return jax.vmap(client)(jnp.arange(problem.n), problem.samples, keys)


def minibatch_gradients(problem: Problem, w: Vector, key: PRNGKey) -> Rows:
    """Return each client's ∇f_j(w) from one minibatch."""
    return _minibatch(problem, w, key)[0]


def _norms(rows: Rows) -> Float[Array, " n"]:
    return jnp.linalg.norm(rows, axis=1)
