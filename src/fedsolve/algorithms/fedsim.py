"""FedSim: partial personalisation, shared and personal steps at the same time.

Paper: Pillutla et al., "Federated Learning with Partial Model Personalization" (2022), Algorithm 2
with LocalSim; h_i, symbols and settings as in `fedalt.py`. Each of `local_steps` steps moves both w
and v_i along their gradients at the same point (w, v_i).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from fedsolve.algorithms.fedalt import FedAlt
from fedsolve.errors import InvalidInput
from fedsolve.problem.client import Client

Vector = Float[Array, " d"]


class FedSim(FedAlt):
    """Shared and personal parameters that move together; the server averages the shared ones."""

    def __check_init__(self):
        if self.personal_steps is not None or self.local_optimizer is not None:
            raise InvalidInput(
                "FedSim's plain steps move both parts at once: leave out personal_steps and "
                "local_optimizer."
            )

    def local(self, client: Client, personal: Vector) -> tuple[Vector, Vector]:
        step_size, own_step = self.steps(client)

        def both(step: Any, carry: tuple[Vector, Vector]) -> tuple[Vector, Vector]:
            (v, total), key = carry, jax.random.fold_in(client.key, step)
            w = client.w - step_size * total
            own = self.own_slope(client, w, v, key)
            return v - own_step * own, total + self.shared_slope(client, w, v, key)

        return lax.fori_loop(0, self.local_steps, both, (personal, jnp.zeros_like(client.w)))
