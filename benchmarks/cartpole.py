"""Constrained CartPole: environment steps a second, beside Gymnasium's, and seconds a round.

    python benchmarks/cartpole.py

Gymnasium is stepped as its users do: one environment in a Python loop, and its own vectorised
CartPole with as many environments as we play (NumPy). Forces are drawn beforehand; no policy.
"""

import time

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from rich import box
from rich.console import Console
from rich.table import Table

import fedsolve as fs
from fedsolve.problems.cartpole_environment import draw, fallen, move
from tiny import tiny

STEPS, ENVIRONMENTS = tiny((2000, 50), (20, 5))


def best(function, times=5):
    """Seconds of the best of several calls, after one that compiles."""
    function()
    found = []
    for _ in range(times):
        began = time.perf_counter()
        function()
        found.append(time.perf_counter() - began)
    return min(found)


def one_by_one():
    world = gymnasium.make("CartPole-v1")
    actions = np.random.default_rng(0).integers(0, 2, STEPS).tolist()

    def run():
        world.reset(seed=0)
        for action in actions:
            _, _, terminated, truncated, _ = world.step(action)
            if terminated or truncated:
                world.reset()

    return STEPS / best(run)


def vectorised():
    world = CartPoleVectorEnv(ENVIRONMENTS)
    actions = np.random.default_rng(0).integers(0, 2, (STEPS, ENVIRONMENTS))

    def run():
        world.reset(seed=0)
        for action in actions:
            world.step(action)

    return STEPS * ENVIRONMENTS / best(run)


def ours():
    forces = 20.0 * np.random.default_rng(0).integers(0, 2, (STEPS, ENVIRONMENTS)) - 10

    def step(states, force):
        states = move(states, force)
        ended = fallen(states)
        return jnp.where(ended[:, None], 0.01, states), ended

    run = jax.jit(lambda forces: jax.lax.scan(step, jnp.zeros((ENVIRONMENTS, 4)), forces))
    placed = jnp.asarray(forces, jnp.float32)
    return STEPS * ENVIRONMENTS / best(lambda: jax.block_until_ready(run(placed)))


def with_policy():
    problem = fs.problems.cartpole().on_device()
    run = jax.jit(lambda key: draw(problem.params, key, ENVIRONMENTS, STEPS, 200))
    return STEPS * ENVIRONMENTS / best(lambda: jax.block_until_ready(run(jax.random.key(0))))


def a_round(rounds=20):
    problem = fs.problems.cartpole(**tiny({}, {"steps": 20, "horizon": 20, "hidden": (4, 4)}))
    algorithm = fs.FedSGM(1.0, 10.0, fs.Soft(0.05), participants=7)
    began = time.perf_counter()
    fs.solve(problem, algorithm, rounds=1)
    first = time.perf_counter() - began

    def run():
        return fs.solve(problem, algorithm, rounds=rounds, evaluate_every=rounds)

    return first, best(run, 2) / rounds


def main():
    table = Table(box=box.SIMPLE)
    for name in ("environment steps", "a second", "to Gymnasium"):
        table.add_column(name, justify="right" if name != "environment steps" else "left")
    peer = one_by_one()
    table.add_row("Gymnasium, one environment", f"{peer:,.0f}", "1")
    for name, measure in (
        (f"Gymnasium, vectorised, {ENVIRONMENTS} environments", vectorised),
        (f"Fedsolve, {ENVIRONMENTS} environments", ours),
        ("the same with the 128-128 policy acting", with_policy),
    ):
        found = measure()
        table.add_row(name, f"{found:,.0f}", f"{found / peer:.0f}")
    Console().print(table)
    first, each = a_round()
    print(f"FedSGM, 7 of 10 clients × 1000 steps: {each:.2f} s a round, {first:.0f} s to compile")


if __name__ == "__main__":
    main()
