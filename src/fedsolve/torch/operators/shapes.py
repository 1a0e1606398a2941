"""Operators that make, rearrange, index and scatter tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Shaped

from fedsolve.torch.operators.table import Maybe, Number, Operand, Sizes, Tensor, operator

Places = Int[jax.Array, "..."]


@operator("aten.view", "aten._unsafe_view", "aten.reshape")
def view(x: Tensor, size: Sizes) -> Tensor:
    """Change the shape."""
    return x.reshape(tuple(size))


@operator("aten.permute")
def permute(x: Tensor, dims: Sizes) -> Tensor:
    """Permute the axes."""
    return x.transpose([dim % x.ndim for dim in dims])


@operator("aten.transpose.int")
def transpose(x: Tensor, dim0: int, dim1: int) -> Tensor:
    """Swap two axes."""
    return jnp.swapaxes(x, dim0, dim1) if x.ndim else x


@operator("aten.t")
def matrix_transpose(x: Tensor) -> Tensor:
    """Transpose a matrix."""
    return x.T


@operator("aten.expand")
def expand(x: Tensor, size: Sizes, implicit: bool = False) -> Tensor:
    """Broadcast; -1 keeps an axis."""
    new = len(size) - x.ndim
    shape = [x.shape[i - new] if n == -1 else n for i, n in enumerate(size)]
    return jnp.broadcast_to(x, shape)


@operator("aten.unsqueeze")
def unsqueeze(x: Tensor, dim: int) -> Tensor:
    """Add an axis of length 1."""
    return jnp.expand_dims(x, dim)


@operator("aten.squeeze")
def squeeze(x: Tensor, dim: int | Sizes | None = None) -> Tensor:
    """Remove axes of length 1."""
    named = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    return jnp.squeeze(x, tuple({d % x.ndim for d in named if x.ndim and x.shape[d] == 1}))


@operator("aten.repeat")
def repeat(x: Tensor, repeats: Sizes) -> Tensor:
    """Repeat the whole."""
    return jnp.tile(x, tuple(repeats))


@operator("aten.cat")
def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate; an empty vector counts for nothing."""
    given = [x for x in tensors if x.shape != (0,)] or list(tensors)
    return jnp.concatenate(given, dim)


