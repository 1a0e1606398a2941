"""Switching between objective and constraint: σ as a function of the violation Ĝ(w) − ε.

A round follows (1 − σ)∇f + σ∇g.
"""

from __future__ import annotations

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedsolve.fields import Scalar, check_positive, scalar
from fedsolve.types import Round

AMONG = ("steepest", "violation", "round robin", "blend")


class Switching(eqx.Module):
    """Base class of switching rules: `switching(violation)` returns σ in [0, 1]."""

    @abc.abstractmethod
    def __call__(self, violation: Float[Array, ""]) -> Float[Array, ""]:
        """Return σ.

        Args:
            violation: Ĝ(w) − ε.
        """


class Hard(Switching):
    """Follow the objective at feasible points, else the constraint: σ = 1{Ĝ > ε}.

    Example:
        >>> import fedsolve as fs
        >>> import jax.numpy as jnp
        >>> float(fs.Hard()(jnp.asarray(-0.1))), float(fs.Hard()(jnp.asarray(0.1)))
        (0.0, 1.0)
    """

    def __call__(self, violation: Float[Array, ""]) -> Float[Array, ""]:
        return (violation > 0).astype(violation.dtype)


def shares_among(rule: str, violations: Float[Array, " k"], round: Round) -> Float[Array, " k"]:
    """Return the weights with which clients reduce each of several constraints; they sum to 1.

    Args:
        rule: `"steepest"`: the largest violation alone, whose gradient is a subgradient of the
            maximum; `"violation"`: those violated, by their violation; `"round robin"`: those
            violated, in turns; `"blend"`: those violated, equally. Where none is violated, the
            largest.
        violations: Ĝ_i − ε_i.
        round: The round.
    """
    size, kind = len(violations), violations.dtype
    largest = jax.nn.one_hot(jnp.argmax(violations), size, dtype=kind)
    violated = violations > 0
    if rule == "steepest":
        return largest
    if rule == "violation":
        # An infinite violation, as of an unknown error, would leave no finite shares.
        finite = jnp.where(jnp.isfinite(violations), violations, 1)
        parts = jnp.where(violated, finite, 0)
    elif rule == "blend":
        parts = violated.astype(kind)
    else:
        turn = jnp.mod(round, jnp.maximum(jnp.sum(violated), 1))
        parts = (violated & (jnp.cumsum(violated) - 1 == turn)).astype(kind)
    total = jnp.sum(parts)
    return jnp.where(total > 0, parts / jnp.where(total > 0, total, 1), largest)


class Soft(Switching):
    """Blend objective and constraint within 1/β of the tolerance: σ = min(1, max(0, 1 + β(Ĝ − ε))).

    Args:
        beta: β, the sharpness of the transition.

    Example:
        >>> import fedsolve as fs
        >>> import jax.numpy as jnp
        >>> switching = fs.Soft(beta=5.0)
        >>> [round(float(switching(jnp.asarray(v))), 2) for v in (-0.3, -0.1, 0.1)]
        [0.0, 0.5, 1.0]
    """

    beta: Scalar = eqx.field(converter=scalar("beta"))

    def __check_init__(self):
        check_positive("beta", self.beta)

    def __call__(self, violation: Float[Array, ""]) -> Float[Array, ""]:
        return jnp.clip(1 + self.beta * violation, 0, 1).astype(violation.dtype)
