"""Tables of how many samples of each class every client gets, and the draw that follows them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from fedsolve.errors import InvalidInput

Labels = np.ndarray | Sequence[object]
Parts = list[np.ndarray]
Shares = Sequence[float | int] | np.ndarray


def class_codes(labels: Labels) -> Int[np.ndarray, " samples"]:
    """Return labels of any kind as integer codes from 0."""
    given = np.asarray(labels)
    if given.ndim != 1 or len(given) == 0:
        raise InvalidInput(
            f"Labels must be a list of one for each sample, got shape {given.shape}."
        )
    return np.unique(given, return_inverse=True)[1]


def dirichlet_rows(
    rng: np.random.Generator, alpha: float, shape: tuple[int, int]
) -> Float[np.ndarray, "rows columns"]:
    """Draw rows from Dirichlet(α), kept away from zero so that every row can be scaled."""
    return rng.dirichlet(np.full(shape[1], float(alpha)), shape[0]) + 1e-12


def client_sizes(shares: Shares, total: int) -> Int[np.ndarray, " clients"]:
    """Return the clients' sizes from shares that a user gave; raise if a client would be empty."""
    wanted = np.asarray(shares, float)
    if wanted.ndim != 1 or not len(wanted) or not np.all(np.isfinite(wanted) & (wanted > 0)):
        raise InvalidInput(f"Sizes must be positive numbers, one for each client, got {shares!r}.")
    whole = apportion(wanted, total)
    if whole.min() == 0:
        raise InvalidInput(
            f"{total} samples are too few for these {len(wanted)} clients: "
            f"client {np.argmin(whole)} would have none."
        )
    return whole


def apportion(
    shares: Float[np.ndarray, " parts"], total: int | np.integer
) -> Int[np.ndarray, " parts"]:
    """Return whole numbers in proportion to the shares that sum to `total` (largest remainders)."""
    exact = shares / shares.sum() * total
    whole = np.floor(exact + 1e-9).astype(np.int64)
    rest = np.argsort(whole - exact, kind="stable")[: total - whole.sum()]
    whole[rest] += 1
    return whole


def fit_table(
    mixture: Float[np.ndarray, "clients classes"] | Int[np.ndarray, "clients classes"],
    sizes: Int[np.ndarray, " clients"],
    counts: Int[np.ndarray, " classes"],
) -> Int[np.ndarray, "clients classes"]:
    """Return how many samples of each class every client gets.

    Rows are close to the clients' mixtures and sum to `sizes`; columns sum to `counts`.
    """
    scaled = np.asarray(mixture, float)
    for _ in range(2000):  # Sinkhorn: rows and columns in turn
        scaled = scaled * (counts / scaled.sum(axis=0))
        rows = scaled.sum(axis=1)
        scaled = scaled * (sizes / rows)[:, None]
        if np.max(np.abs(rows - sizes)) < 0.1:
            break
    table = np.stack([apportion(row, size) for row, size in zip(scaled, sizes, strict=True)])
    # After rounding, some classes are given out a few times too often, others too seldom.
    excess = table.sum(axis=0) - counts
    for client in np.argsort(-sizes, kind="stable"):
        _exchange_excess(table[client], excess)
    return table


def _exchange_excess(row: Int[np.ndarray, " classes"], excess: Int[np.ndarray, " classes"]) -> None:
    """Replace, in one client's row, classes given out too often by those given out too seldom."""
    for over in np.flatnonzero(excess > 0):
        for under in np.flatnonzero(excess < 0):
            moved = min(row[over], excess[over], -excess[under])
            row[over] -= moved
            row[under] += moved
            excess[over] -= moved
            excess[under] += moved


def draw_parts(
    classes: Int[np.ndarray, " samples"],
    table: Int[np.ndarray, "clients classes"],
    seed: int | np.random.Generator,
) -> Parts:
    """Draw for every client, at random, the number of samples of each class that `table` says."""
    rng = np.random.default_rng(seed)
    own: list[list[np.ndarray]] = [[] for _ in table]
    for kind, column in enumerate(table.T):
        members = rng.permutation(np.flatnonzero(classes == kind))
        for client, piece in enumerate(np.split(members, np.cumsum(column)[:-1])):
            own[client].append(piece)
    return [np.sort(np.concatenate(pieces)) for pieces in own]
