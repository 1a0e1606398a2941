"""Sums of the numbers in sites' tables, from which `tabular` gets its means and deviations.

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

from fedsolve.data.preprocessing import Arrays, Fitted, fitted_from, numbers_of
from fedsolve.data.table_files import Source
from fedsolve.data.tables import Feature, Schema, load_table
from fedsolve.errors import InvalidInput
from fedsolve.problem.problem import Problem
from fedsolve.problem.stacking import stack_clients
from fedsolve.types import Table

Rows = dict[str, PyTree]  # of one client, with their mask


def tabular_sums(features: dict[str, Table], label: Table, group: Table | None = None) -> Problem:
    """Sum numbers over all sites, from which `tabular` gets its means and deviations.

    The objective is f_j(w) = −⟨w, s_j⟩ with client j's sums s_j, so that a step of size 1 from 0
    leads to the mean of the clients' sums. In the first round s_j has the number of known values
    and their sum, in the second the squares of their distances from the mean. So two rounds of
    `FedAvg(1.0)` suffice.

    Args:
        features: As in `tabular`.
        label: As in `tabular`.
        group: As in `tabular`.

    Returns:
        The problem, of which each site has its own data.

    Raises:
        InvalidInput: If the schema is not valid, or has no numbers.

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
    if not schema.numbers:
        raise InvalidInput("The schema has no numeric features, so there is nothing to sum.")
    start = {name: np.zeros(len(schema.numbers)) for name in ("count", "total", "square")}
    one = numbers_of(schema, stand_in(schema))
    return Problem(SumsLoss(schema), clients=stack_clients([one]), params=start)


def fitted_at(problem: Problem, params: PyTree) -> Fitted:
    """Return means and deviations where `FedAvg` has led `tabular_sums`."""
    objective = problem.given[0]
    assert isinstance(objective, SumsLoss)
    schema = objective.schema
    return fitted_from(schema, *(np.asarray(params[k]) for k in ("count", "total", "square")))


@dataclasses.dataclass(frozen=True)
class SumsLoss:
    """−⟨w, s_j⟩ with client j's sums s_j; see `tabular_sums`."""

    schema: Schema

    def __call__(self, params: dict[str, Array], data: Rows) -> Float[Array, ""]:
        """Compute −⟨w, s_j⟩."""
        known = data["known"] & data["mask"][:, None]
        values = jnp.asarray(data["values"])
        at = jax.lax.stop_gradient(params)
        mean = at["total"] / jnp.where(at["count"] > 0, at["count"], 1)
        is_first = jnp.all(at["count"] == 0)
        sums = {
            "count": jnp.where(is_first, jnp.sum(known, 0, dtype=values.dtype), 0),
            "total": jnp.where(is_first, jnp.sum(values, 0, where=known), 0),
            "square": jnp.where(is_first, 0, jnp.sum((values - mean) ** 2, 0, where=known)),
        }
        return -sum((jnp.vdot(params[name], sums[name]) for name in sums), jnp.zeros(()))

    def read_clients(self, paths: Sequence[Path], source: Source, part: str = "train") -> PyTree:
        """Read a client from each file; see `TabularLoss.read_clients`."""
        tables = [load_table(self.schema, path, source, part=part) for path in paths]
        return stack_clients([numbers_of(self.schema, table) for table in tables])


def stand_in(schema: Schema) -> Arrays:
    """Return four rows that stand for a site's table: both labels in both groups."""

    def values(entry: str, column: object) -> np.ndarray:
        if isinstance(column, Feature) and column.is_number:
            return np.zeros(4)
        rows = np.arange(4, dtype=np.int32)
        return rows // 2 if entry == "label" else rows % 2

    found = {entry: values(entry, column) for entry, column in schema.columns().items()}
    for feature in schema.features:
        if feature.kind == "categorical":
            found[f"feature {feature.name}"] = np.zeros(4, np.int32)
    return found
