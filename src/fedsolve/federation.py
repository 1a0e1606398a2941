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

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PyTree, UInt32

from fedsolve.clock import Seconds
from fedsolve.constraints import Constraint
from fedsolve.packets import Packet
from fedsolve.problem import Problem
from fedsolve.replies import Replies
from fedsolve.samples import Samples
from fedsolve.setting import Setting

Flags = Bool[Array, " m"] | Bool[np.ndarray, " m"]
Cohort = Int[Array, " m"] | Int[np.ndarray, " m"]
SUBSETS = 2**31 - 1  # a key that no exchange has


class Bytes(eqx.Module):
    """An exact count below 2^48 in two parts, since JAX has no 64-bit integers by default."""

    high: UInt32[Array, ...]  # in units of 2^16
    low: UInt32[Array, ...]

    @classmethod
    def zero(cls) -> Bytes:
        return cls(jnp.uint32(0), jnp.uint32(0))

    def plus(self, count: Any, each: int) -> Bytes:
        """`count` more messages of `each` bytes."""
        count = jnp.asarray(count, jnp.uint32)
        high, low = np.uint32(each >> 16), np.uint32(each & 0xFFFF)
        few, many = count & 0xFFFF, count >> 16
        return self._carry(few * high + many * low + (many * high << 16), few * low)

    def plus_all(self, amounts: UInt32[Array, " m"]) -> Bytes:
        """The amounts (at most 2^24 of them), added up."""
        high, middle, low = (
            jnp.sum(part, dtype=jnp.uint32)
            for part in (amounts >> 16, (amounts >> 8) & 0xFF, amounts & 0xFF)
        )
        return self._carry(
            high + (middle >> 8) + (low >> 16), ((middle & 0xFF) << 8) + (low & 0xFFFF)
        )

    def __add__(self, other: Bytes) -> Bytes:
        return self._carry(other.high, other.low)

    def minus(self, less: Bytes, at_most: int) -> UInt32[Array, ...]:
        """The difference, or `at_most` (less than 2^31) where it is more."""
        high, limit = self.high - less.high, np.uint32(at_most)
        exact = (high << 16) + self.low - less.low
        return jnp.where(high > 2**15, limit, jnp.minimum(exact, limit))

    def _carry(self, high: Any, low: Any) -> Bytes:
        low = self.low + low
        return Bytes(self.high + high + (low >> 16), low & 0xFFFF)

    def exact(self) -> Any:
        """On the host: the count as 64-bit integers."""
        return np.asarray(self.high, np.int64) * 2**16 + np.asarray(self.low, np.int64)


class State(eqx.Module):
    """Everything that a run is, between two rounds. Arrays only: it can be saved and restored."""

    round: Int[Array, ""]
    seed: UInt32[Array, " words"]  # the key's words
    w: Float[Array, " d"]  # what every client holds, or will when it is next asked
    server: PyTree
    clients: PyTree  # each client's state, on a leading axis
    memory: PyTree  # and what it remembers for the problem
    participation: PyTree  # what the server remembers of who takes part
    published: Bytes  # all publications so far
    seen: Bytes | None  # those that each client has, on a leading axis
    up: Bytes  # all that was sent so far, in both directions
    down: Bytes
    messages: Bytes  # how many that were
    updates: Bytes  # answers with more than numbers in them
    fault: Int[Array, "3"]  # first non-finite value: round, exchange, client; -1 for none
    seconds: Seconds | None  # of simulated time so far, where there is a clock

    @classmethod
    def start(
        cls,
        problem: Problem,
        algorithm: Any,
        key: Key[Array, ""],
        clients: int | None = None,
        timed: bool = False,
    ) -> State:
        """Before the first round; `clients` where there are not as many as the problem has;
        `timed` where there is a clock."""
        w, n = problem.start(), problem.n if clients is None else clients
        states, memory = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (n, *jnp.shape(leaf))),
            (algorithm.init_client(w), problem.init_memory()),
        )
        return cls(
            round=jnp.int32(0),
            seed=jax.random.key_data(key),
            w=w,
            server=algorithm.init(w),
            clients=states,
            memory=memory,
            participation=algorithm.init_participation(w, n),
            published=Bytes.zero(),
            seen=Bytes(jnp.zeros(n, jnp.uint32), jnp.zeros(n, jnp.uint32)),
            up=Bytes.zero(),
            down=Bytes.zero(),
            messages=Bytes.zero(),
            updates=Bytes.zero(),
            fault=jnp.full(3, -1, jnp.int32),
            seconds=Seconds.zero() if timed else None,
        )

    @property
    def evaluation_key(self) -> Key[Array, ""]:
        """For an evaluation after this many rounds."""
        return evaluation_key(self.seed, self.round)


def evaluation_key(seed: UInt32[Array, " words"], round: Any) -> Key[Array, ""]:
    """A key that no exchange has."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(seed), round), 2**31)


class Restricted(eqx.Module):
    """A message, and how many samples each client may look at for its answer."""

    contributions: Float[Array, " n"]
    message: PyTree


class Question:
    """One exchange: what is asked of whom, and how a client finds its answer."""

    def __init__(self, fed: Federation, method: Callable, cohort: Cohort, message: Any, when: Any):
        self.method, self.cohort, self.message, self.when = method, cohort, message, when
        self.exchange = len(fed.exchanges)
        self._fed, self._key = fed, jax.random.fold_in(fed._key, self.exchange + 1)
        size = len(cohort)
        # Known before the program runs if it is simply everyone: then nothing needs masking.
        self.asked: Flags = (
            np.full(size, when) if isinstance(when, bool) else jnp.broadcast_to(when, (size,))
        )

    def answer(self, index: Any, samples: Samples, both: PyTree) -> tuple[PyTree, PyTree]:
        """On a client: its next state and memory, and its reply."""
        fed, own = self._fed, jax.random.fold_in(self._key, index)
        state, memory = both
        client = fed._problem.client(samples, fed.w, fed.round, index, own, memory)
        message = self.message
        if isinstance(message, Restricted):
            draw = jax.random.fold_in(jax.random.fold_in(fed._key, SUBSETS), index)
            client = client.restricted(jnp.ceil(message.contributions[index]), draw)
            message = message.message
        state, reply = self.method(client, state, *(() if message is None else (message,)))
        return (state, client.memory), reply


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
