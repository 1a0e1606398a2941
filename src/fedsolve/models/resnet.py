"""ResNet-18 for small images, with normalisation by groups of channels."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from fedsolve.models.base import Network, Shape
from fedsolve.models.layers import GroupNorm, Images, Maps, Rows, convolve


class Block(eqx.Module):
    """A residual block: two convolutions of 3×3, added to the input.

    The input is added as it is, or after a convolution of 1×1 where the shapes differ.

    Args:
        before: The number of channels of the input.
        after: The number of channels of the output.
        stride: The stride of the first convolution.
        key: Key of the initial parameters.

    Example:
        >>> import fedsolve as fs
        >>> import jax
        >>> import jax.numpy as jnp
        >>> block = fs.models.Block(before=2, after=4, stride=2, key=jax.random.key(0))
        >>> block(jnp.zeros((1, 8, 8, 2))).shape
        (1, 4, 4, 4)
    """

    convolutions: tuple[eqx.nn.Conv2d, eqx.nn.Conv2d]
    norms: tuple[GroupNorm, GroupNorm]
    shortcut: tuple[eqx.nn.Conv2d, GroupNorm] | None

    def __init__(self, before: int, after: int, stride: int, *, key: Key[Array, ""]):
        one, two, three = jax.random.split(key, 3)
        self.convolutions = (
            eqx.nn.Conv2d(before, after, 3, stride, 1, use_bias=False, key=one),
            eqx.nn.Conv2d(after, after, 3, 1, 1, use_bias=False, key=two),
        )
        self.norms = GroupNorm(after), GroupNorm(after)
        self.shortcut = None
        if before != after or stride != 1:
            straight = eqx.nn.Conv2d(before, after, 1, stride, use_bias=False, key=three)
            self.shortcut = straight, GroupNorm(after)

    def __call__(self, maps: Maps) -> Float[Array, "batch _ _ _"]:
        """Apply the block to a batch of maps.

        Args:
            maps: Maps of shape (batch, height, width, channels).

        Returns:
            Maps with `after` channels, smaller by the stride.
        """
        around = maps
        if self.shortcut is not None:
            straight, norm = self.shortcut
            around = norm(convolve(straight, maps))
        (one, two), (first, second) = self.convolutions, self.norms
        return jax.nn.relu(second(convolve(two, jax.nn.relu(first(convolve(one, maps))))) + around)


class ResNet18(Network):
    """ResNet-18 in its form for 32×32 images.

    The first convolution is of 3×3, without pooling before the eight blocks, which have `width`, 2,
    4 and 8 times as many channels.

    Normalisation is by groups of channels within one image, not over the batch. Statistics of a
    batch depend on a client's classes: they differ between clients, so the statistics of the
    averaged model fit none of them, and as they are not parameters, no algorithm here would correct
    them. Groups need no statistics besides the parameters, and training and evaluation are the same
    function.

    Args:
        shape: Height, width and colours of an image.
        classes: The number of classes.
        width: The number of channels of the first two blocks.
        key: Key of the initial parameters.

    Example:
        >>> import equinox as eqx
        >>> import fedsolve as fs
        >>> import jax
        >>> import jax.numpy as jnp
        >>> network = eqx.filter_eval_shape(fs.models.ResNet18, (32, 32, 3), key=jax.random.key(0))
        >>> eqx.filter_eval_shape(network, jnp.zeros((2, 32, 32, 3))).shape
        (2, 10)
    """

    stem: eqx.nn.Conv2d
    norm: GroupNorm
    blocks: tuple[Block, ...]
    head: eqx.nn.Linear

    def __init__(self, shape: Shape, classes: int = 10, width: int = 64, *, key: Key[Array, ""]):
        keys = jax.random.split(key, 10)
        self.stem = eqx.nn.Conv2d(shape[-1], width, 3, 1, 1, use_bias=False, key=keys[0])
        self.norm = GroupNorm(width)
        sizes = [width * 2 ** (i // 2) for i in range(8)]
        self.blocks = tuple(
            Block(before, after, 1 if before == after else 2, key=own)
            for before, after, own in zip([width, *sizes], sizes, keys[1:9], strict=False)
        )
        self.head = eqx.nn.Linear(sizes[-1], classes, key=keys[9])

    def represent(self, images: Images) -> Rows:
        """Compute the mean over pixels of the last maps of each image."""
        maps = jax.nn.relu(self.norm(convolve(self.stem, images)))
        for block in self.blocks:
            maps = block(maps)
        return jnp.mean(maps, axis=(1, 2))
