"""Reproduce the papers' figures and tables: run their experiments, measure, and draw.

Experiments are run as `fedsolve run` runs them; numbers and pictures are made from their folders.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import platform
import shlex
import subprocess
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedsolve import plots
from fedsolve.algorithms import Algorithm
from fedsolve.errors import InvalidInput
from fedsolve.experiments import config, run_folder
from fedsolve.experiments.config import Experiment
from fedsolve.experiments.runner import Progress, Result, execute
from fedsolve.experiments.tracking import Tracked
from fedsolve.papers import tuning
from fedsolve.papers.catalogue import Entry, changes, duration, find, minutes, tables
from fedsolve.papers.decisive import Decisive
from fedsolve.papers.pages import page
from fedsolve.runtimes.history import History, no_history
from fedsolve.solving.result import Columns
from fedsolve.storage.atomic import write_atomically
from fedsolve.theory.fedadmm import communication_rounds
from fedsolve.types import Table

if TYPE_CHECKING:  # slow imports
    from matplotlib.figure import Figure
    from pandas import DataFrame

FOLDER = Path("reproduced")  # where reproductions are written by default


@dataclasses.dataclass(frozen=True)
class Reproduction:
    """A figure or table that is being reproduced; see `start`."""

    entry: Entry
    quick: bool
    seeds: int | None
    folder: Path
    experiments: dict[str, Experiment]
    by: dict[str, str]  # when, where and with which version it was begun

    @property
    def command(self) -> str:
        """The command that reproduces it."""
        words = ["fedsolve", "reproduce", self.entry.name, *(["--quick"] if self.quick else [])]
        words += ["--seeds", str(self.seeds)] if self.seeds is not None else []
        return shlex.join(words)

    @property
    def announcement(self) -> str:
        """How many runs it has, and about how long they take."""
        runs = sum(len(experiment.runs) for experiment in self.experiments.values())
        expected = duration(minutes(self.entry, self.quick, self.seeds))
        told = f"{self.entry.name}: {runs} runs, about {expected} on 2 cores"
        if self.entry.gpu_minutes and not self.quick:
            gpu = duration(self.entry.gpu_minutes)
            told += f" (on a GPU about {gpu}; --quick is small)"
        return f"{told}."

    def run(
        self,
        progress: Progress | None = None,
        interrupted: Callable[[], bool] | None = None,
    ) -> Iterator[Result]:
        """Run the experiments that have not finished, one after the other."""
        for label in self.experiments:
            own = self.folder / "runs" / label
            if not finished(own):
                if not self._tune(label, progress, interrupted):
                    yield Result({}, self.folder, "interrupted", "Interrupted while tuning.")
                    return
                experiment = self.tuned(label)
                there = own.exists()
                yield execute(
                    experiment,
                    out=None if there else own,
                    resume=own if there else None,
                    progress=progress,
                    interrupted=interrupted,
                )

    def _tune(
        self, label: str, progress: Progress | None, interrupted: Callable[[], bool] | None
    ) -> bool:
        """Choose the step sizes of an experiment; return whether it was not interrupted."""
        if not self._tunes(label):
            return True
        experiment, seeds = self.experiments[label], self.entry.steps_seeds
        shown = Tracked(label, f"{label}: step sizes", 0)

        def stopped(number: int) -> bool:
            if progress is not None:
                progress(shown, number, len(experiment.cells), no_history())
            return interrupted is not None and interrupted()

        return tuning.tune(experiment, self.entry.steps, seeds, self._steps(label), stopped)

    def _tunes(self, label: str) -> bool:
        return not self.quick and bool(self.entry.steps) and label not in self.entry.fixed

    def _steps(self, label: str) -> Path:
        return self.folder / "steps" / f"{label}.json"

    def tuned(self, label: str) -> Experiment:
        """Return an experiment with the step sizes that were chosen for it, if any were."""
        if not self._tunes(label):
            return self.experiments[label]
        table = tables(self.entry, self.quick, self.seeds)[label]
        return config.resolve(label, tuning.with_steps(table, tuning.read(self._steps(label))))

    def finish(self) -> Table:
        """Write the numbers, pictures, data and page; return the summary.

        Raises:
            InvalidInput: If an experiment has not finished.
            OSError: If the folder cannot be written to.
        """
        results: dict[str, Groups] = {}
        seconds, histories = 0.0, []
        for label in self.experiments:
            own = self.folder / "runs" / label
            if not finished(own):
                raise InvalidInput(f"The runs in {own} have not finished.")
            contents = run_folder.read(own)
            seconds += sum(contents.facts["seconds"].values())
            shown_with = self.entry.joined.get(label, label)
            results.setdefault(shown_with, {}).update(recorded(contents, self.tuned(label)))
            contents.table.insert(0, "experiment", label)
            histories.append(contents.table)
        made = {"size": "quick" if self.quick else "full"}
        made |= {"changes": changes(self.entry, self.quick), "command": self.command}
        made |= {**self.by, "seconds": round(seconds, 1)}
        summary = finish(self.entry, results, self.folder, made)
        write_data(self.folder / "data.csv", histories)
        write_atomically(self.folder / "page.md", page(self.entry, summary).encode())
        return summary


def start(
    name: str,
    quick: bool = False,
    seeds: int | None = None,
    out: Path | None = None,
    only: str = "",
) -> Reproduction | Decisive:
    """Start to reproduce a figure or table in a folder, or resume it there."""
    entry = find(name)
    if only and not entry.study:
        raise InvalidInput(f"--only is for studies such as ppbc/decisive; {name} is none.")
    experiments = {} if entry.study else plan(entry, quick, seeds)
    folder = out or FOLDER / (f"{name}-quick" if quick else name)
    study = Decisive(name, quick, seeds, folder, {}, only)
    if entry.study:
        study.check()
    by = begin(folder, {"name": name, "quick": quick, "seeds": seeds})
    if entry.study:
        return dataclasses.replace(study, by=by)
    return Reproduction(entry, quick, seeds, folder, experiments, by)


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A run as it was read from its folder."""

    history: Columns
    algorithm: Algorithm
    seed: int
    allowed: int  # rounds, unless a rule stopped the run before
    seconds: float = math.nan

    @property
    def rounds(self) -> int:
        return int(self.history["round"][-1])


