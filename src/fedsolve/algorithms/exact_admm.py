"""FedADMM's iterations with the exact solution of (6), for quadratic objectives.

With the Hessian H_i and M = α_i H_i + σ_i I, an iteration is w_i = w − M⁻¹s and s ← s − σ_i M⁻¹s,
for one Cholesky factor of M a round.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.linalg import cho_factor, cho_solve
from jaxtyping import Array, Int

from fedsolve.algorithms.admm_state import Local, Number
from fedsolve.algorithms.curvature import hessian_product
from fedsolve.errors import InvalidInput
from fedsolve.problem.client import Client
from fedsolve.problem.problem import Problem
from fedsolve.types import Round, Vector


class ExactIterations(eqx.Module):
    """Iterations with the exact solution of (6).

    Args:
        local_iterations: k_0.
    """

    local_iterations: Int[Array, ""]

    def __call__(
        self, client: Client, state: Local, penalty: Number, first: Vector, slope: Vector
    ) -> tuple[Vector, Vector, Number]:
        """Return π_i, w_i and ε_i after k_0 iterations, where α_i ∇f_i(w) is `slope`."""
        identity = jnp.eye(first.size, dtype=first.dtype)
        hessian = jax.vmap(hessian_product(client))(identity)
        factor = cho_factor(state.share * hessian + penalty * identity)

        def one(_: Round, carry: tuple[Vector, Vector]) -> tuple[Vector, Vector]:
            s, _ = carry
            step = cho_solve(factor, s)
            return s - penalty * step, step

        start = first, jnp.zeros_like(first)
        s, step = lax.fori_loop(0, jnp.asarray(self.local_iterations), one, start)
        return s - slope, client.w - step, state.accuracy


def check_quadratic(problem: Problem) -> None:
    """Raise if some f_i is seen not to be quadratic: its Hessian differs at two points."""
    if problem.batch_size is not None:
        raise InvalidInput('solver="exact" uses all samples of a client, not minibatches.')
    placed = problem.on_device()
    rng, w = np.random.default_rng(0), placed.start()
    direction = jnp.asarray(rng.standard_normal(w.size), w.dtype)
    for index in {0, problem.n - 1}:
        own = jax.tree.map(lambda leaf, i=index: leaf[i], placed.samples)
        client = placed.client(own, w, jnp.int32(0), jnp.int32(index), jax.random.key(0))
        here = jax.jvp(client.grad, (w,), (direction,))[1]
        other = w + jnp.asarray(rng.standard_normal(w.size), w.dtype)
        there = jax.jvp(client.grad, (other,), (direction,))[1]
        if jnp.linalg.norm(here - there) > 1e-3 * jnp.linalg.norm(here):
            raise InvalidInput(
                f'solver="exact" is for quadratic objectives; that of client {index} has another '
                "Hessian at another point."
            )
