"""What every algorithm sends and keeps: the table of docs/cost.md.

    python benchmarks/costs.py

Least squares with d = 1000 parameters, 8 clients, everyone in every round, nothing compressed: the
bytes of a participant's second round, and what is kept, in vectors of d numbers, to two digits, so
that a few numbers more do not show.
"""

import jax
import jax.numpy as jnp
import numpy as np

import fedsolve as fs
from tiny import tiny

D, CLIENTS = tiny((1000, 8), (10, 4))


def vectors(tree: object) -> float:
    return sum(np.size(leaf) for leaf in jax.tree.leaves(tree)) / D


def main() -> None:
    rng = np.random.default_rng(0)
    parts = {
        "objective": lambda w, data: 0.5 * jnp.mean((data["x"] @ w - data["y"]) ** 2),
        "clients": {
            "x": rng.standard_normal((CLIENTS, 4, D)),
            "y": rng.standard_normal((CLIENTS, 4)),
        },
        "params": np.zeros(D),
    }
    free = fs.Problem(**parts)
    seen = fs.Problem(**parts, representation=lambda w, data: data["x"] * w)
    problem = fs.Problem(**parts, constraint=lambda w, data: jnp.mean(w**2) - 1)
    game = fs.Game(
        fs.games.RandomDiscovery(np.full((CLIENTS, 2), 0.5)),
        fs.games.LinearCost(np.full(CLIENTS, 0.3)),
        1,
        4,
        0.1,
    )
    algorithms = {
        "FedSGM": (problem, fs.FedSGM(1e-3)),
        "PenaltyFedAvg": (problem, fs.PenaltyFedAvg(1e-3, rho=1.0)),
        "LagrangianFedAvg": (problem, fs.LagrangianFedAvg(1e-3, dual_step=0.1)),
        "IPPConEx": (problem, fs.IPPConEx(1e-3)),
        "FedAvg": (free, fs.FedAvg(1e-3)),
        "FedProx": (free, fs.FedProx(1e-3)),
        "FedAvgAll": (free, fs.FedAvgAll(1e-3)),
        "SCAFFOLD": (free, fs.SCAFFOLD(1e-3)),
        "FedDyn": (free, fs.FedDyn(1e-3)),
        "MIFA": (free, fs.MIFA(1e-3)),
        "FedVARP": (free, fs.FedVARP(1e-3)),
        "FedAMD": (free, fs.FedAMD(1e-3)),
        "FedNova": (free, fs.FedNova(1e-3)),
        "MOON": (seen, fs.MOON(1e-3)),
        "FedAlt, FedSim": (free, fs.FedAlt(1e-3)),
        "F3AST": (free, fs.F3AST(1e-3, participants=CLIENTS)),
        "PPBC": (free, fs.PPBC(1e-3, epoch_length=100)),
        "FedADMM": (free, fs.FedADMM()),
        "IncentFedAvg": (free, fs.IncentFedAvg(game, 1e-3, 0.1)),
    }
    print("| algorithm | up | down | a client keeps | the server keeps |")
    print("|---|---|---|---|---|")
    for name, (task, algorithm) in algorithms.items():
        run = fs.solve(task, algorithm, rounds=2)
        each = [run.history[f"bytes_{way}"][-1] / (4 * D * CLIENTS) for way in ("up", "down")]
        kept = vectors(run.state.clients) / CLIENTS, vectors(run.state.server)
        print(f"| {name} | " + " | ".join(f"{value:.2g}" for value in (*each, *kept)) + " |")


if __name__ == "__main__":
    main()
