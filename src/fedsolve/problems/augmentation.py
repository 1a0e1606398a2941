"""Random crops and mirrored images in minibatches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt8

from fedsolve.types import PRNGKey

MARGIN = 4  # pixels by which a crop may be moved


def augmented(
    key: PRNGKey, images: UInt8[Array, "s h w c"], flip: bool = True
) -> UInt8[Array, "s h w c"]:
    """Move each image by up to `MARGIN` pixels, filled with zeros, and mirror half of them."""
    to_move, to_flip = jax.random.split(key)
    count, height, width, _ = images.shape
    down, right = jax.random.randint(to_move, (2, count, 1), 0, 2 * MARGIN + 1)
    rows, columns = jnp.arange(height)[None], jnp.arange(width)[None]
    if flip:
        mirrored = jax.random.bernoulli(to_flip, shape=(count, 1))
        columns = jnp.where(mirrored, width - 1 - columns, columns)
    rows, columns = down + rows, right + columns
    wide = jnp.pad(images, ((0, 0), (MARGIN, MARGIN), (MARGIN, MARGIN), (0, 0)))
    return wide[jnp.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]
