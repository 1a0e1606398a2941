"""Scheme 4.1 of FedADMM: random cohorts, among which every client is within s_0 rounds.

    Ω^{τ+1} ∪ Ω^{τ+2} ∪ … ∪ Ω^{τ+s_0} = [m]    for τ = 0, s_0, 2s_0, …

The paper says that a client then waits at most s_0 rounds, (21). That is so for `Cyclic`. Here a
client may be in the first cohort of one window and in the last of the next: it waits at most
2s_0 − 1 rounds, which is the s_0 of the theorems' proofs.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from fedsolve.errors import InvalidInput
from fedsolve.fields import check_count
from fedsolve.participation.selection import Selection
from fedsolve.participation.weighting import Weights
from fedsolve.types import Cohort, PRNGKey

Window = tuple[Bool[Array, " n"], Int[Array, ""]]  # who was drawn in it, and its next round


class Covering(Selection):
    """Select clients at random such that each is selected in every window of `within` rounds.

    As many of those that are still missing are drawn first as later rounds of the window cannot
    take; the others of the cohort are drawn uniformly from all clients that are left. With
    `within` = ⌈n/count⌉ or little more, nearly all draws are forced; the more rounds there are, the
    closer it is to `Random`.

    Args:
        count: How many clients are selected.
        within: s_0, the rounds of a window; `count`·`within` must be at least the number of
            clients.

    Example:
        >>> import fedsolve as fs
        >>> import jax
        >>> selection, drawn = fs.participation.Covering(2, within=3), []
        >>> memory = selection.init(5)
        >>> for key in jax.random.split(jax.random.key(0), 3):
        ...     cohort, memory = selection.select(None, 5, memory, key)
        ...     drawn += cohort.tolist()
        >>> sorted(set(drawn))
        [0, 1, 2, 3, 4]
    """

    count: int = eqx.field(static=True)
    within: int = eqx.field(static=True)

    def __check_init__(self):
        check_count("count", self.count)
        check_count("within", self.within)

    @property
    def size(self) -> int | None:
        return self.count

    def init(self, clients: int) -> Window:
        if self.count * self.within < clients:
            raise InvalidInput(
                f"{self.count} of {clients} clients a round cannot be everyone within "
                f"{self.within} rounds."
            )
        return jnp.zeros(clients, bool), jnp.int32(0)

    def select(
        self, weights: Weights, clients: int, memory: Window, key: PRNGKey
    ) -> tuple[Cohort, Window]:
        drawn, position = memory
        count = min(self.count, clients)
        later = (self.within - 1 - position) * count
        forced = jnp.maximum(jnp.sum(~drawn) - later, 0)
        lots = jax.random.uniform(key, (clients,))
        place = jnp.argsort(jnp.argsort(jnp.where(drawn, 2, lots)))  # of the missing ones first
        order = jnp.argsort(jnp.where(place < forced, lots - 1, lots))
        cohort = order[:count].astype(jnp.int32)
        drawn, position = drawn.at[cohort].set(True), position + 1
        ends = position == self.within
        return cohort, (drawn & ~ends, jnp.where(ends, 0, position))
