"""FedNova: averaging that does not favour clients with many local steps.

Paper: Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization" (NeurIPS 2020), (9) to (12).

| here | paper | |
|---|---|---|
| `step_size` | η | local |
| `local_epochs` | τ_i = E n_i/B | clients with more samples take more steps |
| `weighting` | p_i | `DataSize` is the paper's; by default all are equal |
| `length` | ‖a_i‖₁ | τ_i; with momentum ρ, (τ_i − ρ(1 − ρ^τ_i)/(1 − ρ))/(1 − ρ) |

Client i sends d_i = (w − w_i)/(η ‖a_i‖₁), the mean of its gradients on the way, and the number
‖a_i‖₁. The server moves by

    w ← w − η τ_eff Σ p_i d_i,    τ_eff = Σ p_i ‖a_i‖₁.

FedAvg has τ_eff = 1 and d_i = (w − w_i)/η: it finds the minimum of an objective in which client i
counts ‖a_i‖₁ times. Where all clients take as many steps, FedNova is FedAvg.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedsolve.algorithms.fedavg import Averaging, X
from fedsolve.compression.packets import Packet
from fedsolve.errors import InvalidInput
from fedsolve.federation.federation import Federation
from fedsolve.local_updates.optimizers import SGD
from fedsolve.problem.client import Client
from fedsolve.problem.local_pass import Follows
from fedsolve.problem.problem import Problem
from fedsolve.types import Info, PRNGKey, PyTree, Vector


class FedNova(Averaging):
    """Federated averaging, normalised by how many local steps each client takes.

    Args:
        step_size, local_steps, local_epochs, uplink, downlink, server_optimizer: Local training,
            compression and the server's step; see `FedAvg`. With `local_epochs`, clients take as
            many steps as their samples give.
        local_optimizer: `fs.SGD`, with or without momentum; None for gradient descent.
        participants, weighting, selection, availability: Which clients take part; see
            `Participating`.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.linear_regression(clients=4, size=3, batch_size=5)
        >>> run = fs.solve(problem, fs.FedNova(0.01, local_epochs=2), rounds=9)
        >>> bool(run.history["objective"][-1] < run.history["objective"][0])
        True
    """

    takes_unbiased = True

    def __check_init__(self):
        if self.local_optimizer is not None and not isinstance(self.local_optimizer, SGD):
            raise InvalidInput(
                "FedNova divides a client's change by the weight of its gradients, which is known "
                f"for gradient descent and fs.SGD, not for {type(self.local_optimizer).__name__}."
            )

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if problem.trains_itself:
            raise InvalidInput("FedNova must know the local steps, which a training loop decides.")

    # On the server

    def init(self, w: Vector) -> X:
        return self.start(w)

    def round(self, fed: Federation, server: X, key: PRNGKey) -> tuple[X, Info]:
        to_sample, to_compress = jax.random.split(key)
        drawn = self.draw(fed, to_sample)
        answers = fed.ask(self.improve, drawn.cohort, when=drawn.available)
        steps = answers.pick(1).mean(drawn.weights)  # τ_eff
        update = steps * drawn.mean(answers.pick(0))
        x = self.step(fed, server, update, to_compress, answers.any())
        self.learn(fed, update)
        return x, drawn.info | {"effective_steps": steps}

    # On a client

    def improve(
        self, client: Client, kept: PyTree
    ) -> tuple[PyTree, tuple[Packet, Float[Array, ""]]]:
        total, length = self.descend(client, client.grad, Follows()), self.length(client)
        kept, packet = self.compress(client, kept, total / length)
        return kept, (packet, length)

    def length(self, client: Client) -> Float[Array, ""]:
        """Return ‖a_i‖₁, by which the client's gradients are weighted in all."""
        steps = jnp.asarray(self.count_steps(client), client.w.dtype)
        if not isinstance(self.local_optimizer, SGD):
            return steps
        rho = jnp.asarray(self.local_optimizer.momentum, client.w.dtype)
        return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
