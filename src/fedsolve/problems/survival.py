"""Survival analysis: Cox regression on Fed-TCGA-BRCA, a benchmark of FLamby.

Paper: Ogier du Terrail et al., "FLamby: Datasets and Benchmarks for Cross-Silo Federated Learning
in Realistic Healthcare Settings" (2022). Client j has patients with features x_i, a time t_i and an
event e_i (1: death at t_i, 0: lost from sight at t_i). The risk of a patient is s_i = ⟨w, x_i⟩, and

    f_j(w) = (1/n_j) Σ_i e_i (log Σ_{k in R_i} exp(s_k) − s_i),    R_i = {k : t_k ≥ t_i},

the negative partial log-likelihood of Cox (1972), divided by the number of patients. R_i is
Breslow's for equal times. In FLamby's program R_i has, of those with t_k = t_i, only the ones that
stand before i in the data, and i.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from fedsolve.data.datasets import load
from fedsolve.errors import InvalidInput
from fedsolve.problem.problem import Problem
from fedsolve.problem.stacking import stack_clients
from fedsolve.types import Vector

Patients = dict[str, PyTree]  # x, time, event and mask


def tcga_brca(
    batch_size: int | None = 8, ties: str = "order", seed: int = 0, region: int | None = None
) -> Problem:
    """Predict survival with breast cancer in six regions (Fed-TCGA-BRCA), by Cox regression.

    The clients are six regions with 866 patients in all, divided as in FLamby; 222 others are for
    testing. The 39 features are those of the files, not scaled. A linear model has 39 parameters;
    FLamby's also has a bias, which the loss does not depend on. The history has the loss and the
    concordance on the test part of all regions, as `test_loss` and `test_concordance`.

    The data may not be used to identify patients.

    Args:
        batch_size: The size of minibatches; None for all patients of a client.
        ties: Who is at risk among patients of equal time: `"order"`, those before in the data, as
            in FLamby's program; or `"breslow"`, all of them.
        seed: Seed of the initial parameters, uniform in ±1/√39 as in FLamby.
        region: The only region that takes part, from 0 to 5; None for all. Tests are over all
            regions.

    Returns:
        The problem.

    Raises:
        InvalidInput: If `ties` or `region` is not known, or the data set cannot be loaded.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.tcga_brca()  # doctest: +SKIP
        >>> problem.n, problem.dimension  # doctest: +SKIP
        (6, 39)
    """
    if ties not in LOSSES:
        raise InvalidInput(f'ties must be "order" or "breslow", got {ties!r}.')
    data = load("tcga_brca")
    patients = {
        part: {name: arrays[name] for name in ("x", "time", "event")}
        for part, arrays in {"train": data.train, "test": data.test}.items()
    }
    regions = [data.train["region"] == code for code in range(len(data.names["region"]))]
    if region is not None:
        if isinstance(region, bool) or region not in range(len(regions)):
            raise InvalidInput(f"region must be from 0 to {len(regions) - 1}, got {region!r}.")
        regions = [regions[region]]
    size = data.train["x"].shape[1]
    start = np.random.default_rng(seed).uniform(-1, 1, size) / np.sqrt(size)
    return Problem(
        objective=LOSSES[ties],
        clients=stack_clients(
            [{name: rows[here] for name, rows in patients["train"].items()} for here in regions]
        ),
        params=start,
        batch_size=batch_size,
        test=patients["test"] | {"mask": np.ones(len(data.test["x"]), bool)},
        metrics={"test_loss": LOSSES[ties], "test_concordance": concordance},
    )


def cox_loss(w: Vector, data: Patients) -> Float[Array, ""]:
    """Compute f_j with Breslow's sets R_i."""
    return partial_likelihood(data["x"] @ w, data, together=True)


def cox_loss_in_order(w: Vector, data: Patients) -> Float[Array, ""]:
    """Compute f_j with FLamby's sets R_i, which depend on the order of patients of equal time."""
    return partial_likelihood(data["x"] @ w, data, together=False)


LOSSES = {"order": cox_loss_in_order, "breslow": cox_loss}


def partial_likelihood(
    risks: Float[Array, " s"], data: Patients, together: bool = True
) -> Float[Array, ""]:
    """Compute f_j; `together` says whether patients of equal time are all at risk."""
    late = jnp.where(data["mask"], -data["time"], jnp.inf)  # padding comes last
    order = jnp.argsort(late, stable=True)
    late, scores = late[order], risks[order]
    died = (data["mask"] & (data["event"] == 1))[order]
    at_risk = jax.lax.cumlogsumexp(scores)
    if together:
        at_risk = at_risk[jnp.searchsorted(late, late, side="right") - 1]
    return jnp.sum(jnp.where(died, at_risk - scores, 0)) / jnp.sum(data["mask"])


def concordance(w: Vector, data: Patients) -> Float[Array, ""]:
    """Compute Harrell's C, the share of comparable pairs in which who dies first has more risk.

    A pair is comparable if one of the two dies, and the other one is still seen then: at a later
    time, or lost from sight at the same time. A pair of equal risks counts one half.
    """
    return concordance_of(data["x"] @ w, data)


def concordance_of(scores: Float[Array, " s"], data: Patients) -> Float[Array, ""]:
    """Compute Harrell's C of these risks."""
    time, died = data["time"], data["mask"] & (data["event"] == 1)
    outlives = (time > time[:, None]) | ((time == time[:, None]) & ~died)
    pairs = died[:, None] & outlives & data["mask"]
    ranked = (scores[:, None] > scores) + 0.5 * (scores[:, None] == scores)
    return jnp.sum(jnp.where(pairs, ranked, 0)) / jnp.sum(pairs)
