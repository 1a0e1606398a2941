"""Values that are not finite: the first of them, and whose it is."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from fedsolve.algorithms.base import Algorithm
from fedsolve.federation.state import State
from fedsolve.problem.problem import Problem
from fedsolve.runtimes.evaluation import client_values
from fedsolve.runtimes.simulation import Simulation
from fedsolve.solving.result import History


@dataclasses.dataclass(frozen=True)
class Fault:
    """The first value that is not finite: in which round, and what. `good` rounds can be kept."""

    round: int
    good: int
    quantity: str = ""
    exchange: int = -1
    client: int = -1


def first_fault(before: State, after: State, entries: History) -> Fault | None:
    broken, exchange, client = map(int, after.fault)  # the round counts from 0
    good = int(before.round)
    for position, stop in enumerate(entries["round"]):
        if 0 <= broken < stop:
            return Fault(broken + 1, broken, "", exchange, client)
        for quantity in ("objective", "constraint"):
            if quantity in entries and not np.isfinite(entries[quantity][position]):
                return Fault(int(stop), good, quantity)
        good = int(stop)
    return Fault(broken + 1, broken, "", exchange, client) if broken >= 0 else None


def whose(problem: Problem, state: State, quantity: str) -> str:
    """Whose part of the objective or the constraint is not finite."""
    values = client_values(problem, state.w, state.evaluation_key)[quantity]
    bad = [~np.isfinite(leaf).reshape(problem.n, -1).all(1) for leaf in jax.tree.leaves(values)]
    clients = np.flatnonzero(np.any(bad, axis=0))
    return f"client {clients[0]}'s {quantity}" if len(clients) else f"the {quantity}"


def method_of(problem: Problem, algorithm: Algorithm, state: State, fault: Fault) -> str:
    """The method behind a faulty exchange: found by tracing a round, as programs keep no names."""
    names: list[str] = []

    def look(state: State) -> Any:
        fed = Simulation(problem, state)
        fed.exchanges = names
        return fed.play(algorithm)[0].w

    jax.eval_shape(look, state)
    return names[fault.exchange]
