"""Schedules: numbers that change from round to round.

Any function of the round (counted from 0) is a schedule, those of optax among them.
"""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp

from fedsolve.fields import Scalar, check_positive, scalar
from fedsolve.types import Round


class Diminishing(eqx.Module):
    """Decrease as initial / (1 + round)^power; subgradient methods need the power 1/2.

    Args:
        initial: The value in round 0.
        power: The exponent.

    Example:
        >>> import fedsolve as fs
        >>> schedule = fs.Diminishing(0.1)
        >>> [round(schedule(t), 3) for t in (0, 3, 99)]
        [0.1, 0.05, 0.01]
    """

    initial: Scalar = eqx.field(converter=scalar("initial"))
    power: Scalar = eqx.field(converter=scalar("power"), default=0.5)

    def __check_init__(self):
        check_positive("initial", self.initial)
        check_positive("power", self.power)

    def __call__(self, round: Round) -> Scalar:
        return self.initial / (1 + round) ** self.power


class Cosine(eqx.Module):
    """Decrease to zero over a number of rounds along half a cosine wave, as for deep networks.

    Args:
        initial: The value in round 0.
        rounds: After how many rounds it is zero.

    Example:
        >>> import fedsolve as fs
        >>> schedule = fs.Cosine(0.1, rounds=100)
        >>> [round(float(schedule(t)), 3) for t in (0, 50, 100)]
        [0.1, 0.05, 0.0]
    """

    initial: Scalar = eqx.field(converter=scalar("initial"))
    rounds: Scalar = eqx.field(converter=scalar("rounds"))

    def __check_init__(self):
        check_positive("initial", self.initial)
        check_positive("rounds", self.rounds)

    def __call__(self, round: Round) -> Scalar:
        done = jnp.clip(round / self.rounds, 0, 1)
        return self.initial * (1 + jnp.cos(jnp.pi * done)) / 2
