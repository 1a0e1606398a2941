"""A round cut at its questions: for clients that can only be looked at block by block.

What an algorithm's round does between two questions is the server's and small. So the round is
played again and again, with the answers that are known, up to the first question without one; that
one is answered outside, and the round is played once more. Nothing is random but by (seed, round,
exchange, client): each time it asks the same.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from fedsolve.algorithms.base import Algorithm
from fedsolve.federation.exchange import Question
from fedsolve.federation.federation import Federation
from fedsolve.federation.options import Setting
from fedsolve.federation.state import State
from fedsolve.problem.problem import Problem
from fedsolve.types import Cohort, Flags


class Asked(eqx.Module):
    """A question that is to be answered outside."""

    method: str = eqx.field(static=True)
    cohort: Int[Array, " m"]
    message: PyTree
    w: Float[Array, " d"]  # as clients hold it then
    arrived: Bool[Array, " m"]  # whose answers will have arrived


class _Waiting(Exception):
    def __init__(self, asked: Asked):
        self.asked = asked


class _Somewhere(Federation):
    """A federation of so many clients, of which the problem and the state have one."""

    def __init__(self, problem: Problem, state: State, setting: Setting, clients: int):
        super().__init__(problem, state, setting)
        self._clients = clients

    @property
    def clients(self) -> int:
        return self._clients


class _Onlooker(_Somewhere):
    """Only sees whom a round asks."""

    def __init__(self, problem: Problem, state: State, setting: Setting, clients: int):
        super().__init__(problem, state, setting, clients)
        self.cohorts: list[Cohort] = []

    def _exchange(self, question: Question) -> tuple[PyTree, Flags]:
        self.cohorts.append(question.cohort)
        one = jax.tree.map(lambda leaf: leaf[0], (self._problem.samples, self._states))
        reply = jax.eval_shape(question.answer, jnp.int32(0), *one)[1]
        rows = len(question.cohort)
        nothing = jax.tree.map(lambda leaf: jnp.zeros((rows, *leaf.shape), leaf.dtype), reply)
        return nothing, self._arrived(question)


class _Replay(_Somewhere):
    """Plays a round from the answers that are known."""

    def __init__(
        self, problem: Problem, state: State, setting: Setting, clients: int, known: list[PyTree]
    ):
        super().__init__(problem, state, setting, clients)
        self._known = known

    def _exchange(self, question: Question) -> tuple[PyTree, Flags]:
        arrived = self._arrived(question)
        if question.exchange < len(self._known):
            return self._known[question.exchange], arrived
        raise _Waiting(
            Asked(
                question.method.__name__,
                jnp.asarray(question.cohort),
                question.message,
                self.w,
                jnp.asarray(arrived),
            )
        )


def asks_one_cohort(
    problem: Problem, algorithm: Algorithm, state: State, setting: Setting, clients: int
) -> bool:
    """Whether all questions of a round go to one and the same cohort, drawn before the first."""
    found: list[Cohort] = []

    def look(state: State) -> None:
        fed = _Onlooker(problem, state, setting, clients)
        fed.play(algorithm)
        found.extend(fed.cohorts)

    eqx.filter_eval_shape(look, state)
    return all(who is found[0] and not isinstance(who, np.ndarray) for who in found)


@eqx.filter_jit
def played(
    problem: Problem,
    algorithm: Algorithm,
    state: State,
    setting: Setting,
    clients: int,
    known: list[PyTree],
) -> Asked | tuple[State, dict[str, Any]]:
    """The round up to the first question that is not answered yet; or the state after it, and what
    to write in the history."""
    try:
        return _Replay(problem, state, setting, clients, known).play(algorithm)
    except _Waiting as waiting:
        return waiting.asked


@eqx.filter_jit
def answered(
    problem: Problem,
    algorithm: Algorithm,
    state: State,
    asked: Asked,
    exchange: int,
    who: Int[Array, " b"],
) -> tuple[PyTree, PyTree]:
    """The next states and the replies of some clients; problem and state have their rows."""
    fed = Federation(problem, state)
    fed.w, fed.exchanges = asked.w, [""] * exchange
    question = Question(fed, getattr(algorithm, asked.method), who, asked.message, True)

    def answer(*one: Any) -> tuple[PyTree, PyTree]:
        moved, reply = question.answer(*one)
        return moved, jax.tree.map(jnp.asarray, reply)

    return jax.vmap(answer)(who, problem.samples, (state.clients, state.memory))
