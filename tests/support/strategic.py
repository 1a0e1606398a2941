"""Small games of data contribution and a problem to go with them."""

import jax.numpy as jnp
import numpy as np

import fedsolve as fs
from fedsolve import games


def mean_problem(clients=5, samples=6, size=3, seed=0, **options):
    """Each client wants w at its own samples' mean."""
    points = np.random.default_rng(seed).standard_normal((clients, samples, size))
    points += np.arange(clients)[:, None, None]
    return fs.Problem(
        lambda w, data: 0.5 * jnp.mean(jnp.sum((data["points"] - w) ** 2, axis=1)),
        {"points": points},
        np.zeros(size),
        **options,
    )


def settling_game(best, pace=0.1):
    """F(N) = pace·(N − best)."""
    cost = games.QuadraticCost(pace * np.eye(len(best)), -pace * np.asarray(best))
    return fs.Game(None, cost, np.ones(len(best)), 8.0)


def a_game(lower=2.0, upper=6.0, clients=5):
    return fs.Game(None, games.LinearCost(0.1), np.full(clients, lower), upper, 0.1)
