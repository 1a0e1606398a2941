"""FedSim: partial personalisation, shared and personal steps at the same time.

Paper: Pillutla et al., "Federated Learning with Partial Model Personalization" (2022), Algorithm 2
with LocalSim; h_i, symbols and settings as in `fedalt.py`. Each of `local_steps` steps moves both w
and v_i along their gradients at the same point (w, v_i).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedsolve.algorithms.common import steps_of
from fedsolve.algorithms.fedalt import FedAlt
from fedsolve.errors import InvalidInput
from fedsolve.local_updates.descent import run_steps
from fedsolve.problem.client import Client
from fedsolve.types import Round, Vector


class FedSim(FedAlt):
    """Partial personalisation: shared and personal parameters move in the same local steps.

    Args:
        step_size, local_steps, local_epochs, uplink, downlink, server_optimizer: Local training,
            compression and the server's step; see `FedAvg`.
        personal_step_size: γ_v, the step of the personal parameters; None for `step_size`.
        mixing: α, the weight of the personal parameters in the objective; None where they are
            parts of the problem's own model.
        proximity: μ, which keeps personal and shared parameters close.
        personal_steps, local_optimizer: Not used: plain steps move both parts at the same time.
        participants, weighting, selection, availability: Which clients take part; see
            `Participating`.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.linear_regression(clients=4, size=3, smallest=5, largest=5)
        >>> run = fs.solve(problem, fs.FedSim(0.05, local_steps=2), rounds=3)
        >>> run.state.clients.personal.shape
        (4, 3)
    """

    def __check_init__(self):
        if self.personal_steps is not None or self.local_optimizer is not None:
            raise InvalidInput(
                "FedSim's plain steps move both parts at once: leave out personal_steps and "
                "local_optimizer."
            )

    def local_parts(self, client: Client) -> Vector:
        step_size, own_step = self.steps(client)

        def both(step: Round, total: Vector) -> Vector:
            key = jax.random.fold_in(client.key, step)
            slope = client.grad(client.w - step_size * total, key)
            client.move_personal(-own_step * client.own_slope)
            return total + slope

        return run_steps(client, steps_of(self), client.key, both, jnp.zeros_like(client.w))

    def local(self, client: Client, personal: Vector) -> tuple[Vector, Vector]:
        step_size, own_step = self.steps(client)

        def both(step: Round, carry: tuple[Vector, Vector]) -> tuple[Vector, Vector]:
            (v, total), key = carry, jax.random.fold_in(client.key, step)
            w = client.w - step_size * total
            own = self.own_slope(client, w, v, key)
            return v - own_step * own, total + self.shared_slope(client, w, v, key)

        start = personal, jnp.zeros_like(client.w)
        return run_steps(client, steps_of(self), client.key, both, start)
