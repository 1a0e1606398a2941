"""What an algorithm's `round` sees: clients to ask, and parameters to publish.

Runtimes derive from `Federation` and say how an exchange reaches its clients. What must be the same
in all of them is here: randomness, which replies count, and what every exchange costs.

Randomness is a function of (seed, round, exchange, client), never of order or place.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from fedsolve.compression.packets import Packet
from fedsolve.errors import InvalidInput
from fedsolve.federation.counters import Count
from fedsolve.federation.exchange import Exchange, Restricted, WithState
from fedsolve.federation.options import RoundOptions
from fedsolve.federation.replies import Replies
from fedsolve.federation.rules import Context, Draw, Summed
from fedsolve.federation.state import AlgorithmLike, State, noise_of
from fedsolve.problem.constraints import Constraint
from fedsolve.problem.problem import Problem
from fedsolve.types import (
    Cohort,
    Flag,
    Flags,
    Function,
    Info,
    Message,
    Number,
    PyTree,
    Reply,
    Vector,
)


class Federation:
    """The server's view of its clients during one round.

    Runtimes make it; algorithms get it as the first argument of `round`.

    Args:
        problem: The problem.
        state: The state before the round.
        options: How rounds are run.

    Example:
        >>> import jax
        >>> import fedsolve as fs
        >>> class Descent(fs.Algorithm):
        ...     step_size: float
        ...     def init(self, w):
        ...         return None
        ...     def slope(self, client, state):
        ...         return state, client.grad(client.w)
        ...     def round(self, fed, server, key):
        ...         mean = fed.ask(self.slope, fed.everyone).mean()
        ...         fed.publish(fs.Identity()(-self.step_size * mean))
        ...         return server, {}
        >>> problem = fs.problems.linear_regression(clients=4, size=3)
        >>> fs.solve(problem, Descent(0.1), rounds=2).rounds
        2
    """

    def __init__(self, problem: Problem, state: State, options: RoundOptions | None = None):
        self.w = state.w
        self.round = state.round
        self.participation = state.participation
        self.contributions: Float[Array, " n"] | None = None  # samples of each in this round
        self.delays: Float[Array, " n"] | None = None  # seconds before each answers in this round
        self._problem = problem
        self._state = state
        self._options = RoundOptions() if options is None else options
        self._states = state.clients, state.memory
        self._published, self._seen = state.published, state.seen
        self._fault = state.fault
        self._key = jax.random.fold_in(jax.random.wrap_key_data(state.seed), state.round)
        self._asked = 0  # exchanges of this round so far
        self._waits_for: Flags | None = None  # in the exchange that goes on
        self._moved_buffers: _Buffers | None = None  # of the last exchange with local steps
        self.bytes_up, self.bytes_down = Count.zero(), Count.zero()
        self.messages_up, self.messages_down = Count.zero(), Count.zero()
        self.vectors_up = Count.zero()
        self.releases: list[str] = []  # the exchange of every sum that a rule computed
        self._seconds: Number = 0.0  # of this round so far

    # For algorithms

    @property
    def clients(self) -> int:
        """The number of clients."""
        return self._problem.n

    @property
    def everyone(self) -> Int[np.ndarray, " n"]:
        """The cohort of all clients."""
        return np.arange(self.clients, dtype=np.int32)

    @property
    def constraint(self) -> Constraint | None:
        """The problem's constraint, to combine what clients measured."""
        return self._problem.constraint

    def project(self, x: Vector) -> Vector:
        """Project x onto the domain: Π_X."""
        return self._problem.project(x)

    def validate(self, w: Vector) -> Float[Array, ""]:
        """Return the objective at w on the data that the server holds."""
        return self._problem.validate(w)

    def ask(
        self,
        method: Function,
        cohort: Cohort,
        message: Message = None,
        when: Flag | Flags = True,
        waits_for: Flags | None = None,
    ) -> Replies:
        """Run `method(client, state, message)` on every client of the cohort.

        A client's state moves if and only if its reply arrived. Where `contributions` is set, every
        client answers from a random subset of that many of its samples, the same in all exchanges
        of the round.

        Args:
            method: A method of the algorithm, `method(client, state) -> (state, reply)` or
                `method(client, state, message) -> (state, reply)`.
            cohort: The indices of the clients to ask.
            message: What is sent to them, as a tree of arrays.
            when: Whether they are asked, one flag for all or one for each of the cohort.
            waits_for: Whose answers the simulated clock waits for; None for all. The answers of the
                others are among the replies, too: the algorithm uses them in a later round.

        Returns:
            The replies, and which of them arrived.
        """
        if self.contributions is not None:
            message = Restricted(self.contributions, message)
        if self._problem.averages_state:
            if any(rule.hides for rule in self._options.rules):
                raise InvalidInput(
                    "The state of the loss, which the server averages, is not part of a secure "
                    'sum: give the problem buffers="frozen".'
                )
            message = WithState(self._state.buffers, message)
        exchange = Exchange(
            self._problem,
            self._key,
            self.w,
            self.round,
            self._asked,
            method,
            message,
            self._options.clip_of(method.__name__),
        )
        self._asked += 1
        self._waits_for = waits_for
        size = len(cohort)
        # Known before the program runs if it is simply everyone: then nothing needs masking.
        asked = np.full(size, when) if isinstance(when, bool) else jnp.broadcast_to(when, (size,))
        values, arrived = self._deliver(exchange, cohort, asked)
        known = not isinstance(values, Summed)
        if known and not any(rule.drops_broken for rule in self._options.rules):
            self._check_finite(values, exchange.number, cohort, arrived)
        self._count(exchange, cohort, asked, arrived, values)
        if isinstance(values, WithState):
            moved = self._moved_buffers = _Buffers(values.state, arrived)
            replies = Replies(values.content, arrived, moved.weigh)
        else:
            replies = Replies(values, arrived)
        for rule in self._options.rules:
            context = Context(exchange.name, self._noise(exchange.number), self.releases.append)
            replies = rule.receive(replies, context)
        return replies

    def publish(self, packet: Packet, when: Flag = True) -> None:
        """Move w by a packet, w ← w + packet, on the server and on every client.

        The packet reaches a client when it is next asked: with all others that it missed, or as the
        whole of w where that is smaller. That is what is counted.

        Args:
            packet: What is added to w.
            when: Whether it is published.
        """
        self.w = jnp.where(when, self.w + packet.dense(), self.w)
        self._published = self._published.plus(when, packet.nbytes)

    # For runtimes

    def play(self, algorithm: AlgorithmLike) -> tuple[State, Info]:
        """Play one round of the algorithm.

        Args:
            algorithm: The algorithm.

        Returns:
            The state after the round, and what the round writes in the history.
        """
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
            bytes_up=before.bytes_up + self.bytes_up,
            bytes_down=before.bytes_down + self.bytes_down,
            messages_up=before.messages_up + self.messages_up,
            messages_down=before.messages_down + self.messages_down,
            vectors_up=before.vectors_up + self.vectors_up,
            fault=jnp.where(broken, here, self._fault),
            seconds=None if before.seconds is None else before.seconds.plus(self._seconds),
            best=before.best,
            buffers=self._next_buffers(),
            spent=before.spent,
        )
        entry: Info = jax.tree.map(jnp.asarray, info) | self._costs(algorithm, state)
        for rule in self._options.rules:
            entry = rule.published(entry)
        return state, entry

    def _noise(self, exchange: int) -> Draw:
        """Return what draws the noise that a rule adds in an exchange of this round."""
        return noise_of(self._state.seed, self.round, exchange)

    def _next_buffers(self) -> PyTree:
        """Return the state of the loss for the next round."""
        before, moved = self._state.buffers, self._moved_buffers
        return before if moved is None else moved.mean(before)

    def _costs(self, algorithm: AlgorithmLike, state: State) -> Info:
        """Columns of the history that every algorithm has."""
        costs: Info = {"bytes_up": self.bytes_up, "bytes_down": self.bytes_down}
        costs |= {"bytes_up_total": state.bytes_up, "bytes_down_total": state.bytes_down}
        costs |= {"messages_up": self.messages_up, "messages_up_total": state.messages_up}
        costs |= {"messages_down": self.messages_down, "messages_down_total": state.messages_down}
        costs |= {"vectors_up": self.vectors_up, "vectors_up_total": state.vectors_up}
        error = algorithm.compression_error(state.server, self.w)
        costs |= {} if error is None else {"compression_error": error}
        if state.seconds is not None:
            costs |= {"seconds": jnp.asarray(self._seconds), "seconds_total": state.seconds}
        return costs

    def _deliver(self, exchange: Exchange, cohort: Cohort, asked: Flags) -> tuple[Reply, Flags]:
        """Get the cohort's answers and move the states of the clients whose answers arrived.

        Returns the replies, stacked on a leading axis, and which of them arrived.
        """
        raise NotImplementedError

    def _arrived(self, exchange: Exchange, cohort: Cohort, asked: Flags) -> Flags:
        """Return which answers arrive in a runtime where nothing can really be lost."""
        arrivals, clock, arrived = self._options.arrivals, self._options.clock, asked
        if arrivals is not None:
            told = arrivals(self.round, exchange.number, cohort)
            arrived = arrived & jnp.asarray(told)
        if clock is None:
            return self._counted(arrived)
        times = self._times(exchange, cohort)
        arrived = clock.waited_for(arrived, times)
        waited = arrived if self._waits_for is None else arrived & self._waits_for
        self._seconds += jnp.max(jnp.where(waited, times, 0))
        return self._counted(arrived)

    def _counted(self, arrived: Flags) -> Flags:
        """Return which answers the rules let count."""
        for rule in self._options.rules:
            arrived = rule.arriving(arrived)
        return arrived

    def _times(self, exchange: Exchange, cohort: Cohort) -> Float[Array, " m"]:
        """Return how long each client of the cohort takes to answer, by the clock."""
        clock = self._options.clock
        assert clock is not None
        sent_up = tree_bytes(self._reply_shapes(exchange))
        missed = self._missed(cohort).astype(jnp.result_type(float))
        sent_down = tree_bytes(exchange.message) + missed
        seed = jax.random.wrap_key_data(self._state.seed)
        times = clock.times(exchange.name, cohort, sent_down, sent_up, self.round, seed)
        return times if self.delays is None else times + self.delays[cohort]

    def _reply_shapes(self, exchange: Exchange) -> Reply:
        """Return the shapes of one client's reply."""
        one = jax.tree.map(lambda leaf: leaf[0], (self._problem.samples, self._states))
        return jax.eval_shape(exchange.answer, jnp.int32(0), *one)[1]

    def _rows(self, cohort: Cohort) -> Cohort | slice:
        """Return where the cohort lies in arrays with one row for each client."""
        everyone = isinstance(cohort, np.ndarray) and len(cohort) == self.clients
        return slice(None) if everyone else cohort

    def _missed(self, cohort: Cohort) -> UInt32[Array, " m"]:
        """Return the bytes that bring each client of the cohort up to date with w."""
        rows = self._rows(cohort)
        seen = jax.tree.map(lambda leaf: leaf[rows], self._seen)
        return self._published.minus(seen, at_most=self.w.size * self.w.dtype.itemsize)

    def _check_finite(self, values: Reply, exchange: int, cohort: Cohort, arrived: Flags) -> None:
        """Remember the first reply that is not finite."""
        bad = jnp.zeros(len(cohort), bool)
        for leaf in jax.tree.leaves(values):
            if jnp.issubdtype(leaf.dtype, jnp.inexact):
                bad |= ~jnp.all(jnp.isfinite(leaf.reshape(len(cohort), -1)), axis=1)
        bad &= arrived
        where = jnp.stack([self.round, exchange, jnp.asarray(cohort)[jnp.argmax(bad)]])
        first = jnp.any(bad) & (self._fault[0] < 0)
        self._fault = jnp.where(first, where.astype(jnp.int32), self._fault)

    def _count(
        self, exchange: Exchange, cohort: Cohort, asked: Flags, arrived: Flags, values: Reply
    ) -> None:
        """Count what went down to everyone asked, and what came up from those that answered."""
        rows, answers = self._rows(cohort), jnp.sum(arrived)
        up, more = tree_bytes(values) // len(cohort), 0
        for rule in self._options.rules:
            up, more = rule.cost(values, len(cohort)) or (up, more)
        self.bytes_up = self.bytes_up.plus(answers, up)
        self.bytes_down = self.bytes_down.plus(jnp.sum(asked), more)
        self.bytes_down = self.bytes_down.plus(jnp.sum(asked), tree_bytes(exchange.message))
        missed = self._missed(cohort)
        self.bytes_down = self.bytes_down.plus_all(jnp.where(asked, missed, np.uint32(0)))
        self.messages_up = self.messages_up.plus(answers, 1)
        self.messages_down = self.messages_down.plus(jnp.sum(asked), 1)
        if any(np.ndim(leaf) > 1 for leaf in jax.tree.leaves(values)):
            self.vectors_up = self.vectors_up.plus(answers, 1)
        # The server learns that a client is up to date from its answer, not from having asked.
        self._seen = jax.tree.map(
            lambda all, new: all.at[rows].set(jnp.where(arrived, new, all[rows])),
            self._seen,
            self._published,
        )


