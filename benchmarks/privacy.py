"""f and g against ε: FedSGM under client-level privacy, beside FedAvg without its constraint.

    python benchmarks/privacy.py [neyman-pearson | adult] [--tiny]

Noise is chosen for each ε; f and g are exact values at the last parameters, means over seeds
(`evaluation="outside"`). `inf` is the run without privacy.
"""

import sys

import numpy as np

import fedsolve as fs

TINY = "--tiny" in sys.argv
ROUNDS, SEEDS = (5, 1) if TINY else (60, 5)
BUDGETS = (4.0,) if TINY else (1.0, 4.0, 16.0, 64.0)
CLIP = {"improve": 2.0, "measure": 1.0}


def problem_of(name: str) -> fs.Problem:
    """Return the problem; of Adult, one with enough clients for privacy of clients."""
    if name == "adult":
        return fs.problems.adult(clients=20 if TINY else 500)
    return fs.problems.neyman_pearson(clients=20)


def ends(problem: fs.Problem, algorithm: fs.Algorithm, epsilon: float) -> tuple[float, ...]:
    """Return f, g and the noise of an update's mean, at the end, as means over seeds."""
    unconstrained = isinstance(algorithm, fs.FedAvg)
    clip = {"improve": CLIP["improve"]} if unconstrained else CLIP
    privacy, deviation = None, 0.0
    if np.isfinite(epsilon):
        privacy = fs.Private.for_budget(epsilon, clip=clip, evaluation="outside")
        plan = privacy.plan(problem, algorithm, ROUNDS, ROUNDS)
        deviation = plan.deviation("improve")
        privacy = fs.Private(clip=clip, noise=plan.noise, evaluation="outside")
    found = []
    for seed in range(SEEDS):
        run = fs.solve(problem, algorithm, ROUNDS, seed, evaluate_every=ROUNDS, privacy=privacy)
        found.append([run.history["objective"][-1], run.history["constraint"][-1]])
    return (*np.mean(found, axis=0), deviation)


name = next((word for word in sys.argv[1:] if not word.startswith("-")), "neyman-pearson")
problem = problem_of(name)
cohort = problem.n // 2
METHODS = {
    "FedSGM hard, everyone": fs.FedSGM(0.3, 0.05),
    "FedSGM soft, everyone": fs.FedSGM(0.3, 0.05, fs.Soft(40.0)),
    "FedSGM hard, half": fs.FedSGM(0.3, 0.05, participants=cohort),
    "FedSGM soft, half": fs.FedSGM(0.3, 0.05, fs.Soft(40.0), participants=cohort),
    "FedAvg, everyone": fs.FedAvg(0.3),
}
print(f"{name}: {problem.n} clients, {problem.dimension} parameters, {ROUNDS} rounds")
print("| method | ε | f | g | noise of a mean |")
print("|---|---|---|---|---|")
for method, algorithm in METHODS.items():
    for epsilon in (*BUDGETS, np.inf):
        f, g, deviation = ends(problem, algorithm, epsilon)
        print(f"| {method} | {epsilon:g} | {f:.3f} | {g:+.3f} | {deviation:.3f} |", flush=True)
