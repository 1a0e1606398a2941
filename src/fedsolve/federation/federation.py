"""What an algorithm's `round` sees: clients to ask, and parameters to publish.

Two runtimes fill this in: `simulation` runs the cohort as one `vmap` inside a compiled program,
`debug` one client after the other. Whatever must be the same in both is here: randomness, who
counts as heard, and what every exchange costs.

Randomness is a function of (seed, round, exchange, client), never of order or place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree, UInt32

from fedsolve.compression.packets import Packet
from fedsolve.federation.counters import Bytes
from fedsolve.federation.exchange import Question, Restricted
from fedsolve.federation.options import Setting
from fedsolve.federation.replies import Replies
from fedsolve.federation.state import State
from fedsolve.problem.constraints import Constraint
from fedsolve.problem.problem import Problem
from fedsolve.types import Cohort, Flags


class Federation:
    """The server's view of its clients during one round."""

    def __init__(self, problem: Problem, state: State, setting: Setting | None = None):
        self.w = state.w
        self.round = state.round
        self.up, self.down = Bytes.zero(), Bytes.zero()
        self.messages, self.updates = Bytes.zero(), Bytes.zero()
        self.exchanges: list[str] = []  # names of the methods asked, in order
        self._problem = problem
        self._state = state
        self._states = state.clients, state.memory
        self.participation = state.participation
        self.contributions: Float[Array, " n"] | None = None  # samples of each in this round
        self._published, self._seen = state.published, state.seen
        self._fault = state.fault
        self._setting = Setting() if setting is None else setting
        self.delays: Float[Array, " n"] | None = None  # seconds before each answers in this round
        self._seconds: Any = 0.0  # of this round so far
        self._key = jax.random.fold_in(jax.random.wrap_key_data(state.seed), state.round)

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return self._problem.n

    @property
    def everyone(self) -> Int[np.ndarray, " n"]:
        """The cohort of all of them."""
        return np.arange(self.clients, dtype=np.int32)

    @property
    def constraint(self) -> Constraint | None:
        """The problem's constraint, to combine what clients measured."""
        return self._problem.constraint

    def project(self, x: Float[Array, " d"]) -> Float[Array, " d"]:
        """Π_X."""
        return self._problem.project(x)

    def validate(self, w: Float[Array, " d"]) -> Float[Array, ""]:
        """The objective at w on the data that the server holds."""
        return self._problem.validate(w)

    def ask(
        self, method: Callable, cohort: Cohort, message: PyTree = None, when: Any = True
    ) -> Replies:
        """Runs `method(client, state, message)` on every client of the cohort.

        `when` is a flag for the exchange, or one for each client: those not wanted are not asked.
        A client's state moves if and only if its reply arrived. Where `contributions` is set, every
        client answers from a random subset of that many of its samples, the same all round.
        """
        if self.contributions is not None:
            message = Restricted(self.contributions, message)
        question = Question(self, method, cohort, message, when)
        self.exchanges.append(method.__name__)
        values, arrived = self._exchange(question)
        self._notice(values, question.exchange, cohort, arrived)
        self._charge(question, arrived, values)
        return Replies(values, arrived)

    def publish(self, packet: Packet, when: Any = True) -> None:
        """w ← w + packet, here and on every client.

        It reaches a client when it is next asked: by the packets it missed, or by the whole of w
        where that is smaller. That is what the meter counts.
        """
        self.w = jnp.where(when, self.w + packet.dense(), self.w)
        self._published = self._published.plus(when, packet.nbytes)

    def play(self, algorithm: Any) -> tuple[State, dict[str, Any]]:
        """One round of the algorithm: the state after it, and what to write in the history."""
        before = self._state
        server, info = algorithm.round(self, before.server, jax.random.fold_in(self._key, 0))
        broken = ~jnp.all(jnp.isfinite(self.w)) & (self._fault[0] < 0)
        here = jnp.stack([self.round, -1, -1]).astype(jnp.int32)
        clients, memory = self._states
        state = State(
            round=before.round + 1,
            seed=before.seed,
            w=self.w,
            server=server,
            clients=clients,
            memory=memory,
            participation=self.participation,
            published=self._published,
            seen=self._seen,
            up=before.up + self.up,
            down=before.down + self.down,
            messages=before.messages + self.messages,
            updates=before.updates + self.updates,
            fault=jnp.where(broken, here, self._fault),
            seconds=None if before.seconds is None else before.seconds.plus(self._seconds),
        )
        spent = {"bytes_up": self.up, "bytes_down": self.down}
        spent |= {"bytes_up_total": state.up, "bytes_down_total": state.down}
        spent |= {"messages": self.updates, "messages_total": state.updates}
        spent |= {"messages_both_ways": state.messages}
        error = algorithm.compression_error(server, self.w)
        spent |= {} if error is None else {"compression_error": error}
        if state.seconds is not None:
            spent |= {"seconds": jnp.asarray(self._seconds), "seconds_total": state.seconds}
        return state, jax.tree.map(jnp.asarray, info) | spent

    def _exchange(self, question: Question) -> tuple[PyTree, Flags]:
        """Runs the question on its cohort and moves the states of those that arrived: the replies,
        stacked on a leading axis, and which of them arrived."""
        raise NotImplementedError

    def _arrived(self, question: Question) -> Flags:
        """Which answers arrive where nothing can really be lost."""
        arrivals, clock, arrived = self._setting.arrivals, self._setting.clock, question.asked
        if arrivals is not None:
            told = arrivals(self.round, question.exchange, question.cohort)
            arrived = arrived & jnp.asarray(told)
        if clock is None:
            return arrived
        times = self._times(question)
        arrived = clock.waited_for(arrived, times)
        self._seconds += jnp.max(jnp.where(arrived, times, 0))
        return arrived

    def _times(self, question: Question) -> Float[Array, " m"]:
        """How long each of the cohort takes for its answer, by the clock."""
        clock, cohort = self._setting.clock, question.cohort
        assert clock is not None
        one = jax.tree.map(lambda leaf: leaf[0], (self._problem.samples, self._states))
        reply = jax.eval_shape(question.answer, jnp.int32(0), *one)[1]
        down = _bytes(question.message) + self._missed(cohort).astype(jnp.result_type(float))
        seed = jax.random.wrap_key_data(self._state.seed)
        name = self.exchanges[question.exchange]
        times = clock.times(name, cohort, down, _bytes(reply), self.round, seed)
        return times if self.delays is None else times + self.delays[cohort]

    def _rows(self, cohort: Cohort) -> Any:
        """Where the cohort lies in what there is for each client."""
        everyone = isinstance(cohort, np.ndarray) and len(cohort) == self.clients
        return slice(None) if everyone else cohort

    def _missed(self, cohort: Cohort) -> UInt32[Array, " m"]:
        """The bytes that bring each of the cohort up to date with w."""
        rows = self._rows(cohort)
        seen = jax.tree.map(lambda leaf: leaf[rows], self._seen)
        return self._published.minus(seen, at_most=self.w.size * self.w.dtype.itemsize)

    def _notice(self, values: PyTree, exchange: int, cohort: Cohort, arrived: Flags) -> None:
        """Remembers the first reply that is not finite."""
        bad = jnp.zeros(len(cohort), bool)
        for leaf in jax.tree.leaves(values):
            if jnp.issubdtype(leaf.dtype, jnp.inexact):
                bad |= ~jnp.all(jnp.isfinite(leaf.reshape(len(cohort), -1)), axis=1)
        bad &= arrived
        where = jnp.stack([self.round, exchange, jnp.asarray(cohort)[jnp.argmax(bad)]])
        first = jnp.any(bad) & (self._fault[0] < 0)
        self._fault = jnp.where(first, where.astype(jnp.int32), self._fault)

    def _charge(self, question: Question, arrived: Flags, values: PyTree) -> None:
        """Counts what went down to everyone asked and what came up from those that answered."""
        rows, asked = self._rows(question.cohort), question.asked
        self.up = self.up.plus(jnp.sum(arrived), _bytes(values) // len(question.cohort))
        self.down = self.down.plus(jnp.sum(asked), _bytes(question.message))
        missed = self._missed(question.cohort)
        self.down = self.down.plus_all(jnp.where(asked, missed, np.uint32(0)))
        self.messages = self.messages.plus(jnp.sum(asked), 1).plus(jnp.sum(arrived), 1)
        if any(np.ndim(leaf) > 1 for leaf in jax.tree.leaves(values)):
            self.updates = self.updates.plus(jnp.sum(arrived), 1)
        # The server learns that a client is up to date from its answer, not from having asked.
        self._seen = jax.tree.map(
            lambda all, new: all.at[rows].set(jnp.where(arrived, new, all[rows])),
            self._seen,
            self._published,
        )


def _bytes(tree: PyTree) -> int:
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(np.shape(leaf)) * jnp.result_type(leaf).itemsize for leaf in leaves)
