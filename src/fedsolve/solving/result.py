"""What a run leaves behind: parameters, history, state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import PyTree

from fedsolve.algorithms.base import Algorithm
from fedsolve.errors import InvalidInput
from fedsolve.federation.state import State
from fedsolve.fields import check_positive
from fedsolve.problem.problem import Problem
from fedsolve.runtimes.history import History

if TYPE_CHECKING:
    from fedsolve.theory import Certificate


@dataclasses.dataclass(frozen=True, repr=False)
class Run:
    """The result of `solve`.

    - `params`: the parameters after the last round, in the problem's own structure.
    - `average`: the averaged parameters, None where the algorithm has none (or none yet).
    - `history`: by name, one entry for each evaluated round; `round` says which. `objective` and
      `constraint` are over all clients at the parameters after that round (where clients choose
      what they count: `weighted_objective`, Σ p_i f_i, is what is minimised); `bytes_up` and
      `bytes_down` are what all participants sent and received in it, `…_total` since the start;
      with a clock, `seconds` and `seconds_total` are the time that this would have taken.
      `messages` counts what devices sent to the server as PPBC's paper does: answers with a vector
      in them, not those that are a number (a loss, a norm).
      `messages_both_ways` counts questions and answers. `compression_error`: ‖x − w‖ / ‖x‖, how
      far the clients' w is from the server's x where the downlink is compressed. `uplink_error`:
      η‖(1/n) Σ e_j‖ / ‖w‖, how far w would move if clients sent what a biased uplink holds back
      (where all clients' states are in memory: not streamed, not deployed).
    - `state`: everything needed to go on from here (`solve(..., resume=run.state)`).
    """

    params: PyTree
    average: PyTree
    history: History
    state: State
    problem: Problem
    algorithm: Algorithm
    seed: int
    seconds: float
    settings: dict[str, Any]

    @classmethod
    def of(
        cls,
        problem: Problem,
        algorithm: Algorithm,
        state: State,
        history: History,
        seed: int,
        seconds: float,
        settings: dict[str, Any] | None = None,
    ) -> Run:
        def on_host(w: Any) -> PyTree:  # NumPy keeps float64 whatever JAX is set to
            return problem.layout.unravel(np.asarray(w))

        average = algorithm.average(state.server)
        return cls(
            params=on_host(state.w),
            average=None if average is None else on_host(average),
            history=history,
            state=state,
            problem=problem,
            algorithm=algorithm,
            seed=seed,
            seconds=seconds,
            settings=settings or {},
        )

    @property
    def rounds(self) -> int:
        """How many rounds were done."""
        return int(self.state.round)

    @property
    def evaluated(self) -> bool:
        """Whether the history has an entry yet: a run may be stopped before its first."""
        return len(self.history.get("round", ())) > 0

    def __repr__(self) -> str:
        last = {k: v[-1] for k, v in self.history.items() if np.ndim(v) == 1 and len(v)}
        shown = ", ".join(f"{k}={last[k]:.6g}" for k in ("objective", "constraint") if k in last)
        return (
            f"Run({type(self.algorithm).__name__}, rounds={self.rounds}, seed={self.seed}, {shown})"
        )

    def certificate(
        self, optimum: float | int | None = None, accuracy: float = 1e-6
    ) -> Certificate:
        """What the theorem behind the algorithm promised (`FedSGM.from_theory`), beside what was
        reached: f(w̄) − f* and g(w̄). f* is `optimum`, else the problem's own, else a reference
        solution to `accuracy`, for which f and g must be convex."""
        from fedsolve.theory import certificate

        return certificate(self, optimum=optimum, accuracy=accuracy)

    def plot(
        self,
        path: str | Path | None = None,
        against: str = "round",
        panels: Sequence[str] | None = None,
        width: float | int | None = None,
        style: Mapping[str, Any] | None = None,
    ) -> Any:
        """Objective and constraint, or the entries of the history that `panels` names (`"switch"`,
        `"compression_error"`, `"cohort"`, …), against rounds (or `"seconds_total"`,
        `"bytes_up_total"`), as a matplotlib figure so many inches wide; saved if a path is given,
        as vectors if that ends in .pdf. `style` are matplotlib's own settings:
        `{"font.family": "serif", "font.size": 8}`."""
        return _plot({"": [self]}, path, against, panels, width, style)


class Sweep:
    """The result of `sweep`: `runs`, and `table`, tidy, with one row for each run."""

    def __init__(self, runs: list[Run]):
        self.runs = runs

    def __len__(self) -> int:
        return len(self.runs)

    def __getitem__(self, index: int) -> Run:
        return self.runs[index]

    @property
    def table(self) -> Any:
        """A pandas table: settings and seed, then the last entry of everything in the history."""
        return self._frame(lambda history: {k: v[-1:] for k, v in history.items()})

    @property
    def history(self) -> Any:
        """A pandas table of every entry of every run: settings, seed, round, values."""
        return self._frame(lambda history: history)

    def plot(
        self,
        path: str | Path | None = None,
        against: str = "round",
        panels: Sequence[str] | None = None,
        width: float | int | None = None,
        style: Mapping[str, Any] | None = None,
    ) -> Any:
        """Mean and band over seeds of every combination, as `Run.plot` shows a run."""
        groups: dict[str, list[Run]] = {}
        for run in self.runs:
            label = ", ".join(f"{name} = {value}" for name, value in run.settings.items())
            groups.setdefault(label, []).append(run)
        return _plot(groups, path, against, panels, width, style)

    def __repr__(self) -> str:
        return repr(self.table)

    def _frame(self, choose: Any) -> Any:
        labels = [{k: _label(v) for k, v in run.settings.items()} for run in self.runs]
        return tidy(list(zip(labels, self.runs, strict=True)), choose)


def _plot(
    groups: dict[str, list[Run]],
    path: str | Path | None,
    against: str,
    panels: Sequence[str] | None,
    width: float | int | None,
    style: Mapping[str, Any] | None,
) -> Any:
    from matplotlib import rcParams

    from fedsolve.plots import USUAL, plot

    if not all(run.evaluated for group in groups.values() for run in group):
        raise InvalidInput("There is nothing to show of a run that was never evaluated.")
    histories = [run.history for group in groups.values() for run in group]
    for name in panels or ():
        if not all(name in history for history in histories):
            known = [name for name in histories[0] if all(name in each for each in histories)]
            raise InvalidInput(f"Runs have no {name!r} to show; they have {', '.join(known)}.")
    if width is not None:
        check_positive("width", width)
    for key in style or {}:
        if key not in rcParams:
            raise InvalidInput(f"{key!r} is no setting of matplotlib's; fonts are font.family.")
    return plot(groups, path, panels or USUAL, against=against, width=width, style=style)


def tidy(labelled: list[tuple[dict[str, Any], Run]], choose: Any = dict) -> Any:
    """Runs as one pandas table: labels, seed, and the chosen entries of the histories. If a run of
    them diverged, `diverged` says in which round."""
    import pandas as pd

    frames = []
    for labels, run in labelled:
        rows = frame(labels, run.seed, choose(run.history))
        if (broken := int(run.state.fault[0])) >= 0:
            rows["diverged"] = broken + 1
        frames.append(rows)
    return pd.concat(frames, ignore_index=True)


def frame(labels: dict[str, Any], seed: int, entries: History) -> Any:
    """Entries of a history that are numbers, as rows of a pandas table."""
    import pandas as pd

    numbers = {k: v for k, v in entries.items() if v.ndim == 1}
    return pd.DataFrame(labels | {"seed": seed} | numbers)


def _label(value: Any) -> Any:
    return value if isinstance(value, int | float | str | bool) else str(value)