@operator("aten.stack")
def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Put tensors side by side on a new axis."""
    return jnp.stack(list(tensors), dim)


@operator("aten.split_with_sizes")
def split_with_sizes(x: Tensor, split_sizes: Sizes, dim: int = 0) -> list[Tensor]:
    """Split into parts of these lengths."""
    return jnp.split(x, list(np.cumsum(split_sizes)[:-1]), dim)


@operator("aten.split.Tensor")
def split(x: Tensor, split_size: int, dim: int = 0) -> list[Tensor]:
    """Split into parts of one length."""
    return jnp.split(x, list(range(split_size, x.shape[dim], split_size)), dim)


@operator("aten.unbind")
def unbind(x: Tensor, dim: int = 0) -> list[Tensor]:
    """Return the parts along an axis."""
    return [jnp.take(x, i, dim) for i in range(x.shape[dim])]


def _bounds(length: int, start: int | None, end: int | None, step: int) -> slice:
    """Return the part of an axis that PyTorch means."""
    return slice(*slice(start, end, step).indices(length))


@operator("aten.slice.Tensor")
def sliced(
    x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """Return a part along an axis."""
    dim %= x.ndim
    return x[(slice(None),) * dim + (_bounds(x.shape[dim], start, end, step),)]


@operator("aten.slice_scatter")
def slice_scatter(
    x: Tensor,
    source: Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Tensor:
    """Replace a part along an axis."""
    dim %= x.ndim
    return x.at[(slice(None),) * dim + (_bounds(x.shape[dim], start, end, step),)].set(source)


@operator("aten.select.int")
def select(x: Tensor, dim: int, index: int) -> Tensor:
    """Return what lies at one place of an axis."""
    return jax.lax.index_in_dim(x, index % x.shape[dim], dim % x.ndim, keepdims=False)


@operator("aten.select_scatter")
def select_scatter(x: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    """Replace what lies at one place of an axis."""
    return x.at[(slice(None),) * (dim % x.ndim) + (index,)].set(source)


@operator("aten.flip")
def flip(x: Tensor, dims: Sizes) -> Tensor:
    """Reverse axes."""
    return jnp.flip(x, tuple(dims))


@operator("aten.roll")
def roll(x: Tensor, shifts: Sizes, dims: Sizes = ()) -> Tensor:
    """Shift cyclically."""
    return jnp.roll(x, tuple(shifts), tuple(dims)) if dims else jnp.roll(x, shifts[0])


@operator("aten.diagonal")
def diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """Return a diagonal."""
    return jnp.diagonal(x, offset, dim1, dim2)


@operator("aten.tril")
def tril(x: Tensor, diagonal: int = 0) -> Tensor:
    """Keep what lies on and below a diagonal."""
    return jnp.tril(x, diagonal)


@operator("aten.triu")
def triu(x: Tensor, diagonal: int = 0) -> Tensor:
    """Keep what lies on and above a diagonal."""
    return jnp.triu(x, diagonal)


@operator("aten.constant_pad_nd")
def constant_pad_nd(x: Tensor, pad: Sizes, value: Number = 0) -> Tensor:
    """Pad, from the last axis on, by a value; cut where the padding is negative."""
    pairs = [(pad[i], pad[i + 1], 0) for i in range(0, len(pad), 2)][::-1]
    config = [(0, 0, 0)] * (x.ndim - len(pairs)) + pairs
    return jax.lax.pad(x, jnp.asarray(value, x.dtype), config)


def _padded(x: Tensor, padding: Sizes, mode: str) -> Tensor:
    """Pad, from the last axis on, by what is there."""
    pairs = [(padding[i], padding[i + 1]) for i in range(0, len(padding), 2)][::-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - len(pairs)) + pairs, mode=mode)


@operator("aten.reflection_pad1d", "aten.reflection_pad2d", "aten.reflection_pad3d")
def reflection_pad(x: Tensor, padding: Sizes) -> Tensor:
    """Pad by reflection."""
    return _padded(x, padding, "reflect")


@operator("aten.replication_pad1d", "aten.replication_pad2d", "aten.replication_pad3d")
def replication_pad(x: Tensor, padding: Sizes) -> Tensor:
    """Pad by the border."""
    return _padded(x, padding, "edge")


# Making tensors


@operator("aten.full", "aten.new_full")
def full(*given: Tensor | Sizes | Number, dtype: jnp.dtype | None = None) -> Tensor:
    """Return a tensor of one value."""
    size, value = given[-2:]
    return jnp.full(tuple(size), value, dtype)


@operator("aten.full_like")
def full_like(x: Tensor, fill_value: Number, dtype: jnp.dtype | None = None) -> Tensor:
    """Return a tensor of one value, in the shape of another."""
    return jnp.full(x.shape, fill_value, dtype or x.dtype)


@operator("aten.zeros", "aten.empty", "aten.empty_strided")
def zeros(size: Sizes, *strides: Sizes, dtype: jnp.dtype | None = None) -> Tensor:
    """Return zeros."""
    return jnp.zeros(tuple(size), dtype)


@operator("aten.ones")
def ones(size: Sizes, dtype: jnp.dtype | None = None) -> Tensor:
    """Return ones."""
    return jnp.ones(tuple(size), dtype)


@operator("aten.zeros_like", "aten.empty_like")
def zeros_like(x: Tensor, dtype: jnp.dtype | None = None) -> Tensor:
    """Return zeros in the shape of another tensor."""
    return jnp.zeros(x.shape, dtype or x.dtype)


@operator("aten.ones_like")
def ones_like(x: Tensor, dtype: jnp.dtype | None = None) -> Tensor:
    """Return ones in the shape of another tensor."""
    return jnp.ones(x.shape, dtype or x.dtype)


@operator("aten.fill")
def fill(x: Tensor, value: Operand) -> Tensor:
    """Return a tensor of one value, in the shape of another."""
    return jnp.full(x.shape, value, x.dtype)


@operator("aten.scalar_tensor")
def scalar_tensor(value: Number, dtype: jnp.dtype | None = None) -> Tensor:
    """Return a number as a tensor."""
    return jnp.asarray(value, dtype)


@operator("aten.arange.default")
def arange(end: Number, dtype: jnp.dtype | None = None) -> Tensor:
    """Return numbers from 0."""
    return jnp.arange(end, dtype=dtype)


@operator("aten.arange.start", "aten.arange.start_step")
def arange_from(
    start: Number, end: Number, step: Number = 1, dtype: jnp.dtype | None = None
) -> Tensor:
    """Return numbers at equal distances."""
    return jnp.arange(start, end, step, dtype=dtype)


@operator("aten.linspace")
def linspace(start: Number, end: Number, steps: int, dtype: jnp.dtype | None = None) -> Tensor:
    """Return a number of numbers at equal distances."""
    return jnp.linspace(start, end, steps, dtype=dtype)


# Indexing


def _index(indices: Sequence[Maybe]) -> tuple[Shaped[jax.Array, "..."] | slice, ...]:
    """Return an index; where there is no tensor, an axis stays whole."""
    return tuple(slice(None) if index is None else index for index in indices)


@operator("aten.index.Tensor")
def index(x: Tensor, indices: Sequence[Maybe]) -> Tensor:
    """Return what lies at some places."""
    return x.at[_index(indices)].get(mode="fill")


@operator("aten.index_put")
def index_put(
    x: Tensor, indices: Sequence[Maybe], values: Tensor, accumulate: bool = False
) -> Tensor:
    """Replace, or add to, what lies at some places."""
    if (
        len(indices) == 1
        and indices[0] is not None
        and indices[0].dtype == bool
        and values.size == 1
    ):
        mask = indices[0].reshape(indices[0].shape + (1,) * (x.ndim - indices[0].ndim))
        return jnp.where(mask, x + values if accumulate else values.reshape(()), x)
    place = x.at[_index(indices)]
    return place.add(values) if accumulate else place.set(values)


@operator("aten.index_select")
def index_select(x: Tensor, dim: int, index: Places) -> Tensor:
    """Return what lies at some places of an axis."""
    return jnp.take(x, index.reshape(-1), dim, mode="fill") if x.ndim else x


@operator("aten.embedding")
def embedding(
    weight: Tensor,
    indices: Places,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Return rows of a table; the padding's row has no derivative."""
    if scale_grad_by_freq:
        raise NotImplementedError("an embedding with scale_grad_by_freq=True")
    if padding_idx >= 0:
        fixed = (jnp.arange(len(weight)) == padding_idx)[:, None]
        weight = jnp.where(fixed, jax.lax.stop_gradient(weight), weight)
    return weight.at[indices].get(mode="fill")


