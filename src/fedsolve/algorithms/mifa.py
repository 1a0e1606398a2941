"""MIFA: the server remembers every client's latest update.

Paper: Gu et al., "Fast Federated Learning in the Presence of Arbitrary Device Unavailability"
(NeurIPS 2021), Algorithm 1 in its memory-efficient form.

| here | paper | |
|---|---|---|
| `step_size` | η_t | local and global, as in the paper; with a `local_optimizer`, the server's |
| `local_steps` | K | |
| `kept` | G^i | client i's latest update, (w − w^i_K)/η_t of the round when it last answered |
| `mean` | (1/N) Σ_i G^i | kept by the server |

A participant i replaces G^i, and sends by how much it changed. Then, over all N clients,

    w ← w − η_t (1/N) Σ_i G^i,

absent ones with what they last sent. G^i is zero before a client first answers; the paper's theorem
lets all clients answer in the first round.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from fedsolve.algorithms.fedavg import Averaging, X
from fedsolve.algorithms.participating import Drawn
from fedsolve.compression.packets import Packet
from fedsolve.errors import InvalidInput
from fedsolve.federation.federation import Federation
from fedsolve.federation.replies import Replies
from fedsolve.problem.client import Client
from fedsolve.problem.local_pass import Follows
from fedsolve.types import ClientState, Info, PRNGKey, Vector


class Server(NamedTuple):
    """x, and the mean of all clients' latest updates."""

    x: X
    mean: Vector


class MIFA(Averaging):
    """Federated averaging over the latest update of every client, absent ones included.

    A compressed uplink sends C(G_i − Ĝ_i), where Ĝ_i is what the server has of G_i.

    Args:
        step_size, local_steps, local_epochs, local_optimizer, uplink, downlink, server_optimizer:
            Local training, compression and the server's step; see `FedAvg`.
        participants, weighting, selection, availability: Which clients take part; see
            `Participating`. Weights only select: every client's update counts the same.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.linear_regression(clients=4, size=3, smallest=5, largest=5)
        >>> run = fs.solve(problem, fs.MIFA(0.02, local_steps=2, availability=0.5), rounds=9)
        >>> bool(run.history["objective"][-1] < run.history["objective"][0])
        True
    """

    weighs_objective = False  # every client's latest update counts the same

    def __check_init__(self):
        if not self.uplink.contractive:
            raise InvalidInput(
                "The uplink must be contractive, as the server keeps what it was sent: "
                f"{type(self.uplink).__name__} is unbiased (RandK(unbiased=False) would do)."
            )

    # On the server

    def init(self, w: Vector) -> Server:
        return Server(self.start(w), 0 * w)

    def round(self, fed: Federation, server: Server, key: PRNGKey) -> tuple[Server, Info]:
        to_sample, to_compress = jax.random.split(key)
        drawn = self.draw(fed, to_sample)
        answers = fed.ask(self.improve, drawn.cohort, when=drawn.available)
        mean = server.mean + answers.sum() / fed.clients
        update = self.estimate(server.mean, mean, answers, drawn)
        x = self.step(fed, server.x, update, to_compress)
        self.learn(fed, update)
        return Server(x, mean), drawn.info

    def estimate(self, before: Vector, mean: Vector, answers: Replies, drawn: Drawn) -> Vector:
        """Return the server's direction, from the mean before and after the answers."""
        return mean

    def unsent(self, clients: ClientState) -> None:
        return None  # clients keep what the server has of them

    # On a client

    def init_client(self, w: Vector) -> Vector:
        return 0 * w

    def improve(self, client: Client, kept: Vector) -> tuple[Vector, Packet]:
        latest = self.descend(client, client.grad, Follows())
        packet = self.uplink(latest - kept, self.after_steps(client))
        return kept + packet.dense(), packet
