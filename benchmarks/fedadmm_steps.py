"""The steps of FedADMM's baselines, which its paper does not give: averagings by step size.

    python benchmarks/fedadmm_steps.py             # linear regression, Example 5.1
    python benchmarks/fedadmm_steps.py qsar        # logistic regression, QSAR oral toxicity, 5.2
    python benchmarks/fedadmm_steps.py newsgroups  # the same on 20 Newsgroups, in place of real-sim
    python benchmarks/fedadmm_steps.py qsar 1 30   # some k_0

m = 100, ρ = 0.5. A baseline stops where the paper lets it: f ≤ f_ADMM + 2(1 + |f_ADMM|)·1e-4, with
f_ADMM what FedADMM has at its own rule (30). Steps are 2^e / (r k_0), r the clients' mean Lipschitz
constant; a cell is the median over two instances, one of the real data (>: not reached), and the
least is marked.

The experiments `fedadmm-figure-1` to `-4` have one step for k_0 = 1 and steps inverse to k_0 for
all others, whatever ρ is.
"""

import sys

import numpy as np

import fedsolve as fs
from tiny import tiny

INSTANCES = tiny({"linear": 2, "qsar": 1, "newsgroups": 1}, {"linear": 1})
ROUNDS, HALF = tiny({"linear": 400, "qsar": 40, "newsgroups": 40}, {"linear": 20}), 50
EXPONENTS = tiny(range(-3, 4), range(-2, 0))
LOCAL = tiny([1, 10], [1])
SIZE = tiny(100, 5)
BASELINES = {
    "FedAvg": fs.FedAvgAll,
    "FedProx": fs.FedProx,
    "FedAlt": fs.FedAlt,
    "FedSim": fs.FedSim,
}


def problems(kind: str) -> list[fs.Problem]:
    instances = INSTANCES[kind]
    if kind == "linear":
        return [fs.problems.linear_regression(size=SIZE, seed=i) for i in range(instances)]
    if kind == "newsgroups":
        return [fs.problems.newsgroups(clients=100, seed=i) for i in range(instances)]
    return [fs.problems.logistic(unit_columns=True, seed=i) for i in range(instances)]


def main(kind: str, local: list[int]) -> None:
    accuracy, limit = 1e-3 if kind == "linear" else 1e-7, ROUNDS[kind]
    found: dict[str, list[list[int]]] = {}
    known: dict[str, list[int]] = {}
    soon: dict[str, list[int]] = {}
    for problem in problems(kind):
        rule = fs.StationaryForSize(accuracy)
        runs = [
            fs.solve(problem, fs.FedADMM(participants=HALF, local_iterations=k), 400, stop=rule)
            for k in local
        ]
        for k, run in zip(local, runs, strict=True):
            known.setdefault(f"k_0 = {k}: FedADMM", []).append(run.rounds)
        reached = float(runs[-1].history["objective"][-1])
        enough = fs.Reached(reached + 2e-4 * (1 + abs(reached)))
        for k in local:
            again = fs.FedADMM(participants=HALF, local_iterations=k)
            run = fs.solve(problem, again, limit, stop=enough)
            soon.setdefault(f"k_0 = {k}: FedADMM", []).append(run.rounds)
        curvature = float(problem.n * np.mean(runs[0].state.clients.smoothness))
        print(f"f_ADMM {reached:.6g}, r {curvature:.4g}", flush=True)
        for k in local:
            steps = [2.0**e / curvature / k for e in EXPONENTS]
            for name, algorithm in BASELINES.items():
                made = algorithm(steps[0], participants=HALF, local_steps=k)
                sweep = fs.sweep(problem, made, limit, stop=enough, step_size=steps)
                done = [
                    run.rounds if run.history["objective"][-1] <= enough.objective else limit + 1
                    for run in sweep.runs
                ]
                found.setdefault(f"k_0 = {k}: {name}", []).append(done)
    print("| step · r k_0 | " + " | ".join(f"2^{e}" for e in EXPONENTS) + " |")
    print("|---" * (len(EXPONENTS) + 1) + "|")
    for label, rows in found.items():
        medians = np.median(np.asarray(rows, float), axis=0)
        cells = [f">{limit}" if x > limit else f"{x:.0f}" for x in medians]
        best = int(np.argmin(medians))
        cells[best] = f"**{cells[best]}**"
        print(f"| {label} | {' | '.join(cells)} |")
    for label, rounds in known.items():
        near = np.median(soon[label])
        print(f"{label}: {near:.0f} averagings until there, {np.median(rounds):.0f} until (30)")


if __name__ == "__main__":
    words = sys.argv[1:]
    kind = words.pop(0) if words and words[0] in ROUNDS else "linear"
    main(kind, [int(word) for word in words] or LOCAL)
