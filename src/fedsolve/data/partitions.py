"""Dealing samples out to clients: who has which.

Every function goes from labels (and a seed) to one array of sample numbers for each client, sorted.
Every sample belongs to exactly one client.

| here | in the PPBC paper (appendix B) | |
|---|---|---|
| `iid` | distr-1 | equal sizes, every client the same share of every class |
| `two_groups` | distr-2 | two groups of clients with classes of their own, equal sizes |
| `uneven` | distr-3 | given sizes, classes by Dirichlet(1/2) within each client |
| `dirichlet` | | each class dealt out by Dirichlet(α) over clients: sizes differ, too |
| `shards` | | sorted by class, cut into pieces, a few pieces each |
| `by_size` | | given sizes, every client the same mixture of classes |
| `by_id` | | one client for each value of a natural key (a writer, a hospital) |
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int, PyTree

from fedsolve.errors import InvalidInput
from fedsolve.fields import check_count, check_positive

Labels = np.ndarray | Sequence[Any]
Parts = list[np.ndarray]

PERCENT = (10.6, 7.4, 12.0, 11.4, 8.8, 14.6, 10.0, 5.4, 10.2, 9.2)  # Table 3 of the PPBC paper


def iid(labels: Labels, clients: int = 10, seed: int = 0) -> Parts:
    """Equal sizes, and every class in equal parts, as far as numbers divide (distr-1)."""
    check_count("clients", clients)
    return by_size(labels, np.ones(clients), seed)


def by_size(labels: Labels, sizes: Sequence[float | int] | np.ndarray, seed: int = 0) -> Parts:
    """Clients of these sizes (numbers of samples, or shares of any total), the same mixture of
    classes in each."""
    classes = _classes(labels)
    mixture = np.tile(np.bincount(classes), (len(sizes), 1))
    return _deal(classes, _table(mixture, _sizes(sizes, len(classes)), np.bincount(classes)), seed)


def two_groups(labels: Labels, clients: int = 10, seed: int = 0, alpha: float = 1.0) -> Parts:
    """Clients in two groups, of equal size within each, that share no class (distr-2).

    The first half of the classes belongs to the first half of the clients. How many samples of each
    class of its group a client has is drawn from Dirichlet(α). Where both groups of classes have
    as many samples, as in CIFAR-10, all clients are of one size.
    """
    check_count("clients", clients)
    check_positive("alpha", alpha)
    classes = _classes(labels)
    kinds = classes.max() + 1
    if clients < 2 or kinds < 2:
        raise InvalidInput(
            f"Two groups need two clients and two classes, got {clients} and {kinds}."
        )
    rng, counts = np.random.default_rng(seed), np.bincount(classes)
    table = np.zeros((clients, kinds), np.int64)
    for rows, columns in (
        (slice(None, clients // 2), slice(None, kinds // 2)),
        (slice(clients // 2, None), slice(kinds // 2, None)),
    ):
        own = counts[columns]
        members = len(range(clients)[rows])
        sizes = _sizes(np.ones(members), int(own.sum()))
        table[rows, columns] = _table(_dirichlet(rng, alpha, (members, len(own))), sizes, own)
    return _deal(classes, table, rng)


def uneven(
    labels: Labels,
    sizes: Sequence[float | int] | np.ndarray = PERCENT,
    alpha: float = 0.5,
    seed: int = 0,
) -> Parts:
    """Clients of these sizes, the classes of each by Dirichlet(α) (distr-3, with its ten sizes).

    The drawn mixtures are scaled, by rows and columns in turn, until every sample has a place.
    """
    check_positive("alpha", alpha)
    classes, rng = _classes(labels), np.random.default_rng(seed)
    counts = np.bincount(classes)
    mixture = _dirichlet(rng, alpha, (len(sizes), len(counts)))
    return _deal(classes, _table(mixture, _sizes(sizes, len(classes)), counts), rng)


def dirichlet(
    labels: Labels, clients: int = 10, alpha: float = 0.5, seed: int = 0, least: int = 1
) -> Parts:
    """Every class dealt out in shares drawn from Dirichlet(α) over clients.

    A small α gives clients of few classes and very different sizes, a large one nearly `iid`. Drawn
    again until every client has at least `least` samples.
    """
    check_count("clients", clients)
    check_positive("alpha", alpha)
    check_count("least", least)
    classes, rng = _classes(labels), np.random.default_rng(seed)
    counts = np.bincount(classes)
    for _ in range(1000):
        shares = _dirichlet(rng, alpha, (len(counts), clients))
        table = np.stack([_apportion(s, c) for s, c in zip(shares, counts, strict=True)], 1)
        if table.sum(axis=1).min() >= least:
            return _deal(classes, table, rng)
    raise InvalidInput(
        f"Dirichlet({alpha}) over {clients} clients left one with fewer than {least} of "
        f"{len(classes)} samples in each of 1000 draws; take a larger alpha or fewer clients."
    )


def shards(labels: Labels, clients: int = 10, each: int = 2, seed: int = 0) -> Parts:
    """The samples sorted by class and cut into clients × `each` pieces, `each` to every client."""
    check_count("clients", clients)
    check_count("each", each)
    classes, rng = _classes(labels), np.random.default_rng(seed)
    pieces = clients * each
    if pieces > len(classes):
        raise InvalidInput(f"{len(classes)} samples cannot be cut into {pieces} pieces.")
    ordered = rng.permutation(len(classes))
    ordered = ordered[np.argsort(classes[ordered], kind="stable")]
    cut, owner = np.array_split(ordered, pieces), rng.permutation(pieces) % clients
    return [
        np.sort(np.concatenate([cut[p] for p in np.flatnonzero(owner == client)]))
        for client in range(clients)
    ]


def by_id(ids: Labels) -> Parts:
    """One client for each value, in their order."""
    values = _classes(ids)
    order = np.argsort(values, kind="stable")
    return np.split(order, np.cumsum(np.bincount(values))[:-1])


def take(data: PyTree, parts: Parts) -> list[PyTree]:
    """Each client's part of every array in `data`, ready for `stack_clients`."""
    return [jax.tree.map(lambda leaf, own=own: np.asarray(leaf)[own], data) for own in parts]


