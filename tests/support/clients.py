"""Clients of different sizes, and one client of a problem."""

import jax
import jax.numpy as jnp
import numpy as np

from fedsolve.problem.client import Client

SIZES = (3, 7, 1, 5)


def ragged(seed=0, size=4):
    rng = np.random.default_rng(seed)
    return [{"x": rng.standard_normal((n, size)), "y": rng.standard_normal(n)} for n in SIZES]


def mean_loss(w, data):
    return jnp.mean((data["x"] @ w - data["y"]) ** 2) + 0.1 * jnp.sum(w**2)


def client(problem, index, key=0):
    placed = problem.on_device()
    samples = jax.tree.map(lambda leaf: leaf[index], placed.samples)
    w = placed.start()
    return Client(placed, samples, w, jnp.int32(0), jnp.int32(index), jax.random.key(key))
