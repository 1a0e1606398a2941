"""Constants of a problem that theorems ask for, from a look at sampled points.

| here | papers | how |
|---|---|---|
| `distance` | D | sup ‖w_0 − w‖ over X, exact for the domains of this package |
| `diameter` | D | of X, likewise |
| `lipschitz` | G | largest ‖∇f_j‖ or ‖∇g_j‖ seen |
| `sigma` | σ | largest half range of the g_j(w) seen: Hoeffding's proxy for their means |
| `gradient_noise` | σ_ξ | largest distance seen of a minibatch gradient from the whole one |
| `constraint_noise` | σ_b/√N_b | likewise, of a minibatch constraint value |
| `lowest_constraint` | g(w_feas) | smallest g seen |

What was seen at some points is no proof about all: true suprema may be larger.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from fedsolve.errors import InvalidInput
from fedsolve.fields import check_count, check_positive
from fedsolve.problem.client import Client
from fedsolve.problem.constraints import Mean
from fedsolve.problem.domains import Domain
from fedsolve.problem.problem import Problem
from fedsolve.problem.samples import Samples
from fedsolve.runtimes.evaluation import client_values
from fedsolve.theory.gradients import check_functions, client_gradients


@dataclasses.dataclass(frozen=True)
class Estimates:
    """Constants seen at `points` points of X (`draws` minibatches at each); not proofs."""

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
    """Estimates D, G, σ and the noise of minibatches, at points drawn from X.

    Half of the points are as far from the start as X allows, half anywhere between, and four lie
    along ±∇f and ±∇g. Where X is unbounded, `radius` says how far from the start to look.
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
                "X is unbounded: give a radius around the start to look in, or a bounded domain "
                "such as Ball."
            )
        reach = distance if radius is None else min(distance, radius)
        found = _look(placed, jax.random.key(seed), jnp.float64(reach), points, draws)
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
    """sup ‖w_0 − w‖ over X, and its diameter; infinite where X is or does not say."""
    if not isinstance(problem.domain, Domain):
        return np.inf, np.inf
    farthest = problem.domain.farthest(problem.start())
    return float(farthest), float(problem.domain.diameter(problem.size))


def check_mean(problem: Problem) -> None:
    """Refuses a constraint that is not an average of clients' own, as the theorems have it."""
    check_functions(problem)
    if problem.constraint is not None and not isinstance(problem.constraint, Mean):
        kind = type(problem.constraint).__name__
        raise InvalidInput(
            f"The theorems are about a constraint that is a mean of clients' own; this is a {kind}."
        )


@eqx.filter_jit
def _look(
    problem: Problem, key: Key[Array, ""], reach: Float[Array, ""], points: int, draws: int
) -> dict[str, Any]:
    to_draw, to_place, to_stretch = jax.random.split(key, 3)
    start = problem.start()

    def whole(w: Any) -> tuple[Any, Any, Any]:
        """∇f_j(w), ∇g_j(w) and g_j(w), from all samples."""
        values = client_values(problem, w).get("constraint", jnp.zeros(problem.n))
        return *client_gradients(problem, w), values

    def drawn(w: Any, key: Any) -> tuple[Any, Any, Any]:
        """The same from minibatches."""

        def client(index: Int[Array, ""], samples: Samples, key: Any) -> tuple[Any, Any, Any]:
            one = Client(problem, samples, w, jnp.int32(0), index, key)
            if one.unconstrained:
                return one.grad(w), jnp.zeros_like(w), jnp.zeros(())
            return one.grad(w), one.constraint_grad(w), one.constraint(w)

        keys = jax.random.split(key, problem.n)
        return jax.vmap(client)(jnp.arange(problem.n), problem.samples, keys)

    here, there, _ = whole(start)
    slopes = jnp.stack([here.mean(0), -here.mean(0), there.mean(0), -there.mean(0)])
    random = jax.random.normal(to_place, (points, problem.size))
    away = jnp.concatenate([random, slopes])
    away /= jnp.maximum(jnp.linalg.norm(away, axis=1, keepdims=True), 1e-300)
    stretch = (
        jnp.where(jnp.arange(len(away)) % 2 == 0, 1, jax.random.uniform(to_stretch, (len(away),)))
        .at[points:]
        .set(1)
    )
    places = jax.vmap(problem.project)(start + reach * stretch[:, None] * away)

    def at(w: Any, key: Any) -> dict[str, Any]:
        grads, slopes, values = whole(w)
        longest = jnp.maximum(_norms(grads), _norms(slopes))
        found = {
            "lipschitz": jnp.max(longest),
            "sigma": (jnp.max(values) - jnp.min(values)) / 2,
            "lowest": -jnp.mean(values),
        }
        if problem.batch_size is None:
            return found

        def deviation(key: Any) -> tuple:
            noisy = drawn(w, key)
            off = jnp.maximum(_norms(noisy[0] - grads), _norms(noisy[1] - slopes))
            return jnp.max(off), jnp.max(jnp.abs(noisy[2] - values))

        of_gradients, of_values = jax.lax.map(deviation, jax.random.split(key, draws))
        noise = {"gradient_noise": of_gradients.max(), "constraint_noise": of_values.max()}
        return found | noise

    keys = jax.random.split(to_draw, len(places) + 1)
    found = jax.lax.map(lambda one: at(*one), (jnp.vstack([start, places]), keys))
    largest = jax.tree.map(jnp.max, found)
    return largest | {"lowest": -largest["lowest"]}


def _norms(rows: Float[Array, "n d"]) -> Float[Array, " n"]:
    return jnp.linalg.norm(rows, axis=1)
