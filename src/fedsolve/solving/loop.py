"""The loop over rounds, the same for all runtimes.

Rounds are computed in chunks. Between two chunks a run can be interrupted, saved and followed, a
stopping rule can end it, and a value that is not finite ends it with a sentence.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from fedsolve.errors import Diverged, Interrupted
from fedsolve.federation.state import State
from fedsolve.privacy.accounting import Ledger
from fedsolve.runtimes.base import Fault, Runtime
from fedsolve.runtimes.chunks import LAST, Spans, spans_of, split, until
from fedsolve.runtimes.history import History
from fedsolve.runtimes.sharding import agreed, anyone
from fedsolve.solving.options import Progress
from fedsolve.solving.result import Run

SECONDS_PER_CHUNK = 0.5  # how long a run may ignore Ctrl-C and report nothing


@runtime_checkable
class Saver(Protocol):
    """Keeps a run on disk: `Checkpoints` of a simulation, the journal of a deployment."""

    def at_most(self, budget: int, done: int) -> int:
        """Return how many rounds to play before the run must be saved, at most `budget`."""
        ...

    def due(self, done: int) -> bool:
        """Return whether the run is to be saved now."""
        ...

    def write(self, state: State, chunks: list[History], seconds: float, stopped: bool) -> None:
        """Save the run; `stopped` if a rule ended it."""
        ...


@dataclasses.dataclass
class Loop:
    """One run: plays the rounds of a runtime until they are done or something ends it.

    Args:
        runtime: Where the clients are.
        rounds: The number of rounds, counted from the beginning of the run.
        evaluate_every: Evaluate after this many rounds, and after the last.
        began: When the run began, by `time.perf_counter`.
        result: Makes a `Run` of a state, a history and seconds.
        interrupted: Whether to stop.
        saver: Keeps the run on disk.
        progress: Called after every chunk.
        ledger: Counts what a private run spends.
    """

    runtime: Runtime
    rounds: int
    evaluate_every: int
    began: float
    result: Callable[[State, list[History], float], Run]
    interrupted: Callable[[], bool]
    saver: Saver | None = None
    progress: Progress | None = None
    ledger: Ledger | None = None

    def run(self, state: State, chunks: list[History]) -> Run:
        """Play the rounds that are missing.

        Args:
            state: The state to go on from.
            chunks: The history up to there, in parts. New parts are appended.

        Returns:
            The run.

        Raises:
            Diverged: At the first value that is not finite.
            Interrupted: If `interrupted()`.
        """
        first = int(state.round)
        spans = spans_of(first, self.rounds, self.evaluate_every)[
            : None if first < self.rounds else 0
        ]
        if self.runtime.options.milestones is not None:
            spans[-1:, 2] = LAST
        budget, stopped = 1, False
        while len(spans):
            if self.saver is not None:
                budget = self.saver.at_most(budget, int(state.round))
            (budget,) = agreed(budget)
            if anyone(self.interrupted()):
                self._save(state, chunks)
                message = f"Stopped by the user after round {int(state.round)} of {self.rounds}."
                raise Interrupted(message, self.result_of(state, chunks))
            now, rest = split(spans, budget)
            began = time.perf_counter()
            after, entries, stopped = self.runtime.advance(state, now)
            if fault := self.runtime.fault(state, after, entries):
                self._fail(fault, state, now, chunks)
            after, entries = self._enter(after, entries)
            chunks.append(entries)
            state, spans = after, rest[:0] if stopped else rest
            pace = (now[-1, 1] - now[0, 0]) / max(time.perf_counter() - began, 1e-9)
            budget = max(int(SECONDS_PER_CHUNK * pace), 1)
            if len(spans) or self.runtime.lags:
                self._save_if_due(state, chunks)
            self._report(state, entries)
        state, last = self.runtime.finish(state)
        if last:
            state, last = self._enter(state, last)
            chunks.append(last)
            self._report(state, last)
        self._save(state, chunks, stopped)
        return self.result_of(state, chunks)

    def _fail(self, fault: Fault, state: State, spans: Spans, chunks: list[History]) -> None:
        """Raise `Diverged` with the run up to the last good round."""
        what = self.runtime.describe(fault, state, spans)
        if len(good := until(spans, fault.good)):
            if self.runtime.options.milestones is not None:
                good[-1, 2] = LAST  # evaluated whatever has been counted
            state, entries, _ = self.runtime.advance(state, good)
            state, entries = self._enter(state, entries)
            chunks = [*chunks, entries]
        message = f"Round {fault.round}: {what} is not finite; a smaller step may help."
        raise Diverged(message, self.result_of(state, chunks))

    def _enter(self, state: State, entries: History) -> tuple[State, History]:
        """Enter what a private run has spent."""
        return (state, entries) if self.ledger is None else self.ledger.enter(state, entries)

    def _report(self, state: State, entries: History) -> None:
        if self.progress is not None:
            self.progress(int(state.round), self.rounds, entries)

    def _save_if_due(self, state: State, chunks: list[History]) -> None:
        if self.saver is None:
            return
        (due,) = agreed(self.saver.due(int(state.round)))
        if due:
            self._save(state, chunks)

    def _save(self, state: State, chunks: list[History], stopped: bool = False) -> None:
        if self.saver is not None:
            self.saver.write(self.runtime.gather(state), chunks, self._seconds(), stopped)

    def result_of(self, state: State, chunks: list[History]) -> Run:
        """Return the run as far as it is."""
        return self.result(self.runtime.gather(state), chunks, self._seconds())

    def _seconds(self) -> float:
        return time.perf_counter() - self.began
