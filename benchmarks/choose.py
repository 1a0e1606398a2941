"""What each algorithm needs without a constraint: the table of docs/choose.md.

    python benchmarks/choose.py

Least squares, 20 clients of 30 samples whose solutions differ, 10 parameters, until f − f* is a
thousandth of what it was, at most 1000 rounds; the step size (the penalty of FedADMM) is the best
of a grid, and 10 of 20 clients take part. Seconds are simulated: 50 ms one way, 10 Mbit/s up, 10 ms
for a gradient. With a constraint: constrained.py.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

import fedsolve as fs
from fedsolve.theory.reference import least
from tiny import tiny

STEPS = tiny([0.3, 0.1, 0.03, 0.01, 0.003, 0.001], [0.3, 0.1])
ROUNDS = tiny(1000, 4)


def main() -> None:
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
    print("| algorithm | best setting | rounds | messages | bytes, both ways | seconds |")
    print("|---|---|---|---|---|---|")
    for name, algorithm in algorithms.items():
        field = "penalty" if isinstance(algorithm, fs.FedADMM) else "step_size"
        values = [3.0, 1.0, 0.2, 0.1] if field == "penalty" else STEPS
        grid: dict[str, Any] = {field: values}
        steps = getattr(algorithm, "local_steps", getattr(algorithm, "local_iterations", 1))
        clock = fs.Clock(work=0.01 * int(steps), up=10e6, down=50e6, latency=0.05)
        runs = fs.sweep(
            problem, algorithm, ROUNDS, stop=fs.Reached(target), clock=clock, **grid
        ).runs
        reached = [run for run in runs if run.history["objective"][-1] <= target]
        if not reached:
            near = min(np.nanmin(run.history["objective"]) for run in runs) - lowest
            missing = f"not in {ROUNDS} ({near / (target - lowest):.1f} of it)"
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
    main()
