"""The set X that parameters must stay in, as its Euclidean projection Π_X.

Projections act on all parameters together, as one vector. A user's own domain is any function that
takes parameters (in the problem's structure) and returns the nearest ones inside.
"""

from __future__ import annotations

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fedsolve.errors import InvalidInput
from fedsolve.fields import Scalar, check_positive, scalar
from fedsolve.types import Round, Vector

_Bounds = tuple[Int[Array, ""], Int[Array, ""]]  # between which bisection searches


class Domain(eqx.Module):
    """Base class of closed convex sets X.

    A subclass defines `project`. The other methods say how large the set is, which theory uses; a
    set that does not define them is taken to be unbounded.
    """

    def project(self, x: Vector) -> Vector:
        """Compute Π_X(x), the point of X nearest to x.

        Args:
            x: A point.

        Returns:
            The nearest point of X.
        """
        raise NotImplementedError

    def farthest(self, x: Vector) -> Scalar:
        """Compute sup ‖x − y‖ over y in X.

        Args:
            x: A point.

        Returns:
            The distance; infinite if X is unbounded.
        """
        return math.inf

    def diameter(self, size: int) -> Scalar:
        """Compute sup ‖x − y‖ over x and y in X.

        Args:
            size: The number of dimensions.

        Returns:
            The diameter; infinite if X is unbounded.
        """
        return math.inf

    def lowest(self, slope: Vector) -> Scalar:
        """Compute inf slope·y over y in X.

        Args:
            slope: A vector.

        Returns:
            The least value of the linear function; −infinity if X is unbounded.
        """
        return -math.inf


class WholeSpace(Domain):
    """The whole space X = R^d: no restriction.

    Example:
        >>> import fedsolve as fs
        >>> import jax.numpy as jnp
        >>> fs.WholeSpace().project(jnp.array([3.0, 4.0])).tolist()
        [3.0, 4.0]
    """

    def project(self, x: Vector) -> Vector:
        """Return x."""
        return x


class Ball(Domain):
    """A ball X = {x : ‖x − center‖ ≤ radius}.

    Args:
        radius: The radius, positive.
        center: The centre in every coordinate, by default the origin.

    Raises:
        InvalidInput: If the radius is not positive.

    Example:
        >>> import fedsolve as fs
        >>> import jax.numpy as jnp
        >>> [round(float(x), 3) for x in fs.Ball(1.0).project(jnp.array([3.0, 4.0]))]
        [0.6, 0.8]
    """

    radius: Scalar = eqx.field(converter=scalar("radius"))
    center: Scalar = eqx.field(converter=scalar("center"), default=0.0)

    def __check_init__(self):
        check_positive("radius", self.radius)

    def project(self, x: Vector) -> Vector:
        """Return x, pulled towards the centre if it is outside."""
        away = x - self.center
        norm = jnp.linalg.norm(away)
        return away * jnp.where(norm > self.radius, self.radius / norm, 1) + self.center

    def farthest(self, x: Vector) -> Scalar:
        """Compute ‖x − center‖ + radius."""
        return jnp.linalg.norm(x - self.center) + self.radius

    def diameter(self, size: int) -> Scalar:
        """Compute twice the radius."""
        return 2 * self.radius

    def lowest(self, slope: Vector) -> Scalar:
        """Compute slope·center − radius ‖slope‖."""
        return jnp.sum(slope * self.center) - self.radius * jnp.linalg.norm(slope)


