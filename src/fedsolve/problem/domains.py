"""The set X that parameters must stay in, as its Euclidean projection Π_X.

Projections act on all parameters together, as one vector. A user's own domain is any function that
takes parameters (in the problem's own structure) and returns the nearest ones inside.
"""

from __future__ import annotations

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedsolve.errors import InvalidInput
from fedsolve.fields import Scalar, check_positive, scalar


class Domain(eqx.Module):
    """A closed convex set; `project(x)` is the point of it nearest to x.

    Theory also asks how large it is. A set that does not say is taken to be unbounded.
    """

    def project(self, x: Float[Array, " d"]) -> Float[Array, " d"]:
        raise NotImplementedError

    def farthest(self, x: Float[Array, " d"]) -> Any:
        """sup ‖x − y‖ over y in X."""
        return math.inf

    def diameter(self, size: int) -> Any:
        """sup ‖x − y‖ over x and y in X, in that many dimensions."""
        return math.inf

    def lowest(self, slope: Float[Array, " d"]) -> Any:
        """inf slope·y over y in X."""
        return -math.inf


class WholeSpace(Domain):
    """X = R^d: no restriction."""

    def project(self, x: Float[Array, " d"]) -> Float[Array, " d"]:
        return x


class Ball(Domain):
    """X = {x : ‖x − center‖ ≤ radius}, around the origin unless told."""

    radius: Scalar = eqx.field(converter=scalar("radius"))
    center: Scalar = eqx.field(converter=scalar("center"), default=0.0)

    def __check_init__(self):
        check_positive("radius", self.radius)

    def project(self, x: Float[Array, " d"]) -> Float[Array, " d"]:
        away = x - self.center
        norm = jnp.linalg.norm(away)
        return away * jnp.where(norm > self.radius, self.radius / norm, 1) + self.center

    def farthest(self, x: Float[Array, " d"]) -> Any:
        return jnp.linalg.norm(x - self.center) + self.radius

    def diameter(self, size: int) -> Any:
        return 2 * self.radius

    def lowest(self, slope: Float[Array, " d"]) -> Any:
        return jnp.sum(slope * self.center) - self.radius * jnp.linalg.norm(slope)


class Box(Domain):
    """X = {x : lower ≤ x_i ≤ upper}."""

    lower: Scalar = eqx.field(converter=scalar("lower"))
    upper: Scalar = eqx.field(converter=scalar("upper"))

    def __check_init__(self):
        known = isinstance(self.lower, float) and isinstance(self.upper, float)
        if known and self.lower > self.upper:
            raise InvalidInput(f"Box needs lower ≤ upper, got {self.lower} and {self.upper}.")

    def project(self, x: Float[Array, " d"]) -> Float[Array, " d"]:
        return jnp.clip(x, self.lower, self.upper)

    def farthest(self, x: Float[Array, " d"]) -> Any:
        return jnp.linalg.norm(jnp.maximum(jnp.abs(x - self.lower), jnp.abs(x - self.upper)))

    def diameter(self, size: int) -> Any:
        return (self.upper - self.lower) * math.sqrt(size)

    def lowest(self, slope: Float[Array, " d"]) -> Any:
        return jnp.sum(jnp.minimum(slope * self.lower, slope * self.upper))


class Simplex(Domain):
    """X = {x ≥ 0, Σ x_i = total}: sort, find the threshold, subtract it."""

    total: Scalar = eqx.field(converter=scalar("total"), default=1.0)

    def __check_init__(self):
        check_positive("total", self.total)

    def project(self, x: Float[Array, " d"]) -> Float[Array, " d"]:
        descending = jnp.sort(x)[::-1]
        excess = jnp.cumsum(descending) - self.total
        count = jnp.arange(1, x.size + 1)
        kept = jnp.sum(descending * count > excess)
        return jnp.maximum(x - excess[kept - 1] / kept, 0)

    def farthest(self, x: Float[Array, " d"]) -> Any:
        # The farthest point is a corner; ‖x − total e_i‖² = ‖x‖² − 2 total x_i + total²
        return jnp.sqrt(jnp.sum(x**2) - 2 * self.total * jnp.min(x) + self.total**2)

    def diameter(self, size: int) -> Any:
        return self.total * math.sqrt(2) if size > 1 else 0.0

    def lowest(self, slope: Float[Array, " d"]) -> Any:
        return self.total * jnp.min(slope)


def project_capped(
    weights: Float[Array, " n"], most: Float[Array, ""] | float
) -> Float[Array, " n"]:
    """The nearest point of {π ≥ 0, Σπ = 1, π ≤ most}: clip(π − τ, 0, most), with the τ at which
    that sums to 1. The sum is linear between the numbers π and π − most; bisection over those finds
    the two that τ lies between, and then it is exact."""
    knots = jnp.sort(jnp.concatenate([weights, weights - most]))

    def total(tau: Any) -> Any:
        return jnp.sum(jnp.clip(weights - tau, 0, most))

    def halve(_: Any, between: tuple[Any, Any]) -> tuple[Any, Any]:
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
