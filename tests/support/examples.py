"""Small problems that tests share."""

import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from tests.support import environment

DATA = Path(os.environ.get("FEDSOLVE_DATA", environment.data))


def needs_data(name, file=None):
    """Skips a test where the real data set is not on this machine."""
    file = file or f"{name}.npz"
    there = (DATA / name / file).is_file()
    return pytest.mark.skipif(not there, reason=f"needs {name}/{file} below FEDSOLVE_DATA")


def quadratic(w, data):
    return 0.5 * jnp.mean((data["inputs"] @ w - data["targets"]) ** 2)


def half_space(w, data):
    """g_j(w) = a_j·w − b_j, an affine constraint."""
    return data["normal"] @ w - data["offset"]


def products(w, data):
    """A sample's representation: its inputs times their weights, which add up to what is fitted."""
    return data["inputs"] * w


def least_squares(clients=6, samples=8, size=5, seed=0, constrained=True):
    """Heterogeneous least squares under one affine constraint that is active at the optimum."""
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal((clients, samples, size)) * rng.uniform(0.5, 1.5, (clients, 1, 1))
    truth = rng.standard_normal((clients, size)) + 1
    # the same bits in every process: einsum's depend on where arrays lie in memory
    targets = np.sum(inputs * truth[:, None, :], axis=2)
    data = {"inputs": inputs, "targets": targets}
    if constrained:
        data["normal"] = np.ones((clients, size)) + 0.3 * rng.standard_normal((clients, size))
        data["offset"] = np.full(clients, 1.0) + 0.2 * rng.standard_normal(clients)
    return fs.Problem(
        objective=quadratic,
        clients=data,
        params=np.zeros(size),
        constraint=half_space if constrained else None,
        representation=products,
    )


def least_squares_clients(problem):
    """(∇f_j, g_j, ∇g_j) of `least_squares`, in NumPy."""
    data = problem.samples.values

    def client(a, y, normal, offset):
        return (
            lambda w: a.T @ (a @ w - y) / len(y),
            lambda w: normal @ w - offset,
            lambda w: normal,
        )

    n = len(data["inputs"])
    normals = data.get("normal", np.zeros((n, data["inputs"].shape[2])))
    offsets = data.get("offset", np.ones(n))
    return [
        client(*row) for row in zip(data["inputs"], data["targets"], normals, offsets, strict=True)
    ]


def least_squares_optimum(problem, tolerance) -> Any:
    """The w*, f* and multiplier of `least_squares` with g ≤ ε, by CVXPY."""
    import cvxpy as cp

    data = problem.samples.values
    w = cp.Variable(data["inputs"].shape[2])
    inputs, targets = data["inputs"].reshape(-1, w.size), data["targets"].reshape(-1)
    f = cp.sum_squares(inputs @ w - targets) / (2 * len(targets))
    g = data["normal"].mean(axis=0) @ w - data["offset"].mean()
    program = cp.Problem(cp.Minimize(f), [g <= tolerance])
    program.solve(solver=cp.CLARABEL)
    multiplier: Any = program.constraints[0].dual_value
    value: Any = program.value
    return w.value, float(value), float(multiplier)


def contribution_game(clients=6, seed=0, most=8):
    """The paper's game for clients with `most` samples: N* is at bounds and between them."""
    rng = np.random.default_rng(seed)
    Q = rng.dirichlet(np.ones(4), clients)
    own = (Q**2).sum(axis=1)
    theta = own - 0.1 * rng.uniform(0, most + 2, clients)
    return fs.Game(
        fs.games.RandomDiscovery(Q), fs.games.LinearCost(theta), np.full(clients, 2.0), most, 0.1
    )