class Box(Domain):
    """A box X = {x : lower ≤ x_i ≤ upper}.

    Args:
        lower: The least value of every coordinate.
        upper: The largest value of every coordinate.

    Raises:
        InvalidInput: If lower > upper.

    Example:
        >>> import fedsolve as fs
        >>> import jax.numpy as jnp
        >>> fs.Box(0.0, 1.0).project(jnp.array([-2.0, 0.5, 3.0])).tolist()
        [0.0, 0.5, 1.0]
    """

    lower: Scalar = eqx.field(converter=scalar("lower"))
    upper: Scalar = eqx.field(converter=scalar("upper"))

    def __check_init__(self):
        known = isinstance(self.lower, float) and isinstance(self.upper, float)
        if known and self.lower > self.upper:
            raise InvalidInput(f"Box needs lower ≤ upper, got {self.lower} and {self.upper}.")

    def project(self, x: Vector) -> Vector:
        """Return x with every coordinate clipped."""
        return jnp.clip(x, self.lower, self.upper)

    def farthest(self, x: Vector) -> Scalar:
        """Compute the distance to the farthest corner."""
        return jnp.linalg.norm(jnp.maximum(jnp.abs(x - self.lower), jnp.abs(x - self.upper)))

    def diameter(self, size: int) -> Scalar:
        """Compute (upper − lower) √d."""
        return (self.upper - self.lower) * math.sqrt(size)

    def lowest(self, slope: Vector) -> Scalar:
        """Compute the least value of slope·y, coordinate by coordinate."""
        return jnp.sum(jnp.minimum(slope * self.lower, slope * self.upper))


class Simplex(Domain):
    """A simplex X = {x ≥ 0, Σ x_i = total}.

    Args:
        total: The sum of the coordinates, positive.

    Raises:
        InvalidInput: If the total is not positive.

    Example:
        >>> import fedsolve as fs
        >>> import jax.numpy as jnp
        >>> fs.Simplex().project(jnp.array([1.0, 0.5, -1.0])).tolist()
        [0.75, 0.25, 0.0]
    """

    total: Scalar = eqx.field(converter=scalar("total"), default=1.0)

    def __check_init__(self):
        check_positive("total", self.total)

    def project(self, x: Vector) -> Vector:
        """Sort, find the threshold, subtract it."""
        descending = jnp.sort(x)[::-1]
        excess = jnp.cumsum(descending) - self.total
        count = jnp.arange(1, x.size + 1)
        kept = jnp.sum(descending * count > excess)
        return jnp.maximum(x - excess[kept - 1] / kept, 0)

    def farthest(self, x: Vector) -> Scalar:
        """Compute the distance to the farthest corner."""
        # ‖x − total e_i‖² = ‖x‖² − 2 total x_i + total²
        return jnp.sqrt(jnp.sum(x**2) - 2 * self.total * jnp.min(x) + self.total**2)

    def diameter(self, size: int) -> Scalar:
        """Compute the distance between two corners."""
        return self.total * math.sqrt(2) if size > 1 else 0.0

    def lowest(self, slope: Vector) -> Scalar:
        """Compute the value of slope·y at the best corner."""
        return self.total * jnp.min(slope)


def project_capped(
    weights: Float[Array, " n"], most: Float[Array, ""] | float
) -> Float[Array, " n"]:
    """Compute the nearest point of {π ≥ 0, Σπ = 1, π ≤ most}.

    It is clip(π − τ, 0, most), with the τ at which that sums to 1. The sum is linear between the
    numbers π and π − most; bisection over those finds the two that τ lies between, and then it is
    exact.
    """
    knots = jnp.sort(jnp.concatenate([weights, weights - most]))

    def total(tau: Float[Array, ""]) -> Float[Array, ""]:
        return jnp.sum(jnp.clip(weights - tau, 0, most))

    def halve(_: Round, between: _Bounds) -> _Bounds:
        low, high = between
        middle = (low + high) // 2
        above = total(knots[middle]) >= 1
        return jnp.where(above, middle, low), jnp.where(above, high, middle)

    steps = int(np.ceil(np.log2(2 * weights.size))) + 1
    low, high = jax.lax.fori_loop(0, steps, halve, (jnp.int32(0), jnp.int32(knots.size - 1)))
    at_low, at_high = total(knots[low]), total(knots[high])
    slope = jnp.where(at_low > at_high, at_low - at_high, 1)
    tau = knots[low] + (at_low - 1) / slope * (knots[high] - knots[low])
    return jnp.clip(weights - jnp.where(at_low > 1, tau, knots[low]), 0, most)
