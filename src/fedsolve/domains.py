"""The set X that parameters must stay in, as its Euclidean projection Π_X.

Projections act on all parameters together, as one vector. A user's own domain is any function that
takes parameters (in the problem's own structure) and returns the nearest ones inside.
"""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedsolve.errors import InvalidInput
from fedsolve.fields import Scalar, check_positive, scalar


class Domain(eqx.Module):
    """A closed convex set; `project(x)` is the point of it nearest to x."""

    def project(self, x: Float[Array, " d"]) -> Float[Array, " d"]:
        raise NotImplementedError


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
