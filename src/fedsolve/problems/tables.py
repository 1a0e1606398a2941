"""Classification of the rows of CSV files, one file at each site.

An experiment states a schema: the columns, their kinds, the label, and perhaps a sensitive group.
Numbers are standardised over all sites before the first round; see `fedsolve.data.preprocessing`.

In a simulation, a folder has the sites' files. In a deployment, each site reads its own file and
sends sums (`tabular_sums`), from which `fedsolve deploy` computes means and deviations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from fedsolve.data.preprocessing import Arrays, Fitted, Preprocessing, fit, fitted_from, numbers_of
from fedsolve.data.tables import Feature, Schema, Source, load_table
from fedsolve.errors import InvalidInput
from fedsolve.fields import check_count
from fedsolve.problem.constraints import Constraint, Statistics
from fedsolve.problem.problem import Problem
from fedsolve.problem.stacking import stack_clients
from fedsolve.problems.fairness import CONSTRAINTS, Sums, cross_entropy, from_tables, gap
from fedsolve.types import Table

Rows = dict[str, PyTree]  # of one client, with their mask
MODELS = ("logistic", "network")


def tabular(
    features: dict[str, Table],
    label: Table,
    group: Table | None = None,
    folder: str | Path | None = None,
    fitted: dict[str, dict[str, float | int]] | None = None,
    model: str = "logistic",
    width: int = 16,
    depth: int = 1,
    constraint: str | Table | list[Table] | None = None,
    bound: float | int = 0.0,
    batch_size: int | None = None,
    seed: int = 0,
) -> Problem:
    """Predict a label from the columns of CSV files, with a bound on the gap between two groups.

    Every file is one client. f_j is the mean cross-entropy of client j's rows.

    Args:
        features: For each column that the model uses, a table with its `kind`: `"numeric"` (with
            `least`, `most`, `units`), `"categorical"` (with `categories`), `"binary"` (with two
            `values`, which become 0 and 1) or `"date"`; and what stands for a `missing` value: the
            `"mean"` or a value, for categories also `"category"` (one of its own). Without it, a
            missing value is an error.
        label: A table with the `column`, and its words for `positive` and `negative`.
        group: A table with the `column` of a sensitive group, and its words for `protected` and
            `unprotected`; None for none.
        folder: A folder with a CSV file for each client, in the order of their names. A deployment
            does not use it: each site names its own file.
        fitted: The `mean` and the `deviation` of each number; None to compute them from the files.
        model: `"logistic"` (logistic regression, from 0) or `"network"`.
        width: The width of a network's hidden layers.
        depth: The number of a network's hidden layers.
        constraint: `"demographic_parity"` or `"equal_opportunity"`, as in `adult`; a constraint by
            name, of decisions, as a table with its `kind` (a function of `fs.constraints`) and its
            arguments: `{"kind": "sensitivity", "at_least": 0.9}`; or a list of tables; None for
            none. `group` is the name of the group's column.
        bound: The gap at which g is 0, of a constraint without a table.
        batch_size: The size of minibatches; None for all rows of a client.
        seed: Seed of a network's initial parameters.

    Returns:
        The problem.

    Raises:
        InvalidInput: If the schema is not valid, or a file does not fit it. The sentence names the
            file, the row and the column.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import fedsolve as fs
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name, rows in {"north": "70,yes 30,no", "south": "50,no 65,yes"}.items():
        ...         text = "age,died " + rows
        ...         _ = Path(folder, f"{name}.csv").write_text(text.replace(" ", chr(10)))
        ...     problem = fs.problems.tabular(
        ...         features={"age": {"kind": "numeric"}},
        ...         label={"column": "died", "positive": "yes", "negative": "no"},
        ...         folder=folder,
        ...     )
        >>> problem.n, problem.dimension
        (2, 2)
    """
    schema = Schema.of(features, label, group)
    tables = None if folder is None else [load_table(schema, path) for path in files_in(folder)]
    if fitted is not None:
        preprocessing = Preprocessing.of(schema, fitted)
    elif tables is not None:
        preprocessing = Preprocessing.of(schema, fit(schema, tables))
    else:
        raise InvalidInput(
            "tabular needs a folder of CSV files, or `fitted`: the means and deviations that "
            "`fedsolve deploy` computes at the sites."
        )
    if tables is None:
        tables = [_stand_in(schema)]
    return Problem(
        objective=TabularLoss(preprocessing),
        constraint=_constraint(constraint, bound, schema),
        clients=stack_clients([preprocessing.arrays(table) for table in tables]),
        params=_model(model, len(preprocessing.names), width, depth, seed),
        batch_size=batch_size,
    )


def tabular_sums(features: dict[str, Table], label: Table) -> Problem:
    """Sum numbers over all sites, from which `tabular` gets its means and deviations.

    The objective is f_j(w) = −⟨w, s_j⟩ with client j's sums s_j, so that a step of size 1 from 0
    leads to the mean of the clients' sums. In the first round s_j has the number of known values
    and their sum, in the second the squares of their distances from the mean. So two rounds of
    `FedAvg(1.0)` suffice.

    Args:
        features: As in `tabular`.
        label: As in `tabular`.

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
    schema = Schema.of(features, label)
    if not schema.numbers:
        raise InvalidInput("The schema has no numeric features, so there is nothing to sum.")
    start = {name: np.zeros(len(schema.numbers)) for name in ("count", "total", "square")}
    one = numbers_of(schema, _stand_in(schema))
    return Problem(SumsLoss(schema), clients=stack_clients([one]), params=start)


