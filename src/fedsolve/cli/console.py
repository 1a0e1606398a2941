"""Console output: progress bars, tables, and errors in one sentence."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn, SupportsFloat

import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedsolve.experiments.tracking import Tracked
from fedsolve.runtimes.history import History
from fedsolve.solving.judgement import judgement
from fedsolve.solving.result import Run
from fedsolve.types import PyTree

Records = Mapping[tuple[str, int], Mapping[str, PyTree]]  # by variant and seed
out, err = Console(highlight=False), Console(stderr=True, highlight=False)


def fail(message: str, status: int) -> NoReturn:
    """Print an error and exit with that status."""
    err.print("Error:", message, style="bold red", markup=False, soft_wrap=True)
    sys.exit(status)


def tell(message: Warning | str, *_: object) -> None:
    """Print a warning; also in place of `warnings.showwarning`."""
    err.print("Warning:", str(message), style="yellow", markup=False, soft_wrap=True)


class Progress:
    """A progress bar: round, objective, constraint, bytes, time left."""

    def __init__(self, label: str, rounds: int):
        from rich import progress

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=20),
            progress.TextColumn("round {task.completed:.0f}/{task.total:.0f}"),
            progress.TextColumn("{task.fields[facts]}", markup=False),
            progress.TimeRemainingColumn(),
            console=err,
            transient=True,
        )
        self._printed = ""
        self._task = self._bar.add_task(label, total=rounds, facts="compiling")

    def __call__(self, done: int, rounds: int, newest: History) -> None:
        """Show the newest entries of the history (the `progress` of `solve`)."""
        self._bar.update(self._task, completed=done)
        if len(newest["round"]):
            facts = [f"f {newest['objective'][-1]:.4g}"]
            if "constraint" in newest:
                facts.append(f"g {newest['constraint'][-1]:.4g}")
            if "epsilon" in newest:
                facts.append(f"ε {newest['epsilon'][-1]:.3g}")
            facts.append(size_text(newest["bytes_up_total"][-1] + newest["bytes_down_total"][-1]))
            self._bar.update(self._task, facts="  ".join(facts))

    def say(self, done: int | None, facts: str) -> None:
        """Show how many rounds are done (None: as before), and a text."""
        self._bar.update(self._task, completed=done, facts=facts)

    def redirected(self, text: str) -> None:
        """Print a text that a terminal shows in the bar, if the output goes elsewhere."""
        if not err.is_terminal and text != self._printed:
            self._printed = text
            err.print(text, markup=False, soft_wrap=True)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


class RunProgress:
    """A progress bar for the current run of an experiment (the `progress` of the runner)."""

    def __init__(self):
        self._run: Tracked | None = None
        self._bar: Progress | None = None

    def __call__(self, run: Tracked, done: int, rounds: int, newest: History) -> None:
        if self._bar is None or run is not self._run:
            self.stop()
            self._run = run
            self._bar = Progress(f"{run.variant or run.experiment}, seed {run.seed}", rounds)
            self._bar.__enter__()
        self._bar(done, rounds, newest)

    def stop(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.__exit__()
            self._bar = None

    def __enter__(self) -> RunProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def closing_table(runs: Mapping[str, Sequence[Run]], records: Records | None = None) -> Table:
    """Return a table of the last values of every run.

    `records` has, by variant and seed, the record of a deployed run's sites: where some clients
    were not heard, a column says over how many of them the values are.
    """
    all_runs = [(variant, run) for variant, group in runs.items() for run in group]
    constrained = any("constraint" in run.history for _, run in all_runs)
    named = any(variant for variant, _ in all_runs)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0 if named else (0, 1, 0, 0))
    if named:  # where there is no room, names are folded and numbers stay whole
        table.add_column("variant", overflow="fold", min_width=10)
    timed = any("seconds_total" in run.history for _, run in all_runs)
    parts = [_clients(run, records or {}, variant) for variant, run in all_runs]
    columns = ["seed", "rounds", *(["clients"] if any(part.text for part in parts) else [])]
    several = len(all_runs) > 1  # of a single run, a sentence tells the best round
    columns += ["f(w)", *(["g(w)", "feasible"] if constrained else [])]
    columns += ["best f"] if constrained and several else []
    columns += ["sent"] if named else ["sent up", "sent down"]
    columns += [*(["clock"] if timed else []), "time"]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for (variant, run), part in zip(all_runs, parts, strict=True):
        history = run.history
        row = [escape(variant)] if variant else []
        row += [str(run.seed), str(run.rounds)]
        if not run.evaluated:
            table.add_row(*row, *["–"] * (len(columns) - 3), f"{run.seconds:.2f} s")
            continue
        row += [part.text or "all"] if "clients" in columns else []
        row.append(f"{history['objective'][-1]:.5g}")
        noisy = "objective_noise" in history
        if constrained:
            within = history["constraint"] <= float(getattr(run.algorithm, "tolerance", 0.0))
            feasible = "unknown" if noisy else _feasible(within, part.everyone)
            row += [f"{history['constraint'][-1]:.5g}", feasible]
        if constrained and several:
            found = f"{best.objective:.5g}" if (best := run.best) and best.feasible else "none"
            row.append("unknown" if noisy else found)
        sent = [history[f"bytes_{way}_total"][-1] for way in ("up", "down")]
        row += [size_text(sum(sent))] if named else [size_text(each) for each in sent]
        row += [f"{history['seconds_total'][-1]:.4g} s"] if timed else []
        table.add_row(*row, f"{run.seconds:.2f} s")
    return table


def best_sentence(runs: Mapping[str, Sequence[Run]]) -> str:
    """Return what the best model of a single run is; empty where there are several runs."""
    all_runs = [run for group in runs.values() for run in group]
    if len(all_runs) != 1 or (best := all_runs[0].best) is None:
        return ""
    if "objective_noise" in all_runs[0].history:
        return f"Best model, by values with noise: round {best.round}; in best.safetensors."
    if best.constraint is None:
        return f"Best model: round {best.round}, f = {best.objective:.5g}; in best.safetensors."
    tolerance = float(all_runs[0].algorithm.feasible_up_to)
    facts = f"round {best.round}, f = {best.objective:.5g}, g = {best.constraint:.5g}"
    if best.feasible:
        return f"Best model: {facts}; feasible (g ≤ {tolerance:g}); in best.safetensors."
    return f"No round was feasible (g ≤ {tolerance:g}); the nearest: {facts}; in best.safetensors."


def closing_sentences(runs: Mapping[str, Sequence[Run]]) -> list[str]:
    """Return what the best model of a single run is, and how each run ended."""
    found = [best] if (best := best_sentence(runs)) else []
    for variant, group in runs.items():
        said = {run.seed: judged(run) for run in group}
        for sentence in dict.fromkeys(said.values()):
            seeds = [seed for seed, text in said.items() if text == sentence]
            who = [variant] if variant else []
            who += [f"seed {', '.join(map(str, seeds))}"] if len(group) > 1 else []
            label = ", ".join(who)
            found += [f"{label}: {sentence}" if label else sentence] if sentence else []
    return found if len(found) <= MOST_SENTENCES else found[:1]


MOST_SENTENCES = 8  # that are printed below a table


def judged(run: Run) -> str:
    """Return a sentence on how a run ended; empty if it was too short."""
    return judgement(run.history, float(run.algorithm.feasible_up_to)) if run.evaluated else ""


class _Clients(NamedTuple):
    """Over which clients a run was evaluated."""

    text: str  # for the last entry; empty if over all
    everyone: np.ndarray  # which entries are over all clients


def _clients(run: Run, records: Records, variant: str) -> _Clients:
    """Compare how many clients were evaluated with how many there are in a deployed run."""
    record, counts = records.get((variant, run.seed)), run.history.get("clients_evaluated")
    if record is None or counts is None:
        return _Clients("", np.ones(len(run.history.get("round", ())), bool))
    total = record["clients"]
    everyone = counts == (-1 if total is None else total)
    partial = run.evaluated and not everyone[-1]
    return _Clients(f"{counts[-1]} of {total or 'more'}" if partial else "", everyone)


def _feasible(within: np.ndarray, everyone: np.ndarray) -> str:
    """Return in how many rounds the constraint held, of those in which it was over all clients."""
    if not everyone[-1]:
        return "unknown"
    share = f"{100 * within[everyone].mean():.0f} %"
    return share if everyone.all() else f"{share} of {everyone.sum()}"


def size_text(exact: SupportsFloat) -> str:
    """Return a number of bytes with a unit."""
    count = float(exact)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def catalogue_table() -> Table:
    """Return a table of the papers' figures and tables, and what it costs to reproduce them."""
    from fedsolve.papers.catalogue import catalogue, costs, papers
    from fedsolve.papers.pages import plain

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("figure or table", "shows", "state", "quick", "full", "on a GPU"):
        table.add_column(column, no_wrap=column != "shows")
    entries = catalogue()
    for paper, text in papers().items():
        table.add_row(f"[bold]{paper}[/bold]", f"[bold]{text['title']}[/bold]")
        for entry in entries.values():
            if entry.paper_of == paper:
                missing = plain(entry.note) if entry.state != "whole" else ""
                shows = escape(entry.shows)
                shows += f". [dim]{escape(missing)}[/dim]" if missing else ""
                table.add_row(entry.name, shows, entry.state, *costs(entry))
    return table
