"""Convolutions and pooling as matrix products and slices, for CPUs and for weights per client.

XLA's own convolution is slow on a CPU where each client has its own weights (under `jax.vmap` over
both images and weights). The same sum is one matrix product of the neighbourhoods of all pixels,
side by side, with the weights; its gradients are matrix products, too. Neighbourhoods are up to
kernel-size times as large as the images, so a large batch is processed in chunks that fit into the
processor's cache, and its backward pass makes them again in place of storing them.

Images are (batch, height, width, channels), weights (out, in / groups, height, width).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

Maps = Float[Array, "_ _ _ _"]  # batch, height, width, channels
Weight = Float[Array, "_ _ _ _"]  # out, in / groups, height, width
Pair = tuple[int, int]
Padding = tuple[Pair, Pair]
Window = tuple[Pair, Pair, Padding, Pair]  # size, stride, padding, dilation

NONE: Padding = ((0, 0), (0, 0))
# Bytes of neighbourhoods made at once. Forward and backward on 32 images, one core: with 64
# channels on 32×32 pixels 112 ms at once (75 MB), 57 ms by 2 images (5 MB), 60 ms by one; with 256
# on 8×8 pixels 38 ms at once (19 MB), 39 ms by 4 images (2 MB), 43 ms by one (2026-11).
CHUNK = 2**23


def convolve2d(
    maps: Maps,
    weight: Weight,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[Sequence[int]] = NONE,
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> Maps:
    """Convolve a batch of maps (cross-correlation, as in PyTorch) by matrix products.

    Args:
        maps: The maps, channels last.
        weight: The filters, of shape (out, in / groups, height, width).
        stride: The steps down and right.
        padding: The zeros ((above, below), (left, right)).
        dilation: The distances between a filter's pixels, down and right.
        groups: The number of groups of channels that are convolved separately.

    Returns:
        Maps with `out` channels.
    """
    window = _window(weight.shape[2:], stride, padding, dilation)
    size = _chunk(maps, window)
    if size == len(maps):
        return _products(maps, weight, window, groups)
    return _by_chunks(window, groups, size, maps, weight)


def max_pool2d(
    maps: Maps,
    size: Sequence[int],
    stride: Sequence[int] | None = None,
    padding: Sequence[Sequence[int]] = NONE,
    dilation: Sequence[int] = (1, 1),
) -> Maps:
    """Return the maxima of windows; the gradient goes to the first maximum, as in PyTorch.

    Args:
        maps: The maps, channels last.
        size: Height and width of a window.
        stride: The steps down and right; by default the size.
        padding: How far windows may reach beyond the maps, ((above, below), (left, right)).
        dilation: The distances between a window's pixels.

    Returns:
        One maximum for each window and channel.
    """
    return _maxima(_window(size, size if stride is None else stride, padding, dilation), maps)


def sum_pool2d(
    maps: Maps,
    size: Sequence[int],
    stride: Sequence[int] | None = None,
    padding: Sequence[Sequence[int]] = NONE,
) -> Maps:
    """Return the sums over windows, with zeros beyond the maps; arguments as for `max_pool2d`."""
    window = _window(size, size if stride is None else stride, padding, (1, 1))
    return functools.reduce(jnp.add, _shifted(maps, window, 0))


def _window(
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[Sequence[int]],
    dilation: Sequence[int],
) -> Window:
    (a, b), (c, d), (e, f) = size, stride, dilation
    (top, bottom), (left, right) = padding
    return (a, b), (c, d), ((top, bottom), (left, right)), (e, f)


def _shifted(maps: Maps, window: Window, fill: float | int) -> list[Maps]:
    """Return for each pixel of a window the maps of what all windows have there."""
    (down, right), (steps, rights), padding, (dilate, dilates) = window
    if any(map(any, padding)):
        maps = jnp.pad(maps, ((0, 0), *padding, (0, 0)), constant_values=fill)
    last = [
        length - (size - 1) * between
        for length, size, between in zip(maps.shape[1:3], window[0], window[3], strict=True)
    ]
    return [
        maps[:, y : y + last[0] : steps, x : x + last[1] : rights]
        for y in range(0, down * dilate, dilate)
        for x in range(0, right * dilates, dilates)
    ]


def _products(maps: Maps, weight: Weight, window: Window, groups: int) -> Maps:
    """Convolve by one product of the neighbourhoods of all pixels with the weights."""
    around, (out, channels) = _shifted(maps, window, 0), weight.shape[:2]
    if groups == 1:
        rows = jnp.concatenate(around, axis=-1)
        return rows @ weight.transpose(2, 3, 1, 0).reshape(-1, out)
    taps = weight.reshape(groups, out // groups, channels, -1)
    if channels == 1:  # each filter sees one channel: no product is worth it
        terms = [near[..., None] * taps[:, :, 0, i] for i, near in enumerate(around)]
        found = functools.reduce(jnp.add, terms)
    else:
        rows = jnp.stack([near.reshape(*near.shape[:3], groups, channels) for near in around], -1)
        found = jnp.einsum("bhwgct,goct->bhwgo", rows, taps)
    return found.reshape(*found.shape[:3], out)


def _chunk(maps: Maps, window: Window) -> int:
    """Return how many images' neighbourhoods fit: a divisor of their number."""
    (down, right), (steps, rights), *_ = window
    _, height, width, channels = maps.shape
    pixels = math.ceil(height / steps) * math.ceil(width / rights)
    each = pixels * channels * down * right * maps.dtype.itemsize
    most = max(CHUNK // max(each, 1), 1)
    return max(size for size in range(1, len(maps) + 1) if len(maps) % size == 0 and size <= most)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _by_chunks(window: Window, groups: int, size: int, maps: Maps, weight: Weight) -> Maps:
    found = lax.map(lambda some: _products(some, weight, window, groups), _cut(maps, size))
    return found.reshape(-1, *found.shape[2:])


def _forward(
    window: Window, groups: int, size: int, maps: Maps, weight: Weight
) -> tuple[Maps, tuple[Maps, Weight]]:
    return _by_chunks(window, groups, size, maps, weight), (maps, weight)


def _backward(
    window: Window, groups: int, size: int, kept: tuple[Maps, Weight], slope: Maps
) -> tuple[Maps, Weight]:
    maps, weight = kept

    def one(total: Weight, parts: tuple[Maps, Maps]) -> tuple[Weight, Maps]:
        some, own = parts
        _, back = jax.vjp(
            lambda maps, weight: _products(maps, weight, window, groups), some, weight
        )
        to_maps, to_weight = back(own)
        return total + to_weight, to_maps

    parts = _cut(maps, size), _cut(slope, size)
    to_weight, to_maps = lax.scan(one, jnp.zeros_like(weight), parts)
    return to_maps.reshape(maps.shape), to_weight


_by_chunks.defvjp(_forward, _backward)


def _cut(maps: Maps, size: int) -> Float[Array, "_ size _ _ _"]:
    return maps.reshape(-1, size, *maps.shape[1:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _maxima(window: Window, maps: Maps) -> Maps:
    return functools.reduce(jnp.maximum, _shifted(maps, window, -jnp.inf))


def _maxima_forward(window: Window, maps: Maps) -> tuple[Maps, tuple[Maps, Maps]]:
    found = functools.reduce(jnp.maximum, _shifted(maps, window, -jnp.inf))
    return found, (maps, found)


def _maxima_backward(window: Window, kept: tuple[Maps, Maps], slope: Maps) -> tuple[Maps]:
    maps, most = kept
    around, back = jax.vjp(lambda maps: _shifted(maps, window, -jnp.inf), maps)
    free, parts = jnp.ones(most.shape, bool), []
    for near in around:
        first = (near == most) & free
        parts.append(jnp.where(first, slope, 0))
        free &= ~first
    size, stride, padding, dilation = window
    height, width = maps.shape[1] // size[0] * size[0], maps.shape[2] // size[1] * size[1]
    if stride == size and padding == NONE and dilation == (1, 1):  # windows side by side
        grid = jnp.stack(parts).reshape(*size, *most.shape).transpose(2, 3, 0, 4, 1, 5)
        whole = grid.reshape(len(maps), height, width, maps.shape[-1])
        rest = maps.shape[1] - height, maps.shape[2] - width
        return (jnp.pad(whole, ((0, 0), (0, rest[0]), (0, rest[1]), (0, 0))),)
    return back(parts)


_maxima.defvjp(_maxima_forward, _maxima_backward)
