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

from fedsolve.data.preprocessing import Arrays, Preprocessing, fit
from fedsolve.data.schema import Schema
from fedsolve.data.table_files import TABLES, Source, data_of, files_of, held_out_part
from fedsolve.data.tables import load_table
from fedsolve.errors import InvalidInput
from fedsolve.fields import check_count
from fedsolve.problem.constraints import Constraint, Statistics
from fedsolve.problem.problem import Problem
from fedsolve.problem.stacking import stack_clients
from fedsolve.problems.fairness import (
    CONSTRAINTS,
    Sums,
    accuracy,
    cross_entropy,
    from_tables,
    gap,
)
from fedsolve.problems.survival import concordance_of, partial_likelihood
from fedsolve.problems.table_sums import stand_in
from fedsolve.types import Table

Rows = dict[str, PyTree]  # of one client, with their mask
Columns = dict[str, np.ndarray]  # of a table
MODELS = ("logistic", "network", "cox")


def tabular(
    features: dict[str, Table],
    label: Table,
    group: Table | list[Table] | None = None,
    folder: str | Path | None = None,
    fitted: dict[str, Table] | None = None,
    model: str = "logistic",
    width: int = 16,
    depth: int = 1,
    constraint: str | Table | list[Table] | None = None,
    bound: float | int = 0.0,
    batch_size: int | None = None,
    test: float | int = 0.0,
    seed: int = 0,
) -> Problem:
    """Predict a label from the columns of tables, with a bound on the gap between two groups.

    Every file is one client. f_j is the mean cross-entropy of client j's rows; of `"cox"`, it is
    the negative partial log-likelihood of `tcga_brca`, with Breslow's sets.

    Args:
        features: For each column that the model uses, a table with its `kind`: `"numeric"` (with
            `least`, `most`, `units`), `"categorical"` (with `categories`, or `"collect"` for those
            that the sites have), `"binary"` (with two `values`, which become 0 and 1) or `"date"`;
            and what stands for a `missing` value: the `"mean"`, the `"median"` or a value, for
            categories also `"category"` (one of its own). Without it, a missing value is an error.
            Numbers with `scaling = "quartiles"` are scaled by them. Median and quartiles are those
            of a histogram of so many `bins` from `least` to `most`.
        label: A table with the `column`, and its words for `positive` and `negative`; for the model
            `"cox"` also the column of the `time` at which the event (`positive`) was seen, or at
            which a row was last seen without it.
        group: A table with the `column` of a sensitive group, and its words for `protected` and
            `unprotected`, or its `categories`; a list of tables for several columns; None for none.
        folder: A folder with a CSV or Parquet file for each client, in the order of their names;
            or with the `site.toml` of each site, in it or in its folders, which name the sites' own
            files, columns, units and words. A deployment does not use it.
        fitted: The `mean` and the `deviation` of each number, with `quartiles` where they are
            used, and the collected `categories`; None to compute them from the files.
        model: `"logistic"` (logistic regression, from 0), `"network"`, or `"cox"` (Cox regression,
            from 0).
        width: The width of a network's hidden layers.
        depth: The number of a network's hidden layers.
        constraint: `"demographic_parity"` or `"equal_opportunity"`, as in `adult`; a constraint by
            name, of decisions, as a table with its `kind` (a function of `fs.constraints`) and its
            arguments: `{"kind": "sensitivity", "at_least": 0.9}`; or a list of tables; None for
            none. `group` is the name of the group's column.
        bound: The gap at which g is 0, of a constraint without a table.
        batch_size: The size of minibatches; None for all rows of a client.
        test: The part of the rows that is held out, chosen by their contents alone; the history
            has the loss and the accuracy (or the concordance) on them. A `site.toml` says its own.
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
    if (model == "cox") != (schema.time is not None):
        raise InvalidInput('The model "cox" is for a label with a `time`, and only that.')
    if model == "cox" and constraint is not None:
        raise InvalidInput('Constraints are on decisions, which the model "cox" does not make.')
    part = held_out_part("test", test)
    sites = [] if folder is None else sites_in(folder, part)
    read = [(table, site.source) for site in sites for table in site.tables(schema)]
    tables = [table for table, _ in read]
    if fitted is not None:
        preprocessing = Preprocessing.of(schema, fitted)
    elif sites:
        sources = [source for _, source in read]
        preprocessing = Preprocessing.of(schema, fit(schema, tables, sources))
    else:
        raise InvalidInput(
            "tabular needs a folder of CSV files, or `fitted`: the means and deviations that "
            "`fedsolve deploy` computes at the sites."
        )
    tables = tables or [stand_in(schema)]
    loss = (CoxLoss if model == "cox" else TabularLoss)(preprocessing)
    held = [table for site in sites if site.source.test for table in site.tables(schema, "test")]
    held = [table for table in held if len(table["label"])]
    return Problem(
        objective=loss,
        constraint=_constraint(constraint, bound, schema),
        clients=stack_clients([preprocessing.arrays(table) for table in tables]),
        params=_model(model, len(preprocessing.names), width, depth, seed),
        batch_size=batch_size,
        **(_tested(preprocessing, held, model) if held else {}),
    )


def _tested(preprocessing: Preprocessing, held: list[Columns], model: str) -> dict[str, PyTree]:
    """Return the rows that are held out, and what is measured on them."""
    each = [preprocessing.arrays(table) for table in held]
    test: Arrays = {name: np.concatenate([one[name] for one in each]) for name in each[0]}
    test["mask"] = np.ones(len(test["x"]), bool)
    if model == "cox":
        metrics = {"test_loss": _cox, "test_concordance": _concordance}
    else:
        metrics = {"test_loss": cross_entropy, "test_accuracy": accuracy}
    return {"test": test, "metrics": metrics}


def preprocessing_of(problem: Problem) -> Preprocessing:
    """Return what turns columns into the inputs of a `tabular` problem."""
    objective = problem.given[0]
    if not isinstance(objective, TabularLoss):
        raise InvalidInput("This is not a problem of the kind `tabular`.")
    return objective.preprocessing


@dataclasses.dataclass(frozen=True)
class Site:
    """The files of a site, and how they are written."""

    files: Sequence[Path]
    source: Source

    def tables(self, schema: Schema, part: str = "train") -> list[Columns]:
        """Read a client from each file."""
        return [load_table(schema, file, self.source, part=part) for file in self.files]


def sites_in(folder: str | Path, test: float = 0.0) -> list[Site]:
    """Return the sites of a folder by name: of `site.toml` files, or a site for each table."""
    if owned := owners_files(folder):
        return [Site(files_of(path), Source.of_site(path)) for path in owned]
    return [Site([path], Source(test=test)) for path in files_in(folder)]


def owners_files(folder: str | Path) -> list[Path]:
    """Return the sites' own files in a folder: NAME.toml, or NAME/site.toml."""
    found = [*Path(folder).glob("*.toml"), *Path(folder).glob("*/site.toml")]
    for path in found:
        if (loader := data_of(path).get("loader")) not in TABLES:
            known = ", ".join(f'"{name}"' for name in TABLES)
            raise InvalidInput(f"{path}: a table needs loader = {known}, got {loader!r}.")
    return sorted(found, key=lambda path: path.relative_to(folder).with_suffix("").parts)


