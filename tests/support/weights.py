"""Clients of different sizes, and the weights that a weighting gives them."""

import jax
import jax.numpy as jnp
import numpy as np

import fedsolve as fs
from fedsolve.federation.state import State
from fedsolve.runtimes.simulation import Simulation


def ragged(sizes=(2, 5, 3, 9, 4, 7), size=4, validation=None, seed=0):
    """Least squares over clients of different sizes, and each client's (f, ∇f) in NumPy."""
    rng = np.random.default_rng(seed)
    clients = []
    for count in sizes:
        inputs = rng.standard_normal((count, size))
        clients.append({"inputs": inputs, "targets": inputs @ rng.standard_normal(size) + 1})
    problem = fs.Problem(
        lambda w, data: 0.5 * jnp.mean((data["inputs"] @ w - data["targets"]) ** 2),
        fs.stack_clients(clients),
        rng.standard_normal(size),
        validation=validation,
    )

    def loss(w, data):
        return 0.5 * np.mean((data["inputs"] @ w - data["targets"]) ** 2)

    def grad(w, data):
        return data["inputs"].T @ (data["inputs"] @ w - data["targets"]) / len(data["targets"])

    return problem, clients, loss, grad


def weigh(problem, weighting, memory=None, up=True, seed=0):
    """The weights at the problem's start, in float64, and the federation that was asked."""
    with jax.enable_x64(True):
        placed = problem.on_device(jnp.float64)
        algorithm = fs.FedAvg(0.1, weighting=weighting)
        state = State.start(placed, algorithm, jax.random.key(seed))
        fed = Simulation(placed, state)
        methods = fs.participation.weighting.Methods(algorithm.assess, algorithm.tell_size)
        known = state.participation.weighting if memory is None else memory
        memory = jax.tree.map(jnp.asarray, known)
        key = jax.random.key(seed)
        weights, after = algorithm.weighting.weigh(fed, methods, memory, up, key)
        return np.asarray(weights), after, fed
