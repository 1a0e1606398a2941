"""Sums over the rows of sites' tables, from which `tabular` gets its means and deviations.

Two rounds of `FedAvg(1.0)` add up what the sites send; see `tabular_sums`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from fedsolve.data.preprocessing import (
    Arrays,
    Fitted,
    check_sends_words,
    collected_from,
    fitted_from,
    numbers_of,
    tables_of,
)
from fedsolve.data.schema import Feature, Schema, Words
from fedsolve.data.table_files import SAMPLES, Source
from fedsolve.data.tables import load_table
from fedsolve.errors import InvalidInput
from fedsolve.problem.problem import Problem
from fedsolve.problem.samples import Samples
from fedsolve.problem.stacking import stack_clients
from fedsolve.types import Table

Rows = dict[str, PyTree]  # of one client, with their mask


def tabular_sums(
    features: dict[str, Table], label: Table, group: Table | list[Table] | None = None
) -> Problem:
    """Sum numbers over all sites, from which `tabular` gets its means and deviations.

    The objective is f_j(w) = −⟨w, s_j⟩ with client j's sums s_j, so that a step of size 1 from 0
    leads to the mean of the clients' sums. In the first round s_j has the number of known values
    and their sum, in the second the squares of their distances from the mean. So two rounds of
    `FedAvg(1.0)` suffice. Histograms and cells of words, where the schema wants quartiles or the
    sites' categories, are of the first round.

    Args:
        features: As in `tabular`.
        label: As in `tabular`.
        group: As in `tabular`.

    Returns:
        The problem, of which each site has its own data.

    Raises:
        InvalidInput: If the schema is not valid, or nothing of it is to be summed.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.tabular_sums(
        ...     {"age": {"kind": "numeric"}, "weight": {"kind": "numeric"}},
        ...     {"column": "died", "positive": "yes", "negative": "no"},
        ... )
        >>> problem.dimension
        6
    """
    schema = Schema.of(features, label, group)
    if not schema.is_exchanged:
        raise InvalidInput("The schema has no numeric features, so there is nothing to sum.")
    one = _client(schema, stand_in(schema), SAMPLES)
    start = {name: np.zeros_like(one[name]) for name in one if name not in ROWS}
    if schema.numbers:
        start |= {name: np.zeros(len(schema.numbers)) for name in ("count", "total", "square")}
    return Problem(SumsLoss(schema), clients=_stacked([one]), params=start)


def fitted_at(problem: Problem, params: PyTree, clients: int | None = None) -> Fitted:
    """Return means, deviations, quartiles and categories where `FedAvg` has led `tabular_sums`.

    `clients` is the number of clients of all sites; None for those of `problem`.
    """
    objective = problem.given[0]
    assert isinstance(objective, SumsLoss)
    schema = objective.schema
    found = {name: np.asarray(value) for name, value in params.items()}
    words = collected_from(schema, found, problem.n if clients is None else clients)
    if not schema.numbers:
        return words
    count, total, square = (found[name] for name in ("count", "total", "square"))
    return fitted_from(schema, count, total, square, found) | words


LATER = ("square",)  # what is summed in the second round
ROWS = ("values", "known", "rows")  # entries of a client with a row for each row of its table


def _client(schema: Schema, columns: Arrays, samples: int) -> Arrays:
    """Return what a client's sums are taken of."""
    rows = {"rows": np.ones(len(columns["label"]), bool)}
    numbers = numbers_of(schema, columns) if schema.numbers else rows
    return numbers | tables_of(schema, columns, samples)


def _stacked(clients: Sequence[Arrays]) -> Samples:
    """Stack clients, with a mask of its own for every entry."""
    stacked = stack_clients(clients)
    assert isinstance(stacked, dict)
    mask = stacked.pop("mask")
    is_plain = stacked.keys() <= {*ROWS}
    return Samples(
        stacked, mask if is_plain or isinstance(mask, dict) else dict.fromkeys(stacked, mask)
    )


@dataclasses.dataclass(frozen=True)
class SumsLoss:
    """−⟨w, s_j⟩ with client j's sums s_j; see `tabular_sums`."""

    schema: Schema

    def __call__(self, params: dict[str, Array], data: Rows) -> Float[Array, ""]:
        """Compute −⟨w, s_j⟩."""
        at = jax.lax.stop_gradient(params)
        firsts = [jnp.all(value == 0) for name, value in at.items() if name not in LATER]
        is_first = jnp.all(jnp.stack(firsts))
        sums: dict[str, Array] = {}
        for name in params:
            if name in data:
                sums[name] = jnp.where(is_first, jnp.asarray(data[name]), 0)
        if self.schema.numbers:
            sums |= self._of_numbers(at, data, is_first)
        return -sum((jnp.vdot(params[name], sums[name]) for name in sums), jnp.zeros(()))

    def _of_numbers(self, at: dict[str, Array], data: Rows, is_first: Array) -> dict[str, Array]:
        mask = data["mask"]["known"] if isinstance(data["mask"], dict) else data["mask"]
        known = data["known"] & mask[:, None]
        values = jnp.asarray(data["values"])
        mean = at["total"] / jnp.where(at["count"] > 0, at["count"], 1)
        return {
            "count": jnp.where(is_first, jnp.sum(known, 0, dtype=values.dtype), 0),
            "total": jnp.where(is_first, jnp.sum(values, 0, where=known), 0),
            "square": jnp.where(is_first, 0, jnp.sum((values - mean) ** 2, 0, where=known)),
        }

    def read_clients(self, paths: Sequence[Path], source: Source, part: str = "train") -> PyTree:
        """Read a client from each file; see `TabularLoss.read_clients`."""
        for feature in self.schema.collected:
            check_sends_words(feature, [source])
        clients = []
        for path in paths:
            columns = load_table(self.schema, path, source, part=part)
            clients.append(_client(self.schema, columns, source.samples))
            self._check_counts(path, columns, source.samples)
        return _stacked(clients)

    def _check_counts(self, path: Path, columns: Arrays, samples: int) -> None:
        """Raise if a sum would be over fewer values than the owner wants."""
        for feature in self.schema.numbers:
            known = int((~np.isnan(columns[f"feature {feature.name}"])).sum())
            if 0 < known < samples:
                raise InvalidInput(
                    f"{path.name} has {known} values in the column {feature.name!r}, and its owner "
                    f"wants at least {samples} behind a sum (`limits.samples`)."
                )


def stand_in(schema: Schema) -> Arrays:
    """Return four rows that stand for a site's table: both labels in both groups."""

    def values(entry: str, column: object) -> np.ndarray:
        if isinstance(column, Feature) and column.is_number:
            return np.zeros(4)
        rows = np.arange(4, dtype=np.int32)
        if entry.startswith("group ") and isinstance(column, Words):
            return rows % len(column.words)
        return rows // 2 if entry == "label" else rows % 2

    found = {entry: values(entry, column) for entry, column in schema.columns().items()}
    for feature in schema.features:
        if feature.collects:
            found[f"feature {feature.name}"] = np.full(4, "", object)
        elif feature.kind == "categorical":
            found[f"feature {feature.name}"] = np.zeros(4, np.int32)
    return found
