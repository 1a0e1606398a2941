"""Logistic regression on sparse data that never become dense (Example 5.2 of FedADMM, real-sim).

A client's rows lie in pieces of a fixed width: columns and values, padded by zeros, and the sample
that each piece belongs to. A row of more non-zeros than the width has several pieces. So the memory
follows the non-zeros, not the longest row (real-sim: 51 a row on average, 3484 at most).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedsolve.errors import InvalidInput
from fedsolve.fields import check_count, check_positive
from fedsolve.problem.problem import Problem
from fedsolve.problem.samples import Samples
from fedsolve.problems.regression import LogisticLoss, deal

Sparse = Any  # a SciPy matrix in rows (CSR)


def sparse_logistic(
    source: str | Path | None = None,
    clients: int = 1000,
    regularisation: float = 0.001,
    seed: int = 0,
    width: int = 32,
) -> Problem:
    """ℓ2-regularised logistic regression on a LIBSVM file (plain, .gz or .bz2), or, without one, on
    generated data of real-sim's shape and density: 72309 × 20958, about 51 non-zeros a row."""
    rows, labels = like_real_sim(seed=seed) if source is None else read_libsvm(source)
    return sparse_regression(rows, labels, clients, regularisation, seed, width)


def read_libsvm(path: str | Path) -> tuple[Sparse, np.ndarray]:
    """A LIBSVM text file: the rows as a SciPy matrix, and labels 0 or 1 (the smaller and the larger
    of the two in the file)."""
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
) -> tuple[Sparse, np.ndarray]:
    """Generated rows: numbers of non-zeros with a long tail, columns by Zipf's law as words are,
    lengths 1; labels by a hidden vector."""
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
    rows: Sparse,
    labels: np.ndarray,
    clients: int,
    regularisation: float = 0.001,
    seed: int = 0,
    width: int = 32,
) -> Problem:
    """Example 5.2 on a SciPy matrix in rows, dealt out at random in equal parts."""
    check_count("width", width)
    check_positive("regularisation", regularisation, zero=True)
    parts = deal(len(labels), clients, seed)
    pieces = [_pieces(rows[part], width) for part in parts]
    most, samples = max(len(p[2]) for p in pieces), max(map(len, parts))
    columns = np.zeros((clients, most, width), np.int32)
    values = np.zeros((clients, most, width), np.float32)
    owner = np.zeros((clients, most), np.int32)
    own = np.zeros((clients, samples), np.float32)
    for client, (part, (c, v, o)) in enumerate(zip(parts, pieces, strict=True)):
        columns[client, : len(o)], values[client, : len(o)], owner[client, : len(o)] = c, v, o
        own[client, : len(part)] = labels[part]
    mask = {
        "rows": np.arange(most) < np.asarray([len(p[2]) for p in pieces])[:, None],
        "labels": np.arange(samples) < np.asarray(list(map(len, parts)))[:, None],
    }
    data = {"rows": {"columns": columns, "values": values, "owner": owner}, "labels": own}
    return Problem(
        objective=SparseLogisticLoss(LogisticLoss(regularisation)),
        clients=Samples(data, mask),
        params=np.zeros(rows.shape[1]),
    )


class SparseLogisticLoss(eqx.Module):
    """The same loss, with margins from pieces of rows."""

    loss: LogisticLoss = eqx.field(static=True)

    def __call__(self, w: Float[Array, " d"], data: dict[str, Any]) -> Float[Array, ""]:
        rows, labels, mask = data["rows"], data["labels"], data["mask"]["labels"]
        parts = jnp.sum(rows["values"] * w[rows["columns"]], axis=1)
        margin = jax.ops.segment_sum(parts, rows["owner"], len(labels))
        return self.loss.of(w, margin, labels, mask)


def _pieces(rows: Sparse, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Columns, values and sample of each piece."""
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
