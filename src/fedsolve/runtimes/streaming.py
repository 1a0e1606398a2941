"""The streamed runtime: clients' data and states stay on disk, and only a cohort is on the device.

A round is one compiled program over the rows of its cohort. Who that is, is found before: the
algorithm's round is followed up to its first question. While a round computes, the rows of the
next cohort are fetched. It may turn out to be another one (where drawing depends on the answers);
then it is fetched again. So data and states in memory are those of two cohorts, whatever the
number of clients.

A round that asks others as well, or everyone, is cut at its questions (`stages`): each is answered
block by block. Then what is in memory is a block of clients, and the replies of all that are asked.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree, UInt32

from fedsolve.algorithms.base import Algorithm
from fedsolve.errors import InvalidInput
from fedsolve.federation.counters import Bytes
from fedsolve.federation.federation import Federation
from fedsolve.federation.options import Setting
from fedsolve.federation.replies import Replies
from fedsolve.federation.state import State
from fedsolve.problem.problem import Problem
from fedsolve.runtimes.evaluation import client_values, combined
from fedsolve.runtimes.simulation import Simulation
from fedsolve.runtimes.stages import Asked, answered, asks_one_cohort, played
from fedsolve.solving.checkpoint import Checkpoint
from fedsolve.solving.stopping import wants_gradient
from fedsolve.storage.client_store import Store
from fedsolve.types import Cohort

BLOCK = 2**26  # bytes of clients' data that are evaluated in one piece


class _Asked(Exception):
    def __init__(self, cohort: Cohort):
        self.cohort = cohort


class _Plan(Federation):
    """Follows a round up to its first question."""

    def __init__(self, problem: Problem, state: State, clients: int):
        super().__init__(problem, state)
        self._clients = clients

    @property
    def clients(self) -> int:
        return self._clients

    def ask(
        self, method: Callable, cohort: Cohort, message: PyTree = None, when: Any = True
    ) -> Replies:
        raise _Asked(cohort)


class Streamed(Simulation):
    """A federation whose problem and state have the rows of one cohort."""

    def __init__(self, problem: Problem, state: State, setting: Setting, clients: int):
        super().__init__(problem, state, setting)
        self._clients = clients
        self.cohort: Any = None

    @property
    def clients(self) -> int:
        return self._clients

    def _rows(self, cohort: Cohort) -> Any:
        if self.cohort is None:
            self.cohort = cohort
        assert self.cohort is cohort, "one cohort a round, or else `stages`"
        return slice(None)


@eqx.filter_jit
def _planned(problem: Problem, algorithm: Algorithm, state: State, clients: int) -> Cohort:
    try:
        _Plan(problem, state, clients).play(algorithm)
    except _Asked as asked:
        return asked.cohort
    raise InvalidInput("This algorithm asks nobody.")


@eqx.filter_jit
def _played(
    problem: Problem,
    algorithm: Algorithm,
    state: State,
    cohort: Int[Array, " m"],
    setting: Setting,
    clients: int,
) -> tuple[State, dict[str, Any], Bool[Array, ""]]:
    fed = Streamed(problem, state, setting, clients)
    after, info = fed.play(algorithm)
    return after, info, jnp.all(fed.cohort == cohort)


@eqx.filter_jit
def _looked(
    problem: Problem, w: Float[Array, " d"], state: State, first: Any, setting: Setting
) -> dict[str, PyTree]:
    gradient = wants_gradient(setting.stop)
    return client_values(problem, w, state.evaluation_key, first, setting, gradient)


_combined = eqx.filter_jit(combined)


class Stream:
    """A run over clients that are not in memory. `problem` is as the user gave it."""

    def __init__(
        self, problem: Problem, algorithm: Algorithm, setting: Setting, place: Any, dtype: Any
    ):
        if setting.follow:
            raise InvalidInput("The streamed runtime follows f, g and the metrics only.")
        self._whole, self._dtype, self._setting = problem, dtype, setting
        self._algorithm, self.clients = algorithm, problem.n
        self._rest = _with_samples(problem, None).on_device(dtype)  # all but clients' data
        self._pool = ThreadPoolExecutor(1)
        self._place, self._first = place, np.zeros(())
        self._one = self._problem(self._data(np.zeros(1, int)))
        self._waiting: tuple[np.ndarray, Future] | None = None  # the next cohort, as it seems
        self._written = np.zeros(0, np.int32)  # since that was fetched
        self._at = 0  # the round of what the store holds
        self._replies: dict[int, PyTree] = {}  # shapes, by the number of the question
        self._one_cohort = True
        self.store: Store

    def start(self, words: UInt32[Array, " words"]) -> State:
        """The state before the first round, without any client's."""
        key, timed = jax.random.wrap_key_data(words), self._setting.clock is not None
        one = State.start(self._one, self._algorithm, key, 1, timed)
        everyone = Bytes(*jnp.zeros((2, self.clients), jnp.uint32))
        participation = self._algorithm.init_participation(one.w, self.clients)
        state = dataclasses.replace(one, participation=participation, seen=everyone)
        known = self._one, self._algorithm, state, self._setting, self.clients
        self._one_cohort = asks_one_cohort(*known)
        own, self._shape = jax.tree.flatten(self._own(one))
        self._names = [f"f{i}" for i in range(len(own))]
        fields = [
            (name, leaf.dtype, leaf.shape[1:]) for name, leaf in zip(self._names, own, strict=True)
        ]
        first = np.zeros((), np.dtype(fields or [("nothing", np.uint8)]))
        for name, leaf in zip(self._names, own, strict=True):
            first[name] = np.asarray(leaf)[0]
        self._first = first
        return self._without_clients(state)

    def advance(self, state: State, spans: Any) -> tuple[State, dict[str, Any]]:
        """As `simulation.advance`, round by round."""
        if int(state.round) == self._at:
            self.store.hold("last call")
        else:  # the rounds since the last call are to be done again
            self.store.go_back("last call")
            self._waiting = None
        entries = []
        for start, stop, look in spans:
            info: dict[str, Any] = {}
            for _ in range(start, stop):
                state, info = self._round(state)
            entry = info | (self._evaluate(state) if look else self._nothing(state))
            if self._setting.stop is not None:
                entry["stopped"] = np.asarray(look > 0 and self._setting.stop(entry), bool)
            entries.append(entry)
            if entry.get("stopped"):
                break
        self._at = int(state.round)
        return state, jax.tree.map(lambda *leaves: np.stack(leaves), *entries)

    @contextlib.contextmanager
    def stored(self, saved: Checkpoint | None) -> Iterator[None]:
        """Has the store in the block: a new run's, or that of what a checkpoint has."""
        self.store = Store(self._place, self._first, self.clients)
        try:
            if saved is None:
                self.store.begin()
            else:
                self.store.load(saved.stores)
                self._at = saved.round
            yield
        finally:
            self._pool.shutdown()
            self.store.close()

    def _round(self, state: State) -> tuple[State, dict[str, Any]]:
        if not self._one_cohort:
            return self._in_stages(state)
        cohort = self._cohort(state)
        data, rows = self._fetched(cohort)
        now = self._with_clients(state, rows)
        guess = self._cohort(dataclasses.replace(state, round=state.round + 1))
        self._waiting = guess, self._pool.submit(self._fetch, guess)
        problem, who = self._problem(data), jnp.asarray(cohort)
        after, info, agree = _played(
            problem, self._algorithm, now, who, self._setting, self.clients
        )
        moved = self._own(after)
        jax.block_until_ready(moved)
        self._waiting[1].result()  # a store is read and written by one at a time
        self._written = self._keep(cohort, rows, moved)
        assert bool(agree), "the cohort was drawn otherwise than planned"
        return self._without_clients(after), info

    def _in_stages(self, state: State) -> tuple[State, dict[str, Any]]:
        """A round of several cohorts, from question to question."""
        now, known = self._with_clients(state, self.store.take(np.zeros(1, np.int32))), []
        while True:
            found = played(self._one, self._algorithm, now, self._setting, self.clients, known)
            if not isinstance(found, Asked):
                return self._without_clients(found[0]), found[1]
            known.append(self._answers(state, found, len(known)))

    def _answers(self, state: State, asked: Asked, exchange: int) -> PyTree:
        """The replies of those that were asked, block by block; zeros where none will arrive."""
        cohort, arrived = np.asarray(asked.cohort), np.asarray(asked.arrived)
        size = min(self._block, len(cohort))

        def block(who: np.ndarray, rows: np.ndarray) -> tuple[Any, ...]:
            now = dataclasses.replace(self._with_clients(state, rows), seen=None)
            problem = self._problem(self._data(who))
            return problem, self._algorithm, now, asked, exchange, jnp.asarray(who)

        shapes = self._replies.get(exchange)
        if shapes is None:
            first = block(cohort[:size], self.store.take(cohort[:size]))
            self._replies[exchange] = shapes = eqx.filter_eval_shape(answered, *first)[1]
        found = jax.tree.map(lambda s: np.zeros((len(cohort), *s.shape[1:]), s.dtype), shapes)
        for first in range(0, len(cohort), size):
            begin = min(first, len(cohort) - size)  # all have the same size: the last looks back
            here = slice(begin, begin + size)
            heard = np.flatnonzero(arrived[here] & (np.arange(size) >= first - begin))
            if len(heard):
                who, rows = cohort[here], self.store.take(cohort[here])
                moved, replies = answered(*block(who, rows))
                self._keep(who[heard], rows[heard], moved, heard)
                for all, part in zip(*map(jax.tree.leaves, (found, replies)), strict=True):
                    all[begin + heard] = np.asarray(part)[heard]
        return jax.tree.map(jnp.asarray, found)

    def _own(self, state: State) -> tuple[PyTree, ...]:
        """What there is for each client. What each has seen of w is the server's to know: where
        all may be asked, it stays in memory."""
        own = state.clients, state.memory
        return (*own, state.seen) if self._one_cohort else own

    def _with_clients(self, state: State, rows: np.ndarray) -> State:
        own = [jnp.asarray(rows[name]) for name in self._names]
        clients, memory, *seen = jax.tree.unflatten(self._shape, own)
        return dataclasses.replace(
            state, clients=clients, memory=memory, seen=seen[0] if seen else state.seen
        )

    def _without_clients(self, state: State) -> State:
        seen = None if self._one_cohort else state.seen
        return dataclasses.replace(state, clients=None, memory=None, seen=seen)

    def _keep(
        self, who: np.ndarray, rows: np.ndarray, moved: PyTree, places: Any = slice(None)
    ) -> np.ndarray:
        """Writes the rows that changed; says whose. They are at those places of `moved`."""
        after = np.zeros(len(who), rows.dtype)
        for name, leaf in zip(self._names, jax.tree.leaves(moved), strict=True):
            after[name] = np.asarray(leaf)[places]
        changed = (_bytes(after) != _bytes(rows)).any(axis=1)
        self.store.put(who[changed], after[changed])
        return who[changed]

    def _cohort(self, state: State) -> np.ndarray:
        return np.asarray(_planned(self._one, self._algorithm, state, self.clients))

    def _fetch(self, cohort: np.ndarray) -> tuple[PyTree, np.ndarray]:
        return self._data(cohort), self.store.take(cohort)

    def _fetched(self, cohort: np.ndarray) -> tuple[PyTree, np.ndarray]:
        """What was fetched ahead, if it is of this cohort; rows written since are read again."""
        if self._waiting is None or not np.array_equal(self._waiting[0], cohort):
            return self._fetch(cohort)
        data, rows = self._waiting[1].result()
        if (old := np.isin(cohort, self._written)).any():
            rows[old] = self.store.take(cohort[old])
        return data, rows

    def _data(self, cohort: np.ndarray) -> PyTree:
        """Those clients' data, on the host, of the types that JAX would give them."""

        def rows(leaf: Any) -> np.ndarray:
            found = np.asarray(leaf[cohort])
            wanted = found.dtype
            if self._dtype is not None and jnp.issubdtype(wanted, jnp.floating):
                wanted = self._dtype
            return found.astype(jax.dtypes.canonicalize_dtype(wanted), copy=False)

        return jax.tree.map(rows, self._whole.samples)

    def _problem(self, data: PyTree) -> Problem:
        return _with_samples(self._rest, jax.tree.map(jnp.asarray, data))

    def _evaluate(self, state: State) -> dict[str, Any]:
        """f and g over all clients, a block of them after the other."""
        n, size = self.clients, self._block
        alike = not wants_gradient(
            self._setting.stop
        )  # sums of gradients have no rows to leave out
        found: list[PyTree] = []
        for first in range(0, n, size):
            begin = min(first, n - size) if alike else first  # of one size: the last looks back
            block = self._problem(self._data(np.arange(begin, min(begin + size, n))))
            values = _looked(block, state.w, state, jnp.int32(begin), self._setting)
            found.append(jax.tree.map(lambda leaf, at=first - begin: np.asarray(leaf)[at:], values))
        values = jax.tree.map(lambda *parts: jnp.asarray(np.concatenate(parts)), *found)
        return _combined(self._rest, state.w, values, self._weights(state))

    def _weights(self, state: State) -> Any:
        return self._algorithm.objective_weights(state.server, state.participation)

    @property
    def _block(self) -> int:
        """So many clients are looked at in one piece."""
        leaves = jax.tree.leaves(self._whole.samples)
        each = self.store.row + sum(x.dtype.itemsize * int(np.prod(x.shape[1:])) for x in leaves)
        return min(max(BLOCK // max(each, 1), 1), self.clients)

    def _nothing(self, state: State) -> dict[str, Any]:
        """In the form of an evaluation."""

        def look() -> dict[str, Any]:
            gradient = wants_gradient(self._setting.stop)
            values = client_values(self._one, state.w, gradient=gradient)
            shares = self._weights(state)
            return combined(self._rest, state.w, values, None if shares is None else shares[:1])

        shapes = jax.eval_shape(look)
        return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)


def _bytes(rows: np.ndarray) -> np.ndarray:
    return rows.view(np.uint8).reshape(len(rows), -1)


def _with_samples(problem: Problem, samples: Any) -> Problem:
    return eqx.tree_at(lambda p: p.samples, problem, samples, is_leaf=lambda node: node is None)