def plot(
    parts: Parts, labels: Labels, names: Sequence[str] | None = None, path: str | Path | None = None
) -> Any:
    """Who has what: a bar for each client, in pieces for its classes; a matplotlib figure, saved if
    a path is given."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.style import context

    from fedsolve.plots import STYLE

    classes = _classes(labels)
    kinds = classes.max() + 1
    called = np.unique(np.asarray(labels)) if names is None else np.asarray(names)
    if len(called) != kinds:
        raise InvalidInput(f"There are {kinds} classes, but {len(called)} names.")
    colors = colormaps["tab20" if kinds > 10 else "tab10"]
    clients = np.arange(len(parts))
    table = np.stack([np.bincount(classes[own], minlength=kinds) for own in parts])
    with context(STYLE):
        figure = Figure(figsize=(5.6, 0.8 + 0.22 * len(parts)), layout="constrained")
        axis = figure.subplots()
        left = np.zeros(len(parts))
        for kind in range(kinds):
            label = str(called[kind]) if kinds <= 20 else None
            color = colors(kind % colors.N)
            axis.barh(clients, table[:, kind], left=left, color=color, label=label, height=0.8)
            left += table[:, kind]
        axis.set(xlabel="Samples", ylabel="Client", yticks=clients[:: -(-len(parts) // 20)])
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
        if kinds <= 20:
            figure.legend(loc="outside right upper", title="Class")
        if path is not None:
            figure.savefig(path)
    return figure


def _classes(labels: Labels) -> Int[np.ndarray, " samples"]:
    """Labels of any kind as 0, 1, 2, …"""
    given = np.asarray(labels)
    if given.ndim != 1 or len(given) == 0:
        raise InvalidInput(
            f"Labels must be a list of one for each sample, got shape {given.shape}."
        )
    return np.unique(given, return_inverse=True)[1]


def _dirichlet(rng: np.random.Generator, alpha: float, shape: tuple[int, int]) -> Any:
    """Rows from Dirichlet(α), kept away from zero, so that every row can be scaled."""
    return rng.dirichlet(np.full(shape[1], float(alpha)), shape[0]) + 1e-12


def _sizes(shares: Sequence[float | int] | np.ndarray, total: int) -> Int[np.ndarray, " clients"]:
    """Clients' sizes from shares that a user gave."""
    wanted = np.asarray(shares, float)
    if wanted.ndim != 1 or not len(wanted) or not np.all(np.isfinite(wanted) & (wanted > 0)):
        raise InvalidInput(f"Sizes must be positive numbers, one for each client, got {shares!r}.")
    whole = _apportion(wanted, total)
    if whole.min() == 0:
        raise InvalidInput(
            f"{total} samples are too few for these {len(wanted)} clients: "
            f"client {np.argmin(whole)} would have none."
        )
    return whole


