"""AFL: agnostic federated learning, the least worst mixture of the clients' losses.

Paper: Mohri, Sivek and Suresh, "Agnostic Federated Learning" (ICML 2019), Stochastic-AFL. It looks
for a saddle point of

    min over w in X, max over λ in the simplex:   L(w, λ) = Σ_k λ_k f_k(w)

by a projected step in each variable from the same point:

    w ← Π_X[w − γ_w ∇_w L(w, λ)],   λ ← Π_Λ[λ + γ_λ ∇_λ L(w, λ)],   (∇_λ L)_k = f_k(w).

With m of n clients drawn uniformly, both gradients are estimated by n/m times the sums over those
m (the paper's per-domain stochastic gradients).

| here | paper | |
|---|---|---|
| `step_size` | γ_w | of the local steps |
| `weight_step` | γ_λ | |
| `run.average` | w^A | the mean of w after each round, to which the paper's bounds apply |
| `weighted_objective` | L(w, λ) | in the history |

The paper takes one step of w in a round; `local_steps` are FedAvg's. Special case: γ_λ = 0 is
FedAvg, with clients drawn uniformly. At the saddle point f_k(w) = max_l f_l(w) for every k with
λ_k > 0.
"""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedsolve.algorithms.fedavg import Averaging, X
from fedsolve.compression.packets import Packet
from fedsolve.errors import InvalidInput
from fedsolve.federation.federation import Federation
from fedsolve.fields import Scalar, Schedule, at, check_positive, scalar
from fedsolve.participation.weighting import Uniform
from fedsolve.problem.client import Client
from fedsolve.problem.domains import Simplex
from fedsolve.problem.local_pass import Follows
from fedsolve.types import Info, PRNGKey, PyTree, ServerState, Vector

Sent = dict[str, Packet | Float[Array, ""]]


class Server(eqx.Module):
    """x_t, and the mean of w_1 … w_t."""

    x: X
    average: Vector


class Memory(NamedTuple):
    """The server's state of participation, and λ."""

    participation: PyTree
    mixture: Float[Array, " n"]


class AFL(Averaging):
    """Minimise the loss of the worst mixture of clients, max_k f_k(w).

    In every round, participants report f_k(w) and take local steps along ∇f_k. The server moves w
    by their changes weighted by λ, and λ towards the clients with a higher loss.

    Clients must be drawn uniformly; other weightings and selections raise, since the estimate of
    L's gradient would be biased. With error feedback, what a client did not send is weighted by
    the λ_k of the round in which it is sent.

    Args:
        step_size: γ_w, of the local steps, a number or a schedule; with a `local_optimizer`, the
            server's step.
        weight_step: γ_λ, a number or a schedule; 0 is FedAvg.
        local_steps, local_epochs, local_optimizer, uplink, downlink, error_feedback:
            Local training and compression; see `FedAvg`.
        server_optimizer: The optimizer of the server; see `FedAvg`.
        participants: How many clients take part, drawn uniformly; None for all.
        availability: Which clients are up; their probabilities should be equal.
        weighting, selection: Must be the defaults.

    Example:
        >>> import fedsolve as fs
        >>> import numpy as np
        >>> problem = fs.Problem(
        ...     lambda w, data: 0.5 * (w[0] - data["point"]) ** 2,
        ...     {"point": np.array([0.0, 0.0, 3.0])},
        ...     params=np.zeros(1),
        ... )
        >>> run = fs.solve(problem, fs.AFL(0.1, weight_step=0.1), rounds=400)
        >>> round(float(run.params[0]), 2)  # not the mean, 1.0
        1.5
    """

    weighs_objective = False

    weight_step: Scalar | Schedule = eqx.field(converter=scalar("weight_step"), kw_only=True)

    def __check_init__(self):
        check_positive("weight_step", self.weight_step, zero=True)
        if not isinstance(self.weighting, Uniform) or self.selection is not None:
            raise InvalidInput(
                "AFL weights clients by its own λ and draws them uniformly: leave out weighting "
                "and selection (participants=m is all right)."
            )

    def init_participation(self, w: Vector, clients: int) -> Memory:
        mixture = jnp.full(clients, 1 / clients, w.dtype)
        return Memory(super().init_participation(w, clients), mixture)

    def objective_weights(
        self, server: ServerState, participation: Memory
    ) -> Float[Array, " n"] | None:
        return participation.mixture

    # On the server

    def init(self, w: Vector) -> Server:
        return Server(x=self.start(w), average=w)

    def round(self, fed: Federation, server: Server, key: PRNGKey) -> tuple[Server, Info]:
        to_sample, to_compress = jax.random.split(key)
        fed.participation, mixture = fed.participation
        drawn = self.draw(fed, to_sample)
        answers = fed.ask(self.improve, drawn.cohort, when=drawn.available)
        scale = fed.clients / jnp.maximum(answers.count, 1)  # n/m
        update = answers.pick("update").sum(scale * mixture[drawn.cohort])
        x = self.step(fed, server.x, update, to_compress, answers.any())
        self.learn(fed, update)

        losses = answers.pick("loss")
        rise = at(self.weight_step, fed.round) * scale * jnp.where(losses.arrived, losses.values, 0)
        moved = Simplex().project(mixture.at[drawn.cohort].add(rise))
        mixture = jnp.where(answers.any(), moved, mixture)
        fed.participation = Memory(fed.participation, mixture)
        average = server.average + (fed.w - server.average) / (fed.round + 1)
        return Server(x, average), drawn.info | {"largest_weight": jnp.max(mixture)}

    def average(self, server: Server) -> Vector | np.ndarray:
        """Return the mean of the parameters after each round."""
        return server.average

    # On a client

    def improve(self, client: Client, residual: Vector | None) -> tuple[Vector | None, Sent]:
        loss = client.objective(client.w)
        residual, packet = self.compress(
            client, residual, self.descend(client, client.grad, Follows())
        )
        return residual, {"update": packet, "loss": loss}
