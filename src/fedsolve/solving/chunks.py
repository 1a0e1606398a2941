"""Spans of rounds between evaluations, and the history that they leave."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Int

from fedsolve.federation.clock import Seconds
from fedsolve.federation.counters import Bytes
from fedsolve.runtimes.simulation import SLOTS
from fedsolve.solving.result import History

Spans = Int[np.ndarray, "_ 3"]  # rounds from start to stop, and whether to evaluate at the stop


def spans_of(first: int, rounds: int, every: int) -> Spans:
    """The spans between evaluations, from round `first` on."""
    stops = np.append(np.arange((first // every + 1) * every, rounds, every), rounds)
    starts = np.append(first, stops[:-1])
    return np.stack([starts, stops, np.ones_like(stops)], axis=1).astype(np.int32)


def padded(spans: Spans) -> Spans:
    """Empty spans up to the number that the program is compiled for."""
    return np.concatenate([spans, np.zeros((SLOTS - len(spans), 3), np.int32)])


def split(spans: Spans, budget: int) -> tuple[Spans, Spans]:
    """As many spans as fit one call and so many rounds, the last one cut short if need be."""
    last = int(spans[0, 0]) + budget
    now = spans[: min(SLOTS, 1 + int(np.sum(spans[:-1, 1] < last)))].copy()
    rest = spans[len(now) :]
    start, stop, look = now[-1]
    if stop > last:
        now[-1] = start, last, 0
        rest = np.concatenate([np.asarray([[last, stop, look]], np.int32), rest])
    return now, rest


def until_stopped(entries: dict[str, Any], spans: Spans) -> tuple[Spans, bool]:
    """The spans up to the one after which the rule stopped the run, and whether it did."""
    stopped = np.flatnonzero(np.asarray(entries.pop("stopped", ()))[: len(spans)])
    return (spans[: stopped[0] + 1], True) if len(stopped) else (spans, False)


def on_host(entries: dict[str, Any], spans: Spans) -> History:
    """What the program wrote, as NumPy arrays of one entry for each evaluation."""
    looked = spans[:, 2] > 0
    found: History = {"round": spans[looked, 1].astype(np.int64)}
    first = [name for name in ("objective", "constraint", "switch") if name in entries]
    for name in dict.fromkeys([*first, *entries]):
        values = entries[name]
        exact = values.exact() if isinstance(values, Bytes | Seconds) else np.asarray(values)
        found[name] = exact[: len(spans)][looked]
    return found


def joined(chunks: list[History]) -> History:
    """The chunks one after the other."""
    return {name: np.concatenate([c[name] for c in chunks]) for name in (chunks or [{}])[0]}


def until(spans: Spans, stop: int) -> Spans:
    """The part of the spans up to a round, with an evaluation there."""
    kept = np.asarray([(a, min(b, stop), c) for a, b, c in spans if a < stop], np.int32)
    kept = kept.reshape(-1, 3)
    kept[-1:, 2] = 1
    return kept
