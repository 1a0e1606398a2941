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

from collections.abc import Callable
from typing import TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from fedsolve.data import partitions
from fedsolve.data.datasets import NUMERIC, Arrays, Dataset, load
from fedsolve.errors import InvalidInput
from fedsolve.fields import check_count
from fedsolve.problem.constraints import Statistics
from fedsolve.problem.layout import as_device_array
from fedsolve.problem.problem import Problem
from fedsolve.problem.stacking import pool, stack_clients
from fedsolve.problems.losses import logistic

if TYPE_CHECKING:
    import pandas as pd

People = dict[str, PyTree]  # x, y, protected and mask
Sums = dict[str, tuple[Array, Array]]  # of each group: Σ π and how many


def adult(
    clients: int = 10,
    constraint: str = "demographic_parity",
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
        constraint: `"demographic_parity"` or `"equal_opportunity"`.
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
    if constraint not in CONSTRAINTS:
        known = " or ".join(f'"{name}"' for name in CONSTRAINTS)
        raise InvalidInput(f"constraint must be {known}, got {constraint!r}.")
    check_count("clients", clients)
    check_count("width", width)
    check_count("depth", depth)
    data = load("adult")
    train, test = people(data)
    groups = 2 * train["y"] + train["protected"]
    parts = partitions.dirichlet(groups, clients, alpha, seed, least=2)
    return Problem(
        objective=cross_entropy,
        constraint=Statistics(CONSTRAINTS[constraint], gap),
        clients=stack_clients(partitions.take(train, parts)),
        params=eqx.nn.MLP(
            train["x"].shape[1], "scalar", width, depth, jax.nn.relu, key=jax.random.key(seed)
        ),
        batch_size=batch_size,
        test=test | {"mask": np.ones(len(test["y"]), bool)},
        metrics={f"test_{name}": metric for name, metric in METRICS.items()},
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


def logits(model: PyTree, data: People) -> Float[Array, " s"]:
    """Compute log(π / (1 − π)) of every person."""
    return jax.vmap(model)(data["x"])


def cross_entropy(model: PyTree, data: People) -> Float[Array, ""]:
    """Compute the mean cross-entropy of π."""
    z = logits(model, data)
    return jnp.mean(logistic(jnp.where(data["y"] == 1, -z, z)), where=data["mask"])


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
