"""FedProx: federated averaging with a proximal term.

Paper: Li et al., "Federated Optimization in Heterogeneous Networks" (2020), Algorithm 2, with
gradient descent as the local solver.

| here | paper | |
|---|---|---|
| `proximity` | μ | client k minimises f_k(v) + μ/2 ‖v − w‖² |
| `local_steps` | γ-inexact solution | so many gradient steps from w |

With μ = 0 it is FedAvg, to the bit.
"""

from __future__ import annotations

import equinox as eqx
from jaxtyping import Array, Float, Key, PyTree

from fedsolve.algorithms.fedavg import FedAvg
from fedsolve.compression.packets import Packet
from fedsolve.fields import Scalar, check_positive, scalar
from fedsolve.problem.client import Client

Vector = Float[Array, " d"]


class FedProx(FedAvg):
    """Federated averaging whose local work is held near w by μ/2 ‖v − w‖²."""

    proximity: Scalar = eqx.field(converter=scalar("proximity"), default=0.01)

    def __check_init__(self):
        check_positive("proximity", self.proximity, zero=True)

    def improve(self, client: Client, kept: PyTree) -> tuple[PyTree, Packet]:
        def direction(v: Vector, key: Key[Array, ""]) -> Vector:
            return client.grad(v, key) + self.proximity * (v - client.w)

        total = self.descend(client, direction)
        return self.compress(client, kept, total)
