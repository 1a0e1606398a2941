"""The server's end: `round` runs here, compiled, and every exchange goes to the sites."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jaxtyping import Array, Key, PyTree

from fedsolve.algorithms.base import Algorithm
from fedsolve.compression.packets import Packet
from fedsolve.federation.exchange import Question
from fedsolve.federation.federation import Federation
from fedsolve.federation.state import State
from fedsolve.flare.journal import Journal, Parts, read
from fedsolve.flare.roster import Link, TooFew
from fedsolve.problem.problem import Problem
from fedsolve.runtimes.compilation import prepared
from fedsolve.runtimes.evaluation import client_values, combined
from fedsolve.solving.chunks import Spans, joined, on_host, spans_of
from fedsolve.solving.result import History, Run
from fedsolve.solving.solve import numbers_on_device, precision_of
from fedsolve.storage.arrays import decode, in_order, parts, take
from fedsolve.types import Flags

FOLDER = "server"  # in a run's home: the server's journal


class Deployment(Federation):
    """A federation over a link, inside the server's compiled round: an exchange is a call out of
    the program, in the order in which the algorithm makes them."""

    def __init__(self, problem: Problem, state: State, link: Link):
        super().__init__(problem, state)
        self._link, self._publications = link, 0

    @property
    def clients(self) -> int:
        return self._link.clients

    def _exchange(self, question: Question) -> tuple[PyTree, Flags]:
        number = question.exchange
        template = self._link.protocol.exchanges[number].reply
        size = len(question.cohort)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape), x.dtype), template)

        def ask(round: Any, cohort: Any, asked: Any, message: PyTree, w: Any) -> Any:
            cohort, asked = np.asarray(cohort), np.asarray(asked)
            values = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), shapes)
            arrived = np.zeros(size, bool)
            found = []
            if asked.any():
                found = self._link.ask(int(round), number, cohort[asked], message, w)
            for clients, replies in found:
                order = np.argsort(clients)
                place = np.searchsorted(clients, cohort, sorter=order)
                row = order[np.minimum(place, len(clients) - 1)]
                here = np.flatnonzero((np.asarray(clients)[row] == cohort) & asked)
                arrived[here] = True
                for all, own in zip(*map(jax.tree.leaves, (values, replies)), strict=True):
                    all[in_order(here)] = own[in_order(row[here])]
            for all in jax.tree.leaves(values):
                all[~arrived] = 0
            return values, arrived

        here = jax.ShapeDtypeStruct((size,), bool)
        arguments = (self.round, question.cohort, question.asked, question.message, self.w)
        return self._call(ask, (shapes, here), *arguments)

    def publish(self, packet: Packet, when: Any = True) -> None:
        super().publish(packet, when)
        kind, whole = self._publications, self.w.size * self.w.dtype.itemsize
        self._publications += 1

        def tell(when: Any, packet: Packet) -> None:
            if when:
                self._link.publish(kind, packet, whole)

        self._call(tell, None, jnp.asarray(when), packet)

    def _call(self, function: Callable, shapes: Any, *arguments: Any) -> Any:
        """Out of the program. What goes wrong there is kept for later, as a program must not fail
        half-way: the rest of its round then asks nobody, and does not count."""

        def safely(*given: Any) -> Any:
            try:
                if self._link.trouble is None:
                    return function(*jax.tree.map(np.asarray, given))
            except BaseException as error:
                self._link.trouble = error
            return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)

        return io_callback(safely, shapes, *arguments, ordered=True)


def serve(
    link: Link,
    sites: list[str],
    problem: Problem,
    algorithm: Algorithm,
    rounds: int,
    seed: int,
    home: Path,
    evaluate_every: int = 1,
    precision: str | None = None,
    progress: Callable[[dict[str, Any]], None] | None = None,
    go_on: Callable[[], bool] = lambda: True,
) -> Run:
    """Runs the algorithm over the link, from the beginning or from where `home` says it stopped,
    as long as `go_on` says so."""
    began = time.perf_counter()
    journal = Journal(home / FOLDER)
    with precision_of(precision) as dtype:
        placed, tuned = problem.on_device(dtype), numbers_on_device(algorithm, dtype)
        values_of = jax.eval_shape(lambda: _one_clients_values(placed, jax.random.key(seed)))
        saved, chunks = _loaded(*journal.load())
        fresh: list[History] = []  # of the history, what is not on disk yet
        waiting: History = {}  # the newest entry of the history, before it has the sites' values
        news: dict[str, Any] = {}  # what is to be told with it
        if saved is None:
            link.hello(sites)
            state = _start(placed, tuned, seed, link.clients)
        else:
            link.restore(saved[0]["link"])

            def may_grow(clients: int) -> bool:
                now, then = (_shapes(placed, tuned, seed, n) for n in (clients, link.clients))
                return (now.server, now.participation) == (then.server, then.participation)

            before = link.clients
            state = _restored(*saved, placed, tuned, seed)
            waiting, news = _named(saved[1], "waiting", saved[0]["waiting"]), saved[0]["news"]
            link.hello(sites, may_grow)
            link.restore_packets(saved[0]["link"], saved[1])
            state = _grown(state, link.clients - before)

        def play(
            problem: Problem, algorithm: Algorithm, state: State
        ) -> tuple[State, dict[str, Any]]:
            return Deployment(problem, state, link).play(algorithm)

        one_round, together = prepared(play, placed, tuned), prepared(combined, placed)

        def complete(state: State) -> None:
            """Gives the entry that waits the values at the end of its round, with that state."""
            nonlocal waiting
            shares = tuned.objective_weights(state.server, state.participation)
            found = link.values()
            if found:
                values = _together(together, state.w, found, link.roster, shares)
            else:
                values = _unknown(placed, state.w, values_of, shares)
            entries = {k: v for k, v in waiting.items() if k != "round"} | _stacked(values)
            new = on_host(entries, _span(waiting["round"].item()))
            chunks.append(new)
            fresh.append(new)
            waiting = {}
            if progress is not None:
                progress({k: v[-1].item() for k, v in new.items() if v.ndim == 1} | news)

        def record(chunks: list[History]) -> Parts:
            """Where the run is, with that part of its history."""
            head, arrays = link.saved()
            head = {"link": head, "news": news, "seconds": time.perf_counter() - began}
            for name, part in {"history": _history(chunks), "waiting": waiting}.items():
                head[name], arrays[name] = list(part), list(part.values())
            return parts(head, arrays | {"state": state})

        def save() -> None:
            journal.append(record(fresh))
            fresh.clear()
            if journal.is_long():
                journal.restart(record(chunks))

        if waiting:
            link.look(int(state.round), state.w, values_of)
        for start, stop, _ in spans_of(int(state.round), rounds, evaluate_every).tolist():
            clock = time.perf_counter()
            for _ in range(start, stop):
                if not go_on():
                    raise TooFew("told to make room for the next job")
                after, info = jax.block_until_ready(one_round(state))
                if link.trouble is not None:
                    raise link.trouble
                answered = sorted(link.answered)
                link.end_round(int(state.round))
                if waiting:
                    complete(state)
                state = after
                if int(state.round) == stop:
                    exchanges = max(len(link.protocol.exchanges), 1) * (stop - start)
                    news = {
                        "answered": answered,
                        "milliseconds": 1e3 * (time.perf_counter() - clock) / exchanges,
                        "wire_sent": link.sent,
                        "wire_received": link.received,
                    }
                    waiting = on_host(_stacked(info), _span(stop))
                    link.look(stop, state.w, values_of)
                save()
        if waiting:
            complete(state)
        journal.restart(record(chunks))
        seconds = time.perf_counter() - began
        return Run.of(problem, algorithm, state, _history(chunks), seed, seconds)


def saved_run(
    path: Path, problem: Problem, algorithm: Algorithm, seed: int, precision: Any
) -> Run | None:
    """The run as far as the server's journal has it, or its last base alone."""
    saved, chunks = _loaded(*(read(path) if path.is_dir() else (path.read_bytes(), [])))
    if saved is None:
        return None
    with precision_of(precision) as dtype:
        placed, tuned = problem.on_device(dtype), numbers_on_device(algorithm, dtype)
        state = _restored(*saved, placed, tuned, seed)
        return Run.of(problem, algorithm, state, _history(chunks), seed, saved[0]["seconds"])


