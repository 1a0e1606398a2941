"""The history of a run: one entry for each evaluated round, by column."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from jaxtyping import Bool

from fedsolve.federation.clock import Seconds
from fedsolve.federation.counters import Count
from fedsolve.runtimes.chunks import Spans
from fedsolve.types import Info

History = dict[str, np.ndarray]
FIRST = ("round", "objective", "constraint", "switch")  # columns in the order that readers expect


def host_history(entries: Info, spans: Spans) -> History:
    """Return what rounds wrote, one entry for each evaluated span, as NumPy arrays."""
    looked = spans[:, 2] > 0
    found: History = {"round": spans[looked, 1].astype(np.int64)}
    for name in dict.fromkeys([*(name for name in FIRST if name in entries), *entries]):
        values = entries[name]
        exact = values.exact() if isinstance(values, Count | Seconds) else np.asarray(values)
        found[name] = exact[: len(spans)][looked]
    return found


def entry_history(entry: Info, round: int) -> History:
    """Return a history of one entry."""
    exact = {k: v.exact() if isinstance(v, Count | Seconds) else v for k, v in entry.items()}
    stacked = {name: np.asarray(value)[None] for name, value in exact.items()}
    order = dict.fromkeys([*(name for name in FIRST if name in stacked), *stacked])
    return {"round": np.asarray([round], np.int64)} | {name: stacked[name] for name in order}


def joined(chunks: Iterable[History]) -> History:
    """Concatenate histories of the same run."""
    chunks = list(chunks)
    filled = [chunk for chunk in chunks if len(chunk["round"])] or chunks[:1]
    return {name: np.concatenate([c[name] for c in filled]) for name in (filled or [{}])[0]}


def truncate_at_stop(entries: Info, spans: Spans) -> tuple[Spans, bool]:
    """Return the spans up to the one after which a rule stopped the run, and whether one did."""
    flags: Bool[np.ndarray, " _"] = np.asarray(entries.pop("stopped", ()))[: len(spans)]
    stopped = np.flatnonzero(flags)
    return (spans[: stopped[0] + 1], True) if len(stopped) else (spans, False)
