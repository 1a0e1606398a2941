"""Algorithms for problems with constraints, at equal bytes, tuned by one rule: docs/baselines.md.

    python benchmarks/constrained.py neyman-pearson --out docs/results/constrained
    python benchmarks/constrained.py adult-sex adult-race-sex tcga-brca --out …

Every algorithm may send as many bytes, both ways together, as FedSGM with hard switching and no
compression does in a fixed number of rounds. All have the same grid of step sizes; those with a
number of their own (ρ, the step of a multiplier, …) three values of it besides. The rule that
chooses is `fedsolve.papers.tuning`: of the settings with mean g ≤ ε the one with the least mean f,
else the one with the least mean g; a setting that diverges is left out. Means are over the last
fifth of the evaluations. A seed is another division of the data or start; numbers are over all
seeds. All of them choose the settings, on Adult the first one alone.
"""

import argparse
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import fedsolve as fs
from fedsolve.papers import tuning
from fedsolve.problems.survival import cox_loss_in_order
from tiny import tiny

EVALUATIONS = tiny(50, 2)
SOME = tiny(51, 2)  # rounds that show how many bytes a round takes
TOP = fs.TopK(0.1)
LEVEL = 0.71  # the loss of a region; without a constraint the least mean has one of 0.734


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem, and what is common to the algorithms on it."""

    problem: Callable[[int], fs.Problem]  # of a seed
    tolerance: float
    participants: int | None  # None: everyone
    local_steps: int
    rounds: int  # of FedSGM without compression: this is the budget
    steps: Sequence[float]
    seeds: int
    choosing: int  # the number of seeds that choose the settings
    convex: bool = False  # and means: ProxAL applies
    each_client: bool = False


def adult(constraint: Any) -> Callable[[int], fs.Problem]:
    return lambda seed: fs.problems.adult(constraint=constraint, seed=seed)


def regions(seed: int) -> fs.Problem:
    """Fed-TCGA-BRCA with scaled features: every region's loss is to be at most `LEVEL`."""
    part = fs.datasets.load("tcga_brca").train
    columns = {name: part[name] for name in ("x", "time", "event")}
    columns["x"] = (part["x"] - part["x"].mean(axis=0)) / part["x"].std(axis=0)
    each = [{k: v[part["region"] == code] for k, v in columns.items()} for code in range(6)]
    return fs.Problem(
        cox_loss_in_order,
        fs.stack_clients(each),
        params=0.1 * np.random.default_rng(seed).standard_normal(part["x"].shape[1]),
        constraint=fs.EachClient(over_level),
    )


def over_level(w: Any, data: Any) -> Any:
    return cox_loss_in_order(w, data) - LEVEL


GROUPS = {"kind": "demographic_parity", "at_most": 0.1, "group": "race and sex"}
CASES = {
    "neyman-pearson": Case(
        lambda seed: fs.problems.neyman_pearson(seed=seed),
        0.05, 10, 5, tiny(500, 3), tiny([3, 1, 0.3, 0.1, 0.03], [0.1]), tiny(3, 1), 3, convex=True,
    ),
    "adult-sex": Case(
        adult("demographic_parity"),
        0.05, 5, 2, tiny(200, 2), tiny([0.3, 0.1], [0.1]), tiny(3, 1), 1,
    ),
    "adult-race-sex": Case(
        adult(GROUPS),
        0.0, 5, 2, tiny(200, 2), tiny([0.3, 0.1], [0.1]), tiny(3, 1), 1,
    ),
    "tcga-brca": Case(
        regions, 0.0, None, 10, tiny(200, 3), tiny([0.3, 0.1, 0.03, 0.01], [0.1]), tiny(3, 1),
        3, convex=True, each_client=True,
    ),
}  # fmt: skip


def algorithms(case: Case) -> dict[str, tuple[fs.Algorithm, dict[str, list[float]]]]:
    """Return the algorithms, and the grid of each one's own numbers."""
    some: dict[str, Any] = {"participants": case.participants}
    local: dict[str, Any] = some | {"local_steps": case.local_steps}
    told: dict[str, Any] = {"tolerance": case.tolerance}
    soft = fs.Soft(2 / (case.tolerance or 0.05))
    found: dict[str, tuple[fs.Algorithm, dict[str, list[float]]]] = {
        "FedAvg (no constraint)": (fs.FedAvg(0.1, **local), {}),
        "FedSGM, hard": (fs.FedSGM(0.1, **told, **local), {}),
        "FedSGM, soft": (fs.FedSGM(0.1, **told, **local, switching=soft), {}),
        "FedSGM, soft, Top-K 0.1": (
            fs.FedSGM(0.1, **told, **local, switching=soft, uplink=TOP, downlink=TOP),
            {},
        ),
        "Safe-EF, Top-K 0.1": (fs.SafeEF(0.1, **told, uplink=TOP, downlink=TOP), {}),
        "PenaltyFedAvg": (
            fs.PenaltyFedAvg(0.1, **told, **local, rho=1.0),
            {"rho": [1.0, 5.0, 25.0]},
        ),
        "LagrangianFedAvg": (
            fs.LagrangianFedAvg(0.1, **told, **local, dual_step=1.0),
            {"dual_step": [0.1, 1.0, 10.0]},
        ),
        "IPP-ConEx": (
            fs.IPPConEx(0.1, **told, **some, proximal=0.1, constraint_proximal=0.1),
            {"dual_step": [0.1, 1.0, 10.0]},
        ),
    }
    if case.participants is not None:
        careful = fs.Adaptive(case.tolerance, 0.95)
        found["FedSGM, soft, Adaptive"] = fs.FedSGM(0.1, careful, soft, **local), {}
    if case.convex:
        found["ProxAL"] = (
            fs.ProxAL(
                0.1, **told, local_steps=case.local_steps, each_client=case.each_client, steps=5
            ),
            {"beta": [1.0, 10.0, 100.0]},
        )
    if case.each_client:  # these two make clients' losses alike, and see no constraint
        found["QFedAvg"] = fs.QFedAvg(0.1, fairness=1.0, **local), {"fairness": [0.5, 2.0, 5.0]}
        found["AFL"] = fs.AFL(0.1, weight_step=0.1, **local), {"weight_step": [0.01, 0.1, 1.0]}
    return found


