"""FedAvg as FedADMM's paper has it: the server averages everyone's last parameters.

Paper: S. Zhou and G. Y. Li, "Federated Learning via Inexact ADMM", Algorithm 2 and (18).

| here | paper | |
|---|---|---|
| `step_size` | γ/m | local |
| `local_steps` | k_0 | from w, by the participants |
| `kept` | w_i^k | kept by client i: its parameters when it last answered |

    w = (1/m) Σ w_i   over all clients, absent ones with their last w_i

The server needs no copies of them: clients send how their w_i moved. With everyone taking part it
is `FedAvg`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedsolve.algorithms.fedavg import FedAvg, Stepped, X
from fedsolve.compression.packets import Packet
from fedsolve.errors import InvalidInput
from fedsolve.federation.federation import Federation
from fedsolve.fields import at
from fedsolve.problem.client import Client
from fedsolve.problem.local_pass import Follows
from fedsolve.types import ClientState, Info, PRNGKey, Vector


class FedAvgAll(FedAvg):
    """Federated averaging over all clients' last parameters (Algorithm 2 of FedADMM's paper).

    Absent clients are in the average with their last parameters. A compressed uplink sends
    C(w_i − ŵ_i), where ŵ_i is what the server has of w_i.

    Args:
        step_size, local_steps, local_epochs, local_optimizer, uplink, downlink: Local training and
            compression; see `FedAvg`.
        server_optimizer: Not used: the server has a step of its own.
        participants, weighting, selection, availability: Which clients take part; see
            `Participating`.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.linear_regression(clients=4, size=3, smallest=5, largest=5)
        >>> algorithm = fs.FedAvgAll(0.05, local_steps=2, participants=2)
        >>> run = fs.solve(problem, algorithm, rounds=3)
        >>> bool(run.history["objective"][-1] < run.history["objective"][0])
        True
    """

    steps_by_rule = False
    takes_unbiased = False
    weighs_objective = False  # of all clients' last parameters, each counts the same

    def __check_init__(self):
        if not self.uplink.contractive:
            raise InvalidInput(
                "The uplink must be contractive, as the server keeps what it was sent: "
                f"{type(self.uplink).__name__} is unbiased (RandK(unbiased=False) would do)."
            )

    def round(self, fed: Federation, server: X, key: PRNGKey) -> tuple[X, Info]:
        assert not isinstance(server, Stepped)  # there is no server optimizer
        to_sample, to_compress = jax.random.split(key)
        drawn = self.draw(fed, to_sample)
        moved = fed.ask(self.improve, drawn.cohort, when=drawn.available).sum()
        server = server + moved / fed.clients
        x = fed.project(jnp.asarray(server))
        fed.publish(self.downlink(x - fed.w, to_compress))
        self.learn(fed, -moved)
        return server, drawn.info

    def unsent(self, clients: ClientState) -> None:
        return None  # clients keep what the server has of them

    def init_client(self, w: Vector) -> Vector:
        return w

    def improve(self, client: Client, kept: Vector) -> tuple[Vector, Packet]:
        here = client.w - at(self.step_size, client.round) * self.descend(
            client, client.grad, Follows()
        )
        packet = client.limited(self.uplink(here - kept, self.after_steps(client)))
        return kept + packet.dense(), packet
