"""Fair classification on the Adult census data (FedSGM, appendix F.3).

Predict who earns more than 50,000, with a bound on how much the prediction depends on sex:

    f_j(w) = mean cross-entropy of π(x; w) over client j's people,
    g(w)   = | mean of π over women − mean of π over men |,  over all clients together.

g is not a mean of the clients' gaps: clients send four numbers, the sum of π and the number of
people in each group, and the server computes the gap from their totals. A client descends its own
gap.

Demographic parity counts everyone; equal opportunity counts only those who do earn more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from fedsolve.constraints import SampleMeans, from_table
from fedsolve.data import partitions
from fedsolve.data.datasets import NUMERIC, Arrays, Dataset, load
from fedsolve.errors import InvalidInput
from fedsolve.fields import check_count
from fedsolve.problem.constraints import Constraint, Statistics
from fedsolve.problem.each_client import EachClient
from fedsolve.problem.layout import as_device_array
from fedsolve.problem.problem import Problem
from fedsolve.problem.several import Several
from fedsolve.problem.stacking import pool, stack_clients
from fedsolve.problems.losses import logistic
from fedsolve.types import Table

if TYPE_CHECKING:
    import pandas as pd

People = dict[str, PyTree]  # x, y, protected and mask
Sums = dict[str, tuple[Array, Array]]  # of each group: Σ π and how many


Columns = Mapping[str, tuple[str, Sequence[str]]]  # by group: its entry, the names of its codes


def adult(
    clients: int = 10,
    constraint: str | Table | list[Table] = "demographic_parity",
    alpha: float = 2.0,
    batch_size: int | None = 256,
    width: int = 64,
    depth: int = 2,
    seed: int = 0,
) -> Problem:
    """Predict income from census data by a network, with a bound on the gap between the sexes.

    All 48,842 people are used: 32,561 to train, 16,281 to test, as published. Missing values are a
    category, categories are one-hot, numbers are standardised on the training part. The history has
    the loss, the accuracy and the gaps on the test part, each with the prefix `test_`.

    Args:
        clients: The number of clients, whose sizes differ.
        constraint: `"demographic_parity"` or `"equal_opportunity"`, of π; or a constraint by name,
            of decisions, as a table: `{"kind": "sensitivity", "at_least": 0.7, "group": "race"}`;
            or a list of tables. `kind` names a function of `fs.constraints`, the rest are its
            arguments; `group` is `"sex"`, `"race"` or `"race and sex"`. The history then has the
            exact values on the test part, too.
        alpha: The partition is by Dirichlet(α) over the four groups of sex and income.
        batch_size: The size of minibatches; None for all samples of a client.
        width: The width of the network's hidden layers.
        depth: The number of the network's hidden layers.
        seed: Seed of the initial parameters and of the partition.

    Returns:
        The problem.

    Raises:
        InvalidInput: If the constraint is unknown, a count is not positive, or the data set cannot
            be loaded.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.adult(clients=5)  # doctest: +SKIP
        >>> problem.n, problem.dimension  # doctest: +SKIP
        (5, 11201)
    """
    if isinstance(constraint, str) and constraint not in CONSTRAINTS:
        known = " or ".join(f'"{name}"' for name in CONSTRAINTS)
        raise InvalidInput(f"constraint must be {known}, got {constraint!r}.")
    check_count("clients", clients)
    check_count("width", width)
    check_count("depth", depth)
    data = load("adult")
    train, test = people(data)
    metrics = {f"test_{name}": metric for name, metric in METRICS.items()}
    if isinstance(constraint, str):
        bound: Constraint = Statistics(CONSTRAINTS[constraint], gap)
    else:
        columns = _groups_of(data)
        bound = from_tables(constraint, columns)
        groups = {each.group for each in means_in(bound) if each.group is not None}
        for entry in groups & {"race", "race_and_sex"}:
            train[entry], test[entry] = (_codes(data, part, entry) for part in ("train", "test"))
        metrics |= {
            f"test_{claim.name}": Exact(each, claim.name)
            for each in means_in(bound)
            for claim in each.claims
        }
    groups = 2 * train["y"] + train["protected"]
    parts = partitions.dirichlet(groups, clients, alpha, seed, least=2)
    return Problem(
        objective=cross_entropy,
        constraint=bound,
        clients=stack_clients(partitions.take(train, parts)),
        params=eqx.nn.MLP(
            train["x"].shape[1], "scalar", width, depth, jax.nn.relu, key=jax.random.key(seed)
        ),
        batch_size=batch_size,
        test=test | {"mask": np.ones(len(test["y"]), bool)},
        metrics=metrics,
    )


def people(data: Dataset) -> tuple[Arrays, Arrays]:
    """Encode both parts: inputs `x`, `y` (1: above 50,000) and `protected` (1: a woman)."""
    center = {c: data.train[c].mean() for c in NUMERIC}
    spread = {c: data.train[c].std() for c in NUMERIC}

    def encode(part: Arrays) -> Arrays:
        columns = [((part[c] - center[c]) / spread[c])[:, None] for c in NUMERIC]
        for name, words in data.names.items():
            if name != "income":
                columns.append(np.eye(len(words))[part[name]])
        return {
            "x": np.concatenate(columns, axis=1).astype(np.float32),
            "y": part["income"].astype(np.int8),
            "protected": (part["sex"] == data.names["sex"].index("Female")).astype(np.int8),
        }

    return encode(data.train), encode(data.test)


def _groups_of(data: Dataset) -> Columns:
    """Return the groups that constraints by name may use; `protected` is 1 for women."""
    sexes, races = ["men", "women"], list(data.names["race"])
    both = [f"{race}, {sex}" for race in races for sex in sexes]
    return {
        "sex": ("protected", sexes),
        "race": ("race", races),
        "race and sex": ("race_and_sex", both),
    }


def _codes(data: Dataset, part: str, entry: str) -> np.ndarray:
    """Return the code of each person's race, or of race and sex."""
    rows = getattr(data, part)
    race = rows["race"].astype(np.int32)
    if entry == "race":
        return race
    return 2 * race + (rows["sex"] == data.names["sex"].index("Female"))


