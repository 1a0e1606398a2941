"""Numbers that change from round to round. Any function of the round (from 0) is a schedule; those
of optax are, too."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax.numpy as jnp

from fedsolve.fields import Scalar, check_positive, scalar


class Diminishing(eqx.Module):
    """`initial` / (1 + round)^`power`: with power 1/2, the step that subgradient methods need."""

    initial: Scalar = eqx.field(converter=scalar("initial"))
    power: Scalar = eqx.field(converter=scalar("power"), default=0.5)

    def __check_init__(self):
        check_positive("initial", self.initial)
        check_positive("power", self.power)

    def __call__(self, round: Any) -> Any:
        return self.initial / (1 + round) ** self.power


class Cosine(eqx.Module):
    """From `initial` down to nothing over `rounds` rounds, along half a wave: how deep networks are
    usually trained."""

    initial: Scalar = eqx.field(converter=scalar("initial"))
    rounds: Scalar = eqx.field(converter=scalar("rounds"))

    def __check_init__(self):
        check_positive("initial", self.initial)
        check_positive("rounds", self.rounds)

    def __call__(self, round: Any) -> Any:
        done = jnp.clip(round / self.rounds, 0, 1)
        return self.initial * (1 + jnp.cos(jnp.pi * done)) / 2
