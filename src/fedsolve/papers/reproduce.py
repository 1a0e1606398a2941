"""`fedsolve reproduce`: the papers' figures and tables, run, measured and drawn.

`papers.toml` is the catalogue: what a figure shows, which experiments it is, what they cost, what
to measure and draw, what the paper says, and what was found. Experiments are run as `fedsolve run`
runs them; everything else is made from the folders that they leave.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from fedsolve import plots
from fedsolve.errors import InvalidInput
from fedsolve.experiments import config
from fedsolve.experiments import run_folder as folder
from fedsolve.experiments.config import Experiment
from fedsolve.experiments.registry import check_known
from fedsolve.fields import check_count
from fedsolve.storage.atomic import write_atomically
from fedsolve.theory.fedadmm import communication_rounds

STATES = ("whole", "in part", "other data", "settings")
LATE = 5  # means are over the last fifth of a run


@dataclasses.dataclass(frozen=True)
class Entry:
    """A figure or table of a paper.

    - `state`: `whole`; `in part`; `other data` than the paper's; `settings`, a table of settings
      where there is nothing to run. `note` says what is missing, or where the settings are.
    - `set` changes keys of the experiments, `variants` picks some of them; `quick` has both for the
      small version, and its minutes.
    - `minutes` on 2 cores with the experiment's own seeds; `gpu_minutes` where it asks for a GPU.
    - `columns` are measures (see `measured`), `paper` its own numbers by variant and measure.
    - `claims` are pairs: what the paper says of it, and what was found, in bold where
      that is something else.
    """

    name: str
    shows: str
    state: str = "whole"
    note: str = ""
    experiments: Sequence[str] = ()
    set: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    variants: Sequence[str] = ()
    quick: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    minutes: float | int = 0.0
    gpu_minutes: float | int = 0.0
    picture: str = "curves"  # or "trade-off"; "rounds" until a rule stopped the run
    panels: Sequence[str] = plots.USUAL
    lines: Mapping[str, float] = dataclasses.field(default_factory=dict)
    band: float | None = None  # standard deviations; None: from the least to the greatest
    columns: Sequence[str] = ()
    paper: Mapping[str, Mapping[str, float | int]] = dataclasses.field(default_factory=dict)
    claims: Sequence[Sequence[str]] = ()

    @property
    def paper_of(self) -> str:
        return self.name.partition("/")[0]


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A run as its folder tells it."""

    history: dict[str, np.ndarray]
    algorithm: Any
    seed: int
    allowed: int  # so many rounds at most
    seconds: float = math.nan

    @property
    def rounds(self) -> int:
        return int(self.history["round"][-1])


Groups = dict[str, list[Recorded]]  # by variant


