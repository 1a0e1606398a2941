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

from typing import NoReturn

import equinox as eqx
from jaxtyping import Array, Float

from fedsolve.algorithms.fedsgm import FedSGM, Server
from fedsolve.errors import InvalidInput
from fedsolve.fields import Scalar, check_positive, scalar
from fedsolve.problem.client import Client
from fedsolve.problem.local_pass import Follows
from fedsolve.types import PRNGKey, PyTree, Vector


class PenaltyFedAvg(FedSGM):
    """Minimise f + ρ[g − ε]₊ with FedAvg: the baseline that FedSGM is compared with.

    Local steps, participation and compression are FedSGM's.

    Args:
        rho: ρ, the weight of the penalty; 0 is FedAvg.
        tolerance: ε, the penalty is on where Ĝ > ε.
        among: Which of several constraints is penalised; see `FedSGM`. With `"steepest"` the
            penalty is ρ max_i [g_i − ε_i]₊.
        switching: `Hard()` is the subgradient of the penalty, `Soft(beta)` smooths its kink.
        step_size, local_steps, local_epochs, local_optimizer, uplink, downlink: Local training and
            compression; see `FedSGM`.
        participants, weighting, selection, availability: Which clients take part; see
            `Participating`.

    Example:
        >>> import fedsolve as fs
        >>> import jax.numpy as jnp
        >>> problem = fs.Problem(
        ...     objective=lambda w, data: 0.5 * jnp.sum((w - data["target"]) ** 2),
        ...     clients={"target": jnp.eye(3)},
        ...     params=jnp.zeros(3),
        ...     constraint=lambda w, data: jnp.sum(w) - 0.5,
        ... )
        >>> run = fs.solve(problem, fs.PenaltyFedAvg(0.1, rho=2.0), rounds=3)
        >>> run.history["objective"].shape
        (3,)
    """

    rho: Scalar = eqx.field(converter=scalar("rho"), kw_only=True)

    @classmethod
    def from_theory(cls, *_: object, **__: object) -> NoReturn:
        """Raise, as there is no theory of this algorithm."""
        raise InvalidInput("No theorem is about PenaltyFedAvg; take FedSGM.from_theory.")

    def __check_init__(self):
        check_positive("rho", self.rho, zero=True)

    def average(self, server: Server) -> None:
        """Return None: no theorem is about an average."""
        return

    def follows(self, client: Client, sigma: Float[Array, ""]) -> Follows | None:
        """Return None: ν is a sum of two gradients."""
        return Follows() if client.unconstrained else None

    def direction(
        self, client: Client, w: Vector, sigma: Float[Array, ""], focus: PyTree, key: PRNGKey
    ) -> Vector:
        """Return ν = ∇f_j(w) + σρ∇g_j(w); a gradient of weight 0 is not computed."""
        return client.penalised(w, sigma * self.rho, focus, key)
