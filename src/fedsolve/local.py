"""Local work: some steps of gradient descent, or of an optimiser, from where the client stands.

What a client then sends is a pseudo-gradient v, the negated change in units of the step: without an
optimiser v = Σ_τ ν_τ, the sum of directions along w_{τ+1} = w_τ − η ν_τ; with one, v = w_0 − w_E.
Either way the server's w ← w − step_size·mean(v) moves to the mean of where the clients came to
(with an optimiser, if `step_size` is 1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float, Key

from fedsolve.errors import InvalidInput
from fedsolve.fields import Scalar, Schedule, at, check_positive, scalar

Vector = Float[Array, " d"]
Direction = Callable[[Vector, Key[Array, ""]], Vector]  # w, key -> a descent direction there


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


def travel(
    direction: Direction,
    w: Vector,
    steps: int,
    key: Key[Array, ""],
    step_size: Scalar | Schedule,
    optimizer: Optimizer | None = None,
    round: Any = 0,
) -> tuple[Vector, Vector]:
    """The pseudo-gradient after `steps` local steps from w, and the sum of the directions on the
    way, which is the same without an optimiser. Step τ draws with a key of its own."""
    if optimizer is None:
        size = at(step_size, round)

        def plain(step: Any, total: Vector) -> Vector:
            return total + direction(w - size * total, jax.random.fold_in(key, step))

        total = lax.fori_loop(0, steps, plain, jnp.zeros_like(w))
        return total, total

    rule = optimizer.transform(round)

    def adapted(step: Any, carry: tuple[Vector, Vector, Any]) -> tuple[Vector, Vector, Any]:
        here, total, memory = carry
        slope = direction(here, jax.random.fold_in(key, step))
        change, memory = rule.update(slope, memory, here)
        return jnp.asarray(optax.apply_updates(here, change)), total + slope, memory

    start = (w, jnp.zeros_like(w), rule.init(w))
    end, total, _ = lax.fori_loop(0, steps, adapted, start)
    return w - end, total


def descend(
    direction: Direction,
    w: Vector,
    steps: int,
    key: Key[Array, ""],
    step_size: Scalar | Schedule,
    optimizer: Optimizer | None = None,
    round: Any = 0,
) -> Vector:
    """The pseudo-gradient alone."""
    return travel(direction, w, steps, key, step_size, optimizer, round)[0]
