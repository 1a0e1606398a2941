"""A small vision transformer."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from fedsolve.errors import InvalidInput
from fedsolve.models.base import Network, Shape
from fedsolve.models.layers import Images, Rows, Tokens, dense, normalise


class Attention(eqx.Module):
    """A transformer block: self-attention, then two dense layers for each token.

    Both are normalised before and added to their input.

    Args:
        width: The number of features of a token.
        heads: The number of attention heads; it must divide `width`.
        key: Key of the initial parameters.

    Example:
        >>> import fedsolve as fs
        >>> import jax
        >>> import jax.numpy as jnp
        >>> block = fs.models.Attention(width=4, heads=2, key=jax.random.key(0))
        >>> block(jnp.zeros((1, 3, 4))).shape
        (1, 3, 4)
    """

    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]
    mix: eqx.nn.Linear
    out: eqx.nn.Linear
    widen: eqx.nn.Linear
    narrow: eqx.nn.Linear
    heads: int = eqx.field(static=True)

    def __init__(self, width: int, heads: int, *, key: Key[Array, ""]):
        keys = jax.random.split(key, 4)
        self.norms = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.mix = eqx.nn.Linear(width, 3 * width, key=keys[0])
        self.out = eqx.nn.Linear(width, width, key=keys[1])
        self.widen = eqx.nn.Linear(width, 2 * width, key=keys[2])
        self.narrow = eqx.nn.Linear(2 * width, width, key=keys[3])
        self.heads = heads

    def __call__(self, tokens: Tokens) -> Tokens:
        """Apply the block to a batch of sequences of tokens.

        Args:
            tokens: Tokens of shape (batch, tokens, width).

        Returns:
            Tokens of the same shape and type.
        """
        batch, count, width = tokens.shape
        mixed = dense(self.mix, normalise(self.norms[0], tokens))
        query, key, value = jnp.split(mixed.reshape(batch, count, self.heads, -1), 3, axis=-1)
        seen = jax.nn.dot_product_attention(query, key, value).reshape(batch, count, width)
        tokens = tokens + dense(self.out, seen)
        wide = jax.nn.gelu(dense(self.widen, normalise(self.norms[1], tokens)))
        return tokens + dense(self.narrow, wide)


class VisionTransformer(Network):
    """A small vision transformer.

    Patches of `patch`×`patch` pixels are tokens with learned positions; after `depth` blocks of
    attention, the mean over tokens goes to the last layer.

    Args:
        shape: Height, width and colours of an image; `patch` must divide height and width.
        classes: The number of classes.
        width: The number of features of a token; `heads` must divide it.
        depth: The number of blocks.
        heads: The number of attention heads of a block.
        patch: The side of a patch, in pixels.
        key: Key of the initial parameters.

    Raises:
        InvalidInput: If `heads` does not divide `width`, or `patch` does not divide the images.

    Example:
        >>> import equinox as eqx
        >>> import fedsolve as fs
        >>> import jax
        >>> import jax.numpy as jnp
        >>> network = fs.models.VisionTransformer(
        ...     (8, 8, 3), width=8, depth=1, heads=2, key=jax.random.key(0)
        ... )
        >>> eqx.filter_eval_shape(network, jnp.zeros((2, 8, 8, 3))).shape
        (2, 10)
    """

    embed: eqx.nn.Linear
    places: Float[Array, "tokens width"]
    blocks: tuple[Attention, ...]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    patch: int = eqx.field(static=True)

    def __init__(
        self,
        shape: Shape,
        classes: int = 10,
        width: int = 128,
        depth: int = 6,
        heads: int = 4,
        patch: int = 4,
        *,
        key: Key[Array, ""],
    ):
        height, breadth, colors = shape
        if width % heads or height % patch or breadth % patch:
            raise InvalidInput(
                f"A transformer's width ({width}) must be a multiple of its heads ({heads}), and "
                f"images ({height}×{breadth}) of whole patches of {patch}×{patch}."
            )
        keys = jax.random.split(key, depth + 3)
        tokens = (height // patch) * (breadth // patch)
        self.embed = eqx.nn.Linear(patch * patch * colors, width, key=keys[0])
        self.places = 0.02 * jax.random.normal(keys[1], (tokens, width))
        self.blocks = tuple(Attention(width, heads, key=own) for own in keys[3:])
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, classes, key=keys[2])
        self.patch = patch

    def represent(self, images: Images) -> Rows:
        """Compute the mean over tokens after the last block, for each image."""
        batch, height, breadth, colors = images.shape
        side = self.patch
        patches = images.reshape(batch, height // side, side, breadth // side, side, colors)
        patches = patches.swapaxes(2, 3).reshape(batch, -1, side * side * colors)
        tokens = dense(self.embed, patches) + self.places.astype(images.dtype)
        for block in self.blocks:
            tokens = block(tokens)
        return jnp.mean(normalise(self.norm, tokens), axis=1)
