"""Operators that reduce, sort or accumulate along axes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.scipy import special

from fedsolve.torch.operators.table import Last, Number, Operand, Sizes, Tensor, axes, operator

Dim = int | Sizes | None


@operator("aten.sum", "aten.sum.dim_IntList")
def total(
    x: Tensor, dim: Dim = None, keepdim: bool = False, dtype: jnp.dtype | None = None
) -> Tensor:
    """Sum; whole numbers and truth values as whole numbers."""
    whole = not jnp.issubdtype(x.dtype, jnp.inexact)
    return jnp.sum(x, axes(dim, x.ndim), dtype or (int if whole else None), keepdims=keepdim)


@operator("aten.mean", layout="own")
def mean(
    x: Tensor | Last, dim: Dim = None, keepdim: bool = False, dtype: jnp.dtype | None = None
) -> Tensor:
    """Average."""
    if isinstance(x, Last) and keepdim:
        x = x.array.transpose(0, 3, 1, 2)
    if isinstance(x, Last):  # the axes that stay are in order only if channels are after the batch
        named = axes(dim, 4)
        if set(named) != {2, 3}:
            return mean(x.array.transpose(0, 3, 1, 2), dim, keepdim, dtype)
        return jnp.mean(x.array, (1, 2), dtype)
    return jnp.mean(x, axes(dim, x.ndim), dtype, keepdims=keepdim)


@operator("aten.prod")
def product(x: Tensor, dtype: jnp.dtype | None = None) -> Tensor:
    """Multiply all."""
    return jnp.prod(x, dtype=dtype)


@operator("aten.prod.dim_int")
def product_along(
    x: Tensor, dim: int, keepdim: bool = False, dtype: jnp.dtype | None = None
) -> Tensor:
    """Multiply along an axis."""
    return jnp.prod(x, axes(dim, x.ndim), dtype, keepdims=keepdim)


@operator("aten.any", "aten.any.dims")
def some(x: Tensor, dim: Dim = None, keepdim: bool = False) -> Tensor:
    """Return whether some element is not 0."""
    return jnp.any(x, axes(dim, x.ndim), keepdims=keepdim)


@operator("aten.all", "aten.all.dims")
def every(x: Tensor, dim: Dim = None, keepdim: bool = False) -> Tensor:
    """Return whether no element is 0."""
    return jnp.all(x, axes(dim, x.ndim), keepdims=keepdim)


@operator("aten.amax", "aten.max.default")
def amax(x: Tensor, dim: Dim = None, keepdim: bool = False) -> Tensor:
    """Return the largest; equal ones share the derivative."""
    return jnp.max(x, axes(dim, x.ndim), keepdims=keepdim)


@operator("aten.amin", "aten.min.default")
def amin(x: Tensor, dim: Dim = None, keepdim: bool = False) -> Tensor:
    """Return the smallest; equal ones share the derivative."""
    return jnp.min(x, axes(dim, x.ndim), keepdims=keepdim)


@operator("aten.argmax")
def argmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Return the place of the largest."""
    return jnp.argmax(x, dim, keepdims=keepdim)


@operator("aten.argmin")
def argmin(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Return the place of the smallest."""
    return jnp.argmin(x, dim, keepdims=keepdim)


def _at(x: Tensor, index: Tensor, dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
    """Return what lies at one place along an axis, and the place."""
    if x.ndim == 0:
        return x, jnp.zeros((), index.dtype)
    values = jnp.take_along_axis(x, jnp.expand_dims(index, dim), dim)
    if keepdim:
        return values, jnp.expand_dims(index, dim)
    return jnp.squeeze(values, dim), index


@operator("aten.max.dim")
def max_along(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return the largest and its place, the first of equal ones, which has the derivative."""
    return _at(x, jnp.argmax(x, dim if x.ndim else None), dim, keepdim)


@operator("aten.min.dim")
def min_along(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return the smallest and its place, the first of equal ones, which has the derivative."""
    return _at(x, jnp.argmin(x, dim if x.ndim else None), dim, keepdim)


@operator("aten.var.correction")
def variance(
    x: Tensor, dim: Dim = None, correction: Number | None = 1, keepdim: bool = False
) -> Tensor:
    """Compute the variance."""
    ddof = 1 if correction is None else int(correction)
    return jnp.var(x, axes(dim, x.ndim), ddof=ddof, keepdims=keepdim)


@operator("aten.var_mean.correction")
def variance_and_mean(
    x: Tensor, dim: Dim = None, correction: Number | None = 1, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute the variance and the mean."""
    return variance(x, dim, correction, keepdim), mean(x, dim, keepdim)


@operator("aten.std.correction")
def deviation(
    x: Tensor, dim: Dim = None, correction: Number | None = 1, keepdim: bool = False
) -> Tensor:
    """Compute the standard deviation, whose derivative is 0 where it is 0."""
    return _root(variance(x, dim, correction, keepdim))


def _root(squares: Tensor) -> Tensor:
    """Compute the square root, with derivative 0 at 0."""
    positive = squares > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, squares, 1)), squares)


