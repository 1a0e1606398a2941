"""Networks for images, in Equinox: dense, two convolutions, ResNet-18 for 32×32, a small vision
transformer; and their parameters from and to safetensors files.

A network takes a batch of images (batch, height, width, colours) to a row of scores for each. It
computes in the type of the images: parameters stay as they are and are cast where they are used, so
images in bfloat16 give mixed precision, with the means of normalisation always in at least float32.
`represent` is all but the last layer, `head`.

Convolutions' weights lie as (out, in, height, width), and maps are flattened with channels first:
as in PyTorch, so that weights trained there fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from jax import lax
from jaxtyping import Array, Float, Key

from fedsolve.errors import InvalidInput

Images = Float[Array, "batch height width colors"]
Maps = Float[Array, "batch height width channels"]
Rows = Float[Array, "batch features"]
Tokens = Float[Array, "batch tokens width"]
Shape = Sequence[int]  # height, width, colours
Tree = TypeVar("Tree")
UNFOLDED = 512  # weights of a filter, up to which a CPU multiplies neighbourhoods


class Network(eqx.Module):
    """A classifier of images: `head` after `represent`."""

    head: eqx.AbstractVar[eqx.nn.Linear]

    def represent(self, images: Images) -> Rows:
        """What the last layer sees of each image."""
        raise NotImplementedError

    def __call__(self, images: Images) -> Float[Array, "batch classes"]:
        return dense(self.head, self.represent(images))


class MLP(Network):
    """Pixels, `hidden` rectified units, classes."""

    first: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, shape: Shape, classes: int = 10, hidden: int = 64, *, key: Key[Array, ""]):
        one, two = jax.random.split(key)
        self.first = eqx.nn.Linear(int(np.prod(shape)), hidden, key=one)
        self.head = eqx.nn.Linear(hidden, classes, key=two)

    def represent(self, images: Images) -> Rows:
        return jax.nn.relu(dense(self.first, flat(images)))


class CNN(Network):
    """Two convolutions with `width` and twice as many filters, each rectified and halved by its
    maxima, then `hidden` rectified units."""

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
        maps = images
        for convolution in self.convolutions:
            maps = halve(jax.nn.relu(convolve(convolution, maps)))
        return jax.nn.relu(dense(self.first, flat(maps)))


class GroupNorm(eqx.Module):
    """Each image's channels, by groups, to mean 0 and variance 1; then a scale and an offset."""

    weight: Float[Array, " channels"]
    bias: Float[Array, " channels"]
    groups: int = eqx.field(static=True)

    def __init__(self, channels: int, groups: int = 32):
        self.weight, self.bias = jnp.ones(channels), jnp.zeros(channels)
        self.groups = int(np.gcd(groups, channels))

    def __call__(self, maps: Maps) -> Maps:
        wide = jnp.promote_types(maps.dtype, jnp.float32)
        parts = maps.astype(wide).reshape(*maps.shape[:3], self.groups, -1)
        mean = jnp.mean(parts, axis=(1, 2, 4), keepdims=True)
        variance = jnp.mean((parts - mean) ** 2, axis=(1, 2, 4), keepdims=True)
        parts = ((parts - mean) * lax.rsqrt(variance + 1e-5)).reshape(maps.shape)
        return (parts * self.weight + self.bias).astype(maps.dtype)


class Block(eqx.Module):
    """Two convolutions of 3×3 around which the input goes, too: as it is, or by one of 1×1."""

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
        around = maps
        if self.shortcut is not None:
            straight, norm = self.shortcut
            around = norm(convolve(straight, maps))
        (one, two), (first, second) = self.convolutions, self.norms
        return jax.nn.relu(second(convolve(two, jax.nn.relu(first(convolve(one, maps))))) + around)


