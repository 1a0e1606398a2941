"""The loop of local steps: gradient descent, or an optimizer, from where a client stands.

A client then sends a pseudo-gradient v, its negated change in units of the step: without an
optimizer v = Σ_τ ν_τ, the sum of directions along w_{τ+1} = w_τ − η ν_τ; with one, v = w_0 − w_E.
Either way the server's w ← w − step_size·mean(v) moves to the mean of the clients' final points
(with an optimizer, if `step_size` is 1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedsolve.fields import Scalar, Schedule, at
from fedsolve.local_updates.optimizers import Optimizer
from fedsolve.problem.client import ORDER, Client
from fedsolve.problem.local_pass import Follows
from fedsolve.types import Function, PRNGKey, PyTree, Round, Vector

Direction = Callable[[Vector, PRNGKey], Vector]  # w, key -> a descent direction there
Carry = tuple[Vector, Vector, optax.OptState]


class Epochs(NamedTuple):
    """Passes over a client's samples, in place of a number of steps."""

    passes: int


Steps = int | Epochs


def take_steps(
    direction: Direction,
    client: Client,
    steps: Steps,
    key: PRNGKey,
    step_size: Scalar | Schedule,
    optimizer: Optimizer | None = None,
    start: Vector | None = None,
    moves_personal: bool = True,
    follows: Follows | None = None,
) -> tuple[Vector, Vector]:
    """Take a client's local steps.

    Personal parameters of the client take steps of the same size, with the same optimizer, along
    their own gradients.

    Args:
        direction: `direction(w, key)` is the descent direction ν at w.
        client: The client.
        steps: The number of steps E, or passes over the client's samples.
        key: A random key; step τ gets the key folded with τ.
        step_size: η, a number or a schedule; not used if there is an optimizer.
        optimizer: The optimizer of the steps; None for gradient descent.
        start: Where to start; None for the client's w.
        moves_personal: Whether the client's personal parameters move, too.
        follows: What `direction` is, for an objective that can take all steps in one call.

    Returns:
        The pseudo-gradient, and the sum of the directions; without an optimizer they are the same.
    """
    w = client.w if start is None else start
    epochs = steps[0] if isinstance(steps, Epochs) else None
    walked = client.local_pass(
        epochs,
        1 if isinstance(steps, Epochs) else steps,
        key,
        at(step_size, client.round) if optimizer is None else None,
        follows,
        w,
        moves_personal,
    )
    if walked is not None:
        return walked.change, walked.directions
    moves = moves_personal and client.personal is not None
    if optimizer is None:
        size = at(step_size, client.round)

        def plain(step: Round, total: Vector) -> Vector:
            slope = direction(w - size * total, jax.random.fold_in(key, step))
            if moves:
                client.move_personal(-size * client.own_slope)
            return total + slope

        total = run_steps(client, steps, key, plain, jnp.zeros_like(w))
        return total, total

    rule: Any = optimizer.transform(client.round)

    def both(shared: Vector, own: Any) -> Any:
        """Return what the optimizer sees: one norm to clip, say, for both vectors."""
        return (shared, own) if moves else shared

    def adapted(step: Round, carry: Carry) -> Carry:
        here, total, memory = carry
        slope = direction(here, jax.random.fold_in(key, step))
        slopes = both(slope, client.own_slope)
        change, memory = rule.update(slopes, memory, both(here, client.personal))
        if moves:
            change, own = change
            client.move_personal(own)
        return jnp.asarray(optax.apply_updates(here, change)), total + slope, memory

    start_of_all = w, jnp.zeros_like(w), rule.init(both(w, client.personal))
    end, total, _ = run_steps(client, steps, key, adapted, start_of_all)
    return w - end, total


def descend(
    direction: Direction,
    client: Client,
    steps: Steps,
    key: PRNGKey,
    step_size: Scalar | Schedule,
    optimizer: Optimizer | None = None,
    start: Vector | None = None,
    moves_personal: bool = True,
) -> Vector:
    """Take local steps and return the pseudo-gradient; arguments as for `take_steps`."""
    given = direction, client, steps, key, step_size, optimizer, start, moves_personal
    return take_steps(*given)[0]


def run_steps(client: Client, steps: Steps, key: PRNGKey, body: Function, start: PyTree) -> PyTree:
    """Run the loop of the steps, or of the minibatches of the passes."""
    if not isinstance(steps, Epochs):
        return client.repeat(steps, body, start)
    order = jax.random.fold_in(key, ORDER)
    return client.each_batch(steps.passes, order, body, start)
