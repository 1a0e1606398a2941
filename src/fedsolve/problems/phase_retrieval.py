"""Constrained phase retrieval: a smooth problem whose objective is only weakly convex.

Find w from the squares of its inner products with known vectors, under a bound on the squares of
its inner products with others:

    f_j(w) = mean of ((x·w)² − y)² / 4 over client j's measurements (x, y),
    g_j(w) = mean of (z·w)² over its probes z, less a budget.

∇²f_j = mean of (3(x·w)² − y) xxᵀ, so that f_j is ρ-weakly convex with ρ = λ_max(mean of y xxᵀ) and
no less; g_j is convex, and g(0) < 0.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedsolve.fields import check_count, check_positive
from fedsolve.problem.domains import Ball
from fedsolve.problem.problem import Problem
from fedsolve.types import Vector

Data = dict[str, Float[Array, "..."]]


def phase_retrieval(
    clients: int = 10,
    size: int = 5,
    samples: int = 40,
    budget: float | int = 0.5,
    radius: float | int = 2.0,
    seed: int = 0,
) -> Problem:
    """Recover a vector from squared measurements, with the mean of squared probes below a budget.

    The vector has length 1, so the mean of squared probes is 1 on average, and a smaller budget is
    active. Clients' measurements differ in scale. The start is a short random vector, as 0 is a
    saddle.

    Args:
        clients: The number of clients.
        size: The dimension of the vector.
        samples: The number of measurements, and of probes, of each client.
        budget: The bound on the mean of squared probes.
        radius: The radius of the ball X around 0.
        seed: Seed of the data and the start.

    Returns:
        The problem.

    Raises:
        InvalidInput: If a count, the budget or the radius is not positive.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.phase_retrieval(clients=4, size=3)
        >>> problem.n, problem.dimension
        (4, 3)
    """
    for name, value in (("clients", clients), ("size", size), ("samples", samples)):
        check_count(name, value)
    check_positive("budget", budget)
    check_positive("radius", radius)
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal(size)
    hidden /= np.linalg.norm(hidden)
    scale = rng.uniform(0.7, 1.3, (clients, 1, 1))
    x = scale * rng.standard_normal((clients, samples, size))
    z = rng.standard_normal((clients, samples, size))
    start = rng.standard_normal(size)
    return Problem(
        objective=misfit,
        constraint=Visibility(float(budget)),
        clients={"x": x, "y": (x @ hidden) ** 2, "z": z},
        params=0.1 * start / np.linalg.norm(start),
        domain=Ball(radius),
    )


def misfit(w: Vector, data: Data) -> Float[Array, ""]:
    """Compute the mean of ((x·w)² − y)² / 4."""
    return jnp.mean(((data["x"] @ w) ** 2 - data["y"]) ** 2) / 4


@dataclasses.dataclass(frozen=True)
class Visibility:
    """The mean of squared probes less a budget."""

    budget: float

    def __call__(self, w: Vector, data: Data) -> Float[Array, ""]:
        """Compute the mean less the budget."""
        return jnp.mean((data["z"] @ w) ** 2) - self.budget
