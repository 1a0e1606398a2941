"""Switching between objective and constraint: σ as a function of the violation Ĝ(w) − ε.

A round follows (1 − σ)∇f + σ∇g.
"""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedsolve.fields import Scalar, check_positive, scalar


class Switching(eqx.Module):
    """`switching(violation)` gives σ in [0, 1]."""

    def __call__(self, violation: Float[Array, ""]) -> Float[Array, ""]:
        raise NotImplementedError


class Hard(Switching):
    """σ = 1{Ĝ > ε}: the objective where feasible, the constraint where not."""

    def __call__(self, violation: Float[Array, ""]) -> Float[Array, ""]:
        return (violation > 0).astype(violation.dtype)


class Soft(Switching):
    """σ = min(1, max(0, 1 + β(Ĝ − ε))): a blend of the two within 1/β below the tolerance."""

    beta: Scalar = eqx.field(converter=scalar("beta"))

    def __check_init__(self):
        check_positive("beta", self.beta)

    def __call__(self, violation: Float[Array, ""]) -> Float[Array, ""]:
        return jnp.clip(1 + self.beta * violation, 0, 1).astype(violation.dtype)
