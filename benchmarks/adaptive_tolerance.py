"""FedSGM with a plain and an adaptive tolerance at different numbers of participants.

    python benchmarks/adaptive_tolerance.py

Every seed is another division of the data. The table is in docs/neyman-pearson.md.
"""

import numpy as np

import fedsolve as fs
from tiny import tiny

ROUNDS, SEEDS = tiny((500, 5), (5, 2))
COHORTS = tiny((2, 5, 10, 20), (2,))
TOLERANCES = {"plain": 0.05, "0.95": fs.Adaptive(0.05, 0.95), "0.99": fs.Adaptive(0.05, 0.99)}


def row(switching: fs.Switching, participants: int, tolerance: fs.Adaptive | float) -> str:
    """Run one setting: mean f and g, the share of g over 0.05, and feasible best rounds."""
    algorithm = fs.FedSGM(0.3, tolerance, switching, participants=participants, local_steps=5)
    runs = [
        fs.sweep(fs.problems.neyman_pearson(20, seed), algorithm, ROUNDS, seeds=[seed]).runs[0]
        for seed in range(SEEDS)
    ]
    f, g = (
        np.concatenate([run.history[name][-100:] for run in runs])
        for name in ("objective", "constraint")
    )
    feasible = sum(run.best is not None and run.best.feasible for run in runs)
    over = 100 * (g > 0.05).mean()
    means = f"f {f.mean():.4f}  g {g.mean():.4f}  largest g {g.max():.4f}  over {over:.0f} %"
    return f"{means}  feasible best {feasible} of {SEEDS}"


if __name__ == "__main__":
    for name, switching in {"hard": fs.Hard(), "soft": fs.Soft(40)}.items():
        for participants in COHORTS:
            for label, tolerance in TOLERANCES.items():
                found = row(switching, participants, tolerance)
                print(f"{name:5} {participants / 20:<5} {label:6} {found}", flush=True)
