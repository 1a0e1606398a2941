"""The numbers of docs/games.md: what payments change, and how long 2000 players take.

    python benchmarks/games.py

The table does not depend on the machine; seconds do, and are of processor time, compiling included.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

import fedsolve as fs
from tiny import tiny

PLAYERS = tiny(2000, 20)


def payments() -> None:
    """Twenty players who would each be worth 500 elsewhere."""
    rng = np.random.default_rng(0)
    Q = rng.dirichlet(np.full(10, 0.5), 20)
    theta = rng.uniform(0, 3, 20) * (Q**2).sum(axis=1)
    game = fs.Game(fs.games.RandomDiscovery(Q), fs.games.LinearCost(theta), 20, 1000, 5e-4)
    rules = {
        "nothing": None,
        "0.1 a sample": fs.games.PricePerSample(0.1),
        "0.2 a sample": fs.games.PricePerSample(0.2),
        "a budget of 1000": fs.games.SharedBudget(1000.0),
        "a budget of 2000": fs.games.SharedBudget(2000.0),
        "Pigou's prices": fs.games.externality_prices(game),
    }
    print("| payment | stay | free riders | samples | paid | welfare |\n|---|---|---|---|---|---|")
    for name, payment in rules.items():
        found = fs.games.who_stays(game, payment, outside=500.0)
        welfare = game.utility(found.contributions)[found.stays].sum()
        row = [found.stays.sum(), found.free_riders.sum(), found.samples, found.spent, welfare]
        print(f"| {name} | " + " | ".join(f"{value:.0f}" for value in row) + " |")
    alone = fs.games.anarchy(game)
    print(
        f"\nWithout outside options: {alone.equilibrium.sum():.0f} samples at the equilibrium, "
        f"{alone.optimum.sum():.0f} at the optimum, price of anarchy {alone.price:.2f}.\n"
    )


def seconds(what: str, work: Callable[[], object]) -> None:
    clock, processor = time.perf_counter(), time.process_time()
    work()
    used, passed = time.process_time() - processor, time.perf_counter() - clock
    print(f"{what}: {used:.1f} s of processor time, {passed:.1f} s by the clock")


def many_players() -> None:
    rng = np.random.default_rng(0)
    Q = rng.dirichlet(np.full(10, 0.5), PLAYERS)
    theta = rng.uniform(0, (Q**2).sum(axis=1))
    upper = rng.integers(2000, 6000, PLAYERS)
    discovery = fs.Game(fs.games.RandomDiscovery(Q), fs.games.LinearCost(theta), 1, upper, 1e-5)
    half, skew = rng.standard_normal((2, PLAYERS, PLAYERS)) / np.sqrt(PLAYERS)
    A = half @ half.T + 0.05 * np.eye(PLAYERS) + skew - skew.T
    cost = fs.games.QuadraticCost(A, rng.standard_normal(PLAYERS))
    affine = fs.Game(None, cost, 0, rng.uniform(0.5, 2, PLAYERS))
    seconds(f"Equilibrium of {PLAYERS} players, random discovery", discovery.equilibrium)
    N = discovery.equilibrium()
    seconds("Its certificate", lambda: discovery.regret(N))
    seconds(f"Equilibrium of {PLAYERS} players, all depending on all", affine.equilibrium)


if __name__ == "__main__":
    payments()
    many_players()
