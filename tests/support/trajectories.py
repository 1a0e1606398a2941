"""The iterates of a run."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from fedsolve.federation.state import State
from fedsolve.runtimes.simulation import Simulation


def trajectory(problem, algorithm, rounds, seed=0):
    """Every w after a round, as the run itself goes through them."""
    path = []
    with jax.enable_x64(True):
        placed = problem.on_device(jnp.float64)
        tuned = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, float) else x, algorithm)
        state = State.start(placed, tuned, jax.random.key(seed))
        step = eqx.filter_jit(lambda p, a, s: Simulation(p, s).play(a))
        path.append(np.asarray(state.w))
        for _ in range(rounds):
            state, _ = step(placed, tuned, state)
            path.append(np.asarray(state.w))
    return np.asarray(path), state
