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
from jaxtyping import Array, Float, Key

from fedsolve.algorithms.fedavg import FedAvg
from fedsolve.fields import Scalar, check_positive, scalar
from fedsolve.problem import Client

Vector = Float[Array, " d"]


class FedProx(FedAvg):
    """Federated averaging whose local work is held near w by μ/2 ‖v − w‖²."""

    proximity: Scalar = eqx.field(converter=scalar("proximity"), default=0.01)

    def __check_init__(self):
        check_positive("proximity", self.proximity, zero=True)

    def direction(self, client: Client, w: Vector, key: Key[Array, ""]) -> Vector:
        return client.grad(w, key) + self.proximity * (w - client.w)
