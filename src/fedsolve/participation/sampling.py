"""Uniform draws without replacement."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key


def sample(
    key: Key[Array, ""], clients: int, participants: int | None
) -> Int[Array, " m"] | Int[np.ndarray, " m"]:
    """`participants` of `clients`, uniformly without replacement; all of them if None.

    Everyone is a NumPy array, a fact that the runtimes can see: nothing needs to be gathered.
    A few of many are drawn by Floyd's method, whose cost does not depend on `clients`.
    """
    if participants is None or participants == clients:
        return np.arange(clients, dtype=np.int32)
    if participants**2 > 64 * clients:
        return jax.random.permutation(key, jnp.arange(clients, dtype=jnp.int32))[:participants]
    last = jnp.arange(clients - participants, clients, dtype=jnp.int32)
    draws = jax.random.randint(key, (participants,), 0, last + 1, dtype=jnp.int32)

    def insert(i: Any, chosen: Int[Array, " m"]) -> Int[Array, " m"]:
        taken = jnp.any(chosen == draws[i])  # a draw already chosen is replaced by the last one
        return chosen.at[i].set(jnp.where(taken, last[i], draws[i]))

    return jax.lax.fori_loop(0, participants, insert, jnp.full(participants, -1, jnp.int32))
