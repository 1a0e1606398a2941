"""The server's end: `round` runs here, compiled, and every exchange goes to the sites."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jaxtyping import Array, Key, PyTree

from fedsolve.algorithm import Algorithm
from fedsolve.compression import Packet
from fedsolve.federation import Federation, Flags, Question, State
from fedsolve.flare.site import ANY, START, write
from fedsolve.flare.wire import (
    Protocol,
    Refused,
    decode,
    encode,
    nothing_left,
    protocol,
    size_of,
    take,
)
from fedsolve.problem import Problem
from fedsolve.runs import History, Run
from fedsolve.simulation import client_values, combined
from fedsolve.solving import joined, numbers_on_device, on_host, precision_of, spans_of


class TooFew(Exception):
    """Fewer answers than the quorum: the round does not count and will be asked again."""


Transport = Callable[[dict[str, bytes]], Mapping[str, bytes | Exception]]  # to sites, and back


class Link:
    """What the server knows of its sites, and how it asks them.

    `transport` delivers one message to each of some sites and brings back what answered in time.
    """

    def __init__(
        self,
        transport: Transport,
        problem: Problem,
        algorithm: Algorithm,
        log: Callable[[str], None],
        quorum: float = 0.0,
    ):
        self.protocol = Protocol((), (), None, None)
        self.roster: dict[str, tuple[int, int]] = {}  # site: its first client, how many it has
        self.settled: dict[str, tuple[int, list[int]]] = {}  # last round heard in, answers used
        self.used: dict[str, list[int]] = {}  # answers used in this round
        self.sent = self.received = 0  # all bytes, whatever they are
        self.answered: list[str] = []
        self.trouble: BaseException | None = None  # what went wrong outside the compiled round
        self._transport, self._log, self._quorum = transport, log, quorum
        self._problem, self._algorithm = problem, algorithm
        self._names = [START]  # w's names, one after each publication still worth sending
        self._packets: list[tuple[int, Packet]] = []
        self._holds: dict[str, str] = {}  # the w that each site was last known to hold

    @property
    def clients(self) -> int:
        return sum(count for _, count in self.roster.values())

    def hello(self, sites: list[str], may_grow: Callable[[int], bool] = bool) -> None:
        """Asks sites how many clients they have. Those of a new run are numbered in the order of
        the sites; newcomers to a run come after the others, where the algorithm can take them."""
        found = {
            site: int(head["clients"])
            for site, (head, _) in self._greet(sites, 0).items()
            if isinstance(head.get("clients"), int) and head["clients"] > 0
        }
        known = self.roster
        for site in sorted(found.keys() & known.keys()):
            if found[site] != known[site][1]:
                self._log(
                    f"{site}: it had {known[site][1]} clients in this run, and has {found[site]}"
                )
        new = sorted(found.keys() - known.keys())
        if known and new and not may_grow(self.clients + sum(found[site] for site in new)):
            self._log(f"{', '.join(new)}: new, and not taken in before the next run")
            new = []
        for site in new:
            known[site] = (self.clients, found[site])
        if not known:
            raise TooFew("no site is ready")
        self.protocol = protocol(self._problem, self._algorithm, self.clients)
        self._greet([site for site in found if site in known], self.clients)

    def _greet(self, sites: list[str], total: int) -> dict[str, tuple[dict, dict]]:
        return self._send({s: encode({"kind": "hello", "total": total}, {}) for s in sites}, 0)

    def ask(
        self, round: int, number: int, clients: Any, message: PyTree, w: Any
    ) -> dict[int, PyTree]:
        """Asks those clients: the reply of each that answered."""
        exchange = self.protocol.exchanges[number]
        wanted = {
            site: [int(c) for c in clients if first <= c < first + count]
            for site, (first, count) in self.roster.items()
        }
        wanted = {site: own for site, own in wanted.items() if own}
        heads = {
            site: {
                "kind": "ask",
                "round": round,
                "exchange": number,
                "method": exchange.method,
                "first": self.roster[site][0],
                "clients": own,
                "used": self.used.get(site, []),
                "settled": self.settled.get(site, (-1, [])),
            }
            for site, own in wanted.items()
        }
        most = max(map(len, wanted.values()), default=0) * size_of(exchange.reply)
        found: dict[int, PyTree] = {}
        for site, (head, arrays) in self._deliver(heads, {"message": message}, w, most).items():
            try:
                if (head.get("round"), head.get("exchange")) != (round, number):
                    raise Refused("it is for another round or exchange")
                reply = take(arrays, "reply", exchange.reply, rows=len(wanted[site]))
                nothing_left(arrays)
            except Refused as refused:
                self._log(f"{site}: refused its reply: {refused}")
                continue
            self.used.setdefault(site, []).append(number)
            for row, client in enumerate(wanted[site]):
                found[client] = jax.tree.map(lambda leaf, row=row: leaf[row], reply)
        if len(found) < max(1, math.ceil(self._quorum * len(clients))):
            raise TooFew(f"{len(found)} of {len(clients)} clients answered in round {round + 1}")
        return found

    def evaluate(self, round: int, w: Any, template: PyTree) -> dict[str, PyTree]:
        """Every site's values of its own clients at w."""
        heads = {
            site: {"kind": "evaluate", "round": round, "first": first}
            for site, (first, _) in self.roster.items()
        }
        most = self.clients * size_of(template)
        found = {}
        for site, (_, arrays) in self._deliver(heads, {}, w, most).items():
            try:
                found[site] = take(arrays, "values", template, rows=self.roster[site][1])
            except Refused as refused:
                self._log(f"{site}: refused its values: {refused}")
        return found

    def publish(self, kind: int, packet: Packet, whole: int) -> None:
        """Remembers a publication, as long as sending it can be worth it."""
        data = encode({"after": self._names[-1]}, {"packet": packet})
        self._packets.append((kind, jax.tree.map(np.asarray, packet)))
        self._names.append(hashlib.sha256(data).hexdigest()[:32])
        while self._packets and sum(size_of(p) for _, p in self._packets) > whole:
            self._packets.pop(0)
            self._names.pop(0)

    def end_round(self, round: int) -> None:
        """The round is on disk: from now on its answers are settled."""
        # A site that was not heard may not have heard either: what it was to be told still stands.
        self.settled |= {site: (round, used) for site, used in self.used.items() if used}
        self.used = {}

    def _deliver(
        self, heads: dict[str, dict], arrays: dict[str, PyTree], w: Any, most: int
    ) -> dict[str, tuple[dict, dict]]:
        """Sends each its head, the common arrays, and what it lacks of w."""
        arrived: dict[str, tuple[dict, dict]] = {}
        waiting = dict(heads)
        for whole in (False, True):  # a site that is not where it was thought gets all of w
            messages = {s: self._message(s, head, arrays, w, whole) for s, head in waiting.items()}
            for site, (head, reply) in self._send(messages, most).items():
                if head["status"] == "behind" and not whole:
                    continue
                waiting.pop(site)
                if head["status"] == "ok":
                    self._holds[site] = self._names[-1]
                    arrived[site] = head, reply
                else:
                    self._log(f"{site}: {head.get('reason', head['status'])}")
            waiting = {s: h for s, h in waiting.items() if s in self._behind}
            if not waiting:
                break
        self.answered = sorted(arrived)
        return arrived

    def _message(self, site: str, head: dict, arrays: dict, w: Any, whole: bool) -> bytes:
        news: dict[str, Any] = {"want": self._names[-1]}
        extra: dict[str, PyTree] = {}
        holds = self._holds.get(site, START)
        if whole or holds not in self._names:
            news["whole"], extra["w"] = True, w
        else:
            start = self._names.index(holds)
            news["from"] = self._names[start:-1]
            news["packets"] = [kind for kind, _ in self._packets[start:]]
            extra |= {f"packet{i}": p for i, (_, p) in enumerate(self._packets[start:])}
        return encode(head | {"w": news}, arrays | extra)

    def _send(self, messages: dict[str, bytes], most: int) -> dict[str, tuple[dict, dict]]:
        self.sent += sum(map(len, messages.values()))
        found, self._behind = {}, set()
        for site, data in self._transport(messages).items():
            try:
                if isinstance(data, Exception):
                    raise Refused(f"no answer ({data})")
                if site not in messages:
                    raise Refused("it was not asked")
                self.received += len(data)
                head, arrays = decode(data, most)
                if head.get("status") not in ("ok", "behind", "refused"):
                    raise Refused("its reply has no status")
                if head["status"] == "behind":
                    self._behind.add(site)
                found[site] = head, arrays
            except Refused as refused:
                self._log(f"{site}: {refused}")
        return found

    # For the checkpoint

    def saved(self) -> tuple[dict[str, Any], dict[str, PyTree]]:
        head = {
            "roster": self.roster,
            "settled": self.settled,
            "names": self._names,
            "kinds": [kind for kind, _ in self._packets],
            "holds": self._holds,
        }
        return head, {f"packet{i}": packet for i, (_, packet) in enumerate(self._packets)}

    def restore(self, head: dict[str, Any]) -> None:
        self.roster = {site: (first, count) for site, (first, count) in head["roster"].items()}
        self.settled = {site: (last, used) for site, (last, used) in head["settled"].items()}
        self._names, self._holds = head["names"], head["holds"]

    def restore_packets(self, head: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Once a round's packets are known again."""
        self._packets = [
            (kind, take(arrays, f"packet{i}", self.protocol.packets[kind]))
            for i, kind in enumerate(head["kinds"])
        ]


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
            found: dict[int, PyTree] = {}
            if asked.any():
                found = self._link.ask(int(round), number, cohort[asked], message, w)
            arrived = np.asarray([int(c) in found for c in cohort]) & asked
            nothing = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), template)
            rows = [found.get(int(c), nothing) for c in cohort]
            return jax.tree.map(lambda *leaves: np.stack(leaves), *rows), arrived

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
    path = home / "server.safetensors"
    with precision_of(precision) as dtype:
        placed, tuned = problem.on_device(dtype), numbers_on_device(algorithm, dtype)
        values_of = jax.eval_shape(lambda: _one_clients_values(placed, jax.random.key(seed)))
        saved = decode(path.read_bytes(), ANY) if path.exists() else None
        if saved is None:
            link.hello(sites)
            state, chunks = _start(placed, tuned, seed, link.clients), []
        else:
            link.restore(saved[0]["link"])

            def may_grow(clients: int) -> bool:
                now, then = (_shapes(placed, tuned, seed, n) for n in (clients, link.clients))
                return (now.server, now.participation) == (then.server, then.participation)

            before = link.clients
            state, chunks = _restored(*saved, placed, tuned, seed)
            link.hello(sites, may_grow)
            link.restore_packets(saved[0]["link"], saved[1])
            state = _grown(state, link.clients - before)

        def play(algorithm: Algorithm, state: State) -> tuple[State, dict[str, Any]]:
            return Deployment(placed, state, link).play(algorithm)

        compiled = eqx.filter_jit(play)
        for start, stop, _ in spans_of(int(state.round), rounds, evaluate_every):
            info: dict[str, Any] = {}
            clock = time.perf_counter()
            for _ in range(start, stop):
                if not go_on():
                    raise TooFew("told to make room for the next job")
                after, info = jax.block_until_ready(compiled(tuned, state))
                if link.trouble is not None:
                    raise link.trouble
                state = after
                link.end_round(int(state.round) - 1)
                if int(state.round) < stop:  # the last is saved with its entry in the history
                    _save(path, state, link, chunks, time.perf_counter() - began)
            seconds = time.perf_counter() - clock
            answered = link.answered
            entry = info | _evaluate(placed, state, link, values_of)
            stacked = jax.tree.map(lambda leaf: np.asarray(leaf)[None], entry)
            new = on_host(stacked, np.asarray([[start, stop, 1]], np.int32))
            chunks = [joined(_same_width([*chunks, new]))]
            _save(path, state, link, chunks, time.perf_counter() - began)
            if progress is not None:
                shown = {k: v[-1].item() for k, v in chunks[0].items() if v.ndim == 1}
                exchanges = max(len(link.protocol.exchanges), 1) * (stop - start)
                progress(
                    shown
                    | {"answered": answered, "milliseconds": 1e3 * seconds / exchanges}
                    | {"wire_sent": link.sent, "wire_received": link.received}
                )
        return Run.of(problem, algorithm, state, joined(chunks), seed, time.perf_counter() - began)


