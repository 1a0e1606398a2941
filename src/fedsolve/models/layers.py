"""Layers on batches of images, which compute in the type of their input."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from fedsolve.models.convolution import convolve2d, max_pool2d

Images = Float[Array, "batch height width colors"]
Maps = Float[Array, "batch height width channels"]
Rows = Float[Array, "batch features"]
Tokens = Float[Array, "batch tokens width"]


class GroupNorm(eqx.Module):
    """Normalise each image's channels, by groups, to mean 0 and variance 1, then scale and shift.

    Args:
        channels: The number of channels.
        groups: The number of groups; if it does not divide `channels`, their greatest common
            divisor is used.

    Example:
        >>> import fedsolve as fs
        >>> import jax.numpy as jnp
        >>> norm = fs.models.GroupNorm(channels=2, groups=1)
        >>> maps = jnp.arange(8.0).reshape(1, 2, 2, 2)
        >>> round(float(abs(jnp.mean(norm(maps)))), 3)
        0.0
    """

    weight: Float[Array, " channels"]
    bias: Float[Array, " channels"]
    groups: int = eqx.field(static=True)

    def __init__(self, channels: int, groups: int = 32):
        self.weight, self.bias = jnp.ones(channels), jnp.zeros(channels)
        self.groups = int(np.gcd(groups, channels))

    def __call__(self, maps: Maps) -> Maps:
        """Normalise a batch of maps.

        Args:
            maps: Maps of shape (batch, height, width, channels).

        Returns:
            Maps of the same shape and type.
        """
        wide = jnp.promote_types(maps.dtype, jnp.float32)
        parts = maps.astype(wide).reshape(*maps.shape[:3], self.groups, -1)
        mean = jnp.mean(parts, axis=(1, 2, 4), keepdims=True)
        variance = jnp.mean((parts - mean) ** 2, axis=(1, 2, 4), keepdims=True)
        parts = ((parts - mean) * lax.rsqrt(variance + 1e-5)).reshape(maps.shape)
        return (parts * self.weight + self.bias).astype(maps.dtype)


def dense(layer: eqx.nn.Linear, rows: Float[Array, "*batch before"]) -> Float[Array, "*batch _"]:
    """Apply a dense layer to every row."""
    assert layer.bias is not None
    return rows @ layer.weight.astype(rows.dtype).T + layer.bias.astype(rows.dtype)


def convolve(layer: eqx.nn.Conv2d, maps: Maps) -> Float[Array, "batch _ _ _"]:
    """Apply a convolution to every image, by the method that is faster on this device."""
    weight, padding = layer.weight.astype(maps.dtype), layer.padding
    if jax.default_backend() == "cpu" and not isinstance(padding, str):
        found = convolve2d(maps, weight, layer.stride, padding, layer.dilation, layer.groups)
    else:
        found = lax.conv_general_dilated(
            maps,
            weight,
            layer.stride,
            padding,
            rhs_dilation=layer.dilation,
            feature_group_count=layer.groups,
            dimension_numbers=("NHWC", "OIHW", "NHWC"),
        )
    return found if layer.bias is None else found + layer.bias.reshape(-1).astype(maps.dtype)


def halve(maps: Maps) -> Float[Array, "batch _ _ channels"]:
    """Return the maxima of squares of 2×2."""
    return max_pool2d(maps, (2, 2))


def normalise(layer: eqx.nn.LayerNorm, tokens: Tokens) -> Tokens:
    """Apply a layer normalisation to every token, computed in at least float32."""
    wide = tokens.astype(jnp.promote_types(tokens.dtype, jnp.float32))
    return jax.vmap(jax.vmap(layer))(wide).astype(tokens.dtype)


def flat(maps: Maps) -> Rows:
    """Flatten each image's maps with channels first."""
    return jnp.moveaxis(maps, -1, 1).reshape(len(maps), -1)