Groups = dict[str, list[Recorded]]  # by variant


def plan(entry: Entry, quick: bool = False, seeds: int | None = None) -> dict[str, Experiment]:
    """Return a figure's experiments, ready to run, by name; without those that lack their data."""
    planned = {}
    for name, table in tables(entry, quick, seeds).items():
        try:
            planned[name] = config.resolve(name, table)
            if name in entry.optional:
                planned[name].cell(*planned[name].runs[0])
        except InvalidInput as error:
            if name not in entry.optional:
                raise
            planned.pop(name, None)
            warnings.warn(f"{name} is left out: {error}", stacklevel=2)
    return planned


def recorded(contents: run_folder.Contents, experiment: Experiment) -> Groups:
    """Return the runs of a folder."""
    groups: Groups = {}
    for _, rows in contents.table.groupby(["variant", "seed"], sort=False):
        variant, seed = str(rows["variant"].iloc[0]), int(rows["seed"].iloc[0])
        numbers = rows.select_dtypes("number").drop(columns=["seed", "diverged"], errors="ignore")
        history = {str(name): numbers[name].to_numpy() for name in numbers}
        prefix = f"{variant}/seed-{seed}/".lstrip("/")
        wide = {k[len(prefix) :]: v for k, v in contents.wide.items() if k.startswith(prefix)}
        algorithm, rounds = experiment.cells.algorithms[variant], experiment.options["rounds"]
        seconds = contents.facts.get("seconds", {}).get(prefix.rstrip("/"), math.nan)
        run = Recorded(History(history | wide), algorithm, seed, rounds, float(seconds))
        groups.setdefault(variant, []).append(run)
    return groups


