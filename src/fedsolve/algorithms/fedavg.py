"""FedAvg: federated averaging, with any selection of clients, local optimiser and compression.

Paper: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data"
(2017), Algorithm 1.

    minimise f(w) = (1/n) Σ f_j(w),   w in X

| here | paper | |
|---|---|---|
| `step_size` | η | local; with a `local_optimizer`, the server's (1: plain averaging) |
| `participants` | C·K | or `weighting` and `selection` |
| `local_steps` | E·n_k/B | minibatches are the problem's `batch_size` |
| `weighting` | n_k/n | `DataSize` is the paper's; by default all count the same |

It is FedSGM without a constraint, to the bit.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Float, Key

from fedsolve.algorithms.participating import Drawn, Participating
from fedsolve.compression.compressors import Compressor, Identity
from fedsolve.compression.error_feedback import check_downlink, no_residual, with_feedback
from fedsolve.compression.packets import Packet
from fedsolve.federation.federation import Federation
from fedsolve.federation.replies import Replies
from fedsolve.fields import (
    Scalar,
    Schedule,
    at,
    check_count,
    check_kind,
    check_positive,
    scalar,
    static,
)
from fedsolve.local_updates.descent import Direction, travel
from fedsolve.local_updates.optimizers import Optimizer, optimizer_field
from fedsolve.problem.client import Client

Vector = Float[Array, " d"]


class Averaging(Participating):
    """What FedAvg and its relatives have in common: local steps from w, and a server that moves w
    along what the participants sent. With a `local_optimizer`, `step_size` is the server's.

    Compression is as in FedSGM: error feedback on a biased uplink, EF21-P on the downlink.
    """

    step_size: Scalar | Schedule = eqx.field(converter=scalar("step_size"))
    local_steps: int = static(1)
    local_optimizer: Optimizer | None = optimizer_field()
    uplink: Compressor = Identity()
    downlink: Compressor = Identity()

    def __check_init__(self):
        check_kind("uplink", self.uplink, Compressor)
        check_kind("downlink", self.downlink, Compressor)
        check_positive("step_size", self.step_size)
        check_count("local_steps", self.local_steps)
        check_downlink(self.downlink)

    def step(self, fed: Federation, x: Vector, update: Vector, key: Key[Array, ""]) -> Vector:
        """On the server: x moved by the update, and published."""
        x = fed.project(x - at(self.step_size, fed.round) * update)
        fed.publish(self.downlink(x - fed.w, key))
        return x

    def reach(self, round: Any) -> Any:
        """How far a client went for each unit of its pseudo-gradient."""
        return at(self.step_size, round) if self.local_optimizer is None else 1.0

    def travel(self, client: Client, direction: Direction) -> tuple[Vector, Vector]:
        """On a client: the pseudo-gradient of its local steps, and the sum of their directions."""
        steps, optimizer = self.local_steps, self.local_optimizer
        return travel(
            direction, client.w, steps, client.key, self.step_size, optimizer, client.round
        )


class FedAvg(Averaging):
    """Federated averaging: participants take local steps from w and send what they moved; the
    server moves w by the (weighted) mean of that."""

    # On the server

    def init(self, w: Vector) -> Vector:
        return w

    def round(
        self, fed: Federation, server: Vector, key: Key[Array, ""]
    ) -> tuple[Vector, dict[str, Any]]:
        to_sample, to_compress = jax.random.split(key)
        drawn = self.draw(fed, to_sample)
        update = self.combine(fed.ask(self.improve, drawn.cohort, when=drawn.available), drawn)
        x = self.step(fed, server, update, to_compress)
        self.learn(fed, update)
        return x, drawn.info

    def combine(self, answers: Replies, drawn: Drawn) -> Vector:
        """The mean of what arrived, by weight."""
        return answers.mean(drawn.weights)

    def unsent(self, clients: Any) -> Any:
        return clients

    # On a client; what it keeps is what a biased uplink has not sent yet

    def init_client(self, w: Vector) -> Any:
        return no_residual(self.uplink, w)

    def improve(self, client: Client, kept: Any) -> tuple[Any, Packet]:
        total, _ = self.travel(client, client.grad)
        key = jax.random.fold_in(client.key, self.local_steps)
        return with_feedback(self.uplink, kept, total, key)
