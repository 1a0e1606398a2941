"""Spans of rounds between evaluations, and the chunks of them that one call computes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from fedsolve.types import Flag

SLOTS = 100  # spans in one call of the compiled program
Spans = Int[np.ndarray, "_ 3"]  # rounds from start to stop, and whether to evaluate at the stop:
GRID, LAST = 1, 2  # it is a multiple of `every`; or only the last round, not so in a longer run


def spans_of(first: int, rounds: int, every: int) -> Spans:
    """Return the spans between evaluations, from round `first` on."""
    stops = np.append(np.arange((first // every + 1) * every, rounds, every), rounds)
    starts = np.append(first, stops[:-1])
    kinds = np.where(stops % every == 0, GRID, LAST)
    return np.stack([starts, stops, kinds], axis=1).astype(np.int32)


def milestone(wanted: Int[Array, ""] | int, passed: Flag) -> Int[Array, ""]:
    """Return what to do after a round that can be evaluated if a milestone was passed in it."""
    if_not = jnp.where(wanted == LAST, LAST, 0)
    return jnp.where((wanted > 0) & jnp.asarray(passed), GRID, if_not)


def padded(spans: Spans) -> Spans:
    """Add empty spans up to the number that the program is compiled for."""
    return np.concatenate([spans, np.zeros((SLOTS - len(spans), 3), np.int32)])


def split(spans: Spans, budget: int) -> tuple[Spans, Spans]:
    """Take at most `SLOTS` spans and `budget` rounds; the last span may be truncated.

    Returns the spans that are taken, and the rest.
    """
    last = int(spans[0, 0]) + budget
    now = spans[: min(SLOTS, 1 + int(np.sum(spans[:-1, 1] < last)))].copy()
    rest = spans[len(now) :]
    start, stop, evaluate = now[-1]
    if stop > last:
        now[-1] = start, last, 0
        rest = np.concatenate([np.asarray([[last, stop, evaluate]], np.int32), rest])
    return now, rest


def until(spans: Spans, stop: int) -> Spans:
    """Return the part of the spans up to a round, with an evaluation there."""
    kept = np.asarray([(a, min(b, stop), c) for a, b, c in spans if a < stop], np.int32)
    kept = kept.reshape(-1, 3)
    kept[-1:, 2] = 1
    return kept
