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

from typing import NamedTuple

import equinox as eqx
import jax
from jaxtyping import Array, Float

from fedsolve.algorithms.fedavg import FedAvg
from fedsolve.compression.error_feedback import no_residual
from fedsolve.compression.packets import Packet
from fedsolve.fields import Scalar, at, check_count, check_positive, scalar, static
from fedsolve.local_updates.descent import descend
from fedsolve.problem.client import Client
from fedsolve.types import PRNGKey, Vector


class Personal(NamedTuple):
    """A client's personal parameters, and what it has not sent yet."""

    personal: Vector
    residual: Vector | None


class FedAlt(FedAvg):
    """Partial personalisation: steps of the personal parameters, then of the shared ones.

    The server averages the shared parameters. `run.state.clients.personal` has the personal ones,
    one row for each client.

    Args:
        step_size, local_steps, local_optimizer, uplink, downlink: Local training and compression;
            see `FedAvg`.
        personal_step_size: γ_v, the step of the personal parameters; None for `step_size`.
        personal_steps: τ_v, the steps of the personal parameters; None for `local_steps`.
        mixing: α, the weight of the personal parameters in the objective.
        proximity: μ, which keeps personal and shared parameters close.
        participants, weighting, selection, availability: Which clients take part; see
            `Participating`.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.linear_regression(clients=4, size=3, smallest=5, largest=5)
        >>> run = fs.solve(problem, fs.FedAlt(0.05, local_steps=2, personal_steps=1), rounds=3)
        >>> run.state.clients.personal.shape
        (4, 3)
    """

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

    def unsent(self, clients: Personal) -> Float[Array, "n d"] | None:
        return clients.residual

    def init_client(self, w: Vector) -> Personal:
        return Personal(w, no_residual(self.uplink, w))

    def improve(self, client: Client, kept: Personal) -> tuple[Personal, Packet]:
        personal, total = self.local(client, kept.personal)
        residual, packet = self.compress(client, kept.residual, total)
        return Personal(personal, residual), packet

    def local(self, client: Client, personal: Vector) -> tuple[Vector, Vector]:
        """Take the steps of LocalAlt: v_i with w fixed, then w with v_i fixed.

        Returns:
            The next v_i, and the pseudo-gradient of w.
        """
        own_key, shared_key = jax.random.split(client.key)
        step_size, own_step = self.steps(client)
        steps = self.local_steps if self.personal_steps is None else self.personal_steps

        def own(v: Vector, key: PRNGKey) -> Vector:
            return self.own_slope(client, client.w, v, key)

        personal = personal - own_step * descend(own, personal, steps, own_key, own_step)

        def shared(w: Vector, key: PRNGKey) -> Vector:
            return self.shared_slope(client, w, personal, key)

        steps, optimizer = self.local_steps, self.local_optimizer
        return personal, descend(
            shared, client.w, steps, shared_key, step_size, optimizer, client.round
        )

    def steps(self, client: Client) -> tuple[Scalar, Scalar]:
        """Return γ_u and γ_v of this round."""
        shared = at(self.step_size, client.round)
        return shared, shared if self.personal_step_size is None else self.personal_step_size

    def own_slope(self, client: Client, w: Vector, v: Vector, key: PRNGKey) -> Vector:
        """Return ∇_v h_i(w, v)."""
        return client.grad(v, key) * self.mixing + (v - w) * self.proximity

    def shared_slope(self, client: Client, w: Vector, v: Vector, key: PRNGKey) -> Vector:
        """Return ∇_w h_i(w, v)."""
        return client.grad(w, key) * (1 - self.mixing) + (w - v) * self.proximity