def from_tables(given: Table | list[Table], columns: Columns) -> Constraint:
    """Return the constraints that tables of a configuration describe, of a classifier.

    Args:
        given: A table, or a list of tables for several; each may have a `tolerance` then.
        columns: The groups that there are; the first one is that of gaps without a `group`.
    """
    if isinstance(given, list):
        tolerances = [t.get("tolerance", 0.0) if isinstance(t, dict) else 0.0 for t in given]
        tables = [
            {k: v for k, v in t.items() if k != "tolerance"} if isinstance(t, dict) else t
            for t in given
        ]
        parts = [
            _from_table(table, columns, f"constraint[{number}]")
            for number, table in enumerate(tables)
        ]
        return Several(parts, tolerances)
    return _from_table(given, columns, "constraint")


def _from_table(table: Table, columns: Columns, where: str) -> Constraint:
    known = {"score": logits, "loss": losses, "label": "y"}
    if isinstance(table, dict) and "groups" in table:
        raise InvalidInput(f"{where}.groups: the groups' names come with the data.")
    group = table.get("group") if isinstance(table, dict) else None
    if group is not None:
        if group not in columns:
            there = ", ".join(map(repr, columns)) or "none"
            raise InvalidInput(f"{where}.group: {group!r} is not a group of the data: {there}.")
        entry, names = columns[group]
        return from_table({**table, "group": entry, "groups": list(names)}, where, **known)
    if columns:
        entry, names = next(iter(columns.values()))
        known |= {"group": entry, "groups": list(names)}
    return from_table(table, where, **known)


def means_in(constraint: Constraint | None) -> list[SampleMeans]:
    """Return the constraints by name that are part of a constraint."""
    if isinstance(constraint, Several):
        return [found for part in constraint.parts for found in means_in(part)]
    if isinstance(constraint, EachClient):
        return means_in(constraint.constraint)
    return [constraint] if isinstance(constraint, SampleMeans) else []


@dataclasses.dataclass(frozen=True)
class Exact:
    """Function of (model, data): the exact value that a claim of a constraint is about."""

    constraint: SampleMeans
    claim: str

    def __call__(self, model: PyTree, data: People) -> Float[Array, ""]:
        """Compute the value."""
        return jnp.asarray(self.constraint.claimed(self.constraint.counts(model, data))[self.claim])


def losses(model: PyTree, data: People) -> Float[Array, " s"]:
    """Compute the cross-entropy of every person."""
    z = logits(model, data)
    return logistic(jnp.where(data["y"] == 1, -z, z))


