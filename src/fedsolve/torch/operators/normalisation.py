"""Normalisation over batches, layers and groups."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from fedsolve.torch.operators.table import Last, Maybe, Number, Sizes, Tensor, operator


def _wide(channels: Maybe, x: Tensor | Last) -> Maybe:
    """Return a number for each channel in a shape that fits images."""
    if channels is None or isinstance(x, Last):
        return channels
    return channels.reshape(-1, *[1] * (x.ndim - 2))


def _scaled(
    x: Tensor | Last, mean: Tensor, variance: Tensor, weight: Maybe, bias: Maybe, eps: Number
) -> Tensor | Last:
    """Normalise by a mean and a variance for each channel, then scale and shift."""
    scale = lax.rsqrt(variance + eps)
    scale = scale if weight is None else scale * weight
    found = (_array(x) - _wide(mean, x)) * _wide(scale, x)
    found = found if bias is None else found + _wide(bias, x)
    return Last(found) if isinstance(x, Last) else found


def _array(x: Tensor | Last) -> Tensor:
    """Return the array, in whichever layout."""
    return x.array if isinstance(x, Last) else x


@operator(
    "aten._native_batch_norm_legit_functional",
    "aten._native_batch_norm_legit.default",
    layout="own",
)
def batch_norm(
    x: Tensor | Last,
    weight: Maybe,
    bias: Maybe,
    running_mean: Maybe,
    running_var: Maybe,
    training: bool,
    momentum: Number,
    eps: Number,
) -> tuple[Tensor | Last | None, ...]:
    """Normalise over the batch, and return the new running statistics; they have no derivative."""
    if not training:
        found = _scaled(x, running_mean, running_var, weight, bias, eps)
        return found, None, None, running_mean, running_var
    array = _array(x)
    along = (0, 1, 2) if isinstance(x, Last) else (0, *range(2, array.ndim))
    mean = jnp.mean(array, along)
    variance = jnp.mean((array - _wide(mean, x)) ** 2, along)
    found = _scaled(x, mean, variance, weight, bias, eps)
    if running_mean is None or running_var is None:
        return found, None, None, None, None
    count = array.size // mean.size
    seen = lax.stop_gradient((mean, variance * (count / max(count - 1, 1))))
    moved = (
        (1 - momentum) * o + momentum * s
        for o, s in zip((running_mean, running_var), seen, strict=True)
    )
    return found, None, None, *moved


@operator("aten._native_batch_norm_legit.no_stats", layout="own")
def batch_norm_without_statistics(
    x: Tensor | Last, weight: Maybe, bias: Maybe, training: bool, momentum: Number, eps: Number
) -> tuple[Tensor | Last | None, ...]:
    """Normalise over the batch."""
    return batch_norm(x, weight, bias, None, None, True, momentum, eps)


@operator("aten._native_batch_norm_legit_no_training", layout="own")
def batch_norm_in_evaluation(
    x: Tensor | Last,
    weight: Maybe,
    bias: Maybe,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: Number,
    eps: Number,
) -> tuple[Tensor | Last | None, ...]:
    """Normalise by the running statistics."""
    return _scaled(x, running_mean, running_var, weight, bias, eps), None, None


def _normalised(x: Tensor, along: tuple[int, ...], eps: Number) -> Tensor:
    """Normalise to mean 0 and variance 1 along axes."""
    mean = jnp.mean(x, along, keepdims=True)
    variance = jnp.mean((x - mean) ** 2, along, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + eps)


@operator("aten.native_layer_norm")
def layer_norm(
    x: Tensor, normalized_shape: Sizes, weight: Maybe, bias: Maybe, eps: Number
) -> tuple[Tensor | None, ...]:
    """Normalise along the last axes."""
    found = _normalised(x, tuple(range(x.ndim - len(normalized_shape), x.ndim)), eps)
    found = found if weight is None else found * weight
    return found if bias is None else found + bias, None, None


@operator("aten.native_group_norm", layout="own")
def group_norm(
    x: Tensor | Last,
    weight: Maybe,
    bias: Maybe,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: Number,
) -> tuple[Tensor | Last | None, ...]:
    """Normalise groups of channels of each image."""
    array = _array(x)
    if isinstance(x, Last):
        parts = array.reshape(N, HxW, group, C // group)
        found = _normalised(parts, (1, 3), eps).reshape(array.shape)
    else:
        parts = array.reshape(N, group, C // group, HxW)
        found = _normalised(parts, (2, 3), eps).reshape(array.shape)
    found = found if weight is None else found * _wide(weight, x)
    found = found if bias is None else found + _wide(bias, x)
    return Last(found) if isinstance(x, Last) else found, None, None
