"""Figures of runs, for papers and reports."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from fedsolve.errors import InvalidInput

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fedsolve.algorithms.base import Algorithm

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe-Ito
DOTS = (2, 2)
DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "X", "s", "^")
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "font.size": 9,
    "legend.frameon": False,
    "savefig.dpi": 200,
    "pdf.fonttype": 42,
}
TITLES = {
    "objective": "Objective $f(w)$",
    "weighted_objective": "Objective $\\Sigma_i\\, p_i f_i(w)$",
    "constraint": "Constraint $g(w)$",
    "participation": "Contributions $N_i$",
    "reward": "Reward of an episode",
    "cost": "Cost of an episode",
    "test_accuracy": "Test accuracy",
    "switch": "Switching weight",
    "compression_error": "Compression error, downlink",
    "uplink_error": "Compression error, uplink",
    "cohort": "Participation",
}
USUAL = ("objective", "weighted_objective", "constraint", "participation")
AXES = {
    "round": "Round",
    "seconds_total": "Simulated time (s)",
    "bytes_up_total": "Bytes sent up",
    "bytes_down_total": "Bytes sent down",
    "messages_up_total": "Messages from clients",
    "messages_down_total": "Messages to clients",
    "messages_both_ways": "Messages",
    "vectors_up_total": "Vectors from clients",
}
BINS = 200  # of rounds in a heat map
History = Mapping[str, np.ndarray]


@runtime_checkable
class PlottedRun(Protocol):
    """The part of a run that is plotted."""

    @property
    def history(self) -> History: ...

    @property
    def rounds(self) -> int: ...

    @property
    def algorithm(self) -> Algorithm: ...


Groups = Mapping[str, Sequence[PlottedRun]]  # runs by label


def plot(
    groups: Groups,
    path: str | Path | None = None,
    panels: Sequence[str] = USUAL,
    lines: Mapping[str, float] | None = None,
    band: float | None = None,
    against: str = "round",
    width: float | int | None = None,
    style: Mapping[str, object] | None = None,
) -> Figure:
    """Plot entries of the history, such as objective and constraint, against rounds.

    For each label, a curve shows the mean over its runs, and a band the range from the least to
    the greatest. An entry with one number for each client (contributions) has a curve for each
    client of the last label's first run, and a dashed line where the algorithm knows its limit;
    `cohort`, the clients of a round, is a heat map of that run. The panel of the constraint shows
    the tolerance as a line, and at its top a tick for each round whose mean exceeds the tolerance.

    Labels of the form "hard: E = 5" make a column of panels for "hard", and one for each other
    word before a colon.

    Args:
        groups: Runs by label.
        path: Where to save the figure; the suffix gives the format.
        panels: The entries to plot; those that not all runs have are left out.
        lines: Reference levels by entry.
        band: How many standard deviations the band covers, in place of least to greatest.
        against: The entry on the horizontal axis, such as `seconds_total` or `bytes_up_total`.
        width: The width in inches.
        style: matplotlib's own settings.

    Returns:
        The figure.

    Raises:
        InvalidInput: If not all runs have the entry `against`.
    """
    from matplotlib.figure import Figure
    from matplotlib.style import context

    runs = [run for group in groups.values() for run in group]
    if not all(against in run.history for run in runs):
        known = [name for name in AXES if all(name in run.history for run in runs)]
        raise InvalidInput(f"Runs can be shown against {', '.join(known)}, not {against!r}.")
    panels = [name for name in panels if all(name in run.history for run in runs)]
    levels = dict(lines or {})
    columns = _columns(groups)
    alone = len(columns) == 1
    across = min(len(panels), 3) if alone else len(columns)
    rows = math.ceil(len(panels) / across) if alone else len(panels)
    single = all(runs[0].history[name].ndim == 1 for name in panels)  # no curve for each client
    labels = [list(shown) for shown in columns.values()]
    alike = all(each == labels[0] for each in labels)  # one legend serves all columns
    crowded = single and alike and len(labels[0]) > (3 if alone else 4)
    with context({**STYLE, **(style or {})}):
        size = _size(across, rows, width, len(labels[0]) if crowded else 0)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(rows, across, squeeze=False, sharey=False if alone else "row")
        for column, (heading, shown) in enumerate(columns.items()):
            for row, name in enumerate(panels):
                axis = axes[divmod(row, across)] if alone else axes[row, column]
                title = TITLES.get(name, name) + (f", {heading}" if heading else "")
                if name in levels:
                    axis.axhline(levels[name], color="black", linewidth=0.9, dashes=DOTS)
                _panel(axis, shown, name, title, runs, band, against)
                has_labels = axis.get_legend_handles_labels()[1] and not crowded
                if has_labels and row < (2 if alone else 1):
                    axis.legend()
        for axis in axes.flat[len(panels) * len(columns) :]:
            axis.remove()
        if crowded:
            found = [axis.get_legend_handles_labels() for axis in figure.axes]
            figure.legend(*max(found, key=lambda legend: len(legend[1])), loc="outside right upper")
        _save(figure, path)
    return figure


def _size(
    across: int, rows: int, width: float | int | None, legend_lines: int
) -> tuple[float, float]:
    """Return width and height in inches, with room for a legend beside the panels if it has lines.

    Without a `width`, a panel is 3.4 inches wide.
    """
    beside = 1.6 if legend_lines else 0.2
    each = 3.4 if width is None else max((width - beside) / across, 1.0)
    legend = 0.4 + 0.2 * legend_lines if legend_lines else 0.0
    return each * across + beside, max((0.5 + 0.62 * each) * rows + 0.1, legend)


def _save(figure: Figure, path: str | Path | None) -> None:
    """Save a figure if there is a path, while the style still applies."""
    if path is not None:
        figure.savefig(path)


def tradeoff(groups: Groups, path: str | Path | None = None) -> Figure:
    """Plot the final objective against the final constraint, a point for each run.

    Both are means over the last fifth of a run.

    Args:
        groups: Runs by label.
        path: Where to save the figure.

    Returns:
        The figure.
    """
    from matplotlib.figure import Figure
    from matplotlib.style import context

    with context(STYLE):
        figure = Figure(figsize=(5.4, 3.2), layout="constrained")
        axis = figure.subplots()
        for index, (label, group) in enumerate(groups.items()):
            ends = [
                [
                    np.mean(run.history[name][-max(len(run.history[name]) // 5, 1) :])
                    for run in group
                ]
                for name in ("constraint", "objective")
            ]
            marker = MARKERS[index // len(COLORS) % len(MARKERS)]
            color = COLORS[index % len(COLORS)]
            axis.scatter(*ends, s=28, color=color, marker=marker, label=label, alpha=0.85)
        _tolerance(axis.axvline, [run for group in groups.values() for run in group])
        axis.set(xlabel=TITLES["constraint"], ylabel=TITLES["objective"])
        low, high = axis.dataLim.intervaly
        if low > 0 and high > 10 * low:
            axis.set_yscale("log")
        figure.legend(loc="outside right upper")
        _save(figure, path)
    return figure


def effort(groups: Groups, path: str | Path | None = None) -> Figure:
    """Plot the number of rounds after which a rule stopped the runs, and their seconds.

    Labels are of the form "FedADMM: k_0 = 5". Each word before a colon has a curve: the median
    over runs, with a band from the least to the greatest, against the number after it. Seconds have
    a panel if all runs have them (`seconds`).

    Args:
        groups: Runs by label.
        path: Where to save the figure.

    Returns:
        The figure.
    """
    from matplotlib.figure import Figure
    from matplotlib.style import context

    measures: dict[str, Callable[[PlottedRun], float]] = {"Rounds": lambda run: run.rounds}
    if all(_seconds(run) > 0 for runs in groups.values() for run in runs):
        measures["Seconds"] = _seconds
    with context(STYLE):
        size = (1.3 + 3.1 * len(measures), 2.8)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(1, len(measures), squeeze=False)[0]
        for axis, (name, measure) in zip(axes, measures.items(), strict=True):
            for index, (heading, shown) in enumerate(_columns(groups).items()):
                taken = {
                    label: [float(measure(run)) for run in runs] for label, runs in shown.items()
                }
                _effort_curve(axis, heading, taken, index)
            axis.set(ylabel=name)
            _positive(axis)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper")
        _save(figure, path)
    return figure


def _seconds(run: PlottedRun) -> float:
    """Return the seconds of a run; not a number if it has none."""
    return float(getattr(run, "seconds", math.nan))


def _effort_curve(axis: Axes, heading: str, taken: Mapping[str, list[float]], index: int) -> None:
    """Draw the medians of one method against the number in its labels, with a band."""
    names, numbers = zip(*(label.split(" = ") for label in taken), strict=True)
    color, at = COLORS[index % len(COLORS)], [float(number) for number in numbers]
    middle = [np.median(values) for values in taken.values()]
    marker, size = MARKERS[index % len(MARKERS)], max(6.5 - index, 2.5)  # they may coincide
    axis.plot(at, middle, marker + "-", color=color, ms=size, lw=1.2, label=heading)
    lowest, highest = zip(*((min(values), max(values)) for values in taken.values()), strict=True)
    axis.fill_between(at, lowest, highest, color=color, alpha=0.2, linewidth=0)
    axis.set(xlabel=names[0])


def _positive(axis: Axes) -> None:
    """Scale the axis of positive numbers: logarithmic if they differ much, else from 0."""
    from matplotlib.ticker import LogLocator

    if axis.dataLim.y1 > 5 * axis.dataLim.y0:
        axis.set_yscale("log", subs=[])
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
    else:
        axis.set_ylim(0, 1.1 * axis.dataLim.y1)


def has_numbers(labels: Iterable[str]) -> bool:
    """Return whether all labels are of the form "FedADMM: k_0 = 5"."""
    return all(re.fullmatch(r".+: .+ = -?[\d.]+(e-?\d+)?", label) for label in labels)


def _columns(groups: Groups) -> dict[str, Groups]:
    """Split groups by the word before the colon of their labels, if all labels have one."""
    if not all(": " in label for label in groups):
        return {"": groups}
    columns: dict[str, dict[str, Sequence[PlottedRun]]] = {}
    for label, runs in groups.items():
        heading, _, rest = label.partition(": ")
        columns.setdefault(heading, {})[rest] = runs
    return dict(columns)


def _panel(
    axis: Axes,
    groups: Groups,
    name: str,
    title: str,
    runs: Sequence[PlottedRun],
    band: float | None,
    against: str,
) -> None:
    """Draw one entry of the history: curves of groups, curves of clients, or a heat map."""
    if runs[0].history[name].ndim == 2:
        draw = _heat_map if name == "cohort" else _each_client
        draw(axis, list(groups.values())[-1][0], name, title, against)
        return
    for index, (label, group) in enumerate(groups.items()):
        histories = [run.history for run in group]
        across, mean = _curve(axis, label, histories, name, index, band, against)
        if name == "constraint":
            over = across[mean > float(getattr(group[0].algorithm, "tolerance", 0.0))]
            _marks(axis, over, across, index)
    axis.set(title=title, xlabel=AXES.get(against, against))
    axis.margins(x=0.01)
    if name == "constraint":
        _tolerance(axis.axhline, runs)
    _fit(axis, [run.history[name] for run in runs])


def _each_client(axis: Axes, run: PlottedRun, name: str, title: str, against: str) -> None:
    """Draw a curve for each client, and a dashed line at its limit where that is known."""
    limits = run.algorithm.limits().get(name)
    for client, values in enumerate(run.history[name].T):
        color, width = COLORS[client % len(COLORS)], 1.2 if len(run.history[name].T) < 30 else 0.5
        axis.plot(run.history[against], values, color=color, linewidth=width)
        if limits is not None:
            axis.axhline(limits[client], color=color, linewidth=0.8, linestyle="--", alpha=0.7)
    axis.set(title=title, xlabel=AXES.get(against, against))
    axis.margins(x=0.01)


def _heat_map(axis: Axes, run: PlottedRun, name: str, title: str, against: str) -> None:
    """Draw the share of rounds in which each client took part."""
    ends, shares = participation(run.history[name], run.history["round"])
    edges = np.concatenate([[0], ends])
    axis.pcolormesh(edges, np.arange(shares.shape[1] + 1) - 0.5, shares.T, cmap="Blues", vmin=0)
    axis.set(title=title, xlabel=AXES["round"], ylabel="Client")
    axis.invert_yaxis()
    axis.grid(False)


def participation(
    cohorts: np.ndarray, rounds: np.ndarray
) -> tuple[Int[np.ndarray, " bins"], Float[np.ndarray, "bins clients"]]:
    """Compute each client's share of participation in bins of rounds.

    Args:
        cohorts: The clients of each round, a row for each; -1 stands for none.
        rounds: The number of each round.

    Returns:
        The last round of every bin, and the share of its rounds in which each client took part.
    """
    clients, step = int(cohorts.max(initial=0)) + 1, math.ceil(len(cohorts) / BINS)
    parts = [cohorts[k : k + step] for k in range(0, len(cohorts), step)]
    shares = [np.bincount(p[p >= 0], minlength=clients) / len(p) for p in parts]
    last = [int(rounds[min(k + step, len(rounds)) - 1]) for k in range(0, len(cohorts), step)]
    return np.array(last), np.array(shares)


def _tolerance(line: Callable, runs: Sequence[PlottedRun]) -> None:
    """Draw the tolerance with `axhline` or `axvline`."""
    tolerance = float(getattr(runs[0].algorithm, "tolerance", 0.0))
    label = f"tolerance {tolerance:g}"
    line(tolerance, color="black", linewidth=0.9, dashes=DOTS, label=label)


def _marks(axis: Axes, over: np.ndarray, across: np.ndarray, index: int) -> None:
    """Draw a tick at the top for each position in `over`, in a row for each label."""
    pixel = max((across[-1] - across[0]) / 600, 1e-12)  # closer ticks would overlap
    _, first = np.unique((over - across[0]) // pixel, return_index=True)
    axis.plot(
        over[first],
        np.full(len(first), 0.985 - 0.022 * (index % 20)),
        "|",
        color=COLORS[index % len(COLORS)],
        markersize=3,
        markeredgewidth=0.5,
        transform=axis.get_xaxis_transform(),
        gid="over",
    )


def _curve(
    axis: Axes,
    label: str,
    histories: Sequence[History],
    name: str,
    index: int,
    band: float | None,
    against: str,
) -> tuple[np.ndarray, np.ndarray]:
    """Draw mean and band of a group; return the curve's coordinates."""
    color, dash = COLORS[index % len(COLORS)], DASHES[index // len(COLORS) % len(DASHES)]
    length = min(len(history[name]) for history in histories)
    across = histories[0][against][:length]
    values = np.stack([history[name][:length] for history in histories])
    if against != "round" and len(values) > 1:  # runs differ in their abscissas
        across = np.linspace(
            max(history[against][0] for history in histories),
            min(history[against][-1] for history in histories),
            max(length, 2),
        )
        values = np.stack([np.interp(across, h[against], h[name]) for h in histories])
    mean = values.mean(axis=0)
    axis.plot(across, mean, dash, color=color, linewidth=1.2, label=label or None)
    if len(values) > 1:
        low, high = values.min(axis=0), values.max(axis=0)
        if band is not None:
            spread = band * values.std(axis=0)
            low, high = mean - spread, mean + spread
        axis.fill_between(across, low, high, color=color, alpha=0.2, linewidth=0)
    return across, mean


def _fit(axis: Axes, series: list[np.ndarray]) -> None:
    """Leave a few early values outside if they are so far above the rest that they flatten it."""
    values = np.concatenate([s[np.isfinite(s)] for s in series])
    if not len(values):
        return
    low, high, top = np.min(values), np.quantile(values, 0.97), np.max(values)
    if top - low > 4 * (high - low) > 0:
        axis.set_ylim(low - 0.05 * (high - low), low + 1.6 * (high - low))
