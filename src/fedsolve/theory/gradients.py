"""f, g and their gradients over all samples, as theory evaluates them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedsolve.errors import InvalidInput
from fedsolve.federation.replies import Replies
from fedsolve.problem.problem import Problem
from fedsolve.problem.samples import Samples
from fedsolve.runtimes.evaluation import client_values, combined
from fedsolve.types import Vector

Rows = Float[Array, "n d"]


def check_functions(problem: Problem) -> None:
    """Raise if f_j and g_j are not functions of w alone."""
    if type(problem).values is not Problem.values:
        raise InvalidInput(
            f"{type(problem).__name__} draws its own data; theory needs f_j and g_j as functions."
        )
    if problem.keeps_own or problem.averages_state:
        raise InvalidInput(
            "Theory needs f_j and g_j as functions of w: with personal parameters or a state that "
            "moves there are none."
        )


def client_gradients(problem: Problem, w: Vector) -> tuple[Rows, Rows]:
    """Return ∇f_j(w) and ∇g_j(w) of every client; without a constraint, the latter are zero."""
    check_functions(problem)
    constraint = problem.constraint

    def f(w: Vector, samples: Samples) -> Float[Array, ""]:
        return problem.value(w, samples)

    over = jax.vmap(jax.grad(f), in_axes=(None, 0))(w, problem.samples)
    if constraint is None:
        return over, jnp.zeros_like(over)
    measured = client_values(problem, w)["constraint"]
    _, focus = constraint.combine(Replies(measured, np.ones(problem.n, bool)))

    def g(w: Vector, samples: Samples) -> Float[Array, ""]:
        return constraint.local(problem.params_at(w), problem.with_own_state(samples), focus)

    return over, jax.vmap(jax.grad(g), in_axes=(None, 0))(w, problem.samples)


def totals(problem: Problem, w: Vector) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return f(w) and g(w); without a constraint, g is −1."""
    check_functions(problem)
    found = combined(problem, w, client_values(problem, w))
    return found["objective"], found.get("constraint", -jnp.ones((), w.dtype))
