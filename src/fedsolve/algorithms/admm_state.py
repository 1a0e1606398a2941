"""States of FedADMM: what the server and a client keep."""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fedsolve.types import Vector

Number = Float[Array, ""]
Numbers = Float[Array, " m"] | Float[np.ndarray, " m"]


class Server(eqx.Module):
    """Σ z_i and Σ σ_i over the clients that have answered, and their number."""

    total: Vector
    penalties: Number
    joined: Int[Array, ""]
    scale: Number | None = None  # of the penalties, where they change
    late: tuple[Vector, Number] | None = None  # changes of Σ z_i and Σ σ_i for the next round


class Balanced(eqx.Module):
    """The message of a round whose penalties change."""

    scale: Number


class Local(eqx.Module):
    """A client's state; its σ_i is 0 until its first answer has arrived."""

    dual: Vector  # π_i
    sent: Vector  # z_i, as the server has it
    accuracy: Number  # ε_i
    share: Number  # α_i
    smoothness: Number  # α_i r_i
    penalty: Number  # σ_i


def with_share(state: Local, share: Number) -> Local:
    """Change α_i and keep λ_i and s_i; (6) is squared."""
    scale = jnp.where(state.share > 0, share / jnp.where(state.share > 0, state.share, 1), 1)
    return Local(
        dual=scale * state.dual,
        sent=state.sent,
        accuracy=scale**2 * state.accuracy,
        share=scale * state.share,
        smoothness=scale * state.smoothness,
        penalty=scale * state.penalty,
    )
