"""Quantiles of all sites' values together, from histograms over a stated range.

A site reports no count of few rows. Bins with fewer than `samples` rows are joined with their
neighbours until a block has that many, and the block's rows are spread evenly over its bins.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

Histogram = Float[np.ndarray, " bins"]
SAME = 1e-9  # a part of all rows below which two shares are the same


def bins_of(values: np.ndarray, least: float, most: float, bins: int) -> np.ndarray:
    """Return the bin of each value; the last bin has `most`, too."""
    places = np.floor((values - least) / (most - least) * bins).astype(int)
    return np.clip(places, 0, bins - 1)


def histogram_of(
    values: np.ndarray, least: float, most: float, bins: int, samples: int
) -> Histogram:
    """Count values in bins, with at least `samples` rows behind every number that is not 0."""
    counts = np.bincount(bins_of(values, least, most, bins), minlength=bins)
    found = counts.astype(float)
    first, rows = 0, 0  # of the open block
    last = slice(0, bins)  # the block before it
    for place in np.flatnonzero(counts).tolist():
        rows += int(counts[place])
        if rows < samples:
            continue
        if counts[place] >= samples:  # the few rows of the open block join this bin
            found[first:place] = 0
            first = place
        last = slice(first, place + 1)
        found[last] = rows / (place + 1 - first)
        first, rows = place + 1, 0
    if rows:  # too few for a block: they join the block before
        found[first:] = 0
        found[last] += rows / (last.stop - last.start)
    return found


def quantiles_of(
    histogram: Histogram, least: float, most: float, shares: Sequence[float]
) -> list[float]:
    """Return the least values with these shares of the rows at or below them.

    Rows are taken as evenly spread within a bin, so a value is right to the width of a bin, or of a
    block of joined bins.
    """
    below = np.concatenate([[0.0], np.cumsum(histogram)])
    below /= below[-1]
    width, found = (most - least) / len(histogram), []
    for share in shares:
        place = int(np.searchsorted(below, share - SAME)) - 1
        part = (share - below[place]) / (below[place + 1] - below[place])
        found.append(float(least + (place + min(part, 1.0)) * width))
    return found
