"""The loop of local steps: gradient descent, or an optimizer, from where a client stands.

A client then sends a pseudo-gradient v, its negated change in units of the step: without an
optimizer v = Σ_τ ν_τ, the sum of directions along w_{τ+1} = w_τ − η ν_τ; with one, v = w_0 − w_E.
Either way the server's w ← w − step_size·mean(v) moves to the mean of the clients' final points
(with an optimizer, if `step_size` is 1).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fedsolve.fields import Scalar, Schedule, at
from fedsolve.local_updates.optimizers import Optimizer
from fedsolve.types import PRNGKey, Round, Vector

Direction = Callable[[Vector, PRNGKey], Vector]  # w, key -> a descent direction there
Carry = tuple[Vector, Vector, optax.OptState]


def take_steps(
    direction: Direction,
    w: Vector,
    steps: int,
    key: PRNGKey,
    step_size: Scalar | Schedule,
    optimizer: Optimizer | None = None,
    round: Round = 0,
) -> tuple[Vector, Vector]:
    """Take local steps from w.

    Args:
        direction: `direction(w, key)` is the descent direction ν at w.
        w: Where to start.
        steps: The number of steps E.
        key: A random key; step τ gets the key folded with τ.
        step_size: η, a number or a schedule; not used if there is an optimizer.
        optimizer: The optimizer of the steps; None for gradient descent.
        round: The round, counted from 0, for schedules.

    Returns:
        The pseudo-gradient, and the sum of the directions; without an optimizer they are the same.
    """
    if optimizer is None:
        size = at(step_size, round)

        def plain(step: Round, total: Vector) -> Vector:
            return total + direction(w - size * total, jax.random.fold_in(key, step))

        total = lax.fori_loop(0, steps, plain, jnp.zeros_like(w))
        return total, total

    rule = optimizer.transform(round)

    def adapted(step: Round, carry: Carry) -> Carry:
        here, total, memory = carry
        slope = direction(here, jax.random.fold_in(key, step))
        change, memory = rule.update(slope, memory, here)
        return jnp.asarray(optax.apply_updates(here, change)), total + slope, memory

    start = (w, jnp.zeros_like(w), rule.init(w))
    end, total, _ = lax.fori_loop(0, steps, adapted, start)
    return w - end, total


def descend(
    direction: Direction,
    w: Vector,
    steps: int,
    key: PRNGKey,
    step_size: Scalar | Schedule,
    optimizer: Optimizer | None = None,
    round: Round = 0,
) -> Vector:
    """Take local steps from w and return the pseudo-gradient; arguments as for `take_steps`."""
    return take_steps(direction, w, steps, key, step_size, optimizer, round)[0]