def saved_run(path: Path, problem: Problem, algorithm: Algorithm, seed: int, precision: Any) -> Run:
    """The run as far as the server's checkpoint has it."""
    head, arrays = decode(path.read_bytes(), ANY)
    with precision_of(precision) as dtype:
        placed, tuned = problem.on_device(dtype), numbers_on_device(algorithm, dtype)
        state, chunks = _restored(head, arrays, placed, tuned, seed)
        return Run.of(problem, algorithm, state, joined(chunks), seed, head["seconds"])


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


def _same_width(chunks: list[History]) -> list[History]:
    """Entries by client get -1 for clients that were not there yet."""
    wide = {k: max(c[k].shape[1:] for c in chunks) for k in chunks[-1]}

    def fit(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        more = [(0, 0), *[(0, a - b) for a, b in zip(shape, values.shape[1:], strict=True)]]
        return np.pad(values, more, constant_values=-1) if any(map(any, more)) else values

    return [{k: fit(v, wide[k]) for k, v in chunk.items()} for chunk in chunks]


def _restored(
    head: dict[str, Any], arrays: dict[str, Any], problem: Problem, algorithm: Algorithm, seed: int
) -> tuple[State, list[History]]:
    clients = sum(count for _, count in head["link"]["roster"].values())
    shapes = _shapes(problem, algorithm, seed, clients)
    state = jax.tree.map(jnp.asarray, take(arrays, "state", shapes))
    names = head["history"]
    return state, [{k: arrays[f"history.{i}"] for i, k in enumerate(names)}] if names else []


def _save(path: Path, state: State, link: Link, chunks: list[History], seconds: float) -> None:
    history = joined(chunks)
    head, arrays = link.saved()
    data = encode(
        {"link": head, "history": list(history), "seconds": seconds},
        arrays | {"state": state, "history": list(history.values())},
    )
    write(path, data)


def _one_clients_values(problem: Problem, key: Key[Array, ""]) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[0], client_values(problem, problem.start(), key))


def _evaluate(problem: Problem, state: State, link: Link, template: PyTree) -> dict[str, Any]:
    """f and g over all clients that can be heard, and the metrics."""
    found = link.evaluate(int(state.round), state.w, template)
    if not found:
        return {"objective": np.nan}
    parts = [found[site] for site in sorted(found)]
    values = jax.tree.map(lambda *leaves: jnp.asarray(np.concatenate(leaves)), *parts)
    return combined(problem, state.w, values)