class ResNet18(Network):
    """ResNet-18 as it is used for 32×32 images: a first convolution of 3×3 and no pooling before
    the eight blocks of `width`, 2, 4 and 8 times as many channels.

    Normalisation is by groups of channels within one image, not over the batch. Statistics of a
    batch are those of a client's own classes: they differ between clients, so the averaged model
    has statistics that belong to none of them, and they are no parameters, so no algorithm here
    would correct them. Groups need no statistics beside the parameters, and training and evaluation
    are the same function.
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
        maps = jax.nn.relu(self.norm(convolve(self.stem, images)))
        for block in self.blocks:
            maps = block(maps)
        return jnp.mean(maps, axis=(1, 2))


class Attention(eqx.Module):
    """A transformer's block: attention, then a dense layer for each token, both normalised before
    and added to what came in."""

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
        batch, count, width = tokens.shape
        mixed = dense(self.mix, normalise(self.norms[0], tokens))
        query, key, value = jnp.split(mixed.reshape(batch, count, self.heads, -1), 3, axis=-1)
        seen = jax.nn.dot_product_attention(query, key, value).reshape(batch, count, width)
        tokens = tokens + dense(self.out, seen)
        wide = jax.nn.gelu(dense(self.widen, normalise(self.norms[1], tokens)))
        return tokens + dense(self.narrow, wide)


class VisionTransformer(Network):
    """A small vision transformer: patches of `patch`×`patch` pixels as tokens with learned places,
    `depth` blocks of attention, the mean over tokens."""

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
        batch, height, breadth, colors = images.shape
        side = self.patch
        patches = images.reshape(batch, height // side, side, breadth // side, side, colors)
        patches = patches.swapaxes(2, 3).reshape(batch, -1, side * side * colors)
        tokens = dense(self.embed, patches) + self.places.astype(images.dtype)
        for block in self.blocks:
            tokens = block(tokens)
        return jnp.mean(normalise(self.norm, tokens), axis=1)


# Layers on batches, in the type of what comes in


def dense(layer: eqx.nn.Linear, rows: Float[Array, "*batch before"]) -> Float[Array, "*batch _"]:
    assert layer.bias is not None
    return rows @ layer.weight.astype(rows.dtype).T + layer.bias.astype(rows.dtype)


def convolve(layer: eqx.nn.Conv2d, maps: Maps) -> Float[Array, "batch _ _ _"]:
    weight = layer.weight.astype(maps.dtype)
    if jax.default_backend() == "cpu" and weight[0].size <= UNFOLDED:
        found = unfolded(maps, weight, layer.stride, layer.padding)
    else:
        found = lax.conv_general_dilated(
            maps,
            weight,
            layer.stride,
            layer.padding,
            dimension_numbers=("NHWC", "OIHW", "NHWC"),
        )
    return found if layer.bias is None else found + layer.bias.reshape(-1).astype(maps.dtype)


def unfolded(
    maps: Maps, weight: Float[Array, "out channels down right"], stride: Any, padding: Any
) -> Float[Array, "batch _ _ out"]:
    """The convolution as one product with every pixel's neighbourhood, as wide as it is: on a CPU,
    small ones have their gradients nine times as fast by it (two cores, 2026-11)."""
    out, _, down, right = weight.shape
    wide = jnp.pad(maps, ((0, 0), *padding, (0, 0)))
    last = wide.shape[1] - down + 1, wide.shape[2] - right + 1
    around = [
        wide[:, y : y + last[0] : stride[0], x : x + last[1] : stride[1]]
        for y in range(down)
        for x in range(right)
    ]
    return jnp.concatenate(around, axis=-1) @ weight.transpose(2, 3, 1, 0).reshape(-1, out)


def halve(maps: Maps) -> Float[Array, "batch _ _ channels"]:
    """The maxima of squares of 2×2."""
    batch, height, breadth, channels = maps.shape
    even = maps[:, : height // 2 * 2, : breadth // 2 * 2]
    squares = even.reshape(batch, height // 2, 2, breadth // 2, 2, channels)
    return jnp.max(squares, axis=(2, 4))


def normalise(layer: eqx.nn.LayerNorm, tokens: Tokens) -> Tokens:
    wide = tokens.astype(jnp.promote_types(tokens.dtype, jnp.float32))
    return jax.vmap(jax.vmap(layer))(wide).astype(tokens.dtype)


def flat(maps: Maps) -> Rows:
    return jnp.moveaxis(maps, -1, 1).reshape(len(maps), -1)


# Parameters in files


def save(model: Any, path: str | Path) -> None:
    """Writes a model's parameters to a safetensors file, each by its name (`blocks.0.norms.…`)."""
    safetensors.numpy.save_file({n: np.asarray(leaf) for n, leaf in _named(model)}, path)


def load(model: Tree, path: str | Path, fresh: Sequence[str] = ()) -> Tree:
    """The model with its parameters from a safetensors file, to go on from.

    Parameters whose names begin with one of `fresh` stay as they are in `model`, and may be absent
    from the file or of another shape there: `fresh=["head"]` is fine-tuning to other classes.
    """
    try:
        found = safetensors.numpy.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise InvalidInput(f"{path} cannot be read as safetensors: {error}.") from error

    def is_fresh(name: str) -> bool:
        return any(name == f or name.startswith(f"{f}.") for f in fresh)

    wanted = [(name, leaf) for name, leaf in _named(model) if not is_fresh(name)]
    surplus = {name for name in found if not is_fresh(name)} - {name for name, _ in wanted}
    for name, leaf in wanted:
        if name not in found:
            raise InvalidInput(f"{path} has no {name}, which the model needs.")
        if found[name].shape != leaf.shape:
            raise InvalidInput(
                f"{name} has the shape {list(found[name].shape)} in {path}, but the model's is "
                f"{list(leaf.shape)}."
            )
    if surplus:
        raise InvalidInput(f"{path} has {min(surplus)}, which the model has no place for.")

    def put(name: str, leaf: Any) -> Any:
        return leaf if is_fresh(name) else jnp.asarray(found[name], leaf.dtype)

    arrays, rest = eqx.partition(model, eqx.is_array)
    arrays = jax.tree.map_with_path(lambda path, leaf: put(_name(path), leaf), arrays)
    return eqx.combine(arrays, rest)


def _named(model: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree.leaves_with_path(eqx.filter(model, eqx.is_array))
    return [(_name(path), leaf) for path, leaf in leaves]


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
