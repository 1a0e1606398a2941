"""The streamed runtime: clients' data and states stay on disk, and only a cohort is on the device.

A round is one compiled program over the rows of its cohort. The cohort is found before: the
algorithm's round is recorded up to its first question. While a round computes, the rows of the next
cohort are fetched. Where drawing depends on the answers that cohort may be another one, and is then
fetched again. So memory has the data and states of two cohorts, whatever the number of clients.

A round that asks several cohorts, or everyone, is played from question to question: each is
answered block by block. Then memory has a block of clients, and the replies of all that are asked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from fedsolve.algorithms.base import Algorithm
from fedsolve.errors import InvalidInput
from fedsolve.federation.counters import Count
from fedsolve.federation.exchange import Exchange
from fedsolve.federation.options import RoundOptions
from fedsolve.federation.state import SeedWords, State
from fedsolve.problem.problem import Problem
from fedsolve.problem.samples import Samples
from fedsolve.runtimes.base import Advanced, Fault, RoundByRound
from fedsolve.runtimes.chunks import Spans
from fedsolve.runtimes.evaluation import Shares, Through, Values, client_values, combined
from fedsolve.runtimes.recording import (
    Pending,
    first_cohort,
    play_until_unanswered,
    record_round,
)
from fedsolve.runtimes.simulation import Simulation
from fedsolve.storage.client_store import Pairs, Store
from fedsolve.types import Cohort, Info, PyTree, Reply, Vector

BLOCK = 2**26  # bytes of clients' data that are evaluated in one piece


class CohortFederation(Simulation):
    """A federation whose problem and state have the rows of one cohort only."""

    def __init__(self, problem: Problem, state: State, options: RoundOptions, clients: int):
        super().__init__(problem, state, options)
        self._clients = clients
        self.cohort: Cohort | None = None

    @property
    def clients(self) -> int:
        return self._clients

    def _rows(self, cohort: Cohort) -> slice:
        if self.cohort is None:
            self.cohort = cohort
        assert self.cohort is cohort, "a round of one cohort asks another one"
        return slice(None)


class Streamed(RoundByRound):
    """Clients on disk. `problem` is as the user gave it; its arrays may be memory-mapped."""

    def __init__(
        self,
        problem: Problem,
        algorithm: Algorithm,
        options: RoundOptions,
        place: object,  # a folder or a mutable mapping
        dtype: np.dtype | None,
    ):
        super().__init__(problem, algorithm, options)
        self._place, self.clients = place, problem.n
        self._rest = _with_samples(problem, None).on_device(dtype)  # all but clients' data
        self._pool = ThreadPoolExecutor(1)
        self._first = np.zeros(())
        # Found here: JAX keeps a local `enable_x64` for each thread, and another one fetches data.
        self._kinds = jax.tree.map(lambda leaf: _kind_on_device(leaf, dtype), problem.samples)
        self._one = self._problem_of(self._data(np.zeros(1, int)))
        self._fetching: tuple[np.ndarray, Future] | None = None  # the next cohort, as predicted
        self._written = np.zeros(0, np.int32)  # clients whose rows changed since it was fetched
        self._at = 0  # the round of what the store holds
        self._reply_shapes: dict[int, Reply] = {}  # by the number of the exchange
        self._one_cohort = True

    def start(self, seed: SeedWords) -> State:
        """Return the state before the first round, without any client's."""
        key, timed = jax.random.wrap_key_data(seed), self.options.clock is not None
        one = State.start(self._one, self.algorithm, key, 1, timed)
        everyone = Count(*jnp.zeros((2, self.clients), jnp.uint32))
        participation = self.algorithm.init_participation(one.w, self.clients)
        state = dataclasses.replace(one, participation=participation, seen=everyone)
        known = self._one, self.algorithm, state, self.options, self.clients
        self._one_cohort = record_round(*known).one_cohort
        own, self._structure = jax.tree.flatten(self._own(one))
        self._names = [f"f{i}" for i in range(len(own))]
        fields = [
            (name, leaf.dtype, leaf.shape[1:]) for name, leaf in zip(self._names, own, strict=True)
        ]
        first = np.zeros((), np.dtype(fields or [("nothing", np.uint8)]))
        for name, leaf in zip(self._names, own, strict=True):
            first[name] = np.asarray(leaf)[0]
        self._first = first
        return self._without_clients(state)

    def open(self, round: int, versions: Sequence[tuple[str, Pairs]]) -> None:
        """Open the store: a new run's, or that of a checkpoint and of the one before it."""
        self.store = Store(self._place, self._first, self.clients)
        if versions:
            self.store.load(versions)
            self._at = round
        else:
            self.store.begin()

    def close(self) -> None:
        self._pool.shutdown()
        if self.store is not None:
            self.store.close()

    def advance(self, state: State, spans: Spans) -> Advanced:
        assert self.store is not None
        if int(state.round) == self._at:
            self.store.hold("last call")
        else:  # the rounds since the last call are to be done again
            self.store.go_back("last call")
            self._fetching = None
        found = super().advance(state, spans)
        self._at = int(found.state.round)
        return found

    def describe(self, fault: Fault, state: State, spans: Spans) -> str:
        """Name the value that is not finite; clients' data are not here to look again."""
        if fault.quantity:
            return f"the {fault.quantity}"
        return f"client {fault.client}'s reply" if fault.client >= 0 else "w"

    def play(self, state: State) -> tuple[State, Info]:
        """Play one round: fetch the cohort's rows, compute, write the rows that changed."""
        if not self._one_cohort:
            return self._play_by_exchange(state)
        cohort = self._cohort(state)
        data, rows = self._fetched(cohort)
        now = self._with_clients(state, rows)
        guess = self._cohort(dataclasses.replace(state, round=state.round + 1))
        fetching = self._pool.submit(self._fetch, guess)
        self._fetching = guess, fetching
        problem, who = self._problem_of(data), jnp.asarray(cohort)
        after, info, agree = _play_cohort(
            problem, self.algorithm, now, who, self.options, self.clients
        )
        moved = self._own(after)
        jax.block_until_ready(moved)
        fetching.result()  # a store is read and written by one thread at a time
        self._written = self._write(cohort, rows, moved)
        assert bool(agree), "the cohort was drawn otherwise than planned"
        return self._without_clients(after), info

    def evaluate(self, state: State) -> Info:
        """Return f and g over all clients, from one block of them after the other."""
        n, size = self.clients, self._block
        gradient = self.options.wants_gradient
        found: list[Values] = []
        for first in range(0, n, size):
            # Blocks have one size: the last one starts earlier. Sums of gradients have no rows
            # that could be left out, so with them the last block is shorter.
            begin = first if gradient else min(first, n - size)
            block = self._problem_of(self._data(np.arange(begin, min(begin + size, n))))
            memory = None
            if block.keeps_own:
                rows = self._rows(np.arange(begin, min(begin + size, n)))
                memory = self._with_clients(state, rows).memory
            problem = state.problem_now(block)
            values = _evaluate_block(
                problem, state.w, state, jnp.int32(begin), self.options, memory
            )
            found.append(jax.tree.map(lambda leaf, at=first - begin: np.asarray(leaf)[at:], values))
        values = jax.tree.map(lambda *parts: jnp.asarray(np.concatenate(parts)), *found)
        shares = self.algorithm.objective_weights(state.server, state.participation)
        through = Through.of(self.options, state)
        return _combined(state.problem_now(self._rest), state.w, values, shares, through)

    # A round of several cohorts

    def _play_by_exchange(self, state: State) -> tuple[State, Info]:
        """Play a round of several cohorts, from question to question."""
        now, answers = self._with_clients(state, self._rows(np.zeros(1, np.int32))), []
        while True:
            found = play_until_unanswered(
                self._one, self.algorithm, now, self.options, self.clients, answers
            )
            if not isinstance(found, Pending):
                return self._without_clients(found[0]), found[1]
            answers.append(self._answers(state, found))

    def _answers(self, state: State, pending: Pending) -> Reply:
        """Compute the replies of a cohort, block by block; zeros where none will arrive."""
        cohort, arrived = np.asarray(pending.cohort), np.asarray(pending.arrived)
        size = min(self._block, len(cohort))

        def block(who: np.ndarray, rows: np.ndarray) -> tuple[PyTree, ...]:
            now = dataclasses.replace(self._with_clients(state, rows), seen=None)
            problem = self._problem_of(self._data(who))
            return problem, self.algorithm, now, pending, jnp.asarray(who)

        shapes = self._reply_shapes.get(pending.number)
        if shapes is None:
            first = block(cohort[:size], self._rows(cohort[:size]))
            shapes = eqx.filter_eval_shape(_answer_block, *first)[1]
            self._reply_shapes[pending.number] = shapes
        found = jax.tree.map(lambda s: np.zeros((len(cohort), *s.shape[1:]), s.dtype), shapes)
        for first in range(0, len(cohort), size):
            begin = min(first, len(cohort) - size)  # blocks have one size: the last starts earlier
            here = slice(begin, begin + size)
            heard = np.flatnonzero(arrived[here] & (np.arange(size) >= first - begin))
            if len(heard):
                who, rows = cohort[here], self._rows(cohort[here])
                moved, replies = _answer_block(*block(who, rows))
                self._write(who[heard], rows[heard], moved, heard)
                for all, part in zip(*map(jax.tree.leaves, (found, replies)), strict=True):
                    all[begin + heard] = np.asarray(part)[heard]
        return jax.tree.map(jnp.asarray, found)

    # Clients' states

    def _own(self, state: State) -> tuple[PyTree, ...]:
        """Return the parts of a state that have a row for each client.

        What each client has seen of w stays in memory where all clients may be asked.
        """
        own = state.clients, state.memory
        return (*own, state.seen) if self._one_cohort else own

    def _with_clients(self, state: State, rows: np.ndarray) -> State:
        own = [jnp.asarray(rows[name]) for name in self._names]
        clients, memory, *seen = jax.tree.unflatten(self._structure, own)
        return dataclasses.replace(
            state, clients=clients, memory=memory, seen=seen[0] if seen else state.seen
        )

    def _without_clients(self, state: State) -> State:
        seen = None if self._one_cohort else state.seen
        return dataclasses.replace(state, clients=None, memory=None, seen=seen)

    def _rows(self, clients: np.ndarray) -> np.ndarray:
        assert self.store is not None
        return self.store.take(clients)

    def _write(
        self,
        clients: np.ndarray,
        rows: np.ndarray,
        moved: PyTree,
        places: np.ndarray | slice = slice(None),
    ) -> np.ndarray:
        """Write the rows that changed, found at `places` of `moved`; return whose they are."""
        after = np.zeros(len(clients), rows.dtype)
        for name, leaf in zip(self._names, jax.tree.leaves(moved), strict=True):
            after[name] = np.asarray(leaf)[places]
        changed = (_bytes(after) != _bytes(rows)).any(axis=1)
        assert self.store is not None
        self.store.put(clients[changed], after[changed])
        return clients[changed]

    # Clients' data

    def _cohort(self, state: State) -> np.ndarray:
        cohort = first_cohort(self._one, self.algorithm, state, self.clients)
        if cohort is None:
            raise InvalidInput("This algorithm asks nobody.")
        return np.asarray(cohort)

    def _fetch(self, cohort: np.ndarray) -> tuple[Samples, np.ndarray]:
        return self._data(cohort), self._rows(cohort)

    def _fetched(self, cohort: np.ndarray) -> tuple[Samples, np.ndarray]:
        """Return what was fetched ahead, if it is this cohort's; read rows written since again."""
        if self._fetching is None or not np.array_equal(self._fetching[0], cohort):
            return self._fetch(cohort)
        data, rows = self._fetching[1].result()
        if (old := np.isin(cohort, self._written)).any():
            rows[old] = self._rows(cohort[old])
        return data, rows

    def _data(self, cohort: np.ndarray) -> Samples:
        """Return those clients' data, on the host, of the types that JAX would give them."""

        def rows(leaf: np.ndarray, kind: np.dtype) -> np.ndarray:
            return np.asarray(leaf[cohort]).astype(kind, copy=False)

        return jax.tree.map(rows, self.problem.samples, self._kinds)

    def _problem_of(self, data: Samples) -> Problem:
        return _with_samples(self._rest, jax.tree.map(jnp.asarray, data))

    @property
    def _block(self) -> int:
        """The number of clients that are computed in one piece."""
        leaves = jax.tree.leaves(self.problem.samples)
        each = sum(x.dtype.itemsize * int(np.prod(x.shape[1:])) for x in leaves)
        assert self.store is not None
        return min(max(BLOCK // max(each + self.store.row, 1), 1), self.clients)


@eqx.filter_jit
def _play_cohort(
    problem: Problem,
    algorithm: Algorithm,
    state: State,
    cohort: Int[Array, " m"],
    options: RoundOptions,
    clients: int,
) -> tuple[State, Info, Bool[Array, ""]]:
    """Play a round of one cohort; also return whether it was the cohort that was planned."""
    fed = CohortFederation(problem, state, options, clients)
    after, info = fed.play(algorithm)
    return after, info, jnp.all(fed.cohort == cohort)


@eqx.filter_jit
def _answer_block(
    problem: Problem, algorithm: Algorithm, state: State, pending: Pending, who: Int[Array, " b"]
) -> tuple[PyTree, Reply]:
    """Compute the answers of some clients, whose rows problem and state have."""
    key = jax.random.fold_in(jax.random.wrap_key_data(state.seed), state.round)
    method = getattr(algorithm, pending.method)
    exchange = Exchange(
        problem, key, pending.w, state.round, pending.number, method, pending.message, pending.clip
    )

    def answer(index: Int[Array, ""], samples: Samples, own: PyTree) -> tuple[PyTree, Reply]:
        moved, reply = exchange.answer(index, samples, own)
        return moved, jax.tree.map(jnp.asarray, reply)

    return jax.vmap(answer)(who, problem.samples, (state.clients, state.memory))


@eqx.filter_jit
def _evaluate_block(
    problem: Problem,
    w: Vector,
    state: State,
    first: Int[Array, ""],
    options: RoundOptions,
    memory: PyTree,
) -> Values:
    key, gradient = state.evaluation_key, options.wants_gradient
    return client_values(problem, w, key, first, options, gradient, memory=memory)


@eqx.filter_jit
def _combined(
    problem: Problem, w: Vector, values: Values, shares: Shares, through: Through | None
) -> Info:
    return combined(problem, w, values, shares, through)


def _kind_on_device(leaf: np.ndarray | Array, dtype: np.dtype | None) -> np.dtype:
    """Return the type that JAX gives to an array of clients' data."""
    is_floating = jnp.issubdtype(leaf.dtype, jnp.floating)
    return jax.dtypes.canonicalize_dtype(dtype if is_floating and dtype is not None else leaf.dtype)


def _bytes(rows: np.ndarray) -> np.ndarray:
    return rows.view(np.uint8).reshape(len(rows), -1)


def _with_samples(problem: Problem, samples: Samples | None) -> Problem:
    return eqx.tree_at(lambda p: p.samples, problem, samples, is_leaf=lambda node: node is None)
