"""Residuals of FedADMM and its augmented Lagrangian, over all clients.

At the new w: the primal residual is (Σ‖w_i − w‖²)^½, the dual one (Σ σ_i²)^½ ‖w − w_before‖, and
L = h(w) + Σ α_i f_i(w_i) + ⟨π_i, w_i − w⟩ + (σ_i/2)‖w_i − w‖².
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from fedsolve.algorithms.admm_state import Local, Number
from fedsolve.problem.client import Client
from fedsolve.types import Info, Vector


class Residuals(NamedTuple):
    """Both residuals, and relative to what they are differences of."""

    primal: Number
    dual: Number
    relative: Number
    relative_dual: Number


def own_part(client: Client, state: Local) -> dict[str, Number]:
    """Return a client's part of the residuals and of the augmented Lagrangian."""
    joined = state.penalty > 0
    mean = client.w
    local = (state.sent - state.dual) / jnp.where(joined, state.penalty, 1)  # w_i, as sent
    gap = jnp.where(joined, local - mean, 0)
    value = state.share * client.with_all_samples().objective(mean + gap)
    value += jnp.vdot(state.dual, gap) + 0.5 * state.penalty * jnp.sum(gap**2)
    return {
        "gap": jnp.sum(gap**2),
        "penalty": state.penalty**2,
        "local": jnp.sum((mean + gap) ** 2),
        "dual": jnp.sum(state.dual**2),
        "lagrangian": value,
    }


def residuals(
    found: dict[str, Number], w: Vector, before: Vector, clients: int
) -> tuple[Residuals, Info]:
    """Return the residuals from the sum of all clients' parts, and the history's columns."""
    primal = jnp.sqrt(found["gap"])
    dual = jnp.sqrt(found["penalty"]) * jnp.linalg.norm(w - before)
    info: Info = {"primal_residual": primal, "dual_residual": dual}
    tiny = jnp.finfo(primal.dtype).tiny
    size = jnp.maximum(jnp.sqrt(found["local"]), clients**0.5 * jnp.linalg.norm(w))
    relative = primal / jnp.maximum(size, tiny)
    relative_dual = dual / jnp.maximum(jnp.sqrt(found["dual"]), tiny)
    return Residuals(primal, dual, relative, relative_dual), info
