"""Pictures of runs, fit for a paper."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe-Ito
DASHES = ("-", "--", "-.", ":")
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
TITLES = {"objective": "Objective $f(w)$", "constraint": "Constraint $g(w)$"}


def plot(groups: Mapping[str, list[Any]], path: str | Path | None = None) -> Any:
    """Objective (and constraint, with the tolerance as a line) against rounds: for each label the
    mean over its runs, and the band from the least to the greatest."""
    from matplotlib.figure import Figure
    from matplotlib.style import context

    runs = [run for group in groups.values() for run in group]
    panels = [name for name in TITLES if all(name in run.history for run in runs)]
    with context(STYLE):
        figure = Figure(figsize=(3.4 * len(panels) + 0.2, 2.7), layout="constrained")
        for axis, name in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels, strict=True):
            for index, (label, group) in enumerate(groups.items()):
                _curve(axis, label, [run.history for run in group], name, index)
            axis.set(title=TITLES[name], xlabel="Round")
            axis.margins(x=0.01)
            if name == "constraint":
                tolerance = float(getattr(runs[0].algorithm, "tolerance", 0.0))
                axis.axhline(
                    tolerance,
                    color="black",
                    linewidth=0.9,
                    linestyle=(0, (2, 2)),
                    label=f"tolerance {tolerance:g}",
                )
            _fit(axis, [run.history[name] for run in runs])
            if axis.get_legend_handles_labels()[1]:
                axis.legend()
        if path is not None:
            figure.savefig(path)
    return figure


def _curve(axis: Any, label: str, histories: list[dict], name: str, index: int) -> None:
    color, dash = COLORS[index % len(COLORS)], DASHES[index // len(COLORS) % len(DASHES)]
    length = min(len(history[name]) for history in histories)
    rounds = histories[0]["round"][:length]
    values = np.stack([history[name][:length] for history in histories])
    axis.plot(rounds, values.mean(axis=0), dash, color=color, linewidth=1.2, label=label or None)
    if len(values) > 1:
        axis.fill_between(
            rounds, values.min(axis=0), values.max(axis=0), color=color, alpha=0.2, linewidth=0
        )


def _fit(axis: Any, series: list[np.ndarray]) -> None:
    """A few early values far above the rest would flatten everything else: leave them outside."""
    values = np.concatenate([s[np.isfinite(s)] for s in series])
    low, high, top = np.min(values), np.quantile(values, 0.97), np.max(values)
    if top - low > 4 * (high - low) > 0:
        axis.set_ylim(low - 0.05 * (high - low), low + 1.6 * (high - low))
