"""What a run leaves behind: parameters, history, state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np

from fedsolve.algorithms.base import Algorithm
from fedsolve.errors import InvalidInput
from fedsolve.federation.best import KEPT, with_best
from fedsolve.federation.state import State
from fedsolve.fields import check_positive, html_table
from fedsolve.problem.problem import Kept, Problem
from fedsolve.runtimes.history import History
from fedsolve.solving.judgement import judgement
from fedsolve.solving.tables import latex_table, whole
from fedsolve.types import PyTree, Table, Vector

if TYPE_CHECKING:  # slow imports, and a package above this one
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from fedsolve.auditing import Audit
    from fedsolve.auditing.counting import Ranges
    from fedsolve.theory import Certificate, PPBCCertificate

Settings = Mapping[str, object]  # what a sweep changed, by field
Columns = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class BestRound:
    """The best evaluated round of a run, as `Run.best` returns it.

    Args:
        params: The parameters after that round, in the problem's own structure.
        round: The round, as the history counts.
        objective: f there; where clients have weights, Σ p_j f_j.
        constraint: g there; None if the problem has no constraint.
        feasible: Whether g is within the tolerance. It never is in a deployment where some client
            was not evaluated in that round.
        buffers: The state of the loss there, where the server averages it; None if there is none.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.neyman_pearson(clients=4)
        >>> run = fs.solve(problem, fs.FedSGM(step_size=1.0, tolerance=0.1), rounds=60)
        >>> run.best.feasible, run.best.constraint <= 0.1
        (True, True)
    """

    params: PyTree
    round: int
    objective: float
    constraint: float | None
    feasible: bool
    buffers: PyTree = None

    def __str__(self) -> str:
        text = f"round {self.round}, f = {self.objective:.5g}"
        if self.constraint is None:
            return text
        text += f", g = {self.constraint:.5g}"
        return f"{text}, feasible" if self.feasible else f"{text}, the least: no feasible round"


def concluded(state: State, history: History, algorithm: Algorithm) -> State:
    """Return a run's last state, whose best round may be the last one.

    A last evaluation between the others is not there in longer runs, so the rounds leave it out.
    """
    if not len(history.get("round", ())) or int(history["round"][-1]) != int(state.round):
        return state
    return with_best(state, _last(history, KEPT), algorithm.feasible_up_to)


def _last(history: History, names: Sequence[str]) -> Table:
    return {name: history[name][-1] for name in names if name in history}


@dataclasses.dataclass(frozen=True, repr=False)
class Run:
    """The result of `solve`.

    Columns of `history` that every run has: `round`; `objective` and `constraint`, over all clients
    at the parameters after that round (where clients choose what they count, `weighted_objective`,
    Σ p_i f_i, is what is minimised); `clients_evaluated`, the number of these clients, which is
    smaller only in a deployment where a site did not answer; `bytes_up` and `bytes_down`, what all
    participants sent and received in the round; `messages_up` and `messages_down`, answers and
    questions; `vectors_up`, answers with a vector in them and not only single numbers (a loss, a
    norm), as PPBC's paper counts communications. `…_total` is since the start. With a clock,
    `seconds` is the time that the round would have taken. Where they apply: `compression_error`, ‖x
    − w‖ / ‖x‖, how far the clients' w is from the server's x where the downlink is compressed;
    `uplink_error`, η‖(1/n) Σ e_j‖ / ‖w‖, how far w would move if clients sent what a biased uplink
    holds back (not in streamed and deployed runs, where clients' states are elsewhere).

    Args:
        params: The parameters after the last round, in the problem's own structure.
        average: The averaged parameters; None where the algorithm has none (or none yet).
        history: By column, one entry for each evaluated round.
        state: Everything needed to go on from here (`solve(..., resume=run.state)`).
        problem: The problem.
        algorithm: The algorithm.
        seed: The seed.
        seconds: How long the run took.
        settings: Fields that a sweep changed, by name.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.neyman_pearson(clients=4)
        >>> run = fs.solve(problem, fs.FedAvg(step_size=0.1), rounds=3)
        >>> run.rounds
        3
    """

    params: PyTree
    average: PyTree
    history: History
    state: State
    problem: Problem
    algorithm: Algorithm
    seed: int
    seconds: float
    settings: Settings

    @classmethod
    def of(
        cls,
        problem: Problem,
        algorithm: Algorithm,
        state: State,
        history: History,
        seed: int,
        seconds: float,
        settings: Settings | None = None,
    ) -> Run:
        """Return a run, with its parameters on the host."""

        def on_host(w: Vector | np.ndarray) -> PyTree:  # NumPy keeps float64 whatever JAX is set to
            return problem.params_at(np.asarray(w))

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
    def best(self) -> BestRound | None:
        """The best of the evaluated rounds; None if there is none.

        It is the one with the least f of those with g ≤ tolerance (the algorithm's `tolerance`; 0
        where it has none). If there is none, it is the one with the least g, and is not `feasible`.
        Without a constraint it is the one with the least f. Personal parameters, which clients
        keep, are the initial ones.
        """
        found = self.state.best
        if int(found.round) == 0:
            return None
        constrained = self.problem.constraint is not None
        return BestRound(
            params=self.problem.params_at(np.asarray(found.w)),
            round=int(found.round),
            objective=float(found.objective),
            constraint=float(found.constraint) if constrained else None,
            feasible=bool(found.feasible),
            buffers=jax.tree.map(np.asarray, found.buffers),
        )

    @property
    def rounds(self) -> int:
        """The number of rounds that were played."""
        return int(self.state.round)

    @property
    def buffers(self) -> PyTree:
        """The state of the loss (`Problem.state`) after the last round; None if there is none.

        Where each client keeps its own, it is the initial one; see `client_buffers`.
        """
        now = self.state.buffers if self.problem.averages_state else self.problem.state
        return jax.tree.map(np.asarray, now)

    def client_params(self, client: int) -> PyTree:
        """Return the parameters as one client has them, with its personal ones.

        Args:
            client: The client's index.

        Returns:
            The parameters, in the problem's own structure.

        Raises:
            InvalidInput: If the clients' states are elsewhere (in streamed and deployed runs).
        """
        kept = self._kept_by(client)
        return self.problem.params_at(np.asarray(self.state.w), kept.personal)

    def client_buffers(self, client: int) -> PyTree:
        """Return the state of the loss as one client has it.

        Args:
            client: The client's index.

        Returns:
            The state, in its own structure.

        Raises:
            InvalidInput: If the clients' states are elsewhere (in streamed and deployed runs).
        """
        return self._kept_by(client).state if self.problem.keeps_state else self.buffers

    def _kept_by(self, client: int) -> Kept:
        """Return what a client keeps of the model."""
        if not 0 <= client < self.problem.n:
            raise InvalidInput(f"client must be from 0 to {self.problem.n - 1}, got {client}.")
        if not self.problem.keeps_own:
            return Kept(None, None)
        if self.state.memory is None:
            raise InvalidInput("In streamed and deployed runs, clients' own parts are not here.")
        return jax.tree.map(lambda leaf: np.asarray(leaf)[client], self.state.memory)

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

    def _repr_html_(self) -> str:
        """Return a table of the last values, and a sentence on how the run ended."""
        last = {k: v[-1] for k, v in self.history.items() if np.ndim(v) == 1 and len(v)}
        said = judgement(self.history, float(self.algorithm.feasible_up_to))
        name = f"{type(self.algorithm).__name__}, seed {self.seed}, {self.seconds:.1f} s"
        return html_table(name, {k: f"{float(v):.6g}" for k, v in last.items()}, said)

    def to_csv(self, path: str | Path) -> None:
        """Write the history as a CSV file, one row for each evaluated round.

        Args:
            path: The file.
        """
        tidy([({}, self)]).to_csv(path, index=False)

    def certificate(
        self, optimum: float | int | None = None, accuracy: float = 1e-6
    ) -> Certificate | PPBCCertificate:
        """Compare what a theorem promised (`FedSGM.from_theory`) with what was reached.

        Args:
            optimum: f*; by default the problem's own, else that of a reference solution, for which
                f and g must be convex.
            accuracy: The accuracy of the reference solution.

        Returns:
            f(w̄) − f* and g(w̄), and their bounds.
        """
        from fedsolve.theory import certificate

        return certificate(self, optimum=optimum, accuracy=accuracy)

    def audit(
        self,
        test_clients: object,
        confidence: float | int = 0.95,
        ranges: Ranges = None,
        tolerance: float | int | None = None,
        params: PyTree = None,
        names: Sequence[str] | None = None,
        sites: bool = True,
    ) -> Audit:
        """Judge the constraints on held-out data: met, not met, or too few samples to tell.

        Rates have Clopper-Pearson bounds, means empirical Bernstein bounds, corrected for the
        number of claims. The samples must be independent draws that neither training nor a choice
        between models has used.

        Args:
            test_clients: The clients' held-out data, in a form that `Problem` takes.
            confidence: The probability with which all verdicts are right together.
            ranges: A range (low, high) in which all values of means (losses, a plain g at single
                samples) lie for certain, or one for each claim by name. Without it, means have no
                bound.
            tolerance: The bound of a plain g; by default the algorithm's tolerance.
            params: The parameters to judge; by default those after the last round.
            names: The clients' names; by default `client 0`, `client 1`, …
            sites: Whether to judge every client as well as all together.

        Returns:
            The verdicts; print them, or see `table`, `met` and `save`.

        Raises:
            InvalidInput: If there is nothing to judge, or an argument cannot be used.
        """
        from fedsolve.auditing import audit

        return audit(self, test_clients, confidence, ranges, tolerance, params, names, sites)

    def plot(
        self,
        path: str | Path | None = None,
        against: str = "round",
        panels: Sequence[str] | None = None,
        width: float | int | None = None,
        style: Mapping[str, object] | None = None,
    ) -> Figure:
        """Plot columns of the history.

        Args:
            path: Where to save the figure; as vectors if it ends in .pdf.
            against: The horizontal axis: `"round"`, `"seconds_total"`, `"bytes_up_total"`, …
            panels: Columns to show (`"switch"`, `"compression_error"`, `"cohort"`, …); by default
                objective and constraint.
            width: The width in inches.
            style: Settings of matplotlib: `{"font.family": "serif", "font.size": 8}`.

        Returns:
            The matplotlib figure.
        """
        return _plot({"": [self]}, path, against, panels, width, style)


class Sweep:
    """The result of `sweep`: `runs`, and `table`, tidy, with one row for each run.

    Args:
        runs: The runs.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.neyman_pearson(clients=4)
        >>> swept = fs.sweep(problem, fs.FedAvg(0.1), rounds=2, step_size=[0.1, 0.2])
        >>> list(swept.table["step_size"])
        [0.1, 0.2]
    """

    def __init__(self, runs: list[Run]):
        self.runs = runs

    def __len__(self) -> int:
        return len(self.runs)

    def __getitem__(self, index: int) -> Run:
        return self.runs[index]

    @property
    def table(self) -> DataFrame:
        """A pandas table: settings and seed, then the last entry of everything in the history.

        It is printed with all its columns.
        """
        return whole(self._frame(lambda history: {k: v[-1:] for k, v in history.items()}))

    def to_csv(self, path: str | Path, history: bool = False) -> None:
        """Write the table as a CSV file.

        Args:
            path: The file.
            history: Whether to write every evaluated round, not only the last ones.
        """
        (self.history if history else self.table).to_csv(path, index=False)

    def to_latex(
        self, path: str | Path | None = None, columns: Sequence[str] | None = None, digits: int = 4
    ) -> str:
        """Return the table for a LaTeX document, with `booktabs`: one row for each run.

        Args:
            path: A file to write it to.
            columns: The columns; by default settings, seed, round, objective and constraint.
            digits: Significant digits of numbers.

        Returns:
            The text.

        Raises:
            InvalidInput: If there is no such column.
        """
        table = self.table
        if columns is None:
            names = {name for run in self.runs for name in run.settings}
            usual = ("seed", "round", "objective", "constraint")
            columns = [name for name in table if name in names or name in usual]
        if unknown := [name for name in columns if name not in table]:
            raise InvalidInput(f"There is no column {unknown[0]!r}; there are {', '.join(table)}.")
        text = latex_table(table, columns, digits)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    @property
    def history(self) -> DataFrame:
        """A pandas table of every entry of every run: settings, seed, round, values."""
        return self._frame(lambda history: history)

    def plot(
        self,
        path: str | Path | None = None,
        against: str = "round",
        panels: Sequence[str] | None = None,
        width: float | int | None = None,
        style: Mapping[str, object] | None = None,
    ) -> Figure:
        """Plot means and bands over seeds, one line for each combination of settings.

        Args:
            path: Where to save the figure; as vectors if it ends in .pdf.
            against: The horizontal axis: `"round"`, `"seconds_total"`, `"bytes_up_total"`, …
            panels: Columns to show (`"switch"`, `"compression_error"`, `"cohort"`, …); by default
                objective and constraint.
            width: The width in inches.
            style: Settings of matplotlib: `{"font.family": "serif", "font.size": 8}`.

        Returns:
            The matplotlib figure.
        """
        groups: dict[str, list[Run]] = {}
        for run in self.runs:
            label = ", ".join(f"{name} = {value}" for name, value in run.settings.items())
            groups.setdefault(label, []).append(run)
        return _plot(groups, path, against, panels, width, style)

    def __repr__(self) -> str:
        return repr(self.table)

    def _repr_html_(self) -> str:
        """Return the table."""
        return str(self.table._repr_html_())

    def _frame(self, choose: Callable[[History], Columns]) -> DataFrame:
        labels = [{k: _label(v) for k, v in run.settings.items()} for run in self.runs]
        return tidy(list(zip(labels, self.runs, strict=True)), choose)


def _plot(
    groups: dict[str, list[Run]],
    path: str | Path | None,
    against: str,
    panels: Sequence[str] | None,
    width: float | int | None,
    style: Mapping[str, object] | None,
) -> Figure:
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


def tidy(
    labelled: Sequence[tuple[Settings, Run]], choose: Callable[[History], Columns] = dict
) -> DataFrame:
    """Return runs as one table: labels, seed, and the chosen entries of the histories.

    If some run diverged, the column `diverged` says in which round.
    """
    import pandas as pd

    frames = []
    for labels, run in labelled:
        rows = frame(labels, run.seed, choose(run.history))
        if (broken := int(run.state.fault[0])) >= 0:
            rows["diverged"] = broken + 1
        frames.append(rows)
    return pd.concat(frames, ignore_index=True)


def frame(labels: Settings, seed: int, entries: Columns) -> DataFrame:
    """Return the entries of a history that are numbers, as rows of a table."""
    import pandas as pd

    numbers = {k: v for k, v in entries.items() if v.ndim == 1}
    return pd.DataFrame({**labels, "seed": seed, **numbers})


def _label(value: object) -> int | float | str | bool:
    return value if isinstance(value, int | float | str | bool) else str(value)
