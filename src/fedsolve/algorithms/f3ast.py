"""F3AST: federated averaging under intermittent availability.

Paper: Ribero, Vikalo, de Veciana, "Federated Learning Under Intermittent Client Availability and
Time-Varying Communication Constraints" (2022).

| here | paper | |
|---|---|---|
| `weighting` | p_k | `DataSize` is the paper's; by default all are equal |
| `participants` | | at most this many of the available clients |
| `smoothing` | β | |
| `rates` | r_k | how often client k takes part in the long run |

In a round, the available clients of largest p_k²/r_k² are selected: the steepest descent of the
sampling variance Σ p_k²/r_k. Then r ← (1 − β)r + β·1{k in S}, and w moves by
Σ_{k in S} (p_k/r_k)Δ_k, which is unbiased in the long run. The rates begin at participants/n.
"""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedsolve.algorithms.fedavg import FedAvg
from fedsolve.algorithms.participating import Drawn
from fedsolve.errors import InvalidInput
from fedsolve.federation.federation import Federation
from fedsolve.federation.replies import Replies
from fedsolve.fields import Scalar, check_probability, scalar
from fedsolve.participation.picks import Picks, no_picks, noted
from fedsolve.participation.selection import Top
from fedsolve.types import PRNGKey, PyTree, Vector


class Memory(NamedTuple):
    """The server's state of participation."""

    weighting: PyTree
    availability: PyTree
    rates: Float[Array, " n"]
    picks: Picks


class F3AST(FedAvg):
    """Federated averaging that prefers available clients which took part too rarely.

    The weights of clients in the mean correct for how often they take part.

    Args:
        error_feedback: See `FedAvg`.
        step_size, local_steps, local_epochs, local_optimizer, uplink, downlink, server_optimizer:
            Local training, compression and the server's step; see `FedAvg`.
        smoothing: β, the step of the estimated rates.
        participants: At most this many of the available clients take part.
        weighting, availability: The weights p_k, and which clients are up; see `Participating`.
        selection: Not used: F3AST selects by its own rule.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.linear_regression(clients=4, size=3, smallest=5, largest=5)
        >>> algorithm = fs.F3AST(0.02, participants=2, availability=0.7)
        >>> run = fs.solve(problem, algorithm, rounds=3)
        >>> run.history["cohort"].shape
        (3, 2)
    """

    tells_cohort = False
    takes_unbiased = False

    smoothing: Scalar = eqx.field(converter=scalar("smoothing"), default=0.01)

    def __check_init__(self):
        check_probability("smoothing", self.smoothing)
        if self.selection is not None:
            raise InvalidInput("F3AST selects by its own rule: say how many by participants.")

    def init_participation(self, w: Vector, clients: int) -> Memory:
        share = min(self.participants or clients, clients) / clients
        return Memory(
            self.weighting.init(w, clients),
            None if self.availability is None else self.availability.init(clients),
            jnp.full(clients, share, w.dtype),
            no_picks(clients),
        )

    def draw(self, fed: Federation, key: PRNGKey) -> Drawn:
        memory, n = fed.participation, fed.clients
        up, after = self.draw_available(fed, jax.random.fold_in(key, 1))
        weights, wanted = self.weigh(fed, up, key)
        weights = jnp.full(n, 1 / n, fed.w.dtype) if weights is None else weights
        scores = jnp.where(up, (weights / memory.rates) ** 2, 0)
        cohort, _ = Top(self.participants or n).select(scores, n, None, key)
        heard = self.answering(fed, cohort, scores[cohort] > 0, key)
        taken = jnp.zeros(n, bool).at[cohort].set(heard)
        rates = memory.rates + self.smoothing * (taken - memory.rates)
        picks = memory.picks.at[cohort].add(heard.astype(jnp.int32))
        fed.participation = Memory(wanted, after, rates, picks)
        info = self.weighting.info(wanted) | noted(picks, fed.round + 1)
        return Drawn(cohort, (weights / rates)[cohort], heard, info)

    def combine(self, answers: Replies, drawn: Drawn) -> Vector:
        return answers.sum(drawn.weights)