def _grid(x: Tensor, dim: int, index: Places) -> tuple[tuple[int, ...], list[Places]]:
    """Return the shape of `index`, and for each of its places the place of `x` along all axes."""
    grid = list(jnp.meshgrid(*(jnp.arange(n) for n in index.shape), indexing="ij", sparse=True))
    grid[dim % max(x.ndim, 1)] = index
    return index.shape, grid


@operator("aten.gather")
def gather(x: Tensor, dim: int, index: Places, sparse_grad: bool = False) -> Tensor:
    """Return, for each place of `index`, what lies there along an axis."""
    if x.ndim == 0:
        return jnp.broadcast_to(x, index.shape)
    _, grid = _grid(x, dim, index)
    return x.at[tuple(grid)].get(mode="fill")


@operator("aten.scatter.value", "aten.scatter.src")
def scatter(x: Tensor, dim: int, index: Places, source: Operand) -> Tensor:
    """Replace what lies at some places along an axis."""
    shape, grid = _grid(x, dim, index)
    return x.at[tuple(grid)].set(_part(source, shape))


@operator("aten.scatter_add")
def scatter_add(x: Tensor, dim: int, index: Places, source: Operand) -> Tensor:
    """Add to what lies at some places along an axis."""
    shape, grid = _grid(x, dim, index)
    return x.at[tuple(grid)].add(_part(source, shape))


@operator("aten.scatter_reduce.two")
def scatter_reduce(
    x: Tensor, dim: int, index: Places, source: Tensor, reduce: str, include_self: bool = True
) -> Tensor:
    """Sum, multiply or take the extreme with what lies at some places along an axis."""
    if not include_self or reduce == "mean":
        raise NotImplementedError(f"scatter_reduce of {reduce}, include_self={include_self}")
    shape, grid = _grid(x, dim, index)
    name = {"sum": "add", "prod": "multiply", "amax": "max", "amin": "min"}[reduce]
    return getattr(x.at[tuple(grid)], name)(_part(source, shape))


def _part(source: Operand, shape: Sizes) -> Operand:
    """Return the part of a source that an index of this shape uses."""
    if not isinstance(source, jax.Array):
        return source
    return source[tuple(slice(n) for n in shape)]


@operator("aten.bucketize.Tensor")
def bucketize(
    x: Tensor, boundaries: Tensor, out_int32: bool = False, right: bool = False
) -> Tensor:
    """Return the interval of each number."""
    return jnp.searchsorted(boundaries, x, "right" if right else "left")


@operator("aten.as_strided")
def as_strided(x: Tensor, size: Sizes, stride: Sizes, storage_offset: int | None = None) -> Tensor:
    """Return elements by their place in memory, that of a tensor without gaps."""
    place = np.full((), storage_offset or 0)
    for length, step in zip(size, stride, strict=True):
        place = place[..., None] + step * np.arange(length)
    if place.size and place.max() >= math.prod(x.shape):
        raise NotImplementedError("as_strided beyond its tensor")
    return x.reshape(-1)[place]


@operator("aten.one_hot")
def one_hot(x: Places, num_classes: int = -1) -> Tensor:
    """Return rows that are 1 at one place."""
    if num_classes < 0:
        raise NotImplementedError("one_hot without num_classes, which depends on values")
    return (x[..., None] == jnp.arange(num_classes)).astype(int)
