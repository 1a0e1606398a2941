"""Matrix products, linear algebra and attention."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from fedsolve.torch.operators.random import drop
from fedsolve.torch.operators.table import Maybe, Number, Tensor, operator
from fedsolve.types import PRNGKey


@operator("aten.mm", "aten.bmm", "aten.matmul", "aten.mv", "aten.dot")
def product(x: Tensor, y: Tensor) -> Tensor:
    """Multiply matrices."""
    return jnp.matmul(x, y)


@operator("aten.linear")
def linear(x: Tensor, weight: Tensor, bias: Maybe = None) -> Tensor:
    """Apply a dense layer to every row."""
    found = x @ weight.T
    return found if bias is None else found + bias


@operator("aten.addmm", "aten.addmv", "aten.baddbmm")
def addmm(x: Tensor, y: Tensor, z: Tensor, beta: Number = 1, alpha: Number = 1) -> Tensor:
    """Compute beta x + alpha y z."""
    found = y @ z if alpha == 1 else alpha * (y @ z)
    if beta == 0:
        return found
    return found + (x if beta == 1 else beta * x)


@operator("aten.outer")
def outer(x: Tensor, y: Tensor) -> Tensor:
    """Multiply all elements of one vector with all of another."""
    return jnp.outer(x, y)


@operator("aten._cdist_forward")
def distances(x: Tensor, y: Tensor, p: Number, compute_mode: int | None = None) -> Tensor:
    """Compute the distances of all rows of x to all of y."""
    apart = x[..., :, None, :] - y[..., None, :, :]
    if p != 2:
        raise NotImplementedError("cdist with p other than 2")
    squares = jnp.sum(apart**2, axis=-1)
    positive = squares > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, squares, 1)), 0)


@operator("aten.linalg_inv", "aten.inverse")
def inverse(x: Tensor) -> Tensor:
    """Invert matrices."""
    return jnp.linalg.inv(x)


@operator("aten.linalg_cholesky")
def cholesky(x: Tensor, upper: bool = False) -> Tensor:
    """Factor positive definite matrices."""
    factor = jnp.linalg.cholesky(x)
    return jnp.swapaxes(factor, -1, -2) if upper else factor


@operator("aten.linalg_solve")
def solve(x: Tensor, y: Tensor, left: bool = True) -> Tensor:
    """Solve linear equations."""
    if not left:
        raise NotImplementedError("linalg.solve from the right")
    return jnp.linalg.solve(x, y)


@operator("aten.scaled_dot_product_attention", random=True)
def attention(
    key: PRNGKey | None,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    attn_mask: Maybe = None,
    dropout_p: Number = 0,
    is_causal: bool = False,
    scale: Number | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute softmax(query keysᵀ) values; a query that may attend to nothing gives 0."""
    if enable_gqa:
        repeats = query.shape[-3] // keys.shape[-3]
        keys, values = (jnp.repeat(x, repeats, axis=-3) for x in (keys, values))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = jnp.matmul(query * scale, jnp.swapaxes(keys, -1, -2))
    allowed = None
    if is_causal:
        allowed = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    elif attn_mask is not None and attn_mask.dtype == bool:
        allowed = attn_mask
    elif attn_mask is not None:
        allowed = attn_mask != -jnp.inf
        scores = scores + jnp.where(allowed, attn_mask, 0)
    if allowed is None:
        shares = jax.nn.softmax(scores, axis=-1)
    else:  # finite numbers throughout, for derivatives without NaN
        lowest = lax.stop_gradient(
            jnp.max(jnp.where(allowed, scores, -jnp.inf), axis=-1, keepdims=True)
        )
        lowest = jnp.where(jnp.isfinite(lowest), lowest, 0)
        powers = jnp.where(allowed, jnp.exp(jnp.where(allowed, scores - lowest, 0)), 0)
        totals = jnp.sum(powers, axis=-1, keepdims=True)
        shares = powers / jnp.where(totals == 0, 1, totals)
    return jnp.matmul(drop(key, shares, dropout_p), values)
