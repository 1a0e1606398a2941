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
from jaxtyping import Array, Float, Key, PyTree

from fedsolve.algorithms.common import CompressedTraining
from fedsolve.algorithms.participating import Drawn
from fedsolve.compression.compressors import Compressor, Identity
from fedsolve.compression.packets import Packet
from fedsolve.federation.federation import Federation
from fedsolve.federation.replies import Replies
from fedsolve.fields import (
    Scalar,
    Schedule,
    at,
    scalar,
    static,
)
from fedsolve.local_updates.optimizers import Optimizer, as_optimizer
from fedsolve.problem.client import Client

Vector = Float[Array, " d"]


class Averaging(CompressedTraining):
    """What FedAvg and its relatives have in common: local steps from w, and a server that moves w
    along what the participants sent. With a `local_optimizer`, `step_size` is the server's.

    Compression is as in FedSGM: error feedback on a biased uplink, EF21-P on the downlink.
    """

    step_size: Scalar | Schedule = eqx.field(converter=scalar("step_size"))
    local_steps: int = static(1)
    local_optimizer: Optimizer | None = eqx.field(converter=as_optimizer, default=None)
    uplink: Compressor = Identity()
    downlink: Compressor = Identity()

    def step(self, fed: Federation, x: Vector, update: Vector, key: Key[Array, ""]) -> Vector:
        """On the server: x moved by the update, and published."""
        x = fed.project(x - at(self.step_size, fed.round) * update)
        fed.publish(self.downlink(x - fed.w, key))
        return x


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

    # On a client

    def improve(self, client: Client, kept: PyTree) -> tuple[PyTree, Packet]:
        total = self.descend(client, client.grad)
        return self.compress(client, kept, total)
