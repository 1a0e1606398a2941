"""Penalty FedAvg: FedSGM's loop along another direction.

Paper: FedSGM, appendix (why penalty-based FedAvg is not an appropriate baseline), where it is the
baseline of Figures 6 and 7. It is subgradient descent on

    f(w) + ρ [g(w) − ε]₊

in FedAvg's form: clients follow ν = ∇f_j(w) + 1{Ĝ > ε} ρ ∇g_j(w).

| here | paper | |
|---|---|---|
| `rho` | ρ | the penalty's weight; 0 is FedAvg |
| `tolerance` | ε | the penalty is on where Ĝ > ε |
| others | | as in `FedSGM` |

Special cases: ρ = 0, or no constraint, is FedAvg; one client (`problem.pooled()`) is the
centralized penalty method.
"""

from __future__ import annotations

from typing import Any, NoReturn

import equinox as eqx
from jax import lax
from jaxtyping import PyTree

from fedsolve.algorithms.fedsgm import FedSGM, Server, Vector
from fedsolve.errors import InvalidInput
from fedsolve.fields import Scalar, check_positive, scalar
from fedsolve.problem.client import Client


class PenaltyFedAvg(FedSGM):
    """FedAvg on f + ρ[g − ε]₊, the baseline that FedSGM is compared with.

    Local steps, participation and compression are FedSGM's. `switching` says how the penalty comes
    in: `Hard()` is the subgradient of the penalty, `Soft(beta)` smooths its kink.
    """

    rho: Scalar = eqx.field(converter=scalar("rho"), kw_only=True)

    @classmethod
    def from_theory(cls, *_: Any, **__: Any) -> NoReturn:
        """There is no theory of it."""
        raise InvalidInput("No theorem is about PenaltyFedAvg; take FedSGM.from_theory.")

    def __check_init__(self):
        check_positive("rho", self.rho, zero=True)

    def average(self, server: Server) -> None:
        """Nothing is promised about an average."""
        return

    def direction(self, client: Client, w: Vector, sigma: Any, focus: PyTree, key: Any) -> Vector:
        """ν = ∇f_j(w) + σρ∇g_j(w); a gradient of weight 0 is not computed."""

        def penalised(slope: Vector) -> Vector:
            return slope + sigma * self.rho * client.constraint_grad(w, focus, key)

        objective = client.grad(w, key)
        if client.unconstrained:
            return objective
        return lax.cond(sigma > 0, penalised, lambda slope: slope, objective)
