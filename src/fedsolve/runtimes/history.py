"""The history of a run: one entry for each evaluated round, by column."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from jaxtyping import Bool

from fedsolve.federation.clock import Seconds
from fedsolve.federation.counters import Count
from fedsolve.runtimes.chunks import Spans
from fedsolve.types import Info

FIRST = ("round", "objective", "constraint", "switch")  # columns in the order that readers expect

RENAMED = {"messages": "vectors_up", "messages_total": "vectors_up_total"}
SUMS = {"messages_both_ways": ("messages_up_total", "messages_down_total")}


class History(dict[str, np.ndarray]):
    """Columns by name, each with one entry for each evaluated round.

    Three names of version 0.1 still work: `messages` is `vectors_up`, `messages_total` is
    `vectors_up_total`, and `messages_both_ways` is the sum of `messages_up_total` and
    `messages_down_total`.
    """

    def __missing__(self, name: str) -> np.ndarray:
        if name in RENAMED:
            return self[RENAMED[name]]
        if name in SUMS:
            up, down = SUMS[name]
            return self[up] + self[down]
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        names = SUMS.get(str(name), (RENAMED.get(str(name), name),))
        return all(super(History, self).__contains__(each) for each in names)


def host_history(entries: Info, spans: Spans) -> History:
    """Return what rounds wrote, one entry for each evaluated span, as NumPy arrays."""
    evaluated = spans[:, 2] > 0
    found = History(round=spans[evaluated, 1].astype(np.int64))
    for name in dict.fromkeys([*(name for name in FIRST if name in entries), *entries]):
        values = entries[name]
        exact = values.exact() if isinstance(values, Count | Seconds) else np.asarray(values)
        found[name] = exact[: len(spans)][evaluated]
    return found


def entry_history(entry: Info, round: int) -> History:
    """Return a history of one entry."""
    exact = {k: v.exact() if isinstance(v, Count | Seconds) else v for k, v in entry.items()}
    stacked = {name: np.asarray(value)[None] for name, value in exact.items()}
    order = dict.fromkeys([*(name for name in FIRST if name in stacked), *stacked])
    return History({"round": np.asarray([round], np.int64)} | {k: stacked[k] for k in order})


def joined(chunks: Iterable[History]) -> History:
    """Concatenate histories of the same run."""
    chunks = list(chunks)
    filled = [chunk for chunk in chunks if len(chunk["round"])] or chunks[:1]
    names = filled[0] if filled else ()
    return History({name: np.concatenate([chunk[name] for chunk in filled]) for name in names})


def no_history() -> History:
    """Return a history without entries."""
    return History(round=np.zeros(0, np.int64))


def evaluated(entries: Info, spans: Spans) -> Spans:
    """Return the spans with what the program decided about evaluations, where it decides."""
    if "evaluated" not in entries:
        return spans
    flags = np.asarray(entries.pop("evaluated"))[: len(spans)]
    return np.concatenate([spans[:, :2], flags[:, None]], axis=1).astype(np.int32)


def truncate_at_stop(entries: Info, spans: Spans) -> tuple[Spans, bool]:
    """Return the spans up to the one after which a rule stopped the run, and whether one did."""
    flags: Bool[np.ndarray, " _"] = np.asarray(entries.pop("stopped", ()))[: len(spans)]
    stopped = np.flatnonzero(flags)
    return (spans[: stopped[0] + 1], True) if len(stopped) else (spans, False)
