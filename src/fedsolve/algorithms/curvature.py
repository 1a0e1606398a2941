"""Lipschitz constants of a client's gradient, from products with its Hessian at one point.

For a quadratic f_i they are those of ∇f_i everywhere; for logistic loss at w = 0, too, since its
Hessian is largest there. For other losses they are local.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from fedsolve.fields import Numbers, Scalar
from fedsolve.problem.client import Client
from fedsolve.types import PRNGKey, Round, Vector

Number = Float[Array, ""]
Product = Callable[[Vector], Vector]  # with a symmetric matrix
MISS = 1e-9  # the probability that `bounded` returns less than the largest |eigenvalue|
ROUNDING = 1e-3  # what is added for rounding, relative


def hessian_product(client: Client) -> Product:
    """Return the function v ↦ ∇²f_i(w) v."""
    return lambda v: jax.jvp(client.grad, (client.w,), (v,))[1]


def smoothness_of(
    client: Client,
    given: Scalar | Numbers | None,
    safe: bool,
    steps: int,
) -> Number:
    """Return r_i: as given, or the largest |eigenvalue| of the Hessian at w.

    By power iteration; if it must be `safe`, a bound on it.
    """
    if given is not None:
        known = jnp.asarray(given, client.w.dtype)
        return known[client.index] if known.ndim else known
    product, start = hessian_product(client), random_direction(client.key, client.w)
    size = (bounded if safe else estimated)(product, start, steps)
    return jnp.where(size > 0, size, 1)  # a client whose f_i is linear


def random_direction(key: PRNGKey, like: Vector) -> Vector:
    """Draw a unit vector, uniformly."""
    start = jax.random.normal(key, like.shape, like.dtype)
    return start / jnp.linalg.norm(start)


def estimated(product: Product, start: Vector, steps: int) -> Number:
    """Estimate the largest |eigenvalue| by power iteration: never more than it."""

    def power(_: Round, carry: tuple[Vector, Number]) -> tuple[Vector, Number]:
        found = product(carry[0])
        size = jnp.linalg.norm(found)
        return found / jnp.where(size > 0, size, 1), size

    return lax.fori_loop(0, steps, power, (start, jnp.zeros((), start.dtype)))[1]


def bounded(product: Product, start: Vector, steps: int) -> Number:
    """Return a bound on the largest |eigenvalue|, by 2·`steps` steps of Lanczos' method.

    With T the tridiagonal matrix of 2j steps and ξ the Ritz value of H² in span{v, H²v, …,
    H^{2(j−1)}v}, ξ ≤ ‖T‖²: for x in that span, Hx is in the span of T, so ‖Hx‖ ≤ ‖T‖ ‖x‖. By
    Kuczyński and Woźniakowski (1992, Theorem 4.2), ξ ≥ (1 − e) λ_max(H²) for a uniform start but
    for a probability of 1.648 √n exp(−(2j − 1) √e). That is `MISS` for the e of `margin`, so
    ‖H‖ ≤ ‖T‖/√(1 − e). A basis that loses its orthogonality by rounding does so only where a Ritz
    value has converged.
    """
    tiny = 1e-6 if start.dtype == jnp.float32 else 1e-14

    def step(
        carry: tuple[Vector, Vector, Number, Number], _: None
    ) -> tuple[tuple[Vector, Vector, Number, Number], tuple[Number, Number]]:
        before, now, beta, size = carry
        found = product(now) - beta * before
        alpha = jnp.vdot(found, now)
        found = found - alpha * now
        size = jnp.maximum(size, jnp.abs(alpha) + beta)
        beta = jnp.linalg.norm(found)
        beta = jnp.where(beta > tiny * size, beta, 0)  # an invariant space: what follows is 0
        after = jnp.where(beta > 0, found / jnp.where(beta > 0, beta, 1), 0)
        return (now, after, beta, size), (alpha, beta)

    zero = jnp.zeros((), start.dtype)
    first = jnp.zeros_like(start), start, zero, zero
    _, (alphas, betas) = lax.scan(step, first, length=2 * steps)
    tridiagonal = jnp.diag(alphas) + jnp.diag(betas[:-1], 1) + jnp.diag(betas[:-1], -1)
    ritz = jnp.max(jnp.abs(jnp.linalg.eigvalsh(tridiagonal)))
    return ritz * (1 + ROUNDING) * margin(len(start), steps)


def margin(size: int, steps: int) -> float:
    """Return 1/√(1 − e) of `bounded` for n = `size`; infinite for too few steps."""
    if size <= steps:
        return 1.0  # the Krylov space is everything
    error = (math.log(1.648 * math.sqrt(size) / MISS) / (2 * steps - 1)) ** 2
    return 1 / math.sqrt(1 - error) if error < 1 else math.inf


def least_steps(size: int) -> int:
    """Return the least number of steps with which `bounded` returns a finite bound."""
    return next(steps for steps in range(1, 1000) if math.isfinite(margin(size, steps)))
