"""FedADMM's k_0 iterations of a participant: (6) by the steps (15), and the duals (7).

All iterations of a round start at the same w (v^0 = w in (15)), so ∇f_i(w) is computed once. After
one step the residual (6) is α_i(∇f_i(v) − ∇f_i(w)) − α_i r_i (v − w), of norm at most
2 α_i r_i ‖v − w‖: if this is below ε_i, (6) holds and the gradient at v is not needed.
With s = α_i ∇f_i(w) + π_i such an iteration is w_i = w − s / (α_i r_i + σ_i) and
s ← s · α_i r_i / (α_i r_i + σ_i): many of them are one multiplication.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from fedsolve.algorithms.admm_state import Local, Number
from fedsolve.federation.known import InformedClient
from fedsolve.fields import Scalar
from fedsolve.problem.client import Client
from fedsolve.types import Round, Vector

Whole = Int[Array, ""]
Counted = tuple[Whole, Number, Number, Number]  # iterations, two factors of s, ε_i
Iterated = tuple[Whole, Vector, Vector, Number]  # iterations, π_i, w_i, ε_i
Checked = tuple[Vector, Whole, Bool[Array, ""]]  # v, steps, whether (6) holds
Updated = tuple[Vector, Vector, Number]  # π_i, w_i, ε_i

MOST_STEPS = 1000  # of an adaptive client in one iteration


class InexactIterations(eqx.Module):
    """Iterations with (6) by the steps (15).

    Args:
        local_iterations: k_0.
        decay: ν_i.
        inner_steps: κ; None: until the residual is small enough.
        released: Whether the inner test is that of the authors' program.
    """

    local_iterations: Int[Array, ""]
    decay: Scalar
    inner_steps: int | None = eqx.field(static=True)
    released: bool = eqx.field(static=True)

    def __call__(
        self, client: Client, state: Local, penalty: Number, first: Vector, slope: Vector
    ) -> tuple[Vector, Vector, Number]:
        """Return π_i, w_i and ε_i after k_0 iterations, where α_i ∇f_i(w) is `slope`."""
        ready, last, shrunk = self.without_gradients(state, penalty, jnp.sum(first**2))

        dual = jnp.where(ready > 0, shrunk * first - slope, state.dual)
        local = client.w - last * first / (state.smoothness + penalty)
        accuracy = state.accuracy * self.decay**ready
        start = dual, local, accuracy
        return self.iterate(client, state, penalty, slope, ready, start)

    def without_gradients(
        self, state: Local, penalty: Number, size: Number
    ) -> tuple[Int[Array, ""], Number, Number]:
        """Count the iterations that need only the first gradient, from ‖s‖².

        Returns:
            Their number, and the factors of s in the last of them and after it.
        """
        factor = state.smoothness / (state.smoothness + penalty)
        least = factor if self.released else 2 * factor
        parameters = state.dual.size if self.released else 1

        def enough(carry: Counted) -> Bool[Array, ""]:
            k, _, shrunk, accuracy = carry
            near = (least * shrunk) ** 2 * size <= parameters * self.decay * accuracy
            return (k < self.local_iterations) & (near | (self.inner_steps == 1))

        def skip(carry: Counted) -> Counted:
            k, _, shrunk, accuracy = carry
            return k + 1, shrunk, factor * shrunk, jnp.asarray(self.decay * accuracy)

        none, one = jnp.zeros_like(penalty), jnp.ones_like(penalty)
        start = jnp.int32(0), none, one, jnp.asarray(state.accuracy)
        return lax.while_loop(enough, skip, start)[:3]

    def iterate(
        self,
        client: Client,
        state: Local,
        penalty: Number,
        slope: Vector,
        ready: Round,
        start: tuple[Vector, Vector, Number],
    ) -> tuple[Vector, Vector, Number]:
        """Take the iterations from `ready` on, which may need gradients; return π_i, w_i, ε_i."""

        def unfinished(carry: Iterated) -> Bool[Array, ""]:
            return carry[0] < self.local_iterations

        def rest(carry: Iterated) -> Iterated:
            # at most once, so that samples are read only if some client needs them
            own = client.reading(carry[0]) if isinstance(client, InformedClient) else client

            def one(
                k: Round, carry: tuple[Vector, Vector, Number]
            ) -> tuple[Vector, Vector, Number]:
                dual, _, accuracy = carry
                accuracy = jnp.asarray(self.decay * accuracy)
                local = self.minimise(own, state, penalty, dual, accuracy, slope, k)
                return dual + penalty * (local - client.w), local, accuracy

            done = jnp.asarray(self.local_iterations, jnp.int32)
            return done, *lax.fori_loop(carry[0], self.local_iterations, one, carry[1:])

        return lax.while_loop(unfinished, rest, (jnp.asarray(ready), *start))[1:]

    def minimise(
        self,
        client: Client,
        state: Local,
        penalty: Number,
        dual: Vector,
        accuracy: Number,
        slope: Vector,
        k: Round,
    ) -> Vector:
        """Return w_i with (6), by (15) from v = w, where α_i ∇f_i(w) is `slope`."""
        w, curvature = client.w, state.smoothness + penalty
        key = jax.random.fold_in(client.key, k + 1)

        def step(v: Vector, residual: Vector) -> Vector:  # (15), in terms of (6)
            return v - residual / curvature

        first = slope + dual
        v = step(w, first)
        if self.released:
            bound = state.smoothness * jnp.linalg.norm(v - w)
            accuracy = accuracy * w.size
        else:
            bound = 2 * state.smoothness * jnp.linalg.norm(v - w)
        if self.inner_steps is None:
            most = _steps_needed(jnp.linalg.norm(first), accuracy, state.smoothness, penalty)
        else:
            most = self.inner_steps

        def unfinished(carry: Checked) -> Bool[Array, ""]:
            _, steps, accepted = carry
            return ~accepted & (steps < most)

        def check(carry: Checked) -> Checked:
            v, steps, _ = carry
            slope = client.grad(v, jax.random.fold_in(key, steps))
            residual = state.share * slope + dual + penalty * (v - w)
            if self.released:  # with the gradient at v, after the step from v
                stale = residual * (state.smoothness / curvature)
                return step(v, residual), steps + 1, jnp.sum(stale**2) <= accuracy
            accepted = jnp.sum(residual**2) <= accuracy
            return jnp.where(accepted, v, step(v, residual)), steps + 1, accepted

        carry = v, jnp.int32(1), bound**2 <= accuracy
        return lax.while_loop(unfinished, check, carry)[0]


def _steps_needed(
    residual: Number, accuracy: Number, smoothness: Number, penalty: Number
) -> Int[Array, ""]:
    """Count the steps (15) that reach (6) for a convex f_i.

    Each brings v nearer to the minimiser by a factor α_i r_i / (α_i r_i + σ_i), and v is at most
    ‖residual‖ / σ_i away at first.
    """
    curvature = smoothness + penalty
    far = curvature * residual / (penalty * jnp.sqrt(accuracy))
    steps = jnp.ceil(jnp.log(far) / jnp.log(curvature / smoothness))
    return jnp.clip(jnp.nan_to_num(steps, nan=MOST_STEPS), 1, MOST_STEPS).astype(jnp.int32)
