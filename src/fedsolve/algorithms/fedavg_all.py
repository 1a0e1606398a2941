"""FedAvg as FedADMM's paper has it: the server averages everyone's last parameters.

Paper: S. Zhou and G. Y. Li, "Federated Learning via Inexact ADMM", Algorithm 2 and (18).

| here | paper | |
|---|---|---|
| `step_size` | γ/m | local |
| `local_steps` | k_0 | from w, by the participants |
| `kept` | w_i^k | kept by client i: where it came to when it was last heard |

    w = (1/m) Σ w_i   over all clients, absent ones with their last w_i

The server needs no copies of them: clients send how their w_i moved. With everyone taking part it
is `FedAvg`.
"""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array, Float, Key

from fedsolve.algorithms.fedavg import FedAvg
from fedsolve.compression.packets import Packet
from fedsolve.errors import InvalidInput
from fedsolve.federation.federation import Federation
from fedsolve.fields import at
from fedsolve.problem.client import Client

Vector = Float[Array, " d"]


class FedAvgAll(FedAvg):
    """Federated averaging over all clients' last parameters, also those of absent clients
    (Algorithm 2 of FedADMM's paper). A compressed uplink sends C(w_i − what the server has)."""

    weighs_objective = False  # of all clients' last parameters, each counts the same

    def __check_init__(self):
        if not self.uplink.contractive:
            raise InvalidInput(
                "The uplink must be contractive, as the server keeps what it was sent: "
                f"{type(self.uplink).__name__} is unbiased (RandK(unbiased=False) would do)."
            )

    def round(
        self, fed: Federation, server: Vector, key: Key[Array, ""]
    ) -> tuple[Vector, dict[str, Any]]:
        to_sample, to_compress = jax.random.split(key)
        drawn = self.draw(fed, to_sample)
        moved = fed.ask(self.improve, drawn.cohort, when=drawn.available).sum()
        server = server + moved / fed.clients
        x = fed.project(server)
        fed.publish(self.downlink(x - fed.w, to_compress))
        self.learn(fed, -moved)
        return server, drawn.info

    def unsent(self, clients: Any) -> None:
        return None  # clients keep what the server has of them

    def init_client(self, w: Vector) -> Vector:
        return w

    def improve(self, client: Client, kept: Vector) -> tuple[Vector, Packet]:
        here = client.w - at(self.step_size, client.round) * self.descend(client, client.grad)
        packet = self.uplink(here - kept, jax.random.fold_in(client.key, self.local_steps))
        return kept + packet.dense(), packet
