"""FedDyn: dynamic regularisation.

Paper: Acar et al., "Federated Learning Based on Dynamic Regularization" (ICLR 2021), Algorithm 1.

| here | paper | |
|---|---|---|
| `regularization` | α | |
| `step_size`, `local_steps`, `local_optimizer` | | how clients solve their local problem |
| `dual` of a client, of the server | ∇L_k(θ_k), h | zero at first |

Client k minimises f_k(v) − ⟨h_k, v⟩ + (α/2)‖v − w‖² from v = w, and h_k ← h_k − α(v_k − w),
which is ∇f_k(v_k) where that was done exactly. The server, over the participants S of M clients:

    h ← h − (α/M) Σ_{k in S} (v_k − w),    w ← mean_{k in S} v_k − h/α

With a `local_optimizer` the server goes only `step_size` of the way from w to the mean.
"""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedsolve.algorithms.fedavg import Averaging
from fedsolve.compression.error_feedback import no_residual
from fedsolve.compression.packets import Packet
from fedsolve.errors import InvalidInput
from fedsolve.federation.federation import Federation
from fedsolve.fields import Scalar, at, check_positive, scalar
from fedsolve.problem.client import Client
from fedsolve.problem.local_pass import Follows
from fedsolve.problem.problem import Problem
from fedsolve.types import Info, PRNGKey, Vector


class Kept(NamedTuple):
    """h_k, and what a biased uplink has not sent yet."""

    dual: Vector
    residual: Vector | None


class FedDyn(Averaging):
    """Federated averaging with dynamic regularisation: local problems agree at the optimum.

    Args:
        step_size, local_steps, local_epochs, local_optimizer, uplink, downlink: Local training and
            compression; see `FedAvg`.
        server_optimizer: Not used: the server has a step of its own.
        regularization: α.
        participants, weighting, selection, availability: Which clients take part; see
            `Participating`.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.linear_regression(clients=4, size=3, smallest=5, largest=5)
        >>> run = fs.solve(problem, fs.FedDyn(0.02, local_steps=2), rounds=3)
        >>> bool(run.history["objective"][-1] < run.history["objective"][0])
        True
    """

    steps_by_rule = False
    takes_unbiased = True
    weighs_objective = False  # the dual is a plain mean

    regularization: Scalar = eqx.field(converter=scalar("regularization"), default=0.1)

    def __check_init__(self):
        check_positive("regularization", self.regularization)

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if problem.trains_itself and not (
            isinstance(self.step_size, float) and self.step_size == 1
        ):
            raise InvalidInput("FedDyn over a training loop needs step_size=1.0: its duals do.")

    # On the server

    def init(self, w: Vector) -> Vector:
        return 0 * w  # h

    def round(self, fed: Federation, server: Vector, key: PRNGKey) -> tuple[Vector, Info]:
        to_sample, to_compress = jax.random.split(key)
        drawn = self.draw(fed, to_sample)
        answers = fed.ask(self.improve, drawn.cohort, when=drawn.available)
        step_size, alpha = at(self.step_size, fed.round), self.regularization
        update = drawn.mean(answers)  # (w − v_k)/reach, on average
        dual = server + alpha * self.reach(fed.round) * answers.sum() / fed.clients
        moved = fed.w - step_size * update - dual / alpha
        x = fed.project(jnp.where(answers.any(), moved, fed.w))
        fed.publish(self.downlink(x - fed.w, to_compress))
        self.learn(fed, update)
        return dual, drawn.info

    def unsent(self, clients: Kept) -> Float[Array, "n d"] | None:
        return clients.residual

    # On a client

    def init_client(self, w: Vector) -> Kept:
        return Kept(0 * w, no_residual(self.uplink, w))

    def improve(self, client: Client, kept: Kept) -> tuple[Kept, Packet]:
        alpha = self.regularization

        def direction(v: Vector, key: PRNGKey) -> Vector:
            return client.grad(v, key) - kept.dual + alpha * (v - client.w)

        total = self.descend(client, direction, Follows(-kept.dual, alpha))
        dual = kept.dual + alpha * self.reach(client.round) * total
        residual, packet = self.compress(client, kept.residual, total)
        return Kept(dual, residual), packet
