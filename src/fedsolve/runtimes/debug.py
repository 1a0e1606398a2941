"""The debug runtime: rounds in a Python loop, clients one by one, nothing compiled.

Slow, and honest: an error in a client's method is raised where it happens, with round, client and
method named, and a debugger or a `print` works anywhere.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PyTree

from fedsolve.algorithms.base import Algorithm
from fedsolve.errors import ClientError
from fedsolve.federation.exchange import Question
from fedsolve.federation.federation import Federation
from fedsolve.federation.options import Setting
from fedsolve.federation.state import State
from fedsolve.problem.problem import Problem
from fedsolve.runtimes.evaluation import look
from fedsolve.types import Flags


class Debug(Federation):
    """A federation that asks its clients one after the other."""

    def _exchange(self, question: Question) -> tuple[PyTree, Flags]:
        cohort, answer, arrived = question.cohort, question.answer, self._arrived(question)
        replies: list[PyTree] = []
        states, method = self._states, self.exchanges[-1]
        for index, here in zip(np.asarray(cohort), np.asarray(arrived), strict=True):
            samples, state = jax.tree.map(
                lambda leaf, i=index: leaf[i], (self._problem.samples, self._states)
            )
            place = f"Round {int(self.round) + 1}, client {index}, {method}"
            if not here:  # not asked, or not heard: only the shape of its reply is needed
                shape = jax.eval_shape(answer, jnp.asarray(index), samples, state)[1]
                replies.append(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shape))
                continue
            try:
                moved, reply = answer(jnp.asarray(index), samples, state)
            except Exception as error:
                raise ClientError(f"{place}: {type(error).__name__}: {error}") from error
            _check_finite(place, reply, moved)
            replies.append(reply)
            states = jax.tree.map(lambda all, one, i=index: all.at[i].set(one), states, moved)
        self._states = states
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *replies), arrived


def _check_finite(place: str, reply: PyTree, state: PyTree) -> None:
    for what, tree in (("reply", reply), ("state", state)):
        for path, leaf in jax.tree.leaves_with_path(tree):
            if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) and not np.isfinite(leaf).all():
                name = what + jax.tree_util.keystr(path)
                raise ClientError(f"{place}: {name} is not finite.")


def advance(
    problem: Problem,
    algorithm: Algorithm,
    state: State,
    spans: Int[np.ndarray, "slots 3"],
    setting: Setting,
) -> tuple[State, dict[str, Any]]:
    """As `simulation.advance`, one operation at a time."""
    entries = []
    with jax.disable_jit():
        for start, stop, wanted in spans:
            info: dict[str, Any] = {}
            for _ in range(start, stop):
                state, info = Debug(problem, state, setting).play(algorithm)
            entry = info | look(problem, algorithm, state, setting)
            if setting.stop is not None:
                entry["stopped"] = np.asarray(wanted > 0 and setting.stop(entry), bool)
            entries.append(entry)
            if entry.get("stopped"):
                break
    return state, jax.tree.map(lambda *leaves: np.stack(leaves), *entries)
