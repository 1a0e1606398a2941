"""One exchange: what is asked of which clients, and how a client computes its answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from fedsolve.problem.samples import Samples
from fedsolve.types import Cohort, Flags

if TYPE_CHECKING:
    from fedsolve.federation.federation import Federation


SUBSETS = 2**31 - 1  # a key that no exchange has


class Restricted(eqx.Module):
    """A message, and how many samples each client may look at for its answer."""

    contributions: Float[Array, " n"]
    message: PyTree


class Question:
    """One exchange: what is asked of whom, and how a client finds its answer."""

    def __init__(self, fed: Federation, method: Callable, cohort: Cohort, message: Any, when: Any):
        self.method, self.cohort, self.message, self.when = method, cohort, message, when
        self.exchange = len(fed.exchanges)
        self._fed, self._key = fed, jax.random.fold_in(fed._key, self.exchange + 1)
        size = len(cohort)
        # Known before the program runs if it is simply everyone: then nothing needs masking.
        self.asked: Flags = (
            np.full(size, when) if isinstance(when, bool) else jnp.broadcast_to(when, (size,))
        )

    def answer(self, index: Any, samples: Samples, both: PyTree) -> tuple[PyTree, PyTree]:
        """On a client: its next state and memory, and its reply."""
        fed, own = self._fed, jax.random.fold_in(self._key, index)
        state, memory = both
        client = fed._problem.client(samples, fed.w, fed.round, index, own, memory)
        message = self.message
        if isinstance(message, Restricted):
            draw = jax.random.fold_in(jax.random.fold_in(fed._key, SUBSETS), index)
            client = client.restricted(jnp.ceil(message.contributions[index]), draw)
            message = message.message
        state, reply = self.method(client, state, *(() if message is None else (message,)))
        return (state, client.memory), reply
