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

With a `server_optimizer` it is FedOpt of Reddi et al., "Adaptive Federated Optimization" (ICLR
2021), Algorithm 1: the optimizer gets −Δ, the mean change of the clients, as its gradient.

| | `server_optimizer` |
|---|---|
| FedAvgM | `SGD(η, momentum=β)` |
| FedAdagrad | `AdaptiveStep("adagrad", η, b1=0)` |
| FedYogi | `AdaptiveStep("yogi", η)` |
| FedAdam | `AdaptiveStep("adam", η)` |
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from fedsolve.algorithms.common import CompressedTraining
from fedsolve.algorithms.participating import Drawn
from fedsolve.compression.compressors import Compressor, Identity
from fedsolve.compression.packets import Packet
from fedsolve.errors import InvalidInput
from fedsolve.federation.federation import Federation
from fedsolve.federation.replies import Replies
from fedsolve.fields import (
    Scalar,
    Schedule,
    at,
    scalar,
    static,
)
from fedsolve.local_updates.optimizers import Optimizer, as_optimizer, optimizer_field
from fedsolve.problem.client import Client
from fedsolve.problem.local_pass import Follows
from fedsolve.types import Flag, Info, PRNGKey, PyTree, Vector


class Stepped(NamedTuple):
    """The server's x, with the state of its optimizer."""

    x: Vector
    moments: PyTree


X = Vector | Stepped  # without a `server_optimizer`, x alone


class Averaging(CompressedTraining):
    """Base class of FedAvg and its relatives: local steps from w, and a server step along the mean.

    Compression is as in FedSGM: error feedback on a biased uplink, EF21-P on the downlink.

    Args:
        server_optimizer: The optimizer of the server (`fs.SGD`, `fs.Adam`, `fs.AdaptiveStep` or
            one of optax), whose state stays from round to round. Its gradient is what the server
            would subtract without one; so `fs.SGD(1.0)` changes nothing.
    """

    steps_by_rule: ClassVar[bool] = True  # whether `step` moves x, so that it can be optimized

    step_size: Scalar | Schedule = eqx.field(converter=scalar("step_size"))
    local_steps: int = static(1)
    local_optimizer: Optimizer | None = eqx.field(converter=as_optimizer, default=None)
    uplink: Compressor = Identity()
    downlink: Compressor = Identity()
    server_optimizer: Optimizer | None = eqx.field(
        converter=optimizer_field("server_optimizer"), default=None, kw_only=True
    )

    def __check_init__(self):
        if self.server_optimizer is not None and not self.steps_by_rule:
            raise InvalidInput(
                f"{type(self).__name__} has its own step of the server: leave out server_optimizer."
            )

    def start(self, w: Vector) -> X:
        """Return x before the first round, with the state of the server's optimizer."""
        if self.server_optimizer is None:
            return w
        return Stepped(w, self.server_optimizer.transform(jnp.int32(0)).init(w))

    def step(self, fed: Federation, x: X, update: Vector, key: PRNGKey, heard: Flag = True) -> X:
        """Move x by the update, on the server, and publish it.

        Args:
            fed: The federation.
            x: The server's x.
            update: The mean pseudo-gradient.
            key: A random key, for the downlink.
            heard: Whether anybody answered; if not, a server optimizer does not step.
        """
        change = at(self.step_size, fed.round) * update
        if not isinstance(x, Stepped):
            x = fed.project(x - change)
            fed.publish(self.downlink(x - fed.w, key))
            return x
        assert self.server_optimizer is not None
        rule: Any = self.server_optimizer.transform(fed.round)
        move, moments = rule.update(change, x.moments, x.x)
        after = Stepped(fed.project(jnp.asarray(optax.apply_updates(x.x, move))), moments)
        after = jax.tree.map(lambda new, old: jnp.where(heard, new, old), after, x)
        fed.publish(self.downlink(after.x - fed.w, key))
        return after


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
        server_optimizer: The optimizer of the server's step (`fs.SGD`, `fs.Adam`, `fs.AdaptiveStep`
            or one of optax), whose state stays from round to round; None for plain averaging. Its
            gradient is `step_size` times the mean pseudo-gradient: how far w would move.
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

    takes_unbiased = True

    # On the server

    def init(self, w: Vector) -> X:
        return self.start(w)

    def round(self, fed: Federation, server: X, key: PRNGKey) -> tuple[X, Info]:
        to_sample, to_compress = jax.random.split(key)
        drawn = self.draw(fed, to_sample)
        answers = fed.ask(self.improve, drawn.cohort, when=drawn.available)
        update = self.combine(answers, drawn)
        x = self.step(fed, server, update, to_compress, answers.any())
        self.learn(fed, update)
        return x, drawn.info

    def combine(self, answers: Replies, drawn: Drawn) -> Vector:
        """Return the weighted mean of the answers that arrived."""
        return drawn.mean(answers)

    # On a client

    def improve(self, client: Client, kept: PyTree) -> tuple[PyTree, Packet]:
        total = self.descend(client, client.grad, Follows())
        return self.compress(client, kept, total)
