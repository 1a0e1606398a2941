"""FedAlt: partial personalisation, personal part first.

Paper: Pillutla et al., "Federated Learning with Partial Model Personalization" (2022), Algorithm 2
with LocalAlt; personal objectives as Hanzely et al. (2021) and FedADMM's section 5.3 have them:

    h_i(w, v_i) = (1 − α) f_i(w) + α f_i(v_i) + μ/2 ‖w − v_i‖²

With `mixing=None` v_i is the personal part of the problem's own model, and h_i(w, v_i) is
f_i(w, v_i) as in Pillutla et al.

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

from fedsolve.algorithms.common import steps_of
from fedsolve.algorithms.fedavg import FedAvg
from fedsolve.compression.error_feedback import no_residual
from fedsolve.compression.packets import Packet
from fedsolve.errors import InvalidInput
from fedsolve.fields import (
    Scalar,
    at,
    check_count,
    check_positive,
    optional,
    scalar,
    static,
)
from fedsolve.local_updates.descent import descend, run_steps
from fedsolve.problem.client import Client
from fedsolve.problem.problem import Problem
from fedsolve.types import PRNGKey, Round, Vector


class Kept(NamedTuple):
    """A client's personal parameters, and what it has not sent yet."""

    personal: Vector | None  # None where they are part of the problem
    residual: Vector | None


class FedAlt(FedAvg):
    """Partial personalisation: steps of the personal parameters, then of the shared ones.

    The server averages the shared parameters. `run.state.clients.personal` has the personal ones,
    one row for each client.

    Args:
        step_size, local_steps, local_epochs, local_optimizer, uplink, downlink, server_optimizer:
            Local training, compression and the server's step; see `FedAvg`.
        personal_step_size: γ_v, the step of the personal parameters; None for `step_size`.
        personal_steps: τ_v, the steps of the personal parameters; None for `local_steps`.
        mixing: α, the weight of the personal parameters in the objective; None where they are
            parts of the problem's own model (`Problem(personal=...)`).
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
    mixing: Scalar | None = eqx.field(converter=optional(scalar("mixing")), default=0.5)
    proximity: Scalar = eqx.field(converter=scalar("proximity"), default=0.001)

    def __check_init__(self):
        if self.mixing is not None:
            check_positive("mixing", self.mixing, zero=True)
        check_positive("proximity", self.proximity, zero=True)
        if self.personal_step_size is not None:
            check_positive("personal_step_size", self.personal_step_size)
        if self.personal_steps is not None:
            check_count("personal_steps", self.personal_steps)

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if (self.mixing is None) != (problem.layout.personal_size > 0):
            raise InvalidInput(
                "mixing=None is for a problem with personal parameters, and such a problem needs "
                f"it: {type(self).__name__} then trains those in place of a second model."
            )

    def unsent(self, clients: Kept) -> Float[Array, "n d"] | None:
        return clients.residual

    def init_client(self, w: Vector) -> Kept:
        return Kept(None if self.mixing is None else w, no_residual(self.uplink, w))

    def improve(self, client: Client, kept: Kept) -> tuple[Kept, Packet]:
        if kept.personal is None:
            personal, total = None, self.local_parts(client)
        else:
            personal, total = self.local(client, kept.personal)
        residual, packet = self.compress(client, kept.residual, total)
        return Kept(personal, residual), packet

    def local(self, client: Client, personal: Vector) -> tuple[Vector, Vector]:
        """Take the steps of LocalAlt: v_i with w fixed, then w with v_i fixed.

        Returns:
            The next v_i, and the pseudo-gradient of w.
        """
        own_key, shared_key = jax.random.split(client.key)
        step_size, own_step = self.steps(client)
        shared_steps = steps_of(self)
        steps = shared_steps if self.personal_steps is None else self.personal_steps

        def own(v: Vector, key: PRNGKey) -> Vector:
            return self.own_slope(client, client.w, v, key)

        moved = descend(own, client, steps, own_key, own_step, start=personal)
        personal = personal - own_step * moved

        def shared(w: Vector, key: PRNGKey) -> Vector:
            return self.shared_slope(client, w, personal, key)

        optimizer = self.local_optimizer
        return personal, descend(shared, client, shared_steps, shared_key, step_size, optimizer)

    def local_parts(self, client: Client) -> Vector:
        """Take the steps of LocalAlt with the problem's personal parameters v_i.

        Returns:
            The pseudo-gradient of w.
        """
        own_key, shared_key = jax.random.split(client.key)
        step_size, own_step = self.steps(client)
        shared_steps = steps_of(self)

        def own(step: Round, nothing: tuple[()]) -> tuple[()]:
            client.grad(client.w, jax.random.fold_in(own_key, step))
            client.move_personal(-own_step * client.own_slope)
            return nothing

        steps = shared_steps if self.personal_steps is None else self.personal_steps
        run_steps(client, steps, own_key, own, ())
        optimizer = self.local_optimizer
        return descend(
            client.grad,
            client,
            shared_steps,
            shared_key,
            step_size,
            optimizer,
            moves_personal=False,
        )

    def steps(self, client: Client) -> tuple[Scalar, Scalar]:
        """Return γ_u and γ_v of this round."""
        shared = at(self.step_size, client.round)
        return shared, shared if self.personal_step_size is None else self.personal_step_size

    def own_slope(self, client: Client, w: Vector, v: Vector, key: PRNGKey) -> Vector:
        """Return ∇_v h_i(w, v)."""
        assert self.mixing is not None
        return client.grad(v, key) * self.mixing + (v - w) * self.proximity

    def shared_slope(self, client: Client, w: Vector, v: Vector, key: PRNGKey) -> Vector:
        """Return ∇_w h_i(w, v)."""
        assert self.mixing is not None
        return client.grad(w, key) * (1 - self.mixing) + (w - v) * self.proximity