def measured(column: str, run: Recorded) -> float:
    """Measure a run over the last fifth of its evaluations; not a number if that is not possible.

    | `objective`, or any entry | its mean |
    | `over` | the share of evaluations with g above the tolerance |
    | `worst` | the greatest g |
    | `deviation` | the standard deviation of g |
    | `reward@100`, `reward@end` | at that round; at the end |
    | `test_accuracy@20 epochs` | at the end of that epoch; of that round, where rounds have none |
    | `test_accuracy@960 messages` | when that many messages had come from clients |
    | `violations` | all evaluations with g above the tolerance, after the first without |
    | `step_size` | of the algorithm, or of its local optimizer |
    | `seconds` | of the run, with compiling |
    | `CR` | FedADMM's communication rounds (29) until a rule stopped the run |
    """
    name, at, when = column.partition("@")
    late = slice(-max(len(run.history["round"]) // tuning.LATE, 1), None)
    if column == "CR":
        return float(communication_rounds(run.rounds)) if run.rounds < run.allowed else np.nan
    if column == "seconds":
        return run.seconds
    if column == "step_size":
        part = getattr(run.algorithm, "local_optimizer", None) or run.algorithm
        return float(getattr(part, "step_size", np.nan))
    if column in ("over", "worst", "deviation", "violations"):
        g = run.history["constraint"]
        above = g > float(getattr(run.algorithm, "tolerance", 0.0))
        if column == "violations":
            return float(above[np.argmin(above) :].sum())
        late_g, rules = g[late], {"worst": np.max, "deviation": np.std}
        return float(np.mean(above[late]) if column == "over" else rules[column](late_g))
    if name not in run.history:
        return np.nan
    values = run.history[name]
    if not at:
        return float(np.mean(values[late]))
    number, _, unit = when.partition(" ")
    if unit == "messages":
        return _after_messages(run.history, values, int(number))
    counted = np.isfinite(run.history.get(unit, np.nan)).any()  # else other variants are
    axis = unit if counted else "round"
    row = -1 if when == "end" else int(np.searchsorted(run.history[axis], int(number)))
    return float(values[row]) if row < len(values) else np.nan


def _after_messages(history: Columns, values: np.ndarray, messages: int) -> float:
    """Return the last value before the budget was exceeded; of PPBC, where an epoch had ended.

    A run that did not use up the budget has no value there.
    """
    used = history["vectors_up_total"]
    within = used <= messages
    if "epoch_end" in history:
        within &= history["epoch_end"].astype(bool)
    rows = np.flatnonzero(within)
    return float(values[rows[-1]]) if len(rows) and used[-1] >= messages else np.nan


def finish(
    entry: Entry, results: Mapping[str, Groups], out: Path, made: Mapping[str, object]
) -> Table:
    """Measure and draw: write `summary.json` and the pictures, and return the summary.

    `made` says how the results were obtained, and becomes part of the summary.
    """
    from matplotlib.style import context

    entry, numbers, pictures = entry.shown(str(made.get("size"))), {}, []
    for name, groups in results.items():
        numbers[name] = [
            {"variant": variant, "seeds": len(runs)}
            | {c: _spread(c, [measured(c, run) for run in runs]) for c in entry.columns}
            for variant, runs in groups.items()
        ]
        figure = _draw(entry, groups)
        with context(plots.STYLE):
            for kind in ("png", "pdf"):
                figure.savefig(out / f"{name}.{kind}", dpi=110)
        pictures.append(f"{name}.png")
    summary = {"name": entry.name, **made, "pictures": pictures, "numbers": numbers}
    write_atomically(out / "summary.json", (json.dumps(summary, indent=1) + "\n").encode())
    return summary


def _spread(column: str, values: list[float]) -> list[float] | None:
    """Return the middle and the standard deviation over seeds; None if there is no number.

    The middle is the mean; of CR and of seconds it is the median, as in their paper, where runs
    that did not reach the goal count as infinite.
    """
    there = [value for value in values if np.isfinite(value)]
    if column in ("CR", "seconds"):
        middle = np.median(np.where(np.isfinite(values), values, np.inf))
    else:
        middle = np.mean(there) if there else np.nan
    return [float(f"{x:.6g}") for x in (middle, np.std(there))] if np.isfinite(middle) else None


def _draw(entry: Entry, groups: Groups) -> Figure:
    if entry.picture == "trade-off":
        return plots.tradeoff(groups)
    if entry.picture == "rounds":
        return plots.effort(groups)
    return plots.plot(
        groups, panels=entry.panels, lines=entry.lines, band=entry.band, against=entry.against
    )


def begin(place: Path, wanted: Table) -> dict[str, str]:
    """Make the folder of a reproduction, or check that an existing one is of the same.

    Return when, where and with which version it was begun.
    """
    note = place / "reproduction.json"
    try:
        if note.is_file():
            begun = json.loads(note.read_text(encoding="utf-8"))
            if begun["wanted"] != wanted:
                raise InvalidInput(f"{place} is of another reproduction; choose a folder with -o.")
            return begun["by"]
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            raise InvalidInput(f"{place} exists and is not empty; choose another folder with -o.")
        place.mkdir(parents=True, exist_ok=True)
        by = {"date": datetime.date.today().isoformat(), **origin(), "machine": machine()}
        write_atomically(note, (json.dumps({"wanted": wanted, "by": by}) + "\n").encode())
        return by
    except OSError as error:
        raise InvalidInput(f"Cannot write to {place}: {error.strerror}.") from error


def finished(path: Path) -> bool:
    """Return whether all runs of a folder have finished."""
    try:
        facts = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return facts.get("status") == "finished"


def write_data(path: Path, histories: list[DataFrame]) -> None:
    """Write all histories as one table."""
    import pandas as pd

    write_atomically(path, pd.concat(histories, ignore_index=True).to_csv(index=False).encode())


def origin() -> dict[str, str]:
    """Return the package's version, and its commit if it is in a git checkout."""
    here = Path(__file__).parent.parent

    def git(*words: str) -> str:
        found = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True)
        return found.stdout.strip() if found.returncode == 0 else ""

    version = {"version": importlib.metadata.version("fedsolve")}
    try:
        tracked = git("ls-files", "--error-unmatch", "__init__.py")
        commit = git("rev-parse", "--short=12", "HEAD") if tracked else ""
        if commit and git("status", "--porcelain", "--", str(here)):
            commit += " with changes"
    except OSError:  # no git
        return version
    return version | ({"commit": commit} if commit else {})


def machine() -> str:
    """Describe this machine in a few words."""
    import jax

    model = ""
    if (cpus := Path("/proc/cpuinfo")).is_file():
        lines = cpus.read_text().splitlines()
        model = next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    words = [f"{cores} cores", model or platform.machine(), platform.system()]
    if jax.default_backend() != "cpu":
        words = [*(device.device_kind for device in jax.devices()), *words]
    return f"{', '.join(words)}; JAX {jax.__version__}"
