"""f and g against ε: FedSGM under client-level privacy, beside FedAvg without its constraint.

    python benchmarks/privacy.py [neyman-pearson] [adult] [tcga-brca] [--tiny]

Noise is chosen for each ε; a cell has exact f and g at the last parameters, means over seeds
(`evaluation="outside"`). FedAvg spends its whole budget on updates. Without a name all three
problems are studied; those without data are left out.
"""

import dataclasses
import sys
import time

import jax.numpy as jnp
import numpy as np

import fedsolve as fs

TINY = "--tiny" in sys.argv
BUDGETS = (4.0, np.inf) if TINY else (1.0, 4.0, 16.0, 64.0, np.inf)


@dataclasses.dataclass(frozen=True)
class Study:
    """A problem, and how it is solved.

    Args:
        problem: The problem.
        step: The step size.
        tolerance: Up to which g is feasible.
        clip: The largest norm of an update and of a constraint value.
        rounds: The rounds of a run.
        seeds: How many seeds.
        beta: β of soft switching.
    """

    problem: fs.Problem
    step: float
    tolerance: float
    clip: dict[str, float]
    rounds: int = 5 if TINY else 60
    seeds: int = 1 if TINY else 5
    beta: float = 40.0


def neyman_pearson() -> Study:
    """Twenty clients with a bound on the loss of one class."""
    problem = fs.problems.neyman_pearson(clients=20)
    return Study(problem, 0.3, 0.05, {"improve": 2.0, "measure": 1.0})


def adult() -> Study:
    """Three hundred clients with a bound on the gap between the sexes, and a small network."""
    problem = fs.problems.adult(clients=20 if TINY else 300, batch_size=64, width=16, depth=1)
    clip = {"improve": 0.5, "measure": 50.0}
    return Study(problem, 0.5, 0.05, clip, rounds=5 if TINY else 60, seeds=1 if TINY else 2)


def spread(model, data) -> jnp.ndarray:
    """g_j: how far the scores of a region's patients spread, at most 1."""
    scores = jnp.sum(data["x"] * jnp.ravel(model.weight), axis=1)
    return jnp.sum(jnp.where(data["mask"], scores**2, 0)) / jnp.sum(data["mask"]) - 1.0


def tcga_brca() -> Study:
    """Six regions, Cox regression with a bound on the spread of scores."""
    cox = fs.problems.tcga_brca(batch_size=None)
    problem = fs.Problem(cox.given[0], cox.samples, cox.params, spread)
    return Study(problem, 0.02, 0.0, {"improve": 1.0, "measure": 1.0})


def ends(study: Study, algorithm: fs.Algorithm, epsilon: float) -> str:
    """Return f and g at the end, as means over seeds."""
    problem, rounds, clip = study.problem, study.rounds, dict(study.clip)
    if isinstance(algorithm, fs.FedAvg):
        del clip["measure"]
    privacy = None
    if np.isfinite(epsilon):
        privacy = fs.Private.for_budget(epsilon, clip=clip, evaluation="outside")
        noise = privacy.plan(problem, algorithm, rounds, rounds).noise
        privacy = fs.Private(clip=clip, noise=noise, evaluation="outside")
    found = []
    for seed in range(study.seeds):
        run = fs.solve(problem, algorithm, rounds, seed, evaluate_every=rounds, privacy=privacy)
        found.append([run.history["objective"][-1], run.history["constraint"][-1]])
    f, g = np.mean(found, axis=0)
    return f"{f:.3f} / {g:+.3f}"


STUDIES = {"neyman-pearson": neyman_pearson, "adult": adult, "tcga-brca": tcga_brca}
for name in [word for word in sys.argv[1:] if not word.startswith("-")] or STUDIES:
    began = time.perf_counter()
    try:
        study = STUDIES[name]()
    except fs.InvalidInput as reason:
        print(f"{name} is left out: {reason}")
        continue
    problem, given = study.problem, (study.step, study.tolerance)
    soft, half = fs.Soft(study.beta), problem.n // 2
    methods = {
        "FedSGM hard, everyone": fs.FedSGM(*given),
        "FedSGM soft, everyone": fs.FedSGM(*given, soft),
        "FedSGM hard, half": fs.FedSGM(*given, participants=half),
        "FedSGM soft, half": fs.FedSGM(*given, soft, participants=half),
        "FedAvg, everyone": fs.FedAvg(study.step),
    }
    print(
        f"\n{name}: {problem.n} clients, {problem.dimension} parameters, {study.rounds} rounds, "
        f"tolerance {study.tolerance:g}, clips {study.clip}, {study.seeds} seeds\n"
    )
    shown = [f"ε = {budget:g}" if np.isfinite(budget) else "no privacy" for budget in BUDGETS]
    print("| method | " + " | ".join(shown) + " |")
    print("|---" * (len(BUDGETS) + 1) + "|")
    for method, algorithm in methods.items():
        cells = [ends(study, algorithm, budget) for budget in BUDGETS]
        print(f"| {method} | " + " | ".join(cells) + " |", flush=True)
    print(f"\n({time.perf_counter() - began:.0f} s)", flush=True)
