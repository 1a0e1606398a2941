"""Local optimizers."""

from __future__ import annotations

import abc

import equinox as eqx
import jax.numpy as jnp
import optax

from fedsolve.errors import InvalidInput
from fedsolve.fields import Scalar, Schedule, at, check_positive, scalar
from fedsolve.types import Round


class Optimizer(eqx.Module):
    """Base class of local optimizers. Their state is reset in every round."""

    @abc.abstractmethod
    def transform(self, round: Round) -> optax.GradientTransformation:
        """Return the optax transformation for the local steps of a round.

        Args:
            round: The round, counted from 0.
        """


class SGD(Optimizer):
    """Gradient descent with momentum.

    Args:
        step_size: The step size, a number or a schedule of the rounds.
        momentum: The momentum; 0 for none.

    Example:
        >>> import fedsolve as fs
        >>> algorithm = fs.FedAvg(1.0, local_steps=5, local_optimizer=fs.SGD(0.1, momentum=0.9))
    """

    step_size: Scalar | Schedule = eqx.field(converter=scalar("step_size"))
    momentum: Scalar = eqx.field(converter=scalar("momentum"), default=0.0)

    def __check_init__(self):
        check_positive("step_size", self.step_size)
        check_positive("momentum", self.momentum, zero=True)

    def transform(self, round: Round) -> optax.GradientTransformation:
        return optax.sgd(jnp.asarray(at(self.step_size, round)), jnp.asarray(self.momentum))


class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015).

    Args:
        step_size: The step size, a number or a schedule of the rounds.
        b1: The decay of the first moment.
        b2: The decay of the second moment.
        eps: Added to the denominator.

    Example:
        >>> import fedsolve as fs
        >>> schedule = fs.Cosine(3e-4, rounds=100)
        >>> algorithm = fs.FedAvg(1.0, local_steps=5, local_optimizer=fs.Adam(schedule))
    """

    step_size: Scalar | Schedule = eqx.field(converter=scalar("step_size"))
    b1: Scalar = eqx.field(converter=scalar("b1"), default=0.9)
    b2: Scalar = eqx.field(converter=scalar("b2"), default=0.999)
    eps: Scalar = eqx.field(converter=scalar("eps"), default=1e-8)

    def __check_init__(self):
        check_positive("step_size", self.step_size)

    def transform(self, round: Round) -> optax.GradientTransformation:
        numbers = at(self.step_size, round), self.b1, self.b2, self.eps
        return optax.adam(*map(jnp.asarray, numbers))


class Optax(Optimizer):
    """Any `optax.GradientTransformation`; its numbers are part of the compiled program."""

    given: optax.GradientTransformation = eqx.field(static=True)

    def transform(self, round: Round) -> optax.GradientTransformation:
        return self.given


def as_optimizer(value: object) -> Optimizer | None:
    """Convert what a user may give for an optimizer: an `Optimizer`, one of optax, or None."""
    if value is None or isinstance(value, Optimizer):
        return value
    if isinstance(value, optax.GradientTransformation):
        return Optax(value)
    raise InvalidInput(f"local_optimizer must be an Optimizer or one of optax, got {value!r}.")
