"""FedAvg: federated averaging, with any selection of clients, local optimizer and compression.

Paper: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data"
(2017), Algorithm 1.

    minimise f(w) = (1/n) Σ f_j(w),   w in X

| here | paper | |
|---|---|---|
| `step_size` | η | local; with a `local_optimizer`, the server's (1: plain averaging) |
| `participants` | C·K | or `weighting` and `selection` |
| `local_steps` | E·n_k/B | minibatches are the problem's `batch_size` |
| `weighting` | n_k/n | `DataSize` is the paper's; by default all clients have equal weight |

It is FedSGM without a constraint, to the bit.
"""

from __future__ import annotations

import equinox as eqx
import jax

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
from fedsolve.problem.local_pass import Follows
from fedsolve.types import Info, PRNGKey, PyTree, Vector


class Averaging(CompressedTraining):
    """Base class of FedAvg and its relatives: local steps from w, and a server step along the mean.

    Compression is as in FedSGM: error feedback on a biased uplink, EF21-P on the downlink.
    """

    step_size: Scalar | Schedule = eqx.field(converter=scalar("step_size"))
    local_steps: int = static(1)
    local_optimizer: Optimizer | None = eqx.field(converter=as_optimizer, default=None)
    uplink: Compressor = Identity()
    downlink: Compressor = Identity()

    def step(self, fed: Federation, x: Vector, update: Vector, key: PRNGKey) -> Vector:
        """Move x by the update, on the server, and publish it."""
        x = fed.project(x - at(self.step_size, fed.round) * update)
        fed.publish(self.downlink(x - fed.w, key))
        return x


class FedAvg(Averaging):
    """Federated averaging: the server moves w by the mean of the clients' changes.

    In every round the participants take local steps from w and send their change.

    Args:
        step_size: η of the local steps, a number or a schedule; with a `local_optimizer`, the
            server's step (1 is plain averaging).
        local_steps: The local steps of a client in a round.
        local_epochs: Passes over a client's samples, in shuffled minibatches without replacement,
            in place of `local_steps`.
        local_optimizer: The optimizer of the local steps (`fs.SGD`, `fs.Adam` or one of optax);
            None for gradient descent.
        uplink: The compressor of the clients, with error feedback (EF14) if it is biased.
        error_feedback: Whether clients send later what a biased uplink drops; False is for
            ablations, where it is lost.
        downlink: The compressor of the server (EF21-P), which must be contractive.
        participants, weighting, selection, availability: Which clients take part; see
            `Participating`.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.linear_regression(clients=4, size=3, smallest=5, largest=5)
        >>> algorithm = fs.FedAvg(0.05, local_steps=2, participants=2, weighting="DataSize")
        >>> run = fs.solve(problem, algorithm, rounds=3)
        >>> run.history["cohort"].shape
        (3, 2)
    """

    # On the server

    def init(self, w: Vector) -> Vector:
        return w

    def round(self, fed: Federation, server: Vector, key: PRNGKey) -> tuple[Vector, Info]:
        to_sample, to_compress = jax.random.split(key)
        drawn = self.draw(fed, to_sample)
        update = self.combine(fed.ask(self.improve, drawn.cohort, when=drawn.available), drawn)
        x = self.step(fed, server, update, to_compress)
        self.learn(fed, update)
        return x, drawn.info

    def combine(self, answers: Replies, drawn: Drawn) -> Vector:
        """Return the weighted mean of the answers that arrived."""
        return answers.mean(drawn.weights)

    # On a client

    def improve(self, client: Client, kept: PyTree) -> tuple[PyTree, Packet]:
        total = self.descend(client, client.grad, Follows())
        return self.compress(client, kept, total)