def spent(run: fs.Run) -> float:
    return sum(float(run.history[f"bytes_{way}_total"][-1]) for way in ("up", "down"))


def runs_of(
    problem: fs.Problem, algorithm: fs.Algorithm, seed: int, budget: float | None, rounds: int,
    grid: dict[str, list[float]],
) -> list[fs.Run]:  # fmt: skip
    """Run all settings of a grid for a seed, until the budget of bytes is used up."""
    first: dict[str, Any] = {key: values[:1] for key, values in grid.items()}
    settings: dict[str, Any] = dict(grid)
    if budget is not None:
        # The first round differs from the others: w is known, or multipliers are still zero.
        few = [spent(fs.sweep(problem, algorithm, k, [seed], **first).runs[0]) for k in (1, SOME)]
        rounds = 1 + int((budget - few[0]) // ((few[1] - few[0]) / (SOME - 1)))
    every = max(rounds // EVALUATIONS, 1)
    return fs.sweep(problem, algorithm, rounds, [seed], evaluate_every=every, **settings).runs


def measured(name: str, case: Case, chosen: dict[str, float], runs: Sequence[fs.Run]) -> Any:
    """Return a row of the table."""
    late = [slice(-max(len(run.history["round"]) // tuning.LATE, 1), None) for run in runs]
    f, g = (
        [run.history[key][own] for run, own in zip(runs, late, strict=True)]
        for key in ("objective", "constraint")
    )
    settings = ", ".join(f"{key} {value:g}" for key, value in chosen.items())
    means = [part.mean() for part in f]
    return {
        "algorithm": name,
        "settings": settings,
        "f": np.mean(means),
        "± f": np.std(means),
        "mean g": np.mean([part.mean() for part in g]),
        "worst g": np.max([part.max() for part in g]),
        "over ε": np.mean([(part > case.tolerance).mean() for part in g]),
        "feasible best": f"{sum(bool(r.best and r.best.feasible) for r in runs)} of {len(runs)}",
        "rounds": runs[0].rounds,
        "kB up": float(runs[0].history["bytes_up_total"][-1]) / 1000,
        "kB down": float(runs[0].history["bytes_down_total"][-1]) / 1000,
    }


def table(case: Case) -> pd.DataFrame:
    """Tune and run every algorithm on a case."""
    rows, budget = [], None
    problems = [case.problem(seed) for seed in range(case.seeds)]
    wanted = algorithms(case)
    first = "FedSGM, hard"
    for name in [first, *(other for other in wanted if other != first)]:
        algorithm, own = wanted[name]
        grid = {"step_size": [float(step) for step in case.steps], **own}
        choosing = range(min(case.choosing, case.seeds))
        try:
            tried = [
                runs_of(problems[seed], algorithm, seed, budget, case.rounds, grid)
                for seed in choosing
            ]
        except fs.InvalidInput as refusal:
            print(f"{name} is left out: {refusal}", flush=True)
            continue
        budget = spent(tried[0][0]) if budget is None else budget
        combinations = [
            dict(zip(grid, point, strict=True)) for point in itertools.product(*grid.values())
        ]
        found = [tuning.means(number, runs) for number, runs in enumerate(zip(*tried, strict=True))]
        best = int(tuning.choose(found, case.tolerance).step)
        chosen = {key: [value] for key, value in combinations[best].items()}
        rest = [
            run
            for seed in range(len(tried), case.seeds)
            for run in runs_of(problems[seed], algorithm, seed, budget, case.rounds, chosen)
        ]
        runs = [*(each[best] for each in tried), *rest]
        rows.append(measured(name, case, combinations[best], runs))
        print(rows[-1], flush=True)
    return pd.DataFrame(rows)


def markdown(found: pd.DataFrame) -> str:
    """Write the table as Markdown."""
    head = [
        "algorithm",
        "chosen",
        "f",
        "mean g",
        "worst g",
        "over ε",
        "feasible best",
        "rounds",
        "kB up, down",
    ]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for _, row in found.iterrows():
        cells = [
            row["algorithm"], row["settings"], f"{row['f']:.4f} ± {row['± f']:.4f}",
            f"{row['mean g']:.4f}", f"{row['worst g']:.4f}", f"{100 * row['over ε']:.0f} %",
            row["feasible best"], str(row["rounds"]), f"{row['kB up']:.0f}, {row['kB down']:.0f}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cases", nargs="+", choices=CASES)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    for name in given.cases:
        found = table(CASES[name])
        print(f"\n{name}\n\n{markdown(found)}\n", flush=True)
        if given.out is not None:
            given.out.mkdir(parents=True, exist_ok=True)
            found.to_csv(given.out / f"{name}.csv", index=False, float_format="%.6g")
