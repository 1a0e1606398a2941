"""LagrangianFedAvg: FedAvg on the Lagrangian, with projected dual ascent on the server.

Method: the primal-dual subgradient method of Nedić and Ozdaglar, "Subgradient Methods for
Saddle-Point Problems" (Journal of Optimization Theory and Applications 142, 2009), with FedAvg's
local steps, participation and compression in the primal step. It looks for a saddle point of

    L(w, λ) = f(w) + λ (g(w) − ε),   w in X,   0 ≤ λ ≤ Λ

by a step in each variable from the same point (w_t, λ_t):

    w_{t+1} = Π_X[w_t − η (∇f(w_t) + λ_t ∇g(w_t))],
    λ_{t+1} = min{Λ, [λ_t + γ (g(w_t) − ε)]₊}.

| here | paper | |
|---|---|---|
| `step_size` | α | η above, of the primal steps |
| `dual_step` | α | γ above; the paper has one step for both |
| `dual_bound` | D | Λ above: a bound on the multiplier, from a Slater point; None for none |
| `tolerance` | | ε |
| `run.average` | x̂ | the mean of w_0 … w_{T−1}, to which the paper's bounds apply |

Special cases: with no dual step λ stays 0, and this is FedAvg; one client and one local step is the
centralized method. The paper's bounds are for exact gradients and one local step, f and g convex.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedsolve.algorithms.fedavg import Averaging, X
from fedsolve.compression.packets import Packet
from fedsolve.errors import InvalidInput
from fedsolve.federation.federation import Federation
from fedsolve.fields import Scalar, Schedule, at, check_positive, optional, scalar
from fedsolve.problem.client import Client
from fedsolve.problem.problem import Problem
from fedsolve.types import Info, PRNGKey, PyTree, Vector


class Server(eqx.Module):
    """x_t, λ_t, and the mean of w_0 … w_{t−1}."""

    x: X
    dual: Float[Array, ""]
    average: Vector


class LagrangianFedAvg(Averaging):
    """Minimise under a constraint with a multiplier that grows while the constraint is violated.

    In every round, the participants report g_j(w), and take local steps along ∇f_j + λ∇g_j. The
    server moves w as FedAvg does, and λ by `dual_step` times the violation. `run.average` is the
    mean of the parameters before each round.

    Args:
        tolerance: ε, the points with g(w) ≤ ε are treated as feasible.
        dual_step: γ, the step of the multiplier, a number or a schedule; 0 is FedAvg.
        dual_bound: Λ, the largest value of the multiplier; None for no bound.
        step_size, local_steps, local_epochs, local_optimizer, uplink, downlink, server_optimizer:
            Local training, compression and the server's step; see `FedAvg`.
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
        >>> run = fs.solve(problem, fs.LagrangianFedAvg(0.1, dual_step=0.2), rounds=200)
        >>> round(float(run.history["dual"][-1]), 2)  # the multiplier is 1/6
        0.17
    """

    tolerance: Scalar = eqx.field(converter=scalar("tolerance"), default=0.0, kw_only=True)
    dual_step: Scalar | Schedule = eqx.field(converter=scalar("dual_step"), kw_only=True)
    dual_bound: Scalar | None = eqx.field(
        converter=optional(scalar("dual_bound")), default=None, kw_only=True
    )

    def __check_init__(self):
        for name in ("tolerance", "dual_step"):
            check_positive(name, getattr(self, name), zero=True)
        if self.dual_bound is not None:
            check_positive("dual_bound", self.dual_bound)

    def check(self, problem: Problem) -> None:
        if problem.constraint is None:
            raise InvalidInput("LagrangianFedAvg needs a problem with a constraint; try FedAvg.")
        super().check(problem)

    # On the server

    def init(self, w: Vector) -> Server:
        return Server(x=self.start(w), dual=jnp.zeros((), w.dtype), average=w)

    def round(self, fed: Federation, server: Server, key: PRNGKey) -> tuple[Server, Info]:
        assert fed.constraint is not None
        to_sample, to_compress = jax.random.split(key)
        drawn = self.draw(fed, to_sample)
        answers = fed.ask(self.measure, drawn.cohort, when=drawn.available)
        estimate, focus = fed.constraint.combine(answers, drawn.weights)
        average = server.average + (fed.w - server.average) / (fed.round + 1)

        when = answers.any() & drawn.available
        replies = fed.ask(self.improve, drawn.cohort, (server.dual, focus), when)
        update = replies.mean(drawn.weights)
        x = self.step(fed, server.x, update, to_compress, replies.any())
        self.learn(fed, update)

        rise = at(self.dual_step, fed.round) * (estimate - self.tolerance)
        dual = jnp.clip(server.dual + jnp.where(answers.any(), rise, 0), 0, self.dual_bound)
        return Server(x, dual, average), drawn.info | {
            "dual": dual,
            "constraint_estimate": estimate,
        }

    def average(self, server: Server) -> Vector | np.ndarray:
        """Return the mean of the parameters before each round."""
        return server.average

    # On a client

    def measure(self, client: Client, residual: Vector | None) -> tuple[Vector | None, PyTree]:
        return residual, client.measure(client.w)

    def improve(
        self, client: Client, residual: Vector | None, message: tuple[Float[Array, ""], PyTree]
    ) -> tuple[Vector | None, Packet]:
        dual, focus = message

        def direction(w: Vector, key: PRNGKey) -> Vector:
            return client.penalised(w, dual, focus, key)

        return self.compress(client, residual, self.descend(client, direction))
