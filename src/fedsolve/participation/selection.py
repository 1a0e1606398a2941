"""Who is drawn: from weights to a cohort of fixed size.

| selection | draws | what a drawn client counts |
|---|---|---|
| `Everyone` | all clients | its weight |
| `Random(count)` | uniformly, among those with a weight | its weight |
| `Top(count)` | the largest weights; ties by lot | its weight |
| `Cyclic(count)` | in turn: everyone within ⌈n/count⌉ rounds (Scheme 4.1 of FedADMM) | its weight |
| `Proportional(count)` | by weight, without replacement | the same as the others |

Weights that count are made to sum to 1 over those that answered. With `equal=True` all that are
drawn count the same, as in the papers that only select.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key, PyTree

from fedsolve.fields import check_count
from fedsolve.participation.sampling import sample
from fedsolve.participation.weighting import Weights, draw_proportionally
from fedsolve.types import Cohort


class Selection(eqx.Module):
    """Draws a cohort. It may remember."""

    def init(self, clients: int) -> PyTree:
        """What the server remembers for it, before the first round."""
        return None

    def select(
        self, weights: Weights, clients: int, memory: PyTree, key: Key[Array, ""]
    ) -> tuple[Cohort, PyTree]:
        """The cohort, and the memory after this. Weights of None are the same for all."""
        raise NotImplementedError

    @property
    def size(self) -> int | None:
        """How many are drawn; None for everyone."""
        return None

    @property
    def counts_equally(self) -> bool:
        """Whether those drawn count the same, whatever they weigh."""
        return False


class Everyone(Selection):
    """All clients."""

    def select(
        self, weights: Weights, clients: int, memory: None, key: Key[Array, ""]
    ) -> tuple[Cohort, None]:
        return np.arange(clients, dtype=np.int32), None


class _Some(Selection):
    count: int = eqx.field(static=True)
    equal: bool = eqx.field(static=True, default=False)

    def __check_init__(self):
        check_count("count", self.count)

    @property
    def size(self) -> int | None:
        return self.count

    @property
    def counts_equally(self) -> bool:
        return self.equal


class Random(_Some):
    """`count` clients, uniformly without replacement; those of weight 0 only if there are too few
    others."""

    def select(
        self, weights: Weights, clients: int, memory: None, key: Key[Array, ""]
    ) -> tuple[Cohort, None]:
        if weights is None:
            return sample(key, clients, min(self.count, clients)), None
        wanted = (weights > 0).astype(weights.dtype)
        return draw_proportionally(key, wanted, self.count), None


class Top(_Some):
    """The `count` clients of largest weight."""

    def select(
        self, weights: Weights, clients: int, memory: None, key: Key[Array, ""]
    ) -> tuple[Cohort, None]:
        if weights is None:  # all are tied
            return sample(key, clients, min(self.count, clients)), None
        lot = jax.random.uniform(key, weights.shape)
        order = jnp.lexsort((lot, -weights))
        return order[: min(self.count, clients)].astype(jnp.int32), None


class Proportional(_Some):
    """`count` clients in proportion to their weights, without replacement. What is drawn by weight
    then counts the same."""

    @property
    def counts_equally(self) -> bool:
        return True

    def select(
        self, weights: Weights, clients: int, memory: None, key: Key[Array, ""]
    ) -> tuple[Cohort, None]:
        if weights is None:
            return sample(key, clients, min(self.count, clients)), None
        return draw_proportionally(key, weights, self.count), None


class Cyclic(_Some):
    """`count` clients in turn, in an order drawn in the first round: between two of its turns a
    client waits at most s_0 = ⌈n/count⌉ rounds, (21) of FedADMM."""

    def init(self, clients: int) -> tuple[Int[Array, " n"], Int[Array, ""]]:
        return jnp.full(clients, -1, jnp.int32), jnp.int32(0)  # the order, and whose turn it is

    def select(
        self, weights: Weights, clients: int, memory: Any, key: Key[Array, ""]
    ) -> tuple[Cohort, Any]:
        order, turn = memory
        everyone = jnp.arange(clients, dtype=jnp.int32)
        order = jax.lax.cond(
            order[0] < 0, lambda: jax.random.permutation(key, everyone), lambda: order
        )
        count = min(self.count, clients)
        cohort = order[(turn + jnp.arange(count)) % clients]
        return cohort, (order, (turn + count) % clients)
