"""What decides on constrained CartPole: tolerance, β, step size, and TRPO's own numbers.

    python benchmarks/cartpole_sensitivity.py rule out.csv 500 5 common     # rounds, seeds, scaling
    python benchmarks/cartpole_sensitivity.py wide out.csv 300 3 common     # β below 2/ε, too
    python benchmarks/cartpole_sensitivity.py few out.csv 500 8 common      # the best of those

All settings and seeds that differ in numbers only are one program, mapped over problem, algorithm
and seed: minutes on a GPU, hours on a CPU. With `rule` every seed has its own first policy.
"""

import itertools
import sys
import time
from pathlib import Path

import pandas as pd

import batched
import fedsolve as fs
from tiny import tiny

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


# The paper's rule: β = 2/ε, or 2 to 3 times that; 1e6 is hard switching
RULE = [
    {"step_size": 1.0, "tolerance": tolerance, "beta": beta}
    for tolerance in (1.0, 2.5, 5.0, 10.0)
    for beta in (2 / tolerance, 4 / tolerance, 6 / tolerance, 1e6)
]
SETTINGS = {"rule": RULE, "wide": GRID + ONE_BY_ONE, "few": FEW}


def run_all(settings, rounds, seeds, every, instances, **fixed):
    """A table of reward, cost and σ for every setting, seed and evaluated round."""
    labels = [(setting, seed) for setting in settings for seed in range(seeds)]
    made, cells = {}, []
    for setting, seed in labels:
        own = dict(setting)
        algorithm = fs.FedSGM(
            own.pop("step_size"), own.pop("tolerance"), fs.Soft(own.pop("beta")), participants=7
        )
        own |= {"seed": seed if instances else 0}
        if str(own) not in made:
            made[str(own)] = fs.problems.cartpole(**own, **fixed)
        cells.append((made[str(own)], algorithm, seed))
    found = batched.histories(cells, rounds, every)
    return pd.concat(
        pd.DataFrame(
            setting
            | fixed
            | {"seed": seed, "round": history["round"]}
            | {name: history[name] for name in ("reward", "cost", "switch")}
        )
        for (setting, seed), history in zip(labels, found, strict=True)
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


def main(which, path, rounds, seeds, scaling):
    began = time.perf_counter()
    settings = tiny(SETTINGS[which], SETTINGS[which][:2])
    every = max(rounds // 50, 1)
    table = run_all(settings, rounds, seeds, every, which == "rule", scaling=scaling)
    print(f"{len(settings)} settings × {seeds}: {time.perf_counter() - began:.0f} s", flush=True)
    summary(table).to_csv(path, index=False)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
