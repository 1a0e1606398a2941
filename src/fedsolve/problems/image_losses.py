"""Loss, accuracy and representation of networks on clients' images.

Images are bytes in the clients' data and become numbers here. More than `CHUNK` of them are
processed in blocks, so that an evaluation does not need the activations of all at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped, UInt8

from fedsolve.models import Network

CHUNK = 512  # images
Pictures = dict[str, Shaped[Array, "s ..."]]  # x, y, and a mask if clients differ in size
Labels = Shaped[Array, " s"]


@dataclasses.dataclass(frozen=True)
class ImageFunction:
    """Base class of functions of (network, images).

    Args:
        compute: The type in which the network computes; None for that of its parameters.
        standardize: Whether pixels are scaled to about −2 to 2 in place of 0 to 1.
    """

    compute: str | None
    standardize: bool

    def floats(self, network: Network, images: UInt8[Array, "s h w c"]) -> Float[Array, "s h w c"]:
        """Return the images as the network's input."""
        kind = network.head.weight.dtype
        x = images.astype(kind) / 255
        x = (x - 0.5) / 0.25 if self.standardize else x
        return x if self.compute is None else x.astype(self.compute)

    def scores(self, network: Network, images: UInt8[Array, "s h w c"]) -> Float[Array, "s k"]:
        """Compute the network's scores, in the type of its parameters."""
        return network(self.floats(network, images)).astype(network.head.weight.dtype)


class CrossEntropy(ImageFunction):
    """The mean cross-entropy over a client's images."""

    def __call__(self, network: Network, data: Pictures) -> Float[Array, ""]:
        """Compute the mean."""

        def losses(images: UInt8[Array, "s h w c"], classes: Labels) -> Float[Array, " s"]:
            shares = jax.nn.log_softmax(self.scores(network, images))
            return -jnp.take_along_axis(shares, classes[:, None].astype(int), axis=1)[:, 0]

        return _mean(losses, data)


class Accuracy(ImageFunction):
    """The share of images that are classified correctly."""

    def __call__(self, network: Network, data: Pictures) -> Float[Array, ""]:
        """Compute the share."""

        def right(images: UInt8[Array, "s h w c"], classes: Labels) -> Float[Array, " s"]:
            scores = self.scores(network, images)
            return (jnp.argmax(scores, axis=1) == classes).astype(scores.dtype)

        return _mean(right, data)


class Representation(ImageFunction):
    """The input of the network's last layer for each image."""

    def __call__(self, network: Network, data: Pictures) -> Float[Array, "s features"]:
        """Compute one row for each image."""
        rows = network.represent(self.floats(network, data["x"]))
        return rows.astype(network.head.weight.dtype)


def _mean(each: Callable, data: Pictures) -> Float[Array, ""]:
    """Compute the mean of `each(images, classes)` over the real images, in blocks if many."""
    x, y = data["x"], data["y"]
    if len(x) <= CHUNK:
        values = each(x, y)
    else:

        @jax.checkpoint  # a gradient, too, keeps one block's activations
        def one(row: tuple[Array, Array]) -> Float[Array, ""]:
            return each(row[0][None], row[1][None])[0]

        values = lax.map(one, (x, y), batch_size=CHUNK)
    if "mask" not in data:
        return jnp.mean(values)
    return jnp.sum(jnp.where(data["mask"], values, 0)) / jnp.sum(data["mask"])
