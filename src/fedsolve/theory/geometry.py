"""The geometry behind oscillations (FedSGM, section 3.2 and appendix A).

With a_j = ∇f_j(w), b_j = ∇g_j(w) and their means a and b, the path turns where these are not 0:

    K_glob = abᵀ − baᵀ,   K_loc = (1/n) Σ (a_j b_jᵀ − b_j a_jᵀ).

Heterogeneous clients add to it: ‖K_loc − K_glob‖_F ≤ √(2 V_f V_g), where V_f and V_g are the
variances of a_j and b_j over clients. Norms come from inner products of gradients,

    ‖(1/n) Σ (a_j b_jᵀ − b_j a_jᵀ)‖²_F = (2/n²) Σ_jk [(a_j·a_k)(b_j·b_k) − (a_j·b_k)(b_j·a_k)],

so that no array is larger than the gradients themselves, n × d.
"""

from __future__ import annotations

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from fedsolve.errors import InvalidInput
from fedsolve.problem.layout import as_device_array
from fedsolve.problem.problem import Problem
from fedsolve.theory.gradients import Rows, client_gradients


class Skewness(eqx.Module):
    """Norms of the skew matrices, and the bound on the effect of heterogeneity.

    Args:
        total: ‖K_glob‖_F, from the mean gradients.
        local: ‖K_loc‖_F, the mean over clients.
        difference: ‖K_loc − K_glob‖_F, at most `bound`.
        objective_variance: V_f, the variance of ∇f_j over clients.
        constraint_variance: V_g, the variance of ∇g_j over clients.
        bound: √(2 V_f V_g).

    Example:
        >>> import jax.numpy as jnp
        >>> import fedsolve as fs
        >>> zero = jnp.zeros(())
        >>> fs.theory.Skewness(zero, zero, zero, zero, zero, zero).bound.shape
        ()
    """

    total: Float[Array, ""]
    local: Float[Array, ""]
    difference: Float[Array, ""]
    objective_variance: Float[Array, ""]
    constraint_variance: Float[Array, ""]
    bound: Float[Array, ""]

    def __repr__(self) -> str:
        parts = [f"{field.name}={getattr(self, field.name)}" for field in dataclasses.fields(self)]
        return f"Skewness({', '.join(parts)})"


def skewness(problem: Problem, params: PyTree) -> Skewness:
    """Measure how strongly the gradients of f and g rotate the path at `params`.

    `fs.solve(..., follow={"skewness": fs.theory.skewness})` writes it into the history. In float32
    a norm is accurate to about 0.0003 of ‖a_j‖‖b_j‖.

    Args:
        problem: A problem with a constraint.
        params: The parameters, in the problem's own structure.

    Returns:
        The norms of K_glob, K_loc and their difference, with the bound on the latter.

    Raises:
        InvalidInput: If the problem has no constraint, or draws its own data.

    Example:
        >>> import numpy as np
        >>> import fedsolve as fs
        >>> problem = fs.Problem(
        ...     objective=lambda w, data: 0.5 * ((data["x"] - w) ** 2).sum(axis=1).mean(),
        ...     clients={"x": np.array([[[0.0, 0.0]], [[2.0, 1.0]]])},
        ...     params=np.zeros(2),
        ...     constraint=lambda w, data: w.sum() - 1.0,
        ... )
        >>> found = fs.theory.skewness(problem, np.ones(2))
        >>> round(float(found.total), 3), round(float(found.difference), 3)
        (0.707, 0.0)
    """
    if problem.constraint is None:
        raise InvalidInput("Skewness is between objective and constraint; the problem has none.")
    problem, params = as_device_array(problem), as_device_array(params)
    a, b = client_gradients(problem, problem.layout.ravel(params))
    mean_a, mean_b = a.mean(0), b.mean(0)
    off_a, off_b = a - mean_a, b - mean_b
    v_f = jnp.mean(jnp.sum(off_a**2, axis=1))
    v_g = jnp.mean(jnp.sum(off_b**2, axis=1))
    return Skewness(
        total=_norm(mean_a[None], mean_b[None]),
        local=_norm(a, b),
        difference=_norm(off_a, off_b),
        objective_variance=v_f,
        constraint_variance=v_g,
        bound=jnp.sqrt(2 * v_f * v_g),
    )


def _norm(a: Rows, b: Rows) -> Float[Array, ""]:
    """Return ‖(1/n) Σ (a_j b_jᵀ − b_j a_jᵀ)‖_F, min(n, d) rows of the Gram matrices at a time."""
    # The part of b_j along a_j contributes nothing, and would cancel only up to rounding.
    square = jnp.sum(a**2, axis=1, keepdims=True)
    along = jnp.sum(a * b, axis=1, keepdims=True) / jnp.where(square > 0, square, 1)
    b = b - along * a

    def row(one: tuple[Float[Array, " d"], Float[Array, " d"]]) -> Float[Array, ""]:
        x, y = one
        return jnp.sum(dot(a, x) * dot(b, y) - dot(b, x) * dot(a, y))

    def dot(rows: Rows, x: Float[Array, " d"]) -> Float[Array, " n"]:
        return jnp.matmul(rows, x, precision="highest")

    n, d = a.shape
    total = jnp.sum(jax.lax.map(row, (a, b), batch_size=min(n, d)))
    return jnp.sqrt(2 * jnp.maximum(total, 0)) / n
