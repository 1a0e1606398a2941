"""Logistic regression on sparse data that never become dense (Example 5.2 of FedADMM, real-sim).

A client's rows are stored in pieces of a fixed width: columns and values, padded by zeros, and the
sample that each piece belongs to. A row of more non-zeros than the width has several pieces. So the
memory grows with the non-zeros, not with the longest row (real-sim: 51 a row on average, 3484 at
most).
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from fedsolve.errors import InvalidInput
from fedsolve.fields import check_count, check_positive
from fedsolve.problem.problem import Problem
from fedsolve.problem.samples import Pieces, Samples
from fedsolve.problems.regression import LogisticLoss, deal, released
from fedsolve.types import Vector

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix


def sparse_logistic(
    source: str | Path | None = None,
    clients: int = 1000,
    regularisation: float = 0.001,
    seed: int = 0,
    width: int = 32,
    batch_size: int | None = None,
    split: str = "random",
    variant: str = "paper",
) -> Problem:
    r"""Fit ℓ2-regularised logistic regression on a LIBSVM file or on generated sparse data.

    Generated data have the shape and density of real-sim: 72309 × 20958, about 51 non-zeros a row.

    Args:
        source: The LIBSVM file (plain, .gz or .bz2); None for generated data.
        clients: The number of clients.
        regularisation: λ, at least 0.
        seed: Seed of the generated data and of the division.
        width: The number of non-zeros of a piece, see `sparse_regression`.
        batch_size: The size of minibatches; None for all samples of a client.
        split: `"random"` or `"equal"`, see `logistic_regression`.
        variant: `"paper"` or `"released"`, see `logistic_regression`.

    Returns:
        The problem.

    Raises:
        InvalidInput: If the file cannot be read, there are more clients than samples, or `split` or
            `variant` is not known.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import fedsolve as fs
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder, "data.txt")
        ...     _ = file.write_text("1 1:0.5 3:2\n-1 2:1\n1 3:1\n-1 1:1\n")
        ...     problem = fs.problems.sparse_logistic(file, clients=2)
        >>> problem.n, problem.dimension
        (2, 3)
    """
    rows, labels = like_real_sim(seed=seed) if source is None else read_libsvm(source)
    options = {"batch_size": batch_size, "split": split, "variant": variant}
    return sparse_regression(rows, labels, clients, regularisation, seed, width, **options)


def newsgroups(
    clients: int = 1000,
    regularisation: float = 0.001,
    seed: int = 0,
    width: int = 32,
    batch_size: int | None = None,
    split: str = "random",
    topic: int = 1,
    variant: str = "paper",
) -> Problem:
    """Fit ℓ2-regularised logistic regression on 20 Newsgroups, a real text like real-sim.

    The data are the word counts of 18,221 documents over 36,568 words, 49 words a document on
    average. Rows are scaled to length 1. Documents of one topic are told apart from the others.
    `newsgroups/newsgroups.npz` is looked for in the folder named by `FEDSOLVE_DATA`, then in the
    cache; it is not downloaded.

    Args:
        clients: The number of clients.
        regularisation: λ, at least 0.
        seed: Seed of the division.
        width: The number of non-zeros of a piece, see `sparse_regression`.
        batch_size: The size of minibatches; None for all samples of a client.
        split: `"random"` or `"equal"`, see `logistic_regression`.
        topic: The topic with label 1, from 1 to 6.
        variant: `"paper"` or `"released"`, see `logistic_regression`.

    Returns:
        The problem.

    Raises:
        InvalidInput: If there is no such file, it is damaged, `topic` is not in it, or there are
            more clients than samples.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.newsgroups(clients=100)  # doctest: +SKIP
        >>> problem.n, problem.dimension  # doctest: +SKIP
        (100, 36568)
    """
    rows, topics = _read_newsgroups()
    if topic not in topics:
        raise InvalidInput(f"topic must be one of {np.unique(topics).tolist()}, got {topic!r}.")
    labels = (topics == topic).astype(np.float32)
    options = {"batch_size": batch_size, "split": split, "variant": variant}
    return sparse_regression(rows, labels, clients, regularisation, seed, width, **options)


def _read_newsgroups() -> tuple[csr_matrix, np.ndarray]:
    """Return the documents as rows of length 1, and their topics."""
    from scipy.sparse import csr_matrix

    from fedsolve.data.datasets import cache

    folders = [Path(os.environ["FEDSOLVE_DATA"])] if "FEDSOLVE_DATA" in os.environ else []
    places = [folder / "newsgroups" / "newsgroups.npz" for folder in [*folders, cache()]]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise InvalidInput(f"There is no file {' or '.join(map(str, places))} (20 Newsgroups).")
    try:
        with np.load(path, allow_pickle=False) as found:
            columns, starts = found["columns"].astype(np.int32), found["starts"]
            values = found["values"].astype(np.float32)
            rows = csr_matrix((values, columns, starts), shape=tuple(found["shape"]))
            topics = found["topic"]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise InvalidInput(f"{path} is not the data set newsgroups: {error}.") from error
    lengths = np.sqrt(np.asarray(rows.multiply(rows).sum(axis=1)).ravel())
    rows.data /= np.repeat(lengths, np.diff(rows.indptr)).astype(np.float32)
    return rows, topics


def read_libsvm(path: str | Path) -> tuple[csr_matrix, np.ndarray]:
    r"""Read a LIBSVM text file.

    Args:
        path: The file (plain, .gz or .bz2).

    Returns:
        The rows as a SciPy matrix, and labels 0 or 1 (the smaller and the larger of the two in the
        file).

    Raises:
        InvalidInput: If there is no such file, it is in another format, or it has not two kinds of
            labels.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import fedsolve as fs
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder, "data.txt")
        ...     _ = file.write_text("1 1:0.5 3:2\n-1 2:1\n")
        ...     rows, labels = fs.problems.read_libsvm(file)
        >>> rows.shape, labels.tolist()
        ((2, 3), [1.0, 0.0])
    """
    from sklearn.datasets import load_svmlight_file

    if not Path(path).is_file():
        raise InvalidInput(f"There is no file {path}.")
    try:
        rows, labels = load_svmlight_file(str(path))[:2]
    except (ValueError, OSError, EOFError) as error:
        raise InvalidInput(f"{path} is not in LIBSVM's format: {error}.") from error
    kinds = np.unique(labels)
    if len(kinds) != 2:
        raise InvalidInput(f"{path} must have two kinds of labels, it has {len(kinds)}.")
    return rows.astype(np.float32), (labels == kinds[1]).astype(np.float32)


def like_real_sim(
    samples: int = 72309, size: int = 20958, nonzeros: float = 51.3, seed: int = 0
) -> tuple[csr_matrix, np.ndarray]:
    """Generate sparse data of real-sim's shape and density.

    The numbers of non-zeros of the rows have a long tail, columns are drawn by Zipf's law, as words
    are, rows have length 1, and labels come from a hidden vector.

    Args:
        samples: The number of rows.
        size: The number of columns.
        nonzeros: The mean number of non-zeros of a row.
        seed: Seed of the data.

    Returns:
        The rows as a SciPy matrix, and labels 0 or 1.

    Example:
        >>> import fedsolve as fs
        >>> rows, labels = fs.problems.like_real_sim(samples=20, size=50, nonzeros=5.0)
        >>> rows.shape, labels.shape
        ((20, 50), (20,))
    """
    from scipy.sparse import csr_matrix

    rng = np.random.default_rng(seed)
    counts = rng.lognormal(0, 0.7, samples)
    counts = np.clip(np.round(counts * nonzeros / counts.mean()), 1, size // 2).astype(np.int64)
    chance = 1 / (np.arange(size) + 10.0)
    columns = rng.choice(size, int(counts.sum()), p=chance / chance.sum())
    values = rng.exponential(1, len(columns)).astype(np.float32)
    starts = np.concatenate([[0], np.cumsum(counts)])
    rows = csr_matrix((values, columns, starts), shape=(samples, size))
    rows.sum_duplicates()
    norms = np.sqrt(np.add.reduceat(rows.data**2, rows.indptr[:-1]))
    rows.data /= np.repeat(norms, np.diff(rows.indptr)).astype(np.float32)
    margin = rows @ rng.standard_normal(size)
    return rows, (margin + 0.1 * rng.standard_normal(samples) > 0).astype(np.float32)


def sparse_regression(
    rows: csr_matrix,
    labels: np.ndarray,
    clients: int,
    regularisation: float = 0.001,
    seed: int = 0,
    width: int = 32,
    batch_size: int | None = None,
    split: str = "equal",
    variant: str = "paper",
) -> Problem:
    """Fit ℓ2-regularised logistic regression on a sparse matrix (Example 5.2).

    Samples are shuffled and divided as in `logistic_regression`.

    Args:
        rows: A SciPy matrix in compressed rows, with one row for each sample.
        labels: 0 or 1 for each sample.
        clients: The number of clients.
        regularisation: λ, at least 0.
        seed: Seed of the division.
        width: The number of non-zeros of a piece: rows with more are stored in several pieces, and
            pieces with fewer are padded.
        batch_size: The size of minibatches; None for all samples of a client.
        split: `"equal"` or `"random"`, see `logistic_regression`.
        variant: `"paper"` or `"released"`, see `logistic_regression`.

    Returns:
        The problem.

    Raises:
        InvalidInput: If there are more clients than samples, `width` is not positive,
            `regularisation` is negative, or `split` or `variant` is not known.

    Example:
        >>> import fedsolve as fs
        >>> rows, labels = fs.problems.like_real_sim(samples=20, size=50, nonzeros=5.0)
        >>> problem = fs.problems.sparse_regression(rows, labels, clients=4, width=8)
        >>> problem.n, problem.dimension
        (4, 50)
    """
    check_count("width", width)
    check_positive("regularisation", regularisation, zero=True)
    assert rows.shape is not None
    parts = deal(len(labels), clients, seed, split)
    pieces = [_pieces(rows[part], width) for part in parts]
    most, samples = max(len(p[2]) for p in pieces), max(map(len, parts))
    columns = np.zeros((clients, most, width), np.int32)
    values = np.zeros((clients, most, width), np.float32)
    owner = np.full((clients, most), samples, np.int32)
    own = np.zeros((clients, samples), np.float32)
    for client, (part, (c, v, o)) in enumerate(zip(parts, pieces, strict=True)):
        columns[client, : len(o)], values[client, : len(o)], owner[client, : len(o)] = c, v, o
        own[client, : len(part)] = labels[part]
    each = max(int(np.bincount(p[2]).max()) for p in pieces)
    cut = Pieces({"columns": columns, "values": values}, owner, each)
    mask = np.arange(samples) < np.asarray(list(map(len, parts)))[:, None]
    return Problem(
        objective=SparseLogisticLoss(LogisticLoss(regularisation, released(variant))),
        clients=Samples({"rows": cut, "labels": own}, mask),
        params=np.zeros(rows.shape[1]),
        batch_size=batch_size,
    )


class SparseLogisticLoss(eqx.Module):
    """The logistic loss, with margins from pieces of rows."""

    loss: LogisticLoss = eqx.field(static=True)

    def __call__(self, w: Vector, data: dict[str, PyTree]) -> Float[Array, ""]:
        """Compute the loss of one client."""
        rows, labels = data["rows"], data["labels"]
        parts = jnp.sum(rows.values["values"] * w[rows.values["columns"]], axis=1)
        margin = jax.ops.segment_sum(parts, rows.owner, len(labels))
        return self.loss.of(w, margin, labels, data["mask"])


def _pieces(rows: csr_matrix, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return columns, values and sample of each piece."""
    counts = np.diff(rows.indptr)
    each = np.maximum(-(-counts // width), 1)
    owner = np.repeat(np.arange(len(counts), dtype=np.int32), each)
    first = np.cumsum(each) - each
    within = np.arange(rows.nnz) - np.repeat(rows.indptr[:-1], counts)
    place = np.repeat(first, counts) + within // width, within % width
    columns = np.zeros((len(owner), width), np.int32)
    values = np.zeros((len(owner), width), np.float32)
    columns[place], values[place] = rows.indices, rows.data
    return columns, values, owner
