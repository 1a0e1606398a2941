"""Convolutions, pooling and resizing.

Two-dimensional ones keep images with their channels last (`Last`). On a CPU, convolutions are
products with all neighbourhoods (`fedsolve.models.convolution`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedsolve.models.convolution import convolve2d, max_pool2d
from fedsolve.torch.operators.table import (
    Last,
    Maybe,
    Number,
    Sizes,
    Tensor,
    first,
    last,
    operator,
    pair,
)


@operator("aten.convolution", layout="own")
def convolution(
    x: Tensor | Last,
    weight: Tensor,
    bias: Maybe,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
) -> Tensor | Last:
    """Convolve along all axes after those of batch and channels."""
    count = weight.ndim - 2
    stride, padding, dilation = (pair(given, count) for given in (stride, padding, dilation))
    output_padding = pair(output_padding, count)
    if transposed:
        found = _transposed(first(x), weight, stride, padding, dilation, output_padding, groups)
    elif count == 2:
        maps = _convolved(last(x), weight, stride, padding, dilation, groups)
        return Last(maps if bias is None else maps + bias)
    elif count == 1:  # images of height 1
        wide = first(x)[:, :, None].transpose(0, 2, 3, 1)
        filters = weight[:, :, None]
        maps = _convolved(wide, filters, (1, *stride), (0, *padding), (1, *dilation), groups)
        found = maps[:, 0].transpose(0, 2, 1)
    else:
        found = lax.conv_general_dilated(
            first(x),
            weight,
            stride,
            [(p, p) for p in padding],
            rhs_dilation=dilation,
            feature_group_count=groups,
        )
    return found if bias is None else found + bias.reshape(-1, *[1] * count)


def _convolved(
    maps: Tensor, weight: Tensor, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int
) -> Tensor:
    """Convolve images, by the method that is faster on this device."""
    around = [(p, p) for p in padding]
    if jax.default_backend() == "cpu":
        return convolve2d(maps, weight, stride, around, dilation, groups)
    return lax.conv_general_dilated(
        maps,
        weight,
        stride,
        around,
        rhs_dilation=dilation,
        dimension_numbers=("NHWC", "OIHW", "NHWC"),
        feature_group_count=groups,
    )


def _transposed(
    x: Tensor,
    weight: Tensor,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    output_padding: Sizes,
    groups: int,
) -> Tensor:
    """Apply the transpose of a convolution: a convolution of x with gaps by the mirrored filter."""
    inside, outside, *size = weight.shape
    parts = weight.reshape(groups, inside // groups, outside, *size)
    filters = jnp.flip(jnp.swapaxes(parts, 1, 2), tuple(range(3, parts.ndim)))
    reach = [d * (n - 1) for d, n in zip(dilation, size, strict=True)]
    return lax.conv_general_dilated(
        x,
        filters.reshape(groups * outside, inside // groups, *size),
        (1,) * len(size),
        [(r - p, r - p + o) for r, p, o in zip(reach, padding, output_padding, strict=True)],
        lhs_dilation=stride,
        rhs_dilation=dilation,
        feature_group_count=groups,
    )


def _windows(
    maps: Tensor,
    kernel: Sizes,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    outside: Number,
    ceil_mode: bool,
) -> list[Tensor]:
    """Return, for each place in a window, what lies there in all windows."""
    pads, lasts = [], []
    for n, k, s, p, d in zip(maps.shape[1:-1], kernel, stride, padding, dilation, strict=True):
        span = n + 2 * p - d * (k - 1) - 1
        count = (-(-span // s) if ceil_mode else span // s) + 1
        if ceil_mode and (count - 1) * s >= n + p:  # a window must start inside
            count -= 1
        lasts.append((count - 1) * s + 1)
        pads.append((p, max((count - 1) * s + d * (k - 1) + 1 - n - p, 0), 0))
    config = [(0, 0, 0), *pads, (0, 0, 0)]
    wide = lax.pad(maps, jnp.asarray(outside, maps.dtype), config)
    found = []
    for place in np.ndindex(*kernel):
        starts = [i * d for i, d in zip(place, dilation, strict=True)]
        cut = [slice(a, a + b, s) for a, b, s in zip(starts, lasts, stride, strict=True)]
        found.append(wide[(slice(None), *cut)])
    return found


def _pooled(x: Tensor | Last, count: int, pool: Callable[[Tensor], Tensor]) -> Tensor | Last:
    """Apply a function of maps with channels last to a batch of images, or to one image."""
    if isinstance(x, Last) or (count == 2 and x.ndim == 4):
        return Last(pool(last(x)))
    batch = x.ndim == count + 2
    maps = jnp.moveaxis(x if batch else x[None], 1, -1)
    found = jnp.moveaxis(pool(maps), -1, 1)
    return found if batch else found[0]


@operator("aten.max_pool1d", "aten.max_pool2d", "aten.max_pool3d", layout="own")
def max_pool(
    x: Tensor | Last,
    kernel_size: Sizes,
    stride: Sizes = (),
    padding: Sizes = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
) -> Tensor | Last:
    """Return the largest in each window; the first of equal ones has the derivative."""
    count = len(kernel_size) if len(kernel_size) > 1 else _count(x)
    kernel = pair(kernel_size, count)
    window = kernel, pair(stride or kernel, count), pair(padding, count), pair(dilation, count)

    def larger(a: Tensor, b: Tensor) -> Tensor:
        return jnp.where((b > a) | (b != b), b, a)

    def pool(maps: Tensor) -> Tensor:
        if count == 2 and not ceil_mode and jnp.issubdtype(maps.dtype, jnp.inexact):
            return max_pool2d(maps, kernel, window[1], [(p, p) for p in window[2]], window[3])
        lowest = -jnp.inf if jnp.issubdtype(maps.dtype, jnp.inexact) else jnp.iinfo(maps.dtype).min
        return functools.reduce(larger, _windows(maps, *window, lowest, ceil_mode))

    return _pooled(x, count, pool)


def _count(x: Tensor | Last) -> int:
    """Return the number of axes of a batch of images, besides those of batch and channels."""
    return len(x.shape) - 2


@operator("aten.avg_pool1d", "aten.avg_pool2d", "aten.avg_pool3d", layout="own")
def avg_pool(
    x: Tensor | Last,
    kernel_size: Sizes,
    stride: Sizes = (),
    padding: Sizes = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor | Last:
    """Average over each window."""
    count = len(kernel_size) if len(kernel_size) > 1 else _count(x)
    kernel = pair(kernel_size, count)
    window = kernel, pair(stride or kernel, count), pair(padding, count), (1,) * count

    def pool(maps: Tensor) -> Tensor:
        totals = sum(_windows(maps, *window, 0, ceil_mode))
        if divisor_override:
            return totals / divisor_override
        ones = jnp.ones((1, *maps.shape[1:-1], 1), maps.dtype)
        if count_include_pad and not ceil_mode:
            return totals / np.prod(kernel)
        if count_include_pad:  # padding counts, what ceil_mode adds does not
            ones = jnp.pad(ones, [(0, 0), *((p, p) for p in window[2]), (0, 0)], constant_values=1)
            inner = kernel, window[1], (0,) * count, (1,) * count
            return totals / sum(_windows(ones, *inner, 0, ceil_mode))
        return totals / sum(_windows(ones, *window, 0, ceil_mode))

    return _pooled(x, count, pool)


@operator(
    "aten.adaptive_avg_pool1d",
    "aten.adaptive_avg_pool2d",
    "aten._adaptive_avg_pool2d",
    "aten._adaptive_avg_pool3d",
    layout="own",
)
def adaptive_avg_pool(x: Tensor | Last, output_size: Sizes) -> Tensor | Last:
    """Average over windows that divide each axis into this number of parts."""

    def pool(maps: Tensor) -> Tensor:
        for axis, parts in enumerate(output_size, start=1):
            maps = jnp.moveaxis(
                jnp.tensordot(maps, _shares(maps, axis, parts), (axis, 0)), -1, axis
            )
        return maps

    return _pooled(x, len(output_size), pool)


def _shares(maps: Tensor, axis: int, parts: int) -> Tensor:
    """Return the matrix whose columns average over PyTorch's windows of an axis."""
    length = maps.shape[axis]
    shares = np.zeros((length, parts))
    for i in range(parts):
        start, end = i * length // parts, -(-(i + 1) * length // parts)
        shares[start:end, i] = 1 / (end - start)
    return jnp.asarray(shares, maps.dtype)


