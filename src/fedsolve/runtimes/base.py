"""What a runtime is: the place where clients are, and how rounds are played there."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from fedsolve.algorithms.base import Algorithm
from fedsolve.federation.best import with_best
from fedsolve.federation.options import RoundOptions
from fedsolve.federation.state import SeedWords, State
from fedsolve.problem.problem import Problem
from fedsolve.runtimes.chunks import GRID, Spans, milestone, until
from fedsolve.runtimes.evaluation import client_values
from fedsolve.runtimes.history import History, entry_history, joined, no_history
from fedsolve.runtimes.recording import record_round
from fedsolve.runtimes.sharding import whole
from fedsolve.storage.client_store import Pairs, Store
from fedsolve.types import Info


class Advanced(NamedTuple):
    """What a call of `Runtime.advance` gives: the state, new entries, whether a rule stopped it."""

    state: State
    history: History
    stopped: bool = False


@dataclasses.dataclass(frozen=True)
class Fault:
    """The first value that is not finite: in which round, and what. `good` rounds can be kept."""

    round: int
    good: int
    quantity: str = ""
    exchange: int = -1
    client: int = -1


class Runtime(abc.ABC):
    """A place where clients are. One loop (`fedsolve.solving.loop`) serves all runtimes.

    `store` has the clients' states where these are not in memory; checkpoints save it, too.
    """

    store: Store | None = None
    lags = False  # whether entries of the history come later than their rounds

    def __init__(self, problem: Problem, algorithm: Algorithm, options: RoundOptions):
        self.problem, self.algorithm, self.options = problem, algorithm, options

    @abc.abstractmethod
    def start(self, seed: SeedWords) -> State:
        """Return the state before the first round."""

    @abc.abstractmethod
    def advance(self, state: State, spans: Spans) -> Advanced:
        """Play the rounds of the spans, and evaluate at their ends where they say so."""

    def open(self, round: int, versions: Sequence[tuple[str, Pairs]]) -> None:  # noqa: B027
        """Open the store of clients' states, if there is one: a new run's, or a checkpoint's.

        Args:
            round: The round of the checkpoint.
            versions: The checkpoint's part of the store, and that of the one before it.
        """

    def place(self, state: State) -> State:
        """Put a saved state where this runtime wants it."""
        return state

    def gather(self, state: State) -> State:
        """Return the whole state; of several processes, all must call this."""
        return whole(state)

    def finish(self, state: State) -> tuple[State, History | None]:
        """Return the last state, and entries that are still missing after the last round."""
        return state, None

    def close(self) -> None:  # noqa: B027
        """Release what the runtime holds."""

    def fault(self, before: State, after: State, history: History) -> Fault | None:
        """Return the first value that is not finite, if there is one."""
        broken, exchange, client = map(int, after.fault)  # the round counts from 0
        good = int(before.round)
        for position, stop in enumerate(history["round"]):
            if 0 <= broken < stop:
                return Fault(broken + 1, broken, "", exchange, client)
            for quantity in ("objective", "constraint"):
                if quantity in history and not np.isfinite(history[quantity][position]):
                    return Fault(int(stop), good, quantity)
            good = int(stop)
        return Fault(broken + 1, broken, "", exchange, client) if broken >= 0 else None

    def describe(self, fault: Fault, state: State, spans: Spans) -> str:
        """Name the value that is not finite; `state` is the one before the spans."""
        if fault.quantity:
            bad = self.advance(state, until(spans, fault.round)).state
            return whose(self.problem, bad, fault.quantity)
        if fault.exchange >= 0:
            record = record_round(self.problem, self.algorithm, state)
            return f"client {fault.client}'s reply to '{record.exchanges[fault.exchange].method}'"
        return "w"


class RoundByRound(Runtime):
    """A runtime that plays one round at a time, in a Python loop."""

    @abc.abstractmethod
    def play(self, state: State) -> tuple[State, Info]:
        """Play one round: the state after it, and what it writes in the history."""

    @abc.abstractmethod
    def evaluate(self, state: State) -> Info:
        """Return objective, constraint and metrics over all clients."""

    def advance(self, state: State, spans: Spans) -> Advanced:
        """Play the rounds of the spans, and evaluate at their ends where they say so."""
        entries: list[History] = []
        rule = self.options.stop
        for start, stop, evaluate in spans.tolist():
            info: Info = {}
            before = state
            for _ in range(start, stop):
                state, info = self.play(state)
            if self.options.milestones is not None:
                passed = self.options.milestones.passed(before, state)
                evaluate = int(milestone(evaluate, passed))
            if not evaluate:
                continue
            entry = info | self.evaluate(state)
            entries.append(entry_history(entry, stop))
            if evaluate == GRID:
                state = with_best(state, entry, self.algorithm.feasible_up_to)
            if rule is not None and bool(rule(entry)):
                return Advanced(state, joined(entries), True)
        return Advanced(state, joined(entries) or no_history())


def whose(problem: Problem, state: State, quantity: str) -> str:
    """Name the first client whose part of the objective or the constraint is not finite."""
    problem, key = state.problem_now(problem), state.evaluation_key
    values = client_values(problem, state.w, key, memory=state.memory)[quantity]
    bad = [~np.isfinite(leaf).reshape(problem.n, -1).all(1) for leaf in jax.tree.leaves(values)]
    clients = np.flatnonzero(np.any(bad, axis=0))
    return f"client {clients[0]}'s {quantity}" if len(clients) else f"the {quantity}"