def _apportion(
    shares: Float[np.ndarray, " parts"], total: int | np.integer
) -> Int[np.ndarray, " parts"]:
    """Whole numbers in proportion to the shares, with that sum (largest remainders)."""
    exact = shares / shares.sum() * total
    whole = np.floor(exact + 1e-9).astype(np.int64)
    rest = np.argsort(whole - exact, kind="stable")[: total - whole.sum()]
    whole[rest] += 1
    return whole


def _table(
    mixture: Float[np.ndarray, "clients classes"] | Int[np.ndarray, "clients classes"],
    sizes: Int[np.ndarray, " clients"],
    counts: Int[np.ndarray, " classes"],
) -> Int[np.ndarray, "clients classes"]:
    """How many samples of each class every client gets: close to its mixture, with exactly these
    sizes and exactly so many of each class."""
    scaled = np.asarray(mixture, float)
    for _ in range(2000):  # Sinkhorn: rows and columns in turn
        scaled = scaled * (counts / scaled.sum(axis=0))
        rows = scaled.sum(axis=1)
        scaled = scaled * (sizes / rows)[:, None]
        if np.max(np.abs(rows - sizes)) < 0.1:
            break
    table = np.stack([_apportion(row, size) for row, size in zip(scaled, sizes, strict=True)])
    # Rounding leaves some classes with a few too many, others with as many too few.
    excess = table.sum(axis=0) - counts
    for client in np.argsort(-sizes, kind="stable"):
        _settle(table[client], excess)
    return table


def _settle(row: Int[np.ndarray, " classes"], excess: Int[np.ndarray, " classes"]) -> None:
    """Exchanges what one client can of classes given out too often for those too seldom."""
    for over in np.flatnonzero(excess > 0):
        for under in np.flatnonzero(excess < 0):
            moved = min(row[over], excess[over], -excess[under])
            row[over] -= moved
            row[under] += moved
            excess[over] -= moved
            excess[under] += moved


def _deal(
    classes: Int[np.ndarray, " samples"],
    table: Int[np.ndarray, "clients classes"],
    seed: int | np.random.Generator,
) -> Parts:
    """Samples drawn at random, so many of each class for every client as the table says."""
    rng = np.random.default_rng(seed)
    own: list[list[np.ndarray]] = [[] for _ in table]
    for kind, column in enumerate(table.T):
        members = rng.permutation(np.flatnonzero(classes == kind))
        for client, piece in enumerate(np.split(members, np.cumsum(column)[:-1])):
            own[client].append(piece)
    return [np.sort(np.concatenate(pieces)) for pieces in own]