@functools.cache
def papers() -> dict[str, dict[str, Any]]:
    """The catalogue's text, by paper."""
    text = resources.files("fedsolve.papers").joinpath("papers.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def catalogue() -> dict[str, Entry]:
    """Every figure and table, by name."""
    return {
        f"{paper}/{figure}": Entry(
            name=f"{paper}/{figure}", **(table | {"quick": _quick(figures, table)})
        )
        for paper, figures in papers().items()
        for figure, table in figures.items()
        if figure.startswith(("figure-", "table-"))
    }


def _quick(paper: dict[str, Any], figure: dict[str, Any]) -> dict[str, Any]:
    """A figure's small version: the paper's, with its own changes."""
    usual, own = paper.get("quick", {}), figure.get("quick", {})
    return usual | own | {"set": usual.get("set", {}) | own.get("set", {})}


def find(name: str) -> Entry:
    """The figure or table of that name, which must be one that can be run."""
    entries = catalogue()
    check_known(name, entries, "figure or table")
    if not entries[name].experiments:
        raise InvalidInput(f"There is nothing to run for {name}: {entries[name].note}")
    return entries[name]


def tables(
    entry: Entry, quick: bool = False, seeds: int | None = None
) -> dict[str, dict[str, Any]]:
    """The configurations of a figure's experiments, by name."""
    changes = dict(entry.set) | (entry.quick["set"] if quick else {})
    chosen = (quick and entry.quick.get("variants")) or entry.variants
    found = {}
    for name in entry.experiments:
        table = config.read(name)
        for key, value in changes.items():
            table = config.with_key(table, key, value)
        if chosen:
            table["variants"] = {v: table["variants"][v] for v in chosen if v in table["variants"]}
        own = table["run"].pop("seed", 0)
        table["run"].setdefault("seeds", [own])
        if seeds is not None:
            check_count("--seeds", seeds)
            table["run"]["seeds"] = list(range(seeds))
        found[name] = table
    return found


def plan(entry: Entry, quick: bool = False, seeds: int | None = None) -> dict[str, Experiment]:
    """A figure's experiments, ready to run, by name."""
    return {name: config.resolve(name, t) for name, t in tables(entry, quick, seeds).items()}


def minutes(entry: Entry, quick: bool = False, seeds: int | None = None) -> float | int:
    """What it takes on 2 cores, about."""
    usual = entry.quick["minutes"] if quick else entry.minutes
    if seeds is None:
        return usual
    return usual * seeds / len(next(iter(tables(entry, quick).values()))["run"]["seeds"])


def costs(entry: Entry) -> tuple[str, str, str]:
    """What it takes, in words: quick, full, and on a GPU where it asks for one."""
    if not entry.experiments:
        return "", "", ""
    gpu = duration(entry.gpu_minutes) if entry.gpu_minutes else ""
    return duration(entry.quick["minutes"]), duration(entry.minutes), gpu


def duration(minutes: float | int) -> str:
    """Minutes in words."""
    if minutes < 1:
        return f"{max(round(60 * minutes), 1)} s"
    if minutes < 90:
        return f"{minutes:.0f} min"
    return f"{minutes / 60:.0f} h" if minutes < 48 * 60 else f"{minutes / 1440:.0f} days"


def recorded(contents: folder.Contents, experiment: Experiment) -> Groups:
    """The runs of a folder."""
    groups: Groups = {}
    for (variant, seed), rows in contents.table.groupby(["variant", "seed"], sort=False):
        numbers = rows.select_dtypes("number").drop(columns=["seed", "diverged"], errors="ignore")
        history = {str(name): numbers[name].to_numpy() for name in numbers}
        prefix = f"{variant}/seed-{seed}/".lstrip("/")
        wide = {k[len(prefix) :]: v for k, v in contents.wide.items() if k.startswith(prefix)}
        algorithm, rounds = experiment.cells.algorithms[variant], experiment.options["rounds"]
        seconds = contents.facts.get("seconds", {}).get(prefix.rstrip("/"), math.nan)
        run = Recorded(history | wide, algorithm, int(seed), rounds, float(seconds))
        groups.setdefault(variant, []).append(run)
    return groups


def measured(column: str, run: Recorded) -> float:
    """A measure of a run, over the last fifth of its evaluations; not a number where it has none.

    | `objective`, or any entry | its mean |
    | `over` | the share of evaluations with g above the tolerance |
    | `deviation` | the standard deviation of g |
    | `reward@100`, `reward@end` | at that round; at the end |
    | `test_accuracy@20 epochs` | at the end of that epoch; of that round, where rounds have none |
    | `violations` | all evaluations with g above the tolerance, after the first without |
    | `seconds` | of the run, with compiling |
    | `CR` | FedADMM's communication rounds (29) until a rule stopped the run |
    """
    name, at, when = column.partition("@")
    late = slice(-max(len(run.history["round"]) // LATE, 1), None)
    if column == "CR":
        return float(communication_rounds(run.rounds)) if run.rounds < run.allowed else np.nan
    if column == "seconds":
        return run.seconds
    if column in ("over", "deviation", "violations"):
        g = run.history["constraint"]
        above = g > float(getattr(run.algorithm, "tolerance", 0.0))
        if column == "violations":
            return float(above[np.argmin(above) :].sum())
        return float(np.mean(above[late]) if column == "over" else np.std(g[late]))
    if name not in run.history:
        return np.nan
    values = run.history[name]
    if not at:
        return float(np.mean(values[late]))
    number, _, unit = when.partition(" ")
    counted = np.isfinite(run.history.get(unit, np.nan)).any()  # else other variants are
    axis = unit if counted else "round"
    row = -1 if when == "end" else int(np.searchsorted(run.history[axis], int(number)))
    return float(values[row]) if row < len(values) else np.nan


def finish(
    entry: Entry, results: Mapping[str, Groups], out: Path, made: Mapping[str, Any]
) -> dict[str, Any]:
    """Measures and draws: writes `summary.json` and the pictures, and returns the summary. `made`
    tells how the results came about."""
    from matplotlib.style import context

    tables, pictures = {}, []
    for name, groups in results.items():
        tables[name] = [
            {"variant": variant, "seeds": len(runs)}
            | {c: _spread(c, [measured(c, run) for run in runs]) for c in entry.columns}
            for variant, runs in groups.items()
        ]
        figure = _draw(entry, groups)
        with context(plots.STYLE):
            for kind in ("png", "pdf"):
                figure.savefig(out / f"{name}.{kind}", dpi=110)
        pictures.append(f"{name}.png")
    summary = {"name": entry.name, **made, "pictures": pictures, "numbers": tables}
    write_atomically(out / "summary.json", (json.dumps(summary, indent=1) + "\n").encode())
    return summary


def _spread(column: str, values: list[float]) -> list[float] | None:
    """Middle and standard deviation over seeds; None where there is none, as JSON has only numbers.
    The middle is the mean, but the median of CR, as in its paper: what is not reached is late."""
    there = [value for value in values if np.isfinite(value)]
    if column == "CR":
        middle = np.median(np.where(np.isfinite(values), values, np.inf))
    else:
        middle = np.mean(there) if there else np.nan
    return [float(f"{x:.6g}") for x in (middle, np.std(there))] if np.isfinite(middle) else None


def _draw(entry: Entry, groups: Groups) -> Any:
    if entry.picture == "trade-off":
        return plots.tradeoff(groups)
    if entry.picture == "rounds":
        return plots.effort(groups)
    return plots.plot(groups, panels=entry.panels, lines=entry.lines, band=entry.band)


def begin(place: Path, wanted: dict[str, Any]) -> dict[str, str]:
    """Makes the folder of a reproduction, or sees that it is one of the same; tells when, where and
    by what it was begun."""
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
    """Whether a folder of runs has all of them."""
    try:
        facts = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return facts.get("status") == "finished"


def changes(entry: Entry, quick: bool) -> dict[str, Any]:
    """What the small version changes."""
    if not quick:
        return {}
    chosen = {"variants": len(entry.quick["variants"])} if "variants" in entry.quick else {}
    return dict(entry.quick["set"]) | chosen


def write_data(path: Path, tables: list[Any]) -> None:
    """All histories as one table."""
    import pandas as pd

    write_atomically(path, pd.concat(tables, ignore_index=True).to_csv(index=False).encode())


def origin() -> dict[str, str]:
    """The commit of the package, where it is in a git checkout, and its version."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        found = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True)
        return found.stdout.strip() if found.returncode == 0 else ""

    version = {"version": importlib.metadata.version("fedsolve")}
    try:
        tracked = git("ls-files", "--error-unmatch", Path(__file__).name)
        commit = git("rev-parse", "--short=12", "HEAD") if tracked else ""
        if commit and git("status", "--porcelain", "--", str(here)):
            commit += " with changes"
    except OSError:  # no git
        return version
    return version | ({"commit": commit} if commit else {})


def machine() -> str:
    """This machine in a few words."""
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
