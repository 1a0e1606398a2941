"""Uniform draws without replacement."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from fedsolve.types import Cohort, PRNGKey, Round


def sample(key: PRNGKey, clients: int, participants: int | None) -> Cohort:
    """Draw clients uniformly without replacement.

    All clients together are returned as a NumPy array: the runtimes then know that nothing needs to
    be gathered. A few of many are drawn by Floyd's method, whose cost does not depend on `clients`.

    Args:
        key: A random key.
        clients: The number of clients n.
        participants: How many to draw; None for all of them.

    Returns:
        The indices of the clients drawn.

    Example:
        >>> import fedsolve as fs
        >>> import jax
        >>> fs.sample(jax.random.key(0), 1000, 10).shape
        (10,)
        >>> fs.sample(jax.random.key(0), 3, None).tolist()
        [0, 1, 2]
    """
    if participants is None or participants == clients:
        return np.arange(clients, dtype=np.int32)
    if participants**2 > 64 * clients:
        return jax.random.permutation(key, jnp.arange(clients, dtype=jnp.int32))[:participants]
    last = jnp.arange(clients - participants, clients, dtype=jnp.int32)
    draws = jax.random.randint(key, (participants,), 0, last + 1, dtype=jnp.int32)

    def insert(i: Round, chosen: Int[Array, " m"]) -> Int[Array, " m"]:
        taken = jnp.any(chosen == draws[i])  # a draw already chosen is replaced by the last one
        return chosen.at[i].set(jnp.where(taken, last[i], draws[i]))

    return jax.lax.fori_loop(0, participants, insert, jnp.full(participants, -1, jnp.int32))