def files_in(folder: str | Path) -> list[Path]:
    """Return the CSV and Parquet files of a folder by name."""
    found = sorted(path for kind in ("csv", "parquet") for path in Path(folder).glob(f"*.{kind}"))
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

    def read_clients(self, paths: Sequence[Path], source: Source, part: str = "train") -> PyTree:
        """Read a client from each file: the rows to train with, those held out, or all."""
        tables = Site(paths, source).tables(self.schema, part)
        return stack_clients([self.preprocessing.arrays(table) for table in tables])


@dataclasses.dataclass(frozen=True)
class CoxLoss(TabularLoss):
    """The negative partial log-likelihood, with what turns a site's rows into inputs."""

    def __call__(self, model: PyTree, data: Rows) -> Float[Array, ""]:
        """Compute the negative partial log-likelihood, divided by the number of rows."""
        return _cox(model, data)


def _cox(model: PyTree, data: Rows) -> Float[Array, ""]:
    return partial_likelihood(jax.vmap(model)(data["x"]), data)


def _concordance(model: PyTree, data: Rows) -> Float[Array, ""]:
    return concordance_of(jax.vmap(model)(data["x"]), data)


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
        return from_tables(name, schema.group_entries)
    if name not in CONSTRAINTS:
        known = " or ".join(f'"{each}"' for each in CONSTRAINTS)
        raise InvalidInput(f"constraint must be {known}, got {name!r}.")
    if "protected" not in [entry for entry, _ in schema.group_entries.values()]:
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
    linear = eqx.nn.Linear(inputs, "scalar", use_bias=name != "cox", key=key)
    return jax.tree.map(lambda leaf: jnp.zeros_like(leaf), linear)