@operator("aten.upsample_nearest1d.vec", "aten.upsample_nearest2d.vec", layout="first")
@operator("aten.upsample_nearest3d.vec", layout="first")
def upsample_nearest(
    x: Tensor, output_size: Sizes | None, scale_factors: list[float] | None = None
) -> Tensor:
    """Resize by the nearest pixel."""
    for axis in range(2, x.ndim):
        length, scale = x.shape[axis], scale_factors[axis - 2] if scale_factors else None
        parts = output_size[axis - 2] if output_size else int(length * scale)
        step = length / parts if scale is None else 1 / scale
        place = np.minimum(np.floor(np.arange(parts) * np.float32(step)), length - 1).astype(int)
        x = jnp.take(x, place, axis)
    return x


@operator("aten.upsample_bilinear2d.vec", layout="first")
def upsample_bilinear(
    x: Tensor,
    output_size: Sizes | None,
    align_corners: bool,
    scale_factors: list[float] | None = None,
) -> Tensor:
    """Resize by linear interpolation along both axes."""
    for axis in (2, 3):
        length, scale = x.shape[axis], scale_factors[axis - 2] if scale_factors else None
        parts = output_size[axis - 2] if output_size else int(length * scale)
        if align_corners:
            place = np.arange(parts) * ((length - 1) / max(parts - 1, 1))
        else:
            step = length / parts if scale is None else 1 / scale
            place = np.maximum((np.arange(parts) + 0.5) * step - 0.5, 0)
        low = np.minimum(place.astype(int), length - 1)
        high = np.minimum(low + 1, length - 1)
        share = jnp.asarray(place - low, x.dtype).reshape(-1, *[1] * (3 - axis))
        x = jnp.take(x, low, axis) * (1 - share) + jnp.take(x, high, axis) * share
    return x
