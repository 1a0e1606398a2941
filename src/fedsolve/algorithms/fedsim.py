"""FedSim: partial personalisation, shared and personal steps at the same time.

Paper: Pillutla et al., "Federated Learning with Partial Model Personalization" (2022), Algorithm 2
with LocalSim; h_i, symbols and settings as in `fedalt.py`. Each of `local_steps` steps moves both w
and v_i along their gradients at the same point (w, v_i).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from fedsolve.algorithms.fedalt import FedAlt
from fedsolve.errors import InvalidInput
from fedsolve.problem.client import Client
from fedsolve.types import Round, Vector


class FedSim(FedAlt):
    """Partial personalisation: shared and personal parameters move in the same local steps.

    Args:
        step_size, local_steps, uplink, downlink: Local training and compression; see `FedAvg`.
        personal_step_size: γ_v, the step of the personal parameters; None for `step_size`.
        mixing: α, the weight of the personal parameters in the objective.
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

    def local(self, client: Client, personal: Vector) -> tuple[Vector, Vector]:
        step_size, own_step = self.steps(client)

        def both(step: Round, carry: tuple[Vector, Vector]) -> tuple[Vector, Vector]:
            (v, total), key = carry, jax.random.fold_in(client.key, step)
            w = client.w - step_size * total
            own = self.own_slope(client, w, v, key)
            return v - own_step * own, total + self.shared_slope(client, w, v, key)

        return lax.fori_loop(0, self.local_steps, both, (personal, jnp.zeros_like(client.w)))
