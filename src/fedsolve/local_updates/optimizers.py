"""Local optimizers."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import optax

from fedsolve.errors import InvalidInput
from fedsolve.fields import Scalar, Schedule, at, check_positive, scalar


class Optimizer(eqx.Module):
    """A local optimiser; its state begins anew with every round. Its step size may be a schedule of
    the rounds."""

    def transform(self, round: Any) -> optax.GradientTransformation:
        """As optax has it."""
        raise NotImplementedError


class SGD(Optimizer):
    """Gradient descent, with momentum if wanted."""

    step_size: Scalar | Schedule = eqx.field(converter=scalar("step_size"))
    momentum: Scalar = eqx.field(converter=scalar("momentum"), default=0.0)

    def __check_init__(self):
        check_positive("step_size", self.step_size)
        check_positive("momentum", self.momentum, zero=True)

    def transform(self, round: Any) -> optax.GradientTransformation:
        return optax.sgd(jnp.asarray(at(self.step_size, round)), jnp.asarray(self.momentum))


class Adam(Optimizer):
    """Adam."""

    step_size: Scalar | Schedule = eqx.field(converter=scalar("step_size"))
    b1: Scalar = eqx.field(converter=scalar("b1"), default=0.9)
    b2: Scalar = eqx.field(converter=scalar("b2"), default=0.999)
    eps: Scalar = eqx.field(converter=scalar("eps"), default=1e-8)

    def __check_init__(self):
        check_positive("step_size", self.step_size)

    def transform(self, round: Any) -> optax.GradientTransformation:
        numbers = at(self.step_size, round), self.b1, self.b2, self.eps
        return optax.adam(*map(jnp.asarray, numbers))


class Optax(Optimizer):
    """Any `optax.GradientTransformation`; its numbers are part of the program."""

    given: optax.GradientTransformation = eqx.field(static=True)

    def transform(self, round: Any) -> optax.GradientTransformation:
        return self.given


def as_optimizer(value: Any) -> Optimizer | None:
    """An optimiser as the user may give it: one of ours, or one of optax."""
    if value is None or isinstance(value, Optimizer):
        return value
    if isinstance(value, optax.GradientTransformation):
        return Optax(value)
    raise InvalidInput(f"local_optimizer must be an Optimizer or one of optax, got {value!r}.")


def optimizer_field() -> Any:
    """A field that holds a local optimiser, or None for plain steps."""
    return eqx.field(converter=as_optimizer, default=None)