def fitted_at(problem: Problem, params: PyTree) -> Fitted:
    """Return means and deviations where `FedAvg` has led `tabular_sums`."""
    objective = problem.given[0]
    assert isinstance(objective, SumsLoss)
    schema = objective.schema
    return fitted_from(schema, *(np.asarray(params[k]) for k in ("count", "total", "square")))


def preprocessing_of(problem: Problem) -> Preprocessing:
    """Return what turns columns into the inputs of a `tabular` problem."""
    objective = problem.given[0]
    if not isinstance(objective, TabularLoss):
        raise InvalidInput("This is not a problem of the kind `tabular`.")
    return objective.preprocessing


def files_in(folder: str | Path) -> list[Path]:
    """Return the CSV files of a folder by name."""
    found = sorted(Path(folder).glob("*.csv"))
    if not found:
        raise InvalidInput(f"There are no CSV files in the folder {folder}.")
    return found


@dataclasses.dataclass(frozen=True)
class TabularLoss:
    """The mean cross-entropy, with what turns a site's rows into inputs."""

    preprocessing: Preprocessing

    def __call__(self, model: PyTree, data: Rows) -> Float[Array, ""]:
        """Compute the mean cross-entropy."""
        return cross_entropy(model, data)

    @property
    def schema(self) -> Schema:
        """The columns of a site's file."""
        return self.preprocessing.schema

    def read_clients(self, paths: Sequence[Path], source: Source) -> PyTree:
        """Read a client from each file."""
        tables = [load_table(self.schema, path, source) for path in paths]
        return stack_clients([self.preprocessing.arrays(table) for table in tables])


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

    def read_clients(self, paths: Sequence[Path], source: Source) -> PyTree:
        """Read a client from each file."""
        tables = [load_table(self.schema, path, source) for path in paths]
        return stack_clients([numbers_of(self.schema, table) for table in tables])


@dataclasses.dataclass(frozen=True)
class GapAbove:
    """The gap between two groups, less a bound."""

    bound: float

    def __call__(self, sums: Sums) -> Float[Array, ""]:
        """Compute the gap less the bound."""
        return gap(sums) - self.bound


def _constraint(
    name: str | Table | list[Table] | None, bound: float, schema: Schema
) -> Constraint | None:
    if name is None:
        return None
    if not isinstance(name, str):
        if bound != 0:
            raise InvalidInput("bound is of a constraint without a table; give at_most in it.")
        group = schema.group
        columns = {} if group is None else {group.name: ("protected", group.words)}
        return from_tables(name, columns)
    if name not in CONSTRAINTS:
        known = " or ".join(f'"{each}"' for each in CONSTRAINTS)
        raise InvalidInput(f"constraint must be {known}, got {name!r}.")
    if schema.group is None:
        raise InvalidInput(f"The constraint {name!r} is between two groups: give `group`.")
    if not 0 <= bound < 1:
        raise InvalidInput(
            f"bound is a gap between two rates, at least 0 and below 1, got {bound}."
        )
    return Statistics(CONSTRAINTS[name], GapAbove(float(bound)))


def _model(name: str, inputs: int, width: int, depth: int, seed: int) -> eqx.Module:
    if name not in MODELS:
        raise InvalidInput(f"model must be one of {', '.join(MODELS)}, got {name!r}.")
    check_count("width", width)
    check_count("depth", depth)
    key = jax.random.key(seed)
    if name == "network":
        return eqx.nn.MLP(inputs, "scalar", width, depth, jax.nn.relu, key=key)
    linear = eqx.nn.Linear(inputs, "scalar", key=key)
    return jax.tree.map(lambda leaf: jnp.zeros_like(leaf), linear)


def _stand_in(schema: Schema) -> Arrays:
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
