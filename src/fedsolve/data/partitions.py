"""Partitions of labelled samples among clients.

Every function goes from labels (and a seed) to one sorted array of sample indices for each client.
Every sample belongs to exactly one client.

| here | in the PPBC paper (appendix B) | |
|---|---|---|
| `iid` | distr-1 | equal sizes, every client the same share of every class |
| `two_groups` | distr-2 | two groups of clients with disjoint classes, equal sizes |
| `uneven` | distr-3 | given sizes, classes by Dirichlet(1/2) within each client |
| `dirichlet` | | each class divided by Dirichlet(α) over clients: sizes differ, too |
| `shards` | | sorted by class, cut into pieces, a few pieces each |
| `by_size` | | given sizes, every client the same mixture of classes |
| `by_id` | | one client for each value of a natural key (a writer, a hospital) |
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np
from jaxtyping import PyTree

from fedsolve.data.class_tables import (
    Labels,
    Parts,
    Shares,
    apportion,
    class_codes,
    client_sizes,
    dirichlet_rows,
    draw_parts,
    fit_table,
)
from fedsolve.errors import InvalidInput
from fedsolve.fields import check_count, check_positive

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "PERCENT",
    "Labels",
    "Parts",
    "by_id",
    "by_size",
    "dirichlet",
    "iid",
    "plot",
    "shards",
    "take",
    "two_groups",
    "uneven",
]

PERCENT = (10.6, 7.4, 12.0, 11.4, 8.8, 14.6, 10.0, 5.4, 10.2, 9.2)  # Table 3 of the PPBC paper


def iid(labels: Labels, clients: int = 10, seed: int = 0) -> Parts:
    """Divide samples into equal sizes with equal shares of every class (distr-1).

    Sizes and shares are equal as far as the numbers divide.

    Args:
        labels: The class of each sample.
        clients: The number of clients.
        seed: Seed of the draw.

    Returns:
        The sample indices of each client.

    Raises:
        InvalidInput: If there are fewer samples than clients.

    Example:
        >>> import fedsolve as fs
        >>> import numpy as np
        >>> labels = np.repeat([0, 1], [8, 4])
        >>> parts = fs.partitions.iid(labels, clients=4)
        >>> [np.bincount(labels[part]).tolist() for part in parts]
        [[2, 1], [2, 1], [2, 1], [2, 1]]
    """
    check_count("clients", clients)
    return by_size(labels, np.ones(clients), seed)


def by_size(labels: Labels, sizes: Shares, seed: int = 0) -> Parts:
    """Divide samples into given sizes, with the same mixture of classes in each.

    Args:
        labels: The class of each sample.
        sizes: For each client its number of samples, or its share of any total.
        seed: Seed of the draw.

    Returns:
        The sample indices of each client.

    Raises:
        InvalidInput: If a size is not positive, or a client would have no sample.

    Example:
        >>> import fedsolve as fs
        >>> import numpy as np
        >>> labels = np.repeat([0, 1], [8, 4])
        >>> parts = fs.partitions.by_size(labels, [3, 9])
        >>> [np.bincount(labels[part]).tolist() for part in parts]
        [[2, 1], [6, 3]]
    """
    classes = class_codes(labels)
    mixture = np.tile(np.bincount(classes), (len(sizes), 1))
    table = fit_table(mixture, client_sizes(sizes, len(classes)), np.bincount(classes))
    return draw_parts(classes, table, seed)


def two_groups(labels: Labels, clients: int = 10, seed: int = 0, alpha: float = 1.0) -> Parts:
    """Divide samples between two groups of clients that share no class (distr-2).

    The first half of the classes belongs to the first half of the clients. Within a group, sizes
    are equal, and the mixture of classes of each client is drawn from Dirichlet(α). If both groups
    of classes have equally many samples, as in CIFAR-10, all clients have the same size.

    Args:
        labels: The class of each sample.
        clients: The number of clients.
        seed: Seed of the draw.
        alpha: Concentration α; a small one gives each client few classes.

    Returns:
        The sample indices of each client.

    Raises:
        InvalidInput: If there are fewer than two clients or two classes.

    Example:
        >>> import fedsolve as fs
        >>> import numpy as np
        >>> labels = np.repeat([0, 1], [8, 4])
        >>> parts = fs.partitions.two_groups(labels, clients=4)
        >>> [np.bincount(labels[part], minlength=2).tolist() for part in parts]
        [[4, 0], [4, 0], [0, 2], [0, 2]]
    """
    check_count("clients", clients)
    check_positive("alpha", alpha)
    classes = class_codes(labels)
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
        sizes = client_sizes(np.ones(members), int(own.sum()))
        mixture = dirichlet_rows(rng, alpha, (members, len(own)))
        table[rows, columns] = fit_table(mixture, sizes, own)
    return draw_parts(classes, table, rng)


def uneven(
    labels: Labels,
    sizes: Shares = PERCENT,
    alpha: float = 0.5,
    seed: int = 0,
) -> Parts:
    """Divide samples into given sizes, with the classes of each client by Dirichlet(α) (distr-3).

    The drawn mixtures are scaled, by rows and columns in turn, until every sample has a client.

    Args:
        labels: The class of each sample.
        sizes: For each client its number of samples, or its share of any total; by default the ten
            percentages of the PPBC paper.
        alpha: Concentration α; a small one gives each client few classes.
        seed: Seed of the draw.

    Returns:
        The sample indices of each client.

    Raises:
        InvalidInput: If a size or `alpha` is not positive, or a client would have no sample.

    Example:
        >>> import fedsolve as fs
        >>> import numpy as np
        >>> labels = np.repeat(np.arange(10), 100)
        >>> [len(part) for part in fs.partitions.uneven(labels, sizes=[100, 300, 600])]
        [100, 300, 600]
    """
    check_positive("alpha", alpha)
    classes, rng = class_codes(labels), np.random.default_rng(seed)
    counts = np.bincount(classes)
    mixture = dirichlet_rows(rng, alpha, (len(sizes), len(counts)))
    return draw_parts(classes, fit_table(mixture, client_sizes(sizes, len(classes)), counts), rng)


def dirichlet(
    labels: Labels, clients: int = 10, alpha: float = 0.5, seed: int = 0, least: int = 1
) -> Parts:
    """Divide every class in shares drawn from Dirichlet(α) over clients.

    A small α gives clients with few classes and very different sizes, a large one nearly `iid`. The
    draw is repeated until every client has at least `least` samples.

    Args:
        labels: The class of each sample.
        clients: The number of clients.
        alpha: Concentration α.
        seed: Seed of the draw.
        least: The smallest size that a client may have.

    Returns:
        The sample indices of each client.

    Raises:
        InvalidInput: If 1000 draws leave a client with fewer than `least` samples.

    Example:
        >>> import fedsolve as fs
        >>> import numpy as np
        >>> labels = np.repeat([0, 1], [800, 400])
        >>> parts = fs.partitions.dirichlet(labels, clients=3, least=100)
        >>> len(parts), min(len(part) for part in parts) >= 100
        (3, True)
    """
    check_count("clients", clients)
    check_positive("alpha", alpha)
    check_count("least", least)
    classes, rng = class_codes(labels), np.random.default_rng(seed)
    counts = np.bincount(classes)
    for _ in range(1000):
        shares = dirichlet_rows(rng, alpha, (len(counts), clients))
        table = np.stack([apportion(s, c) for s, c in zip(shares, counts, strict=True)], 1)
        if table.sum(axis=1).min() >= least:
            return draw_parts(classes, table, rng)
    raise InvalidInput(
        f"Dirichlet({alpha}) over {clients} clients left one with fewer than {least} of "
        f"{len(classes)} samples in each of 1000 draws; take a larger alpha or fewer clients."
    )


def shards(labels: Labels, clients: int = 10, each: int = 2, seed: int = 0) -> Parts:
    """Sort the samples by class, cut them into pieces, and give every client a few pieces.

    Args:
        labels: The class of each sample.
        clients: The number of clients.
        each: The number of pieces of each client; there are `clients * each` in all.
        seed: Seed of the draw.

    Returns:
        The sample indices of each client.

    Raises:
        InvalidInput: If there are fewer samples than pieces.

    Example:
        >>> import fedsolve as fs
        >>> import numpy as np
        >>> labels = np.repeat(np.arange(4), 6)
        >>> parts = fs.partitions.shards(labels, clients=4, each=1)
        >>> [len(np.unique(labels[part])) for part in parts]
        [1, 1, 1, 1]
    """
    check_count("clients", clients)
    check_count("each", each)
    classes, rng = class_codes(labels), np.random.default_rng(seed)
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
    """Make one client for each value of a key, in the order of the values.

    Args:
        ids: The key of each sample, such as its writer or hospital.

    Returns:
        The sample indices of each client.

    Example:
        >>> import fedsolve as fs
        >>> [part.tolist() for part in fs.partitions.by_id(["north", "south", "north"])]
        [[0, 2], [1]]
    """
    values = class_codes(ids)
    order = np.argsort(values, kind="stable")
    return np.split(order, np.cumsum(np.bincount(values))[:-1])


def take(data: PyTree, parts: Parts) -> list[PyTree]:
    """Select each client's rows of every array, ready for `stack_clients`.

    Args:
        data: Arrays in any structure, with samples on their first axis.
        parts: The sample indices of each client.

    Returns:
        One tree for each client, in the structure of `data`.

    Example:
        >>> import fedsolve as fs
        >>> import numpy as np
        >>> clients = fs.partitions.take({"y": np.array([5, 6, 7])}, fs.partitions.by_id([0, 1, 0]))
        >>> [client["y"].tolist() for client in clients]
        [[5, 7], [6]]
    """
    return [jax.tree.map(lambda leaf, own=own: np.asarray(leaf)[own], data) for own in parts]


def plot(
    parts: Parts, labels: Labels, names: Sequence[str] | None = None, path: str | Path | None = None
) -> Figure:
    """Draw a bar for each client, divided by class.

    Args:
        parts: The sample indices of each client.
        labels: The class of each sample.
        names: The names of the classes, in their sorted order; by default the labels themselves.
        path: Where to save the figure; it is not saved if None.

    Returns:
        The matplotlib figure.

    Raises:
        InvalidInput: If there are not as many names as classes.

    Example:
        >>> import fedsolve as fs
        >>> labels = ["cat", "cat", "dog", "dog"]
        >>> figure = fs.partitions.plot(fs.partitions.iid(labels, clients=2), labels)
        >>> figure.axes[0].get_ylabel()
        'Client'
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.style import context

    from fedsolve.plots import STYLE

    classes = class_codes(labels)
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
