"""Constrained logistic problems whose constants are known exactly."""

import jax.numpy as jnp
import numpy as np

import fedsolve as fs
from fedsolve.problems.losses import logistic

RADIUS, CLIENTS, SIZE, TWIST = 2.0, 8, 6, 0.02


def benefit(w, data):
    return jnp.mean(logistic(data["x"] @ w))


def cost(w, data):
    return jnp.mean(logistic(-(data["z"] @ w))) - 0.6


def random_problem(seed, twist=TWIST):
    """Convex, with constants that are known for certain: rows of length at most 1 make G = 1, and
    rows that differ by at most 2·twist between clients make σ = RADIUS·twist."""
    rng = np.random.default_rng(seed)

    def unit(*shape, center=0.0):
        rows = center + rng.standard_normal((*shape, SIZE))
        return rows / np.linalg.norm(rows, axis=-1, keepdims=True)

    x = unit(CLIENTS, 5, center=3 * unit())
    z = (1 - twist) * unit(5, center=2 * unit()) + twist * unit(CLIENTS, 5)
    return fs.Problem(benefit, {"x": x, "z": z}, np.zeros(SIZE), cost, fs.Ball(RADIUS))
