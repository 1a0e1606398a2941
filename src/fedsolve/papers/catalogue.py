"""The catalogue of the papers' figures and tables (`papers.toml`), and what they cost.

An entry says what a figure shows, which experiments it consists of, what they cost, what to measure
and draw, what the paper says, and what was found.
"""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources

from fedsolve import plots
from fedsolve.errors import InvalidInput
from fedsolve.experiments import config
from fedsolve.experiments.registry import check_known
from fedsolve.fields import check_count
from fedsolve.types import Table

STATES = ("whole", "in part", "other data", "settings")
STUDIES = ("decisive", "decisive-cnn", "tcga-brca")  # neither figures nor tables of a paper


@dataclasses.dataclass(frozen=True)
class Entry:
    """A figure or table of a paper.

    - `state`: `whole`; `in part`; `other data` than the paper's; `settings`, a table of settings
      with nothing to run. `note` says what is missing, or where the settings are.
    - `set` changes keys of the experiments, `variants` selects some of them; `quick` has both for
      the small version, its minutes, and its own `columns` and `against`, if any; it
      may name fewer `experiments`.
    - `steps` to try for every variant but those of the experiments that are `fixed`; `tuning` has
      the rule that chooses one. `steps_seeds`: with how many of the seeds, by default with all. The
      small version takes the experiments' own steps.
    - `joined`: experiments whose runs are shown with those of another one.
    - `optional`: experiments that are left out where their data are not to be had.
    - `minutes` on 2 cores with the experiment's own seeds; `gpu_minutes` if it needs a GPU.
    - `picture`: `curves`, `trade-off`, or `rounds` (until a rule stopped the run).
    - `band`: the half-width of bands in standard deviations; None: from the least to the greatest.
    - `against`: the entry on the horizontal axis of curves.
    - `columns` are measures (see `reproduce.measured`), `paper` its own numbers by variant and
      measure.
    - `heading` of its section, where that is not `Figure 2`, say.
    - `study`: the page that shows the results of an entry which is a program of its own
      (`decisive`), in place of `experiments`.
    - `claims` are pairs: what the paper says of it, and what was found, in bold where the two
      differ.
    """

    name: str
    shows: str
    state: str = "whole"
    note: str = ""
    experiments: Sequence[str] = ()
    joined: Mapping[str, str] = dataclasses.field(default_factory=dict)
    optional: Sequence[str] = ()
    set: Mapping[str, object] = dataclasses.field(default_factory=dict)
    variants: Sequence[str] = ()
    quick: Table = dataclasses.field(default_factory=dict)
    steps: Sequence[float | int] = ()
    steps_seeds: int | None = None
    fixed: Sequence[str] = ()
    minutes: float | int = 0.0
    gpu_minutes: float | int = 0.0
    picture: str = "curves"
    panels: Sequence[str] = plots.USUAL
    lines: Mapping[str, float] = dataclasses.field(default_factory=dict)
    band: float | None = None
    against: str = "round"
    columns: Sequence[str] = ()
    paper: Mapping[str, Mapping[str, float | int]] = dataclasses.field(default_factory=dict)
    claims: Sequence[Sequence[str]] = ()
    study: str = ""
    heading: str = ""

    @property
    def runs(self) -> bool:
        """Whether there is something to run."""
        return bool(self.experiments or self.study)

    def shown(self, size: str) -> Entry:
        """Return the entry with the columns and the axis of a size, `quick` or `full`."""
        own = {k: v for k, v in self.quick.items() if k in ("columns", "against")}
        return dataclasses.replace(self, **own) if size == "quick" else self

    @property
    def paper_of(self) -> str:
        """The name of the entry's paper."""
        return self.name.partition("/")[0]


@functools.cache
def papers() -> dict[str, Table]:
    """Return the tables of `papers.toml`, by paper."""
    text = resources.files("fedsolve.papers").joinpath("papers.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def catalogue() -> dict[str, Entry]:
    """Return every figure and table, by name."""
    return {
        f"{paper}/{figure}": Entry(
            name=f"{paper}/{figure}", **(table | {"quick": _quick(figures, table)})
        )
        for paper, figures in papers().items()
        for figure, table in figures.items()
        if figure.startswith(("figure-", "table-")) or figure in STUDIES
    }


def _quick(paper: Table, figure: Table) -> Table:
    """Return a figure's small version: that of its paper, with its own changes."""
    usual, own = paper.get("quick", {}), figure.get("quick", {})
    return usual | own | {"set": usual.get("set", {}) | own.get("set", {})}


def find(name: str) -> Entry:
    """Return the figure or table of that name; raise if it has nothing to run."""
    entries = catalogue()
    check_known(name, entries, "figure or table")
    if not entries[name].runs:
        raise InvalidInput(f"There is nothing to run for {name}: {entries[name].note}")
    return entries[name]


def tables(entry: Entry, quick: bool = False, seeds: int | None = None) -> dict[str, Table]:
    """Return the configurations of a figure's experiments, by name."""
    changes = dict(entry.set) | (entry.quick["set"] if quick else {})
    chosen = (quick and entry.quick.get("variants")) or entry.variants
    found = {}
    for name in (quick and entry.quick.get("experiments")) or entry.experiments:
        table = config.read(name)
        for key, value in changes.items():
            table = config.with_key(table, key, value)
        if chosen:
            table["variants"] = {v: table["variants"][v] for v in chosen if v in table["variants"]}
        own = table["run"].pop("seed", 0)
        table["run"].setdefault("seeds", [own])
        if seeds is not None:
            check_count("seeds", seeds)
            table["run"]["seeds"] = list(range(seeds))
        found[name] = table
    return found


def minutes(entry: Entry, quick: bool = False, seeds: int | None = None) -> float | int:
    """Estimate the time on 2 cores."""
    usual = entry.quick["minutes"] if quick else entry.minutes
    if seeds is None or entry.study:
        return usual
    return usual * seeds / len(next(iter(tables(entry, quick).values()))["run"]["seeds"])


def costs(entry: Entry) -> tuple[str, str, str]:
    """Return the cost in words: quick, full, and on a GPU if it needs one."""
    if not entry.runs:
        return "", "", ""
    gpu = duration(entry.gpu_minutes) if entry.gpu_minutes else ""
    return duration(entry.quick["minutes"]), duration(entry.minutes), gpu


def duration(minutes: float | int) -> str:
    """Return a number of minutes in words."""
    if minutes < 1:
        return f"{max(round(60 * minutes), 1)} s"
    if minutes < 90:
        return f"{minutes:.0f} min"
    return f"{minutes / 60:.0f} h" if minutes < 48 * 60 else f"{minutes / 1440:.0f} days"


def changes(entry: Entry, quick: bool) -> Table:
    """Return the settings that the small version changes."""
    if not quick:
        return {}
    chosen = {
        key: len(entry.quick[key]) for key in ("experiments", "variants") if key in entry.quick
    }
    return dict(entry.quick["set"]) | chosen
