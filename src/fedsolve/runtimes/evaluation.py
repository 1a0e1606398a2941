"""Evaluation: objective, constraint and metrics over all clients, at one w."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, PyTree

from fedsolve.algorithms.base import Algorithm
from fedsolve.compression.packets import weighted_sum
from fedsolve.federation.options import Setting
from fedsolve.federation.replies import Replies
from fedsolve.federation.state import State
from fedsolve.problem.constraints import Mean
from fedsolve.problem.problem import Problem
from fedsolve.problem.samples import Samples
from fedsolve.runtimes.blocks import map_clients
from fedsolve.solving.stopping import wants_gradient


def client_values(
    problem: Problem,
    w: Float[Array, " d"],
    key: Key[Array, ""] | None = None,
    first: Any = 0,
    setting: Setting | None = None,
    gradient: bool = False,
) -> dict[str, PyTree]:
    """`problem.values` of each client, where the clients are numbered from `first` on. If asked
    for, `gradient` has sums of gradients of their objectives, one row a block of clients: so that
    there is none for each client."""

    def look(w: Float[Array, " d"], index: Any, samples: Samples) -> dict[str, PyTree]:
        own = None if key is None else jax.random.fold_in(key, first + index)
        return problem.values(w, samples, own)

    def together(indices: Int[Array, " b"], samples: Samples) -> dict[str, PyTree]:
        def total(w: Float[Array, " d"]) -> tuple[Float[Array, ""], dict[str, PyTree]]:
            found = jax.vmap(look, in_axes=(None, 0, 0))(w, indices, samples)
            return jnp.sum(jnp.where(indices < problem.n, found["objective"], 0)), found

        if not gradient:
            return total(w)[1]
        slope, found = jax.grad(total, has_aux=True)(w)
        return found | {"gradient": slope[None]}

    everyone = np.arange(problem.n, dtype=np.int32)
    return map_clients(together, everyone, (problem.samples,), setting or Setting())


def evaluate(
    problem: Problem,
    w: Float[Array, " d"],
    key: Key[Array, ""] | None = None,
    setting: Setting | None = None,
    shares: Float[Array, " n"] | None = None,
) -> dict[str, Any]:
    """f (and ‖∇f‖², if the rule asks for it) and g over all clients, the metrics, and what else is
    to be followed, at w."""
    setting = Setting() if setting is None else setting
    values = client_values(problem, w, key, setting=setting, gradient=wants_gradient(setting.stop))
    found = combined(problem, w, values, shares)
    for name, diagnostic in setting.follow:
        told = diagnostic(problem, problem.layout.unravel(w))
        for path, leaf in jax.tree.leaves_with_path(told):
            part = jax.tree_util.keystr(path, simple=True, separator=".")
            found[f"{name}.{part}" if part else name] = jnp.asarray(leaf)
    return found


def look(problem: Problem, algorithm: Algorithm, state: State, setting: Setting) -> dict[str, Any]:
    """`evaluate` after a round, and what clients hold back there."""
    shares = algorithm.objective_weights(state.server, state.participation)
    found = evaluate(problem, state.w, state.evaluation_key, setting, shares)
    error = algorithm.uplink_error(state.clients, state.w, state.round)
    return found if error is None else found | {"uplink_error": error}


def combined(
    problem: Problem,
    w: Float[Array, " d"],
    values: dict[str, PyTree],
    shares: Float[Array, " n"] | None = None,
) -> dict[str, Any]:
    """f and g from clients' values at w, and the metrics there; with `shares` also the f (and the
    g, where it is a mean) in which clients count by these."""
    found = {k: jnp.mean(v) for k, v in values.items() if k not in ("constraint", "gradient")}
    if "gradient" in values:
        parts = values["gradient"]  # of some clients together each
        slope = weighted_sum(jnp.full(len(parts), 1 / len(values["objective"])), parts)
        found["squared_gradient"] = jnp.sum(slope**2)
    if problem.constraint is not None:
        heard = Replies(values["constraint"], np.ones(len(values["objective"]), bool))
        found["constraint"], _ = problem.constraint.combine(heard)
    if shares is not None:
        each = {k: values[k] for k in ("objective", "constraint") if k in values}
        if not isinstance(problem.constraint, Mean):
            each.pop("constraint", None)
        total = jnp.sum(shares)  # of those that were heard
        found |= {f"weighted_{k}": jnp.sum(shares * v) / total for k, v in each.items()}
    params = problem.layout.unravel(w)
    return found | {name: metric(params, problem.test) for name, metric in problem.metrics}
