"""Convex terms h(w) that the server handles by their proximal operator.

prox(v, step) = argmin h(w) + ‖w − v‖²/(2 step)
"""

from __future__ import annotations

import abc

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedsolve.fields import Scalar, check_positive, scalar
from fedsolve.types import Number, Vector


class Regularizer(eqx.Module):
    """Base class of convex terms h(w), each a sum of functions of single parameters.

    As h is such a sum, its proximal operator and then a box are the proximal operator of both.

    Example:
        >>> import fedsolve as fs
        >>> import jax.numpy as jnp
        >>> class Ridge(fs.Regularizer):
        ...     def __call__(self, w):
        ...         return jnp.sum(w**2) / 2
        ...
        ...     def prox(self, v, step):
        ...         return v / (1 + step)
        >>> Ridge().prox(jnp.array([3.0]), step=0.5).tolist()
        [2.0]
    """

    @abc.abstractmethod
    def __call__(self, w: Vector) -> Float[Array, ""]:
        """Compute h(w).

        Args:
            w: The parameters.
        """

    @abc.abstractmethod
    def prox(self, v: Vector, step: Number) -> Vector:
        """Compute argmin h(w) + ‖w − v‖²/(2 step).

        Args:
            v: A point.
            step: The step, positive.
        """


class L1(Regularizer):
    """The term of the lasso, h(w) = strength · ‖w‖₁.

    Args:
        strength: Its weight, at least 0.

    Raises:
        InvalidInput: If the weight is negative.

    Example:
        >>> import fedsolve as fs
        >>> import jax.numpy as jnp
        >>> fs.L1(2.0).prox(jnp.array([3.0, 0.5]), step=0.5).tolist()
        [2.0, 0.0]
    """

    strength: Scalar = eqx.field(converter=scalar("strength"))

    def __check_init__(self):
        check_positive("strength", self.strength, zero=True)

    def __call__(self, w: Vector) -> Float[Array, ""]:
        """Compute strength · ‖w‖₁."""
        return jnp.asarray(self.strength * jnp.sum(jnp.abs(w)))

    def prox(self, v: Vector, step: Number) -> Vector:
        """Shrink every entry towards 0 by strength · step."""
        return jnp.sign(v) * jnp.maximum(jnp.abs(v) - self.strength * step, 0)
