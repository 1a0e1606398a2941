"""Operators that draw random numbers; each takes a JAX key of its own."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from fedsolve.torch.operators.table import DrawsRandom, Last, Mask, Number, Sizes, Tensor, operator
from fedsolve.types import PRNGKey

if TYPE_CHECKING:  # as the operands
    Key = Any
else:
    Key = PRNGKey | None
Dtype = jnp.dtype | None


def kept(key: Key, share: float, shape: tuple[int, ...]) -> Mask:
    """Draw which elements are kept, each with the probability `share`.

    A share in 256ths takes eight random bits for each element, a quarter of what others need.
    """
    if not (share * 256).is_integer():
        return jax.random.bernoulli(key, share, shape)
    count = math.prod(shape)
    words = jax.random.bits(key, (-(-count // 4),), jnp.uint32)
    parts = lax.bitcast_convert_type(words, jnp.uint8).reshape(-1)[:count]
    return (parts < share * 256).reshape(shape)


def drop(key: Key, x: Tensor, rate: Number) -> Tensor:
    """Set elements to 0 with the probability `rate`, and scale the others up."""
    if rate == 0:
        return x
    if rate == 1:
        return jnp.zeros_like(x)
    if key is None:
        raise DrawsRandom
    return jnp.where(kept(key, float(1 - rate), x.shape), x / (1 - rate), 0)


@operator("aten.native_dropout", layout="own", random=True)
def native_dropout(
    key: Key, x: Tensor | Last, p: Number, train: bool | None = True
) -> tuple[Tensor | Last, None]:
    """Drop elements; what was kept is not returned."""
    if train is False:
        return x, None
    if isinstance(x, Last):
        return Last(drop(key, x.array, p)), None
    return drop(key, x, p), None


@operator("aten.dropout", layout="own", random=True)
def dropout(key: Key, x: Tensor | Last, p: Number, train: bool) -> Tensor | Last:
    """Drop elements."""
    return native_dropout(key, x, p, train)[0]


@operator("aten.bernoulli.default", random=True)
def bernoulli(key: PRNGKey, x: Tensor) -> Tensor:
    """Draw 1 with the probabilities x, or else 0."""
    return jax.random.uniform(key, x.shape, x.dtype) < x


@operator("aten.bernoulli.p", random=True)
def bernoulli_like(key: PRNGKey, x: Tensor, p: Number = 0.5) -> Tensor:
    """Draw 1 with one probability, or else 0, in the shape of x."""
    return jax.random.bernoulli(key, p, x.shape)


@operator("aten.rand", random=True)
def rand(key: PRNGKey, size: Sizes, dtype: Dtype = None) -> Tensor:
    """Draw from [0, 1)."""
    return jax.random.uniform(key, tuple(size), dtype or float)


@operator("aten.rand_like", random=True)
def rand_like(key: PRNGKey, x: Tensor, dtype: Dtype = None) -> Tensor:
    """Draw from [0, 1), in the shape of x."""
    return jax.random.uniform(key, x.shape, dtype or x.dtype)


@operator("aten.uniform", random=True)
def uniform(key: PRNGKey, x: Tensor, low: Number = 0, high: Number = 1) -> Tensor:
    """Draw from an interval, in the shape of x."""
    return jax.random.uniform(key, x.shape, x.dtype, low, high)


@operator("aten.randn", random=True)
def randn(key: PRNGKey, size: Sizes, dtype: Dtype = None) -> Tensor:
    """Draw from the standard normal distribution."""
    return jax.random.normal(key, tuple(size), dtype or float)


@operator("aten.randn_like", random=True)
def randn_like(key: PRNGKey, x: Tensor, dtype: Dtype = None) -> Tensor:
    """Draw from the standard normal distribution, in the shape of x."""
    return jax.random.normal(key, x.shape, dtype or x.dtype)


@operator("aten.normal_functional", random=True)
def normal(key: PRNGKey, x: Tensor, mean: Number = 0, std: Number = 1) -> Tensor:
    """Draw from a normal distribution, in the shape of x."""
    return mean + std * jax.random.normal(key, x.shape, x.dtype)


@operator("aten.exponential", random=True)
def exponential(key: PRNGKey, x: Tensor, rate: Number = 1) -> Tensor:
    """Draw from an exponential distribution, in the shape of x."""
    return jax.random.exponential(key, x.shape, x.dtype) / rate


@operator("aten.randint.default", random=True)
def randint(key: PRNGKey, high: int, size: Sizes, dtype: Dtype = None) -> Tensor:
    """Draw whole numbers below a limit."""
    return jax.random.randint(key, tuple(size), 0, high)


@operator("aten.randint.low", random=True)
def randint_between(key: PRNGKey, low: int, high: int, size: Sizes, dtype: Dtype = None) -> Tensor:
    """Draw whole numbers between limits."""
    return jax.random.randint(key, tuple(size), low, high)


@operator("aten.randint_like", random=True)
def randint_like(key: PRNGKey, x: Tensor, high: int, dtype: Dtype = None) -> Tensor:
    """Draw whole numbers below a limit, in the shape of x."""
    return jax.random.randint(key, x.shape, 0, high)


@operator("aten.randperm", random=True)
def randperm(key: PRNGKey, n: int, dtype: Dtype = None) -> Tensor:
    """Draw a permutation."""
    return jax.random.permutation(key, n)
