"""What decides on constrained CartPole: tolerance, β, step size, and TRPO's own numbers.

    python benchmarks/cartpole_sensitivity.py out.csv 300 3       # rounds, seeds
    python benchmarks/cartpole_sensitivity.py out.csv 500 8 few   # the best ones only

All settings and seeds that differ in numbers only are one program, mapped over problem, algorithm
and seed: minutes on a GPU, hours on a CPU.
"""

import itertools
import sys
import time
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

import fedsolve as fs
from fedsolve.federation.state import State
from fedsolve.runtimes.chunks import SLOTS, padded, spans_of
from fedsolve.runtimes.placement import numbers_on_device
from fedsolve.runtimes.simulation import advance
from tiny import tiny

AXES = (eqx.if_array(0), eqx.if_array(0), 0)
BASE = {"step_size": 1.0, "tolerance": 10.0, "beta": 0.05}
GRID = [
    {"step_size": eta, "tolerance": tolerance, "beta": beta}
    for eta, tolerance, beta in itertools.product(
        (1.0, 2.0), (0.0, 2.5, 5.0, 10.0, 20.0), (0.025, 0.05, 0.1, 0.2, 0.4, 1e6)
    )
]
ONE_BY_ONE = [
    BASE | {name: value}
    for name, values in {
        "step_size": (0.3, 3.0),
        "log_std": (-1.5, 0.0),
        "trace": (0.9, 0.99, 1.0),
        "radius": (0.005, 0.01, 0.05),
        "damping": (0.01, 1.0),
        "value_rate": (0.001, 0.01),
        "discount": (0.99,),
    }.items()
    for value in values
]

FEW = [
    {"step_size": 1.0, "tolerance": tolerance, "beta": beta, "log_std": log_std}
    for tolerance, beta in (
        (10.0, 0.05),
        (0.0, 0.05),
        (2.5, 0.05),
        (5.0, 0.04),
        (20.0, 0.025),
        (10.0, 0.033),
    )
    for log_std in (-0.7, 0.0)
]


@eqx.filter_jit
def advance_all(problems, algorithms, states, spans):
    def one(problem, algorithm, state):
        return advance(problem, algorithm, state, spans)

    return eqx.filter_vmap(one, in_axes=AXES, out_axes=(0, 1))(problems, algorithms, states)


def stack(*leaves):
    return jnp.stack(leaves) if eqx.is_array(leaves[0]) else leaves[0]


def run_all(settings, rounds, seeds, every, **fixed):
    """A table of reward, cost and σ for every setting, seed and evaluated round."""
    cells = [(setting, seed) for setting in settings for seed in range(seeds)]
    made, problems, algorithms = {}, [], []
    for setting, _ in cells:
        own = dict(setting)
        algorithm = fs.FedSGM(
            own.pop("step_size"), own.pop("tolerance"), fs.Soft(own.pop("beta")), participants=7
        )
        algorithms.append(numbers_on_device(algorithm, None))
        name = str(own)
        if name not in made:
            made[name] = fs.problems.cartpole(**own, **fixed).on_device()
        problems.append(made[name])
    keys = jnp.stack([jax.random.key(seed) for _, seed in cells])
    problem, algorithm = (jax.tree.map(stack, *each) for each in (problems, algorithms))
    states = eqx.filter_vmap(State.start, in_axes=AXES)(problem, algorithm, keys)
    spans = spans_of(0, rounds, every)
    assert len(spans) <= SLOTS
    _, entries = advance_all(problem, algorithm, states, padded(spans))
    found = {name: np.asarray(entries[name])[: len(spans)] for name in ("reward", "cost", "switch")}
    return pd.concat(
        pd.DataFrame(
            setting
            | fixed
            | {"seed": seed, "round": spans[:, 1]}
            | {name: values[:, row] for name, values in found.items()}
        )
        for row, (setting, seed) in enumerate(cells)
    )


def summary(table):
    """For every setting and seed: means over the last sixth of the rounds, and the first evaluated
    round with reward ≥ 195 at cost ≤ 30 (none: empty)."""
    late = table[table["round"] > table["round"].max() * 5 / 6]
    names = [name for name in table if name not in ("round", "reward", "cost", "switch")]
    found = late.groupby(names, dropna=False)[["reward", "cost", "switch"]].mean()
    good = table[(table["reward"] >= 195) & (table["cost"] <= 30)]
    found["reached"] = good.groupby(names, dropna=False)["round"].min()
    return found.round(2).reset_index()


def main(path, rounds, seeds, few):
    tables = []
    separate = [each for each in GRID if each["step_size"] == 1]
    everything = (GRID + ONE_BY_ONE, {"scaling": "common"}), (separate, {"scaling": "separate"})
    for settings, fixed in ((tiny(FEW, FEW[:2]), {"scaling": "common"}),) if few else everything:
        began = time.perf_counter()
        tables.append(run_all(settings, rounds, seeds, max(rounds // 50, 1), **fixed))
        seconds = time.perf_counter() - began
        print(f"{len(settings)} settings × {seeds}: {seconds:.0f} s", flush=True)
        summary(pd.concat(tables)).to_csv(path, index=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:] == ["few"])
