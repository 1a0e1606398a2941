"""FedAMD: some participants renew their gradients, the others take local steps by them.

Paper: Wu et al., "Anchor Sampling for Federated Learning with Partial Client Participation" (ICML
2023), Algorithm 1.

| here | paper | |
|---|---|---|
| `step_size`, `server_step_size` | η_l, η_s | |
| `local_steps` | K | of a miner |
| `anchors` | p | the probability that a participant is an anchor, in every round |
| `kept` | v^i | client i's gradient over all samples, of when it was last an anchor |
| `mean` | (1/N) Σ_i v^i | kept by the server |

In a round every participant is an anchor with probability p, and a miner otherwise. An anchor
renews v^i = ∇f_i(x), with a large batch (all samples here). A miner goes from y_0 = x along

    g_0 = mean,    g_k = g_{k−1} + ∇f_i(y_k; B_k) − ∇f_i(y_{k−1}; B_k),    y_{k+1} = y_k − η_l g_k,

with minibatches B_k, and sends x − y_K. The server moves by x ← x − η_s · (the mean over miners);
`mean` is renewed after that. All clients are asked for v^i once, in the first round.
"""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from fedsolve.algorithms.fedavg import Averaging, X
from fedsolve.compression.compressors import Identity
from fedsolve.compression.packets import Packet
from fedsolve.errors import InvalidInput
from fedsolve.federation.federation import Federation
from fedsolve.fields import Scalar, at, check_positive, scalar
from fedsolve.problem.client import Client
from fedsolve.problem.problem import Problem
from fedsolve.types import ClientState, Info, PRNGKey, Round, Vector


class Server(NamedTuple):
    """x, and the mean of all clients' latest gradients."""

    x: X
    mean: Vector


class FedAMD(Averaging):
    """Anchors renew their full gradients; miners take local steps with reduced variance.

    Args:
        step_size, local_steps, downlink, server_optimizer: Local training, compression and the
            server's step; see `FedAvg`.
        anchors: p, the probability that a participant is an anchor, between 0 and 1.
        server_step_size: η_s.
        participants, weighting, selection, availability: Which clients take part; see
            `Participating`. Weights are those of the mean over miners.
        local_epochs, local_optimizer, uplink: Not used: a miner's steps are those of the paper, and
            the server needs its clients' gradients as they are.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.linear_regression(clients=4, size=3, smallest=5, largest=5)
        >>> run = fs.solve(problem, fs.FedAMD(0.02, local_steps=2, participants=2), rounds=9)
        >>> bool(run.history["objective"][-1] < run.history["objective"][0])
        True
    """

    weighs_objective = False  # the mean of gradients is a plain one

    anchors: Scalar = eqx.field(converter=scalar("anchors"), default=0.5)
    server_step_size: Scalar = eqx.field(converter=scalar("server_step_size"), default=1.0)

    def __check_init__(self):
        if isinstance(self.anchors, float) and not 0 < self.anchors < 1:
            raise InvalidInput(f"anchors must be between 0 and 1, got {self.anchors:g}.")
        check_positive("server_step_size", self.server_step_size)
        if self.local_epochs is not None or self.local_optimizer is not None:
            raise InvalidInput(
                "FedAMD's miners take their own steps: leave out local_epochs and local_optimizer."
            )
        if not isinstance(self.uplink, Identity):
            raise InvalidInput("FedAMD's clients send their gradients as they are: no uplink.")

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if problem.trains_itself:
            raise InvalidInput("FedAMD's steps need two gradients each: no training loop has that.")
        if problem.keeps_own or problem.averages_state:
            raise InvalidInput("FedAMD moves w alone, not personal parameters nor a state.")

    # On the server

    def init(self, w: Vector) -> Server:
        return Server(self.start(w), 0 * w)

    def round(self, fed: Federation, server: Server, key: PRNGKey) -> tuple[Server, Info]:
        to_sample, to_compress, to_choose = jax.random.split(key, 3)
        begun = fed.ask(self.renew, fed.everyone, when=fed.round == 0)
        mean = server.mean + begun.sum() / fed.clients
        drawn = self.draw(fed, to_sample)
        anchors = jax.random.bernoulli(to_choose, self.anchors, (fed.clients,))[drawn.cohort]
        renewed = fed.ask(self.renew, drawn.cohort, when=drawn.available & anchors)
        mined = fed.ask(self.mine, drawn.cohort, mean, when=drawn.available & ~anchors)
        update = self.server_step_size * mined.mean(drawn.weights)
        x = self.step(fed, server.x, update, to_compress, mined.any())
        self.learn(fed, update)
        mean = mean + renewed.sum() / fed.clients
        return Server(x, mean), drawn.info | {"anchors": anchors}

    # On a client

    def init_client(self, w: Vector) -> Vector:
        return 0 * w

    def unsent(self, clients: ClientState) -> None:
        return None

    def renew(self, client: Client, kept: Vector) -> tuple[Vector, Packet]:
        latest = client.with_all_samples().grad(client.w)
        return latest, Identity()(latest - kept)

    def mine(self, client: Client, kept: Vector, mean: Vector) -> tuple[Vector, Packet]:
        eta = at(self.step_size, client.round)

        def step(k: Round, carry: tuple[Vector, Vector]) -> tuple[Vector, Vector]:
            g, total = carry  # g_{k−1}, and Σ g up to it
            here, key = client.w - eta * total, jax.random.fold_in(client.key, k)
            g = g + client.grad(here, key) - client.grad(here + eta * g, key)
            return g, total + g

        _, total = client.repeat(self.local_steps, step, (mean, mean), first=1)
        return kept, Identity()(jnp.asarray(total))
