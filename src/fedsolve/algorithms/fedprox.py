"""FedProx: federated averaging with a proximal term.

Paper: Li et al., "Federated Optimization in Heterogeneous Networks" (2020), Algorithm 2, with
gradient descent as the local solver.

| here | paper | |
|---|---|---|
| `proximity` | μ | client k minimises f_k(v) + μ/2 ‖v − w‖² |
| `local_steps` | γ-inexact solution | the number of gradient steps from w |

With μ = 0 it is FedAvg, to the bit.
"""

from __future__ import annotations

import equinox as eqx

from fedsolve.algorithms.fedavg import FedAvg
from fedsolve.compression.packets import Packet
from fedsolve.fields import Scalar, check_positive, scalar
from fedsolve.problem.client import Client
from fedsolve.problem.local_pass import Follows
from fedsolve.types import PRNGKey, PyTree, Vector


class FedProx(FedAvg):
    """Federated averaging with a proximal term μ/2 ‖v − w‖² in the local problems.

    Args:
        step_size, local_steps, local_epochs, local_optimizer, uplink, downlink, server_optimizer:
            Local training, compression and the server's step; see `FedAvg`.
        proximity: μ; 0 is FedAvg.
        participants, weighting, selection, availability: Which clients take part; see
            `Participating`.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.linear_regression(clients=4, size=3, smallest=5, largest=5)
        >>> run = fs.solve(problem, fs.FedProx(0.02, local_steps=2, proximity=0.1), rounds=3)
        >>> bool(run.history["objective"][-1] < run.history["objective"][0])
        True
    """

    proximity: Scalar = eqx.field(converter=scalar("proximity"), default=0.01)

    def __check_init__(self):
        check_positive("proximity", self.proximity, zero=True)

    def improve(self, client: Client, kept: PyTree) -> tuple[PyTree, Packet]:
        def direction(v: Vector, key: PRNGKey) -> Vector:
            return client.grad(v, key) + self.proximity * (v - client.w)

        total = self.descend(client, direction, Follows(proximity=self.proximity))
        return self.compress(client, kept, total)
