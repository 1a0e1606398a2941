"""Optimizers, for the local steps of clients and for the step of the server.

| optimizer | |
|---|---|
| `SGD`, `Adam`, `Yogi`, `Adagrad` | as optax has them |
| `AdaptiveStep` | Algorithm 2 of Reddi et al., "Adaptive Federated Optimization" (2021) |
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from fedsolve.errors import InvalidInput
from fedsolve.fields import Scalar, Schedule, at, check_positive, optional, scalar
from fedsolve.types import PyTree, Round


class Optimizer(eqx.Module):
    """Base class of optimizers.

    As a `local_optimizer`, an optimizer starts anew in every round. As a `server_optimizer`, it
    keeps its state for the whole run.
    """

    @abc.abstractmethod
    def transform(self, round: Round) -> optax.GradientTransformation:
        """Return the optax transformation for the steps of a round.

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


class Yogi(Optimizer):
    """Yogi (Zaheer et al., 2018), as optax has it, with bias correction.

    Args:
        step_size: The step size, a number or a schedule of the rounds.
        b1: The decay of the first moment.
        b2: The decay of the second moment.
        eps: Added to the denominator.

    Example:
        >>> import fedsolve as fs
        >>> algorithm = fs.FedAvg(0.1, local_steps=5, server_optimizer=fs.Yogi(0.01))
    """

    step_size: Scalar | Schedule = eqx.field(converter=scalar("step_size"))
    b1: Scalar = eqx.field(converter=scalar("b1"), default=0.9)
    b2: Scalar = eqx.field(converter=scalar("b2"), default=0.999)
    eps: Scalar = eqx.field(converter=scalar("eps"), default=1e-3)

    def __check_init__(self):
        check_positive("step_size", self.step_size)

    def transform(self, round: Round) -> optax.GradientTransformation:
        numbers = at(self.step_size, round), self.b1, self.b2, self.eps
        return optax.yogi(*map(jnp.asarray, numbers))


class Adagrad(Optimizer):
    """Adagrad (Duchi et al., 2011), as optax has it.

    Args:
        step_size: The step size, a number or a schedule of the rounds.
        initial: The sum of squares before the first step.
        eps: Added to the sum of squares.

    Example:
        >>> import fedsolve as fs
        >>> algorithm = fs.FedAvg(0.1, local_steps=5, server_optimizer=fs.Adagrad(0.1))
    """

    step_size: Scalar | Schedule = eqx.field(converter=scalar("step_size"))
    initial: Scalar = eqx.field(converter=scalar("initial"), default=0.1)
    eps: Scalar = eqx.field(converter=scalar("eps"), default=1e-7)

    def __check_init__(self):
        check_positive("step_size", self.step_size)
        check_positive("initial", self.initial, zero=True)

    def transform(self, round: Round) -> optax.GradientTransformation:
        rule = optax.scale_by_rss(jnp.asarray(self.initial), jnp.asarray(self.eps))
        return optax.chain(rule, optax.scale(-jnp.asarray(at(self.step_size, round))))


class Moments(NamedTuple):
    """m and v of `AdaptiveStep`."""

    first: PyTree
    second: PyTree


RULES: dict[str, Callable[..., Any]] = {
    "adagrad": lambda v, square, b2: v + square,
    "yogi": lambda v, square, b2: v - (1 - b2) * square * jnp.sign(v - square),
    "adam": lambda v, square, b2: b2 * v + (1 - b2) * square,
}


class AdaptiveStep(Optimizer):
    """The adaptive step of FedAdagrad, FedYogi and FedAdam (Reddi et al., 2021, Algorithm 2).

    With Δ the mean change of the clients' models, that is the negative gradient here,

        m ← β₁ m + (1 − β₁) Δ
        v ← v + Δ²                              (adagrad)
        v ← v − (1 − β₂) Δ² sign(v − Δ²)        (yogi)
        v ← β₂ v + (1 − β₂) Δ²                  (adam)
        x ← x + η m / (√v + τ)

    `fs.Adam` and `fs.Yogi` correct the bias of m and v as optax does; this rule does not, as in the
    paper.

    Args:
        rule: `"adagrad"`, `"yogi"` or `"adam"`.
        step_size: η, a number or a schedule of the rounds.
        b1: β₁. The paper takes 0 for Adagrad and 0.9 for the others.
        b2: β₂; not used by Adagrad.
        tau: τ, the degree of adaptivity.
        initial: v before the first step; None for τ², the least that the paper allows.

    Example:
        >>> import fedsolve as fs
        >>> fedyogi = fs.FedAvg(
        ...     0.1, local_steps=5, server_optimizer=fs.AdaptiveStep("yogi", 0.01)
        ... )
    """

    rule: str = eqx.field(static=True)
    step_size: Scalar | Schedule = eqx.field(converter=scalar("step_size"), default=0.01)
    b1: Scalar = eqx.field(converter=scalar("b1"), default=0.9)
    b2: Scalar = eqx.field(converter=scalar("b2"), default=0.99)
    tau: Scalar = eqx.field(converter=scalar("tau"), default=1e-3)
    initial: Scalar | None = eqx.field(converter=optional(scalar("initial")), default=None)

    def __check_init__(self):
        if self.rule not in RULES:
            raise InvalidInput(f"rule must be one of {', '.join(RULES)}, got {self.rule!r}.")
        check_positive("step_size", self.step_size)
        check_positive("tau", self.tau)
        for name in ("b1", "b2"):
            value = getattr(self, name)
            if not isinstance(value, Tracer) and not jnp.all((value >= 0) & (value < 1)):
                raise InvalidInput(f"{name} must be at least 0 and below 1, got {value}.")
        if self.initial is not None:
            check_positive("initial", self.initial, zero=True)

    def transform(self, round: Round) -> optax.GradientTransformation:
        eta, rule = at(self.step_size, round), RULES[self.rule]

        def init(params: PyTree) -> Moments:
            start = self.tau**2 if self.initial is None else self.initial
            return Moments(
                jax.tree.map(jnp.zeros_like, params),
                jax.tree.map(lambda leaf: jnp.full_like(leaf, start), params),
            )

        def update(
            slope: PyTree, moments: Moments, params: PyTree = None
        ) -> tuple[PyTree, Moments]:
            first = jax.tree.map(lambda m, g: self.b1 * m + (1 - self.b1) * g, moments.first, slope)
            second = jax.tree.map(lambda v, g: rule(v, g**2, self.b2), moments.second, slope)
            change = jax.tree.map(lambda m, v: -eta * m / (jnp.sqrt(v) + self.tau), first, second)
            return change, Moments(first, second)

        return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


class Optax(Optimizer):
    """Any `optax.GradientTransformation`; its numbers are part of the compiled program."""

    given: optax.GradientTransformation = eqx.field(static=True)

    def transform(self, round: Round) -> optax.GradientTransformation:
        return self.given


def optimizer_field(name: str) -> Callable[[object], Any]:
    """Make a converter for a field that holds an `Optimizer`, one of optax, or None."""

    def convert(value: object) -> Optimizer | None:
        if value is None or isinstance(value, Optimizer):
            return value
        if isinstance(value, optax.GradientTransformation):
            return Optax(value)
        raise InvalidInput(f"{name} must be an Optimizer or one of optax, got {value!r}.")

    return convert


as_optimizer = optimizer_field("local_optimizer")