def logits(model: PyTree, data: People) -> Float[Array, " s"]:
    """Compute log(π / (1 − π)) of every person."""
    return jax.vmap(model)(data["x"])


def cross_entropy(model: PyTree, data: People) -> Float[Array, ""]:
    """Compute the mean cross-entropy of π."""
    return jnp.mean(losses(model, data), where=data["mask"])


def parity_sums(model: PyTree, data: People) -> Sums:
    """Compute the sums of demographic parity, for which everyone counts."""
    return _sums(jax.nn.sigmoid(logits(model, data)), data, data["mask"])


def opportunity_sums(model: PyTree, data: People) -> Sums:
    """Compute the sums of equal opportunity, for which those who earn more count."""
    return _sums(jax.nn.sigmoid(logits(model, data)), data, data["mask"] & (data["y"] == 1))


CONSTRAINTS: dict[str, Callable] = {
    "demographic_parity": parity_sums,
    "equal_opportunity": opportunity_sums,
}


def gap(sums: Sums) -> Float[Array, ""]:
    """Compute | Σπ / count over the protected − Σπ / count over the others |; 0 if one is empty."""
    (women, some), (men, others) = sums["protected"], sums["unprotected"]
    known = (some > 0) & (others > 0)
    rates = women / jnp.maximum(some, 1), men / jnp.maximum(others, 1)
    return jnp.where(known, jnp.abs(rates[0] - rates[1]), 0)


def _sums(share: Float[Array, " s"], data: People, counted: Bool[Array, " s"]) -> Sums:
    """Compute, for each group, the sum of `share` and the number of people counted."""
    found = {}
    for name, flag in {"protected": 1, "unprotected": 0}.items():
        who = counted & (data["protected"] == flag)
        found[name] = jnp.sum(share, where=who), jnp.sum(who, dtype=share.dtype)
    return found


# Metrics: of decisions (π > 1/2) as well as of π itself


def accuracy(model: PyTree, data: People) -> Float[Array, ""]:
    """Compute the share of people whose income is predicted correctly."""
    right = (logits(model, data) > 0) == (data["y"] == 1)
    return jnp.mean(right.astype(jnp.result_type(float)), where=data["mask"])


def parity_gap(model: PyTree, data: People) -> Float[Array, ""]:
    """Compute the gap in π between the sexes."""
    return gap(parity_sums(model, data))


def decision_gap(model: PyTree, data: People) -> Float[Array, ""]:
    """Compute the gap in decisions, the demographic parity difference."""
    z = logits(model, data)
    return gap(_sums((z > 0).astype(z.dtype), data, data["mask"]))


def opportunity_gap(model: PyTree, data: People) -> Float[Array, ""]:
    """Compute the gap in decisions among those who earn more, the equal opportunity difference."""
    z = logits(model, data)
    return gap(_sums((z > 0).astype(z.dtype), data, data["mask"] & (data["y"] == 1)))


METRICS: dict[str, Callable] = {
    "loss": cross_entropy,
    "accuracy": accuracy,
    "parity_gap": parity_gap,
    "decision_gap": decision_gap,
    "opportunity_gap": opportunity_gap,
}


def fairness_report(problem: Problem, params: PyTree) -> pd.DataFrame:
    """Tabulate loss, accuracy and gaps on the training and the test part.

    Args:
        problem: A problem made by `adult`.
        params: Where to evaluate, such as `run.params`.

    Returns:
        A table with the rows `train` and `test`, and a column for each metric.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.adult()  # doctest: +SKIP
        >>> report = fs.problems.fairness_report(problem, problem.params)  # doctest: +SKIP
        >>> report.columns.tolist()  # doctest: +SKIP
        ['loss', 'accuracy', 'parity_gap', 'decision_gap', 'opportunity_gap']
    """
    import pandas as pd

    samples = pool(problem.samples)
    train = {k: v[0] for k, v in {**samples.values, "mask": samples.mask}.items()}
    parts = {part: as_device_array(d) for part, d in {"train": train, "test": problem.test}.items()}
    rows = {part: {k: float(m(params, d)) for k, m in METRICS.items()} for part, d in parts.items()}
    return pd.DataFrame.from_dict(rows, orient="index")
