"""SCAFFOLD: stochastic controlled averaging.

Paper: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning" (ICML
2020), Algorithm 1, option II.

| here | paper | |
|---|---|---|
| `step_size` | η_l | with a `local_optimizer`, the server's step |
| `server_step_size` | η_g | |
| `local_steps` | K | |
| `control` of the server, of a client | c, c_i | all zero at first |

A client steps along g_i(y) − c_i + c, and its control becomes c_i⁺ = c_i − c + (x − y)/(Kη_l): the
mean of its gradients on the way, which is how it is computed here, with any optimizer. The server's
control moves by the change of the clients' controls over the number M of *all* clients,

    c ← c + (1/M) Σ_{i in S} (c_i⁺ − c_i),

so that it stays the mean of all c_i. Both the change of the model and that of the control go up.
"""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax
from jaxtyping import Array, Float

from fedsolve.algorithms.fedavg import Averaging, X
from fedsolve.compression.error_feedback import no_residual, with_feedback
from fedsolve.compression.packets import Packet
from fedsolve.federation.federation import Federation
from fedsolve.fields import Scalar, check_positive, scalar
from fedsolve.problem.client import Client
from fedsolve.problem.local_pass import Follows
from fedsolve.types import Info, PRNGKey, Vector


class Server(NamedTuple):
    """x and c."""

    x: X
    control: Vector


class Kept(NamedTuple):
    """c_i, and what a biased uplink has not sent yet of the model's and the control's change."""

    control: Vector
    residual: Vector | None
    control_residual: Vector | None


class SCAFFOLD(Averaging):
    """Federated averaging with control variates, which correct the drift of local steps.

    Args:
        step_size, local_steps, local_epochs, local_optimizer, uplink, downlink, server_optimizer:
            Local training, compression and the server's step; see `FedAvg`.
        server_step_size: η_g, the server's step.
        participants, weighting, selection, availability: Which clients take part; see
            `Participating`.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.linear_regression(clients=4, size=3, smallest=5, largest=5)
        >>> run = fs.solve(problem, fs.SCAFFOLD(0.02, local_steps=2), rounds=3)
        >>> bool(run.history["objective"][-1] < run.history["objective"][0])
        True
    """

    takes_unbiased = True
    weighs_objective = False  # the control variate is a plain mean

    server_step_size: Scalar = eqx.field(converter=scalar("server_step_size"), default=1.0)

    def __check_init__(self):
        check_positive("server_step_size", self.server_step_size)

    # On the server

    def init(self, w: Vector) -> Server:
        return Server(self.start(w), 0 * w)

    def round(self, fed: Federation, server: Server, key: PRNGKey) -> tuple[Server, Info]:
        to_sample, to_compress = jax.random.split(key)
        drawn = self.draw(fed, to_sample)
        answers = fed.ask(self.improve, drawn.cohort, server.control, when=drawn.available)
        update = self.server_step_size * drawn.mean(answers.pick(0))
        control = server.control + answers.pick(1).sum() / fed.clients
        x = self.step(fed, server.x, update, to_compress, answers.any())
        self.learn(fed, update)
        return Server(x, control), drawn.info

    def unsent(self, clients: Kept) -> Float[Array, "n d"] | None:
        return clients.residual

    # On a client

    def init_client(self, w: Vector) -> Kept:
        return Kept(0 * w, no_residual(self.uplink, w), no_residual(self.uplink, w))

    def improve(
        self, client: Client, kept: Kept, control: Vector
    ) -> tuple[Kept, tuple[Packet, Packet]]:
        def direction(y: Vector, key: PRNGKey) -> Vector:
            return client.grad(y, key) - kept.control + control

        total, directions = self.take_steps(client, direction, Follows(control - kept.control))
        change = directions / self.count_steps(client) - control  # c_i⁺ − c_i
        key, other = jax.random.split(self.after_steps(client))
        clip = None if client.clip is None else client.clip / 2**0.5  # of two parts together
        residual, packet = with_feedback(self.uplink, kept.residual, total, key, clip)
        left, controls = with_feedback(self.uplink, kept.control_residual, change, other, clip)
        return Kept(kept.control + change, residual, left), (packet, controls)
