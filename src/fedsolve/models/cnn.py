"""A network of two convolutions."""

from __future__ import annotations

import equinox as eqx
import jax
from jaxtyping import Array, Key

from fedsolve.models.base import Network, Shape
from fedsolve.models.layers import Images, Rows, convolve, dense, flat, halve


class CNN(Network):
    """A network of two convolutions, each with rectification and 2×2 max pooling, then one layer.

    Args:
        shape: Height, width and colours of an image.
        classes: The number of classes.
        width: The number of filters of the first convolution; the second has twice as many.
        hidden: The number of rectified units before the last layer.
        side: The side of the filters, in pixels.
        key: Key of the initial parameters.

    Example:
        >>> import fedsolve as fs
        >>> import jax
        >>> import jax.numpy as jnp
        >>> network = fs.models.CNN((8, 8, 3), classes=3, width=2, hidden=5, key=jax.random.key(0))
        >>> network.represent(jnp.zeros((2, 8, 8, 3))).shape
        (2, 5)
    """

    convolutions: tuple[eqx.nn.Conv2d, eqx.nn.Conv2d]
    first: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(
        self,
        shape: Shape,
        classes: int = 10,
        width: int = 32,
        hidden: int = 128,
        side: int = 3,
        *,
        key: Key[Array, ""],
    ):
        one, two, rest = jax.random.split(key, 3)
        three, four = jax.random.split(rest)
        height, breadth, colors = shape
        self.convolutions = (
            eqx.nn.Conv2d(colors, width, side, padding=side // 2, key=one),
            eqx.nn.Conv2d(width, 2 * width, side, padding=side // 2, key=two),
        )
        pixels = (height // 4) * (breadth // 4)
        self.first = eqx.nn.Linear(2 * width * pixels, hidden, key=three)
        self.head = eqx.nn.Linear(hidden, classes, key=four)

    def represent(self, images: Images) -> Rows:
        """Compute the last hidden units of each image."""
        maps = images
        for convolution in self.convolutions:
            maps = halve(jax.nn.relu(convolve(convolution, maps)))
        return jax.nn.relu(dense(self.first, flat(maps)))