def _start(problem: Problem, algorithm: Algorithm, seed: int, clients: int) -> State:
    """As in a simulation, but for the clients' states: those are the sites' own."""
    state = State.start(problem, algorithm, jax.random.key(seed), clients)
    return dataclasses.replace(state, clients=None, memory=None)


def _shapes(problem: Problem, algorithm: Algorithm, seed: int, clients: int) -> State:
    return jax.eval_shape(lambda: _start(problem, algorithm, seed, clients))


def _grown(state: State, more: int) -> State:
    """With room for new clients, who have seen nothing yet."""
    seen = jax.tree.map(lambda x: jnp.concatenate([x, jnp.zeros(more, x.dtype)]), state.seen)
    return dataclasses.replace(state, seen=seen)


def _history(chunks: list[History]) -> History:
    """The chunks one after the other; entries by client get -1 for clients that were not there
    yet."""
    wide = {k: max(c[k].shape[1:] for c in chunks) for k in (chunks or [{}])[-1]}

    def fit(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        more = [(0, 0), *[(0, a - b) for a, b in zip(shape, values.shape[1:], strict=True)]]
        return np.pad(values, more, constant_values=-1) if any(map(any, more)) else values

    return joined([{k: fit(v, wide[k]) for k, v in chunk.items()} for chunk in chunks])


Saved = tuple[dict[str, Any], dict[str, np.ndarray]]  # a record's head and arrays


def _loaded(base: bytes | None, records: list[bytes]) -> tuple[Saved | None, list[History]]:
    """The last record of a journal, and the history that all have together."""
    found = [decode(data, None) for data in ([] if base is None else [base]) + records]
    parts = [_named(arrays, "history", head["history"]) for head, arrays in found]
    return found[-1] if found else None, [part for part in parts if part]


def _restored(
    head: dict[str, Any],
    arrays: dict[str, np.ndarray],
    problem: Problem,
    algorithm: Algorithm,
    seed: int,
) -> State:
    clients = sum(count for _, count in head["link"]["roster"].values())
    shapes = _shapes(problem, algorithm, seed, clients)
    return jax.tree.map(jnp.asarray, take(arrays, "state", shapes, finite=False))


def _named(arrays: dict[str, Any], prefix: str, names: list[str]) -> History:
    return {name: arrays[f"{prefix}.{number}"] for number, name in enumerate(names)}


def _span(stop: int) -> Spans:
    return np.asarray([[stop - 1, stop, 1]], np.int32)


def _stacked(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry as a history of one."""
    return jax.tree.map(lambda leaf: np.asarray(leaf)[None], entry)


def _one_clients_values(problem: Problem, key: Key[Array, ""]) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[0], client_values(problem, problem.start(), key))


def _together(
    together: Callable,
    w: Any,
    found: dict[str, PyTree],
    roster: dict[str, tuple[int, int]],
    shares: Any,
) -> dict[str, Any]:
    """f and g over all clients that were heard, and the metrics; `shares` are of all clients."""
    heard = sorted(found)
    values = jax.tree.map(lambda *leaves: np.concatenate(leaves), *(found[s] for s in heard))
    if shares is None:
        return together(w, values)
    places = [roster[site] for site in heard]
    rows = np.concatenate([np.arange(first, first + count) for first, count in places])
    return together(w, values, shares[rows])


def _unknown(problem: Problem, w: Any, values: PyTree, shares: Any) -> dict[str, Any]:
    """The same where nobody was heard."""
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), values)
    part = () if shares is None else (shares[:1],)
    shapes = jax.eval_shape(lambda v: combined(problem, w, v, *part), one)
    types = {name: x.dtype if x.dtype.kind == "f" else float for name, x in shapes.items()}
    return {name: np.full(x.shape, np.nan, types[name]) for name, x in shapes.items()}