@operator("aten.linalg_vector_norm")
def vector_norm(
    x: Tensor,
    ord: Number = 2,
    dim: Dim = None,
    keepdim: bool = False,
    dtype: jnp.dtype | None = None,
) -> Tensor:
    """Compute a norm, whose derivative is 0 at 0."""
    x, along = x if dtype is None else x.astype(dtype), axes(dim, x.ndim)
    if ord == 2:
        return _root(jnp.sum(x * x, along, keepdims=keepdim))
    if ord == 1:
        return jnp.sum(jnp.abs(x), along, keepdims=keepdim)
    if ord == jnp.inf:
        return jnp.max(jnp.abs(x), along, keepdims=keepdim)
    if ord == -jnp.inf:
        return jnp.min(jnp.abs(x), along, keepdims=keepdim)
    if ord == 0:
        return jnp.sum(x != 0, along, keepdims=keepdim)
    powers = jnp.sum(jnp.where(x == 0, 0, jnp.abs(jnp.where(x == 0, 1, x)) ** ord), along)
    positive = powers > 0
    norm = jnp.where(positive, jnp.where(positive, powers, 1) ** (1 / ord), powers)
    return jnp.expand_dims(norm, along) if keepdim else norm


@operator("aten.logsumexp")
def logsumexp(x: Tensor, dim: Dim, keepdim: bool = False) -> Tensor:
    """Compute log Σ exp."""
    return special.logsumexp(x, axes(dim, x.ndim), keepdims=keepdim)


@operator("aten._softmax")
def softmax(x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    """Compute the softmax."""
    return jax.nn.softmax(x, dim) if x.ndim else jnp.ones_like(x)


@operator("aten._log_softmax")
def log_softmax(x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    """Compute the logarithm of the softmax."""
    return jax.nn.log_softmax(x, dim) if x.ndim else jnp.zeros_like(x)


@operator("aten.cumsum")
def cumsum(x: Tensor, dim: int, dtype: jnp.dtype | None = None) -> Tensor:
    """Sum up along an axis."""
    whole = not jnp.issubdtype(x.dtype, jnp.inexact)
    return jnp.cumsum(x, dim, dtype or (int if whole else None)) if x.ndim else x


@operator("aten.cumprod")
def cumprod(x: Tensor, dim: int, dtype: jnp.dtype | None = None) -> Tensor:
    """Multiply up along an axis."""
    return jnp.cumprod(x, dim, dtype) if x.ndim else x


@operator("aten.logcumsumexp")
def logcumsumexp(x: Tensor, dim: int) -> Tensor:
    """Compute log Σ exp of what lies up to each place of an axis."""
    return jax.lax.cumlogsumexp(x, dim % x.ndim) if x.ndim else x


@operator("aten.sort", "aten.sort.stable")
def sort(
    x: Tensor, *options: Operand | None, dim: int = -1, descending: bool = False, **stable: bool
) -> tuple[Tensor, Tensor]:
    """Sort along an axis, equal ones in their order; return where they were, too."""
    # overloads: (x, dim, descending) and (x, stable, dim, descending), the first one by keyword
    if options and not isinstance(options[0], bool | None):
        dim, *rest = (int(options[0]), *options[1:])
        descending = bool(rest[0]) if rest else descending
    if x.ndim == 0:
        return x, jnp.zeros((), int)
    order = jnp.argsort(x, dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, order, dim), order


@operator("aten.topk")
def topk(
    x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the k largest or smallest along an axis, and where they are."""
    order = jnp.argsort(x, dim, stable=True, descending=largest)
    chosen = jax.lax.slice_in_dim(order, 0, k, axis=dim % x.ndim)
    return jnp.take_along_axis(x, chosen, dim), chosen


@operator("aten.median.dim")
def median(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return the lower median along an axis, and its place."""
    order = jnp.argsort(x, dim, stable=True)
    return _at(x, jnp.take(order, (x.shape[dim] - 1) // 2, dim), dim, keepdim)
