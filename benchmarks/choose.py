"""What each algorithm needs on two small problems: the tables of docs/choose.md.

    python benchmarks/choose.py

Under a constraint: Neyman-Pearson classification, 20 clients, 10 of them a round, 5 local steps,
500 rounds, tolerance 0.05, 3 seeds. Each algorithm has the step of a grid with the least f among
those whose g is within the tolerance, else the one with the least g. Without one: least squares,
20 clients of 30 samples whose solutions differ, 10 parameters, until f − f* is a thousandth of what
it was, at most 1000 rounds; the step size (the penalty of FedADMM) is the best of a grid, and 10 of
20 clients take part. Seconds are simulated: 50 ms one way, 10 Mbit/s up, 10 ms for a gradient.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

import fedsolve as fs
from fedsolve.theory.reference import least
from tiny import tiny

STEPS = tiny([0.3, 0.1, 0.03, 0.01, 0.003, 0.001], [0.3, 0.1])
CONSTRAINED, UNCONSTRAINED = tiny((500, 1000), (4, 4))  # rounds
SEEDS = tiny(range(3), range(1))
LATE = tiny(100, 2)  # rounds whose means are shown


def constrained() -> None:
    problem = fs.problems.neyman_pearson(clients=20)
    common: dict[str, Any] = {"tolerance": 0.05, "participants": 10}
    algorithms = {
        "FedSGM, hard": fs.FedSGM(0.1, **common, local_steps=5),
        "FedSGM, soft (β = 40)": fs.FedSGM(0.1, **common, local_steps=5, switching=fs.Soft(40.0)),
        "PenaltyFedAvg, ρ = 0.5": fs.PenaltyFedAvg(0.1, **common, local_steps=5, rho=0.5),
        "PenaltyFedAvg, ρ = 5": fs.PenaltyFedAvg(0.1, **common, local_steps=5, rho=5.0),
        "IPPConEx, 5 steps": fs.IPPConEx(0.1, **common, steps=5),
        "FedAvg, no constraint": fs.FedAvg(0.1, participants=10, local_steps=5),
    }
    print("| algorithm | best step | f | g | evaluations with g ≤ ε | bytes up | bytes down |")
    print("|---|---|---|---|---|---|---|")
    for name, algorithm in algorithms.items():
        swept = fs.sweep(
            problem, algorithm, CONSTRAINED, seeds=SEEDS, step_size=[3.0, 1.0, *STEPS[:3]]
        )
        found = []
        for step in dict.fromkeys(run.settings["step_size"] for run in swept.runs):
            runs = [run.history for run in swept.runs if run.settings["step_size"] == step]
            if all(len(history["round"]) == CONSTRAINED for history in runs):
                f, g = (
                    np.array([history[key][-LATE:] for history in runs])
                    for key in ("objective", "constraint")
                )
                found.append(
                    (g.mean() > 0.05, f.mean() if g.mean() <= 0.05 else g.mean(), step, f, g)
                )
        *_, step, f, g = min(found, key=lambda each: each[:2])
        last = swept.runs[0].history
        sizes = [f"{last[f'bytes_{way}_total'][-1] / 1000:.0f} kB" for way in ("up", "down")]
        within = f"{100 * (g <= 0.05).mean():.0f} %"
        row = [name, f"{step:g}", f"{f.mean():.4f}", f"{g.mean():.4f}", within, *sizes]
        print("| " + " | ".join(row) + " |", flush=True)


def unconstrained() -> None:
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((20, 30, 10)) * np.linspace(0.5, 2, 10)
    solutions = rng.standard_normal(10) + 0.5 * rng.standard_normal((20, 10))
    outputs = np.einsum("jsd,jd->js", inputs, solutions)
    problem = fs.Problem(
        objective=lambda w, data: 0.5 * jnp.mean((data["x"] @ w - data["y"]) ** 2),
        clients={"x": inputs, "y": outputs},
        params=np.zeros(10),
    )
    lowest = least(problem)
    target = lowest + 1e-3 * (0.5 * np.mean(outputs**2) - lowest)
    common: dict[str, Any] = {"participants": 10}
    algorithms = {
        "FedAvg, 1 local step": fs.FedAvg(0.1, **common),
        "FedAvg, 5 local steps": fs.FedAvg(0.1, **common, local_steps=5),
        "FedProx, 5": fs.FedProx(0.1, **common, local_steps=5, proximity=0.1),
        "SCAFFOLD, 5": fs.SCAFFOLD(0.1, **common, local_steps=5),
        "FedDyn, 5": fs.FedDyn(0.1, **common, local_steps=5),
        "FedAvgAll, 5": fs.FedAvgAll(0.1, **common, local_steps=5),
        "FedADMM, k_0 = 5": fs.FedADMM(**common, local_iterations=5),
        "PPBC, everyone": fs.PPBC(0.1),
    }
    print("\n| algorithm | best setting | rounds | messages | bytes, both ways | seconds |")
    print("|---|---|---|---|---|---|")
    for name, algorithm in algorithms.items():
        field = "penalty" if isinstance(algorithm, fs.FedADMM) else "step_size"
        values = [3.0, 1.0, 0.2, 0.1] if field == "penalty" else STEPS
        grid: dict[str, Any] = {field: values}
        steps = getattr(algorithm, "local_steps", getattr(algorithm, "local_iterations", 1))
        clock = fs.Clock(work=0.01 * int(steps), up=10e6, down=50e6, latency=0.05)
        runs = fs.sweep(
            problem, algorithm, UNCONSTRAINED, stop=fs.Reached(target), clock=clock, **grid
        ).runs
        reached = [run for run in runs if run.history["objective"][-1] <= target]
        if not reached:
            near = min(np.nanmin(run.history["objective"]) for run in runs) - lowest
            missing = f"not in {UNCONSTRAINED} ({near / (target - lowest):.1f} of it)"
            print(f"| {name} | – | {missing} | | | |")
            continue
        best = min(reached, key=lambda run: run.rounds)
        last = {key: values[-1] for key, values in best.history.items()}
        size = (last["bytes_up_total"] + last["bytes_down_total"]) / 1000
        setting = f"{field} {best.settings[field]:g}"
        messages = last["messages_up_total"] + last["messages_down_total"]
        row = [name, setting, best.rounds, messages, f"{size:.0f} kB"]
        print(
            "| " + " | ".join(map(str, [*row, f"{last['seconds_total']:.1f}"])) + " |", flush=True
        )


if __name__ == "__main__":
    constrained()
    unconstrained()
