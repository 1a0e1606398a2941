"""Console output: progress bars, tables, and errors in one sentence."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn, SupportsFloat

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedsolve.experiments.tracking import Tracked
from fedsolve.runtimes.history import History
from fedsolve.solving.result import Run

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
        self._task = self._bar.add_task(label, total=rounds, facts="compiling")

    def __call__(self, done: int, rounds: int, newest: History) -> None:
        """Show the newest entries of the history (the `progress` of `solve`)."""
        self._bar.update(self._task, completed=done)
        if len(newest["round"]):
            facts = [f"f {newest['objective'][-1]:.4g}"]
            if "constraint" in newest:
                facts.append(f"g {newest['constraint'][-1]:.4g}")
            facts.append(size_text(newest["bytes_up_total"][-1] + newest["bytes_down_total"][-1]))
            self._bar.update(self._task, facts="  ".join(facts))

    def say(self, done: int | None, facts: str) -> None:
        """Show how many rounds are done (None: as before), and a text."""
        self._bar.update(self._task, completed=done, facts=facts)

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


def closing_table(runs: Mapping[str, Sequence[Run]]) -> Table:
    """Return a table of the last values of every run."""
    all_runs = [(variant, run) for variant, group in runs.items() for run in group]
    constrained = any("constraint" in run.history for _, run in all_runs)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    if any(variant for variant, _ in all_runs):
        table.add_column("variant", no_wrap=True)
    timed = any("seconds_total" in run.history for _, run in all_runs)
    columns = ["seed", "rounds", "f(w)", *(["g(w)", "feasible"] if constrained else [])]
    columns += ["sent up", "sent down", *(["clock"] if timed else []), "time"]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for variant, run in all_runs:
        history = run.history
        row = [variant] if variant else []
        row += [str(run.seed), str(run.rounds)]
        if not run.evaluated:
            table.add_row(*row, *["–"] * (len(columns) - 3), f"{run.seconds:.2f} s")
            continue
        row.append(f"{history['objective'][-1]:.5g}")
        if constrained:
            g, tolerance = history["constraint"], float(getattr(run.algorithm, "tolerance", 0.0))
            row += [f"{g[-1]:.5g}", f"{100 * (g <= tolerance).mean():.0f} %"]
        row += [size_text(history[f"bytes_{way}_total"][-1]) for way in ("up", "down")]
        row += [f"{history['seconds_total'][-1]:.4g} s"] if timed else []
        table.add_row(*row, f"{run.seconds:.2f} s")
    return table


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
                shows = f"{entry.shows}. [dim]{escape(missing)}[/dim]" if missing else entry.shows
                table.add_row(entry.name, shows, entry.state, *costs(entry))
    return table
