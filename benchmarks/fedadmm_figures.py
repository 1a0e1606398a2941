"""Figures 1 to 4 of FedADMM's paper: objective against CR, and CR by k_0, ρ and m.

    python benchmarks/fedadmm_figures.py 2 fedadmm-figure-2.png     # the figure, and its numbers
    python benchmarks/fedadmm_figures.py 2 out.png 20 5             # instances, and of baselines

Example 5.1 with n = m = 100, k_0 = 10 and ρ = 0.5 where the figure does not vary them. FedADMM
stops by the literal rule (30), the others at f ≤ f_ADMM + 2(1 + |f_ADMM|)·1e-4; CR is two for each
averaging, (29). The paper does not give the baselines' step sizes: each runs with all of `STEPS`
as one program, and the best is shown. A program is compiled once for all instances.
"""

import sys
import time

import numpy as np
from matplotlib.figure import Figure
from matplotlib.style import context

import fedsolve as fs
from fedsolve.plots import COLORS, STYLE
from fedsolve.theory.fedadmm import communication_rounds, tolerance

STEPS = [0.005, 0.01, 0.02, 0.04, 0.08]
BASELINES = {
    "FedAvg": fs.FedAvgAll,
    "FedProx": fs.FedProx,
    "FedAlt": fs.FedAlt,
    "FedSim": fs.FedSim,
}
VALUES = {
    "1": ("k_0", [1, 10, 30]),
    "2": ("k_0", [1, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50]),
    "3": ("ρ", [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]),
    "4": ("m", [50, 100, 150, 200]),
}
OF_BASELINES = {"1": [1, 10, 30], "2": [1, 5, 10, 30], "3": [0.1, 0.5, 0.9], "4": [50, 100, 200]}
ROUNDS = 400


def setting(figure, value):
    """(m, participants, k_0)."""
    m = value if figure == "4" else 100
    share = value if figure == "3" else 0.5
    return m, round(share * m), value if figure in "12" else 10


def admm(m, participants, k0, seed):
    problem = fs.problems.linear_regression(clients=m, size=100, seed=seed)
    algorithm = fs.FedADMM(participants=participants, local_iterations=k0)
    rule = fs.Stationary(tolerance(problem))
    return problem, fs.solve(problem, algorithm, 1000, seed=seed, stop=rule)


def baseline(kind, problem, target, participants, k0, seed):
    """The run of the best step size: the fewest averagings, then the smallest f."""
    algorithm = BASELINES[kind](STEPS[0], participants=participants, local_steps=k0)
    stop, rounds = fs.Reached(target), ROUNDS if k0 < 10 else ROUNDS // 2
    swept = fs.sweep(problem, algorithm, rounds, seeds=[seed], stop=stop, step_size=STEPS)
    return min(swept.runs, key=lambda run: (run.rounds, run.history["objective"][-1]))


def main(figure, path, instances=20, of_baselines=3):
    name, values = VALUES[figure]
    curves = {kind: {} for kind in ("FedADMM", *BASELINES)}
    last = {}
    for value in values:
        m, participants, k0 = setting(figure, value)
        began, found = time.perf_counter(), {kind: [] for kind in curves}
        for seed in range(instances):
            problem, run = admm(m, participants, k0, seed)
            found["FedADMM"].append((run, None))
            if seed < of_baselines and value in OF_BASELINES[figure]:
                f = float(run.history["objective"][-1])
                target = f + 2e-4 * (1 + abs(f))
                for kind in BASELINES:
                    best = baseline(kind, problem, target, participants, k0, seed)
                    reached = best.history["objective"][-1] <= target
                    found[kind].append((best, reached))
        for kind, runs in found.items():
            if not runs:
                continue
            cr = np.median([communication_rounds(run.rounds) for run, _ in runs])
            note = ""
            if kind != "FedADMM":
                steps = [run.settings["step_size"] for run, _ in runs]
                note = f", step {np.median(steps):g}"
                if not all(reached for _, reached in runs):
                    note += f", {sum(not r for _, r in runs)} of {len(runs)} not reached"
            curves[kind][value] = cr
            last[kind, value] = runs[0][0]
            print(f"{name} = {value:<4} {kind:<8} CR {cr:5.0f}{note}", flush=True)
        print(f"           {time.perf_counter() - began:.1f} s", flush=True)
    with context(STYLE):
        if figure == "1":
            picture = objectives(last, values)
        else:
            picture = Figure(figsize=(3.6, 2.7), layout="constrained")
            axis = picture.subplots()
            shown = {kind: points for kind, points in curves.items() if points}
            for color, (kind, points) in zip(COLORS, shown.items(), strict=False):
                axis.plot(list(points), list(points.values()), "o-", ms=3, color=color, label=kind)
            axis.set(xlabel=f"${name}$" if name == "k_0" else name, ylabel="CR", ylim=(0, None))
            axis.legend(fontsize=7)
        picture.savefig(path, dpi=110)


def objectives(last, values):
    picture = Figure(figsize=(2.6 * len(values), 2.6), layout="constrained")
    for axis, value in zip(picture.subplots(1, len(values), sharey=True), values, strict=True):
        for color, kind in zip(COLORS, ("FedADMM", *BASELINES), strict=False):
            history = last[kind, value].history
            axis.plot(2 * history["round"], history["objective"], color=color, label=kind)
        axis.set(title=f"$k_0 = {value}$", xlabel="CR", xscale="log")
    picture.axes[0].set(ylabel="Objective $f(w)$")
    picture.axes[-1].legend(fontsize=7)
    return picture


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