class _Buffers:
    """The clients' next states of the loss, which count as their replies do."""

    def __init__(self, states: PyTree, arrived: Flags):
        self._states, self._arrived = states, arrived
        self._weights: Float[Array, " m"] | None = None

    def weigh(self, weights: Float[Array, " m"]) -> None:
        """Take the weights of the replies, which were summed with them."""
        self._weights = weights

    def mean(self, before: PyTree) -> PyTree:
        """Return the weighted mean over the clients heard; the state before if there were none."""
        weights = jnp.ones(self._arrived.shape) if self._weights is None else self._weights
        weights = jnp.where(self._arrived, weights, 0)
        heard = jnp.sum(weights) > 0
        shares = weights / jnp.where(heard, jnp.sum(weights), 1)

        def one(old: Array, new: Array) -> Array:
            mean = jnp.tensordot(shares, new.astype(shares.dtype), 1)
            if not jnp.issubdtype(old.dtype, jnp.floating):  # such as a count of batches
                mean = jnp.round(mean)
            return jnp.where(heard, mean.astype(old.dtype), old)

        return jax.tree.map(one, before, self._states)


def tree_bytes(tree: PyTree) -> int:
    """Return the bytes of a tree's arrays, or of the arrays that its shapes stand for."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(np.shape(leaf)) * jnp.result_type(leaf).itemsize for leaf in leaves)
