"""The debug runtime: rounds in a Python loop, clients one by one, nothing compiled.

It is slow. An error in a client's method is raised where it happens, with round, client and method
named, and a debugger or a `print` works anywhere.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fedsolve.errors import ClientError
from fedsolve.federation.exchange import Exchange
from fedsolve.federation.federation import Federation
from fedsolve.federation.state import SeedWords, State
from fedsolve.runtimes.base import Advanced, RoundByRound
from fedsolve.runtimes.chunks import Spans
from fedsolve.runtimes.evaluation import evaluate_state
from fedsolve.runtimes.simulation import compiled_start
from fedsolve.types import Cohort, Flags, Info, PyTree, Reply


class DebugFederation(Federation):
    """A federation that asks its clients one after the other."""

    def _deliver(self, exchange: Exchange, cohort: Cohort, asked: Flags) -> tuple[Reply, Flags]:
        arrived, states = self._arrived(exchange, cohort, asked), self._states
        replies: list[Reply] = []
        for index, here in zip(np.asarray(cohort), np.asarray(arrived), strict=True):
            samples, state = jax.tree.map(
                lambda leaf, i=index: leaf[i], (self._problem.samples, self._states)
            )
            place = f"Round {int(self.round) + 1}, client {index}, {exchange.name}"
            if not here:  # not asked, or not heard: only the shape of its reply is needed
                shape = jax.eval_shape(exchange.answer, jnp.asarray(index), samples, state)[1]
                replies.append(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shape))
                continue
            try:
                moved, reply = exchange.answer(jnp.asarray(index), samples, state)
            except Exception as error:
                raise ClientError(f"{place}: {type(error).__name__}: {error}") from error
            _check_finite(place, reply, moved)
            replies.append(reply)
            states = jax.tree.map(lambda all, one, i=index: all.at[i].set(one), states, moved)
        self._states = states
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *replies), arrived


class Debug(RoundByRound):
    """Clients in this process, one operation at a time."""

    def start(self, seed: SeedWords) -> State:
        return compiled_start(self.problem, self.algorithm, seed, self.options)

    def play(self, state: State) -> tuple[State, Info]:
        return DebugFederation(self.problem, state, self.options).play(self.algorithm)

    def evaluate(self, state: State) -> Info:
        return evaluate_state(self.problem, self.algorithm, state, self.options)

    def advance(self, state: State, spans: Spans) -> Advanced:
        with jax.disable_jit():
            return super().advance(state, spans)


def _check_finite(place: str, reply: Reply, state: PyTree) -> None:
    for what, tree in (("reply", reply), ("state", state)):
        for path, leaf in jax.tree.leaves_with_path(tree):
            if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) and not np.isfinite(leaf).all():
                name = what + jax.tree_util.keystr(path)
                raise ClientError(f"{place}: {name} is not finite.")
