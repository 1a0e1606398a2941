"""One sentence on how a run ended: feasible or not, settled or not, and what to try."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

SHORTEST = 8  # evaluated rounds, below which nothing is said of how a run goes on
FLIPS = 0.8  # share of steps that turn around, from which values oscillate
MOVES = 0.02  # part of the whole fall of f, from which it still falls


def judgement(history: Mapping[str, np.ndarray], tolerance: float | int) -> str:
    """Return a sentence about the last quarter of a history; empty if there is too little.

    A run oscillates if the switch, or f and g, turn around in most steps, with an amplitude that
    can be seen; it still falls if the second half of the quarter has a mean f that is lower than
    that of the first by 2% of the whole fall. Otherwise it has settled. Values with noise, of a
    private run, tell whether g is feasible only where it is two deviations away from the tolerance.

    Args:
        history: Columns by name, with `round` and `objective`, perhaps `constraint` and `switch`;
            of a private run `objective_noise`, and `constraint_noise` where that is known.
        tolerance: Up to which g a round is feasible.

    Returns:
        The sentence.

    Example:
        >>> import numpy as np
        >>> from fedsolve.solving.judgement import judgement
        >>> k = np.arange(1, 201)
        >>> judgement({"round": k, "objective": 1 / k}, 0.0)
        'f has settled.'
        >>> g = 0.1 + 0.05 * (-1.0) ** k
        >>> said = judgement({"round": k, "objective": 1 / k, "constraint": g}, 0.1)
        >>> print(said.replace("; ", ";" + chr(10)))
        Not feasible at the end (g = 0.15 > 0.1), but in 50 % of the last rounds;
        g oscillates from round to round: try a smaller step or soft switching.
    """
    f = np.asarray(history.get("objective", ()), float)
    if len(f) and "objective_noise" in history:
        return _with_noise(history, tolerance)
    if len(f) < SHORTEST or not np.isfinite(f).all():
        return ""
    last = slice(-max(SHORTEST, len(f) // 4), None)
    g = np.asarray(history["constraint"], float) if "constraint" in history else None
    switch = history.get("switch")
    parts, advice = [], []
    if g is not None:
        feasible = bool(g[-1] <= tolerance)
        sign = "≤" if feasible else ">"
        text = "Feasible" if feasible else "Not feasible at the end"
        text += f" (g = {g[-1]:.3g} {sign} {tolerance:g})"
        share = float(np.mean(g[last] <= tolerance))
        if not feasible and share > 0:
            text += f", but in {100 * share:.0f} % of the last rounds"
        parts.append(text)
        if not feasible and share == 0 and not _falls(g, last):
            advice.append("a larger step for g, more rounds, or a looser bound")
    if switch is not None and np.ndim(switch) == 1 and _turns(np.asarray(switch, float)[last], 0.5):
        parts.append("the switch turns in most rounds (a two-cycle of f and g)")
        advice.insert(0, "soft switching or a smaller step")
    elif g is not None and _oscillates(g, last):
        parts.append("g oscillates from round to round")
        advice.insert(0, "a smaller step or soft switching")
    elif _oscillates(f, last):
        parts.append("f oscillates from round to round")
        advice.insert(0, "a smaller step")
    elif _falls(f, last):
        parts.append("f still falls")
        advice.append("more rounds")
    else:
        parts.append("f has settled")
    end = f": try {'; or '.join(advice)}." if advice else "."
    return "; ".join(parts) + end


def _with_noise(history: Mapping[str, np.ndarray], tolerance: float | int) -> str:
    """Return what can be said of values that have noise."""
    said = f"f is known up to noise of ±{float(history['objective_noise'][-1]):.3g}"
    if "constraint" not in history:
        return f"{said}."
    if "constraint_noise" not in history:
        return f"{said}; g follows from sums with noise: whether it is feasible is not known."
    g, noise = float(history["constraint"][-1]), float(history["constraint_noise"][-1])
    known = abs(g - tolerance) > 2 * noise
    verdict = "not known to be feasible"
    if known:
        verdict = "feasible" if g <= tolerance else "not feasible"
    return f"{said}, g = {g:.3g} ± {noise:.3g} is {verdict} (g ≤ {tolerance:g})."


def _scale(values: np.ndarray) -> float:
    """Return how far values have gone in all."""
    return float(np.max(values) - np.min(values))


def _falls(values: np.ndarray, last: slice) -> bool:
    """Return whether the mean of the second half of the last values is clearly lower."""
    first, second = np.array_split(values[last], 2)
    return bool(np.mean(first) - np.mean(second) > MOVES * _scale(values))


def _turns(values: np.ndarray, above: float) -> bool:
    """Return whether values cross a height in most steps."""
    high = values > above
    return bool(np.mean(high[1:] != high[:-1]) >= FLIPS)


def _oscillates(values: np.ndarray, last: slice) -> bool:
    """Return whether values turn around in most steps, by a part of their range that is seen."""
    steps = np.diff(values[last])
    turns = float(np.mean(steps[1:] * steps[:-1] < 0))
    return turns >= FLIPS and float(np.median(np.abs(steps))) > MOVES * _scale(values)
