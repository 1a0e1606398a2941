"""Local work: some steps of gradient descent, or of an optimiser, from where the client stands.

What a client then sends is a pseudo-gradient v, the negated change in units of the step: without an
optimiser v = Σ_τ ν_τ, the sum of directions along w_{τ+1} = w_τ − η ν_τ; with one, v = w_0 − w_E.
Either way the server's w ← w − step_size·mean(v) moves to the mean of where the clients came to
(with an optimiser, if `step_size` is 1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float, Key

from fedsolve.fields import Scalar, Schedule, at
from fedsolve.local_updates.optimizers import Optimizer

Vector = Float[Array, " d"]
Direction = Callable[[Vector, Key[Array, ""]], Vector]  # w, key -> a descent direction there


def descend(
    direction: Direction,
    w: Vector,
    steps: int,
    key: Key[Array, ""],
    step_size: Scalar | Schedule,
    optimizer: Optimizer | None = None,
    round: Any = 0,
) -> tuple[Vector, Vector]:
    """The pseudo-gradient after `steps` local steps from w, and the sum of the directions on the
    way, which is the same without an optimiser. Step τ draws with a key of its own."""
    if optimizer is None:
        size = at(step_size, round)

        def plain(step: Any, total: Vector) -> Vector:
            return total + direction(w - size * total, jax.random.fold_in(key, step))

        total = lax.fori_loop(0, steps, plain, jnp.zeros_like(w))
        return total, total

    rule = optimizer.transform(round)

    def adapted(step: Any, carry: tuple[Vector, Vector, Any]) -> tuple[Vector, Vector, Any]:
        here, total, memory = carry
        slope = direction(here, jax.random.fold_in(key, step))
        change, memory = rule.update(slope, memory, here)
        return jnp.asarray(optax.apply_updates(here, change)), total + slope, memory

    start = (w, jnp.zeros_like(w), rule.init(w))
    end, total, _ = lax.fori_loop(0, steps, adapted, start)
    return w - end, total
