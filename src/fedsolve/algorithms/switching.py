"""Switching between objective and constraint: σ as a function of the violation Ĝ(w) − ε.

A round follows (1 − σ)∇f + σ∇g.
"""

from __future__ import annotations

import abc

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedsolve.fields import Scalar, check_positive, scalar


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
