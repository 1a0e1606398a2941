"""Evaluations after a number of messages or bytes instead of a number of rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from fedsolve.federation.counters import Count
from fedsolve.types import Flag

if TYPE_CHECKING:
    from fedsolve.federation.state import State

COLUMNS = {"messages": "vectors_up", "bytes_up": "bytes_up", "bytes_down": "bytes_down"}
MOST = 2**31  # of a unit, between two evaluations


class Milestones(eqx.Module):
    """Says after which rounds a multiple of `each` messages (or bytes) has been reached.

    Args:
        unit: What is counted, a key of `COLUMNS`.
        each: The number between two evaluations, below `MOST`.
    """

    unit: str = eqx.field(static=True)
    each: UInt32[Array | np.ndarray, ""]

    def passed(self, before: State, after: State) -> Flag:
        """Return whether a multiple lies above the count of one state, up to that of a later one.

        Args:
            before: The earlier state.
            after: The later state.
        """
        each = jnp.asarray(self.each, jnp.uint32)
        old, new = self._count(before), self._count(after)
        return new.minus(old, MOST - 1) >= each - old.remainder(each)

    def _count(self, state: State) -> Count:
        """Return what has been counted so far."""
        return getattr(state, COLUMNS[self.unit])
