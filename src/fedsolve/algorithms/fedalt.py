"""FedAlt: partial personalisation, personal part first.

Paper: Pillutla et al., "Federated Learning with Partial Model Personalization" (2022), Algorithm 2
with LocalAlt; personal objectives as Hanzely et al. (2021) and FedADMM's section 5.3 have them:

    h_i(w, v_i) = (1 − α) f_i(w) + α f_i(v_i) + μ/2 ‖w − v_i‖²

| here | paper | |
|---|---|---|
| `step_size`, `local_steps` | γ_u, τ_u | of the shared w |
| `personal_step_size`, `personal_steps` | γ_v, τ_v | of v_i; as the shared ones unless given |
| `mixing` | α | |
| `proximity` | μ | |
| `personal` | v_i | kept by client i, never sent |
"""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
from jaxtyping import Array, Float, Key

from fedsolve.algorithms.fedavg import FedAvg
from fedsolve.compression.error_feedback import no_residual
from fedsolve.compression.packets import Packet
from fedsolve.fields import Scalar, at, check_count, check_positive, scalar, static
from fedsolve.local_updates.descent import descend
from fedsolve.problem.client import Client

Vector = Float[Array, " d"]


class Personal(NamedTuple):
    """A client's own parameters, and what it has not sent yet."""

    personal: Vector
    residual: Vector | None


class FedAlt(FedAvg):
    """Shared and personal parameters: clients take steps of their personal ones and then of the
    shared ones, of which the server averages what came back. `run.state.clients.personal` has the
    personal ones, one row a client."""

    personal_step_size: Scalar | None = None
    personal_steps: int | None = static(None)
    mixing: Scalar = eqx.field(converter=scalar("mixing"), default=0.5)
    proximity: Scalar = eqx.field(converter=scalar("proximity"), default=0.001)

    def __check_init__(self):
        check_positive("mixing", self.mixing, zero=True)
        check_positive("proximity", self.proximity, zero=True)
        if self.personal_step_size is not None:
            check_positive("personal_step_size", self.personal_step_size)
        if self.personal_steps is not None:
            check_count("personal_steps", self.personal_steps)

    def unsent(self, clients: Personal) -> Any:
        return clients.residual

    def init_client(self, w: Vector) -> Personal:
        return Personal(w, no_residual(self.uplink, w))

    def improve(self, client: Client, kept: Personal) -> tuple[Personal, Packet]:
        personal, total = self.local(client, kept.personal)
        residual, packet = self.compress(client, kept.residual, total)
        return Personal(personal, residual), packet

    def local(self, client: Client, personal: Vector) -> tuple[Vector, Vector]:
        """LocalAlt: v_i with w fixed, then w with v_i fixed. The new v_i, and how far w went."""
        own_key, shared_key = jax.random.split(client.key)
        step_size, own_step = self.steps(client)
        steps = self.local_steps if self.personal_steps is None else self.personal_steps

        def own(v: Vector, key: Key[Array, ""]) -> Vector:
            return self.own_slope(client, client.w, v, key)

        personal = personal - own_step * descend(own, personal, steps, own_key, own_step)

        def shared(w: Vector, key: Key[Array, ""]) -> Vector:
            return self.shared_slope(client, w, personal, key)

        steps, optimizer = self.local_steps, self.local_optimizer
        return personal, descend(
            shared, client.w, steps, shared_key, step_size, optimizer, client.round
        )

    def steps(self, client: Client) -> tuple[Any, Any]:
        """γ_u and γ_v in this round."""
        shared = at(self.step_size, client.round)
        return shared, shared if self.personal_step_size is None else self.personal_step_size

    def own_slope(self, client: Client, w: Vector, v: Vector, key: Any) -> Vector:
        """∇_v h_i(w, v)."""
        return client.grad(v, key) * self.mixing + (v - w) * self.proximity

    def shared_slope(self, client: Client, w: Vector, v: Vector, key: Any) -> Vector:
        """∇_w h_i(w, v)."""
        return client.grad(w, key) * (1 - self.mixing) + (w - v) * self.proximity
