"""The server's end: `round` runs eagerly here, and every exchange goes to the sites."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PyTree

from fedsolve.algorithm import Algorithm
from fedsolve.compression import Packet
from fedsolve.federation import Federation, Flags, Question, State
from fedsolve.flare.site import START, write
from fedsolve.flare.wire import Refused, decode, encode, nothing_left, protocol, size_of, take
from fedsolve.problem import Problem
from fedsolve.runs import History, Run
from fedsolve.simulation import client_values, combined
from fedsolve.solving import joined, numbers_on_device, on_host, precision_of, spans_of

ANY = 2**40  # what this machine wrote itself may be of any size
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
    ):
        self.protocol = protocol(problem, algorithm)
        self.roster: dict[str, tuple[int, int]] = {}  # site: its first client, how many it has
        self.settled: dict[str, tuple[int, list[int]]] = {}  # last round heard in, answers used
        self.used: dict[str, list[int]] = {}  # answers used in this round
        self.sent = self.received = 0  # all bytes, whatever they are
        self.answered: list[str] = []
        self._transport, self._log = transport, log
        self._names = [START]  # w's names, one after each publication still worth sending
        self._packets: list[tuple[int, Packet]] = []
        self._holds: dict[str, str] = {}  # the w that each site was last known to hold

    @property
    def clients(self) -> int:
        return sum(count for _, count in self.roster.values())

    def hello(self, sites: list[str]) -> None:
        """Asks sites how many clients they have; those are numbered in the order of the sites."""
        for site, (head, _) in self._send(
            {s: encode({"kind": "hello"}, {}) for s in sites}, 0
        ).items():
            self.roster[site] = (0, int(head["clients"]))
        first = 0
        for site in sorted(self.roster):
            count = self.roster[site][1]
            self.roster[site], first = (first, count), first + count

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
        for site, (_, arrays) in self._deliver(heads, {"message": message}, w, most).items():
            try:
                reply = take(arrays, "reply", exchange.reply, rows=len(wanted[site]))
                nothing_left(arrays)
            except Refused as refused:
                self._log(f"{site}: refused its reply: {refused}")
                continue
            self.used.setdefault(site, []).append(number)
            for row, client in enumerate(wanted[site]):
                found[client] = jax.tree.map(lambda leaf, row=row: leaf[row], reply)
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

    def restore(self, head: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        self.roster = {site: (first, count) for site, (first, count) in head["roster"].items()}
        self.settled = {site: (last, used) for site, (last, used) in head["settled"].items()}
        self._names, self._holds = head["names"], head["holds"]
        self._packets = [
            (kind, take(arrays, f"packet{i}", self.protocol.packets[kind]))
            for i, kind in enumerate(head["kinds"])
        ]


class Deployment(Federation):
    """A federation over a link."""

    def __init__(self, problem: Problem, state: State, link: Link):
        super().__init__(problem, state)
        self._link, self._publications = link, 0

    @property
    def clients(self) -> int:
        return self._link.clients

    def _exchange(self, question: Question) -> tuple[PyTree, Flags]:
        cohort, asked = np.asarray(question.cohort), np.asarray(question.asked)
        found = {}
        if asked.any():
            found = self._link.ask(
                int(self.round), question.exchange, cohort[asked], question.message, self.w
            )
        arrived = np.asarray([int(c) in found for c in cohort]) & asked
        template = self._link.protocol.exchanges[question.exchange].reply
        nothing = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), template)
        rows = [found[int(c)] if here else nothing for c, here in zip(cohort, arrived, strict=True)]
        values = jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *rows)
        return values, arrived

    def publish(self, packet: Packet, when: Any = True) -> None:
        super().publish(packet, when)
        if bool(when):
            whole = self.w.size * self.w.dtype.itemsize
            self._link.publish(self._publications, packet, whole)
        self._publications += 1


def serve(
    link: Link,
    problem: Problem,
    algorithm: Algorithm,
    rounds: int,
    seed: int,
    home: Path,
    evaluate_every: int = 1,
    precision: str | None = None,
    progress: Callable[[dict[str, Any]], None] | None = None,
) -> Run:
    """Runs the algorithm over the link, from the beginning or from where `home` says it stopped."""
    began = time.perf_counter()
    path = home / "server.safetensors"
    with precision_of(precision) as dtype:
        placed, tuned = problem.on_device(dtype), numbers_on_device(algorithm, dtype)
        values_of = jax.eval_shape(lambda: _one_clients_values(placed, jax.random.key(seed)))
        state, chunks = _start(placed, tuned, seed, link.clients), []
        if path.exists():
            head, arrays = decode(path.read_bytes(), ANY)
            link.restore(head["link"], arrays)
            state, chunks = _restored(head, arrays, placed, tuned, seed)
        for start, stop, _ in spans_of(int(state.round), rounds, evaluate_every):
            info: dict[str, Any] = {}
            clock = time.perf_counter()
            for _ in range(start, stop):
                state, info = Deployment(placed, state, link).play(tuned)
                link.end_round(int(state.round) - 1)
                if int(state.round) < stop:  # the last is saved with its entry in the history
                    _save(path, state, link, chunks, time.perf_counter() - began)
            seconds = time.perf_counter() - clock
            answered = link.answered
            entry = info | _evaluate(placed, state, link, values_of)
            stacked = jax.tree.map(lambda leaf: np.asarray(leaf)[None], entry)
            chunks = [joined([*chunks, on_host(stacked, np.asarray([[start, stop, 1]], np.int32))])]
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


def saved_run(home: Path, problem: Problem, algorithm: Algorithm, seed: int, precision: Any) -> Run:
    """The run as far as the server's checkpoint has it."""
    head, arrays = decode((home / "server.safetensors").read_bytes(), ANY)
    with precision_of(precision) as dtype:
        placed, tuned = problem.on_device(dtype), numbers_on_device(algorithm, dtype)
        state, chunks = _restored(head, arrays, placed, tuned, seed)
        return Run.of(problem, algorithm, state, joined(chunks), seed, head["seconds"])


def _start(problem: Problem, algorithm: Algorithm, seed: int, clients: int) -> State:
    """As in a simulation, but for the clients' states: those are the sites' own."""
    state = State.start(problem, algorithm, jax.random.key(seed), clients)
    return dataclasses.replace(state, clients=None, memory=None)


def _restored(
    head: dict[str, Any], arrays: dict[str, Any], problem: Problem, algorithm: Algorithm, seed: int
) -> tuple[State, list[History]]:
    clients = sum(count for _, count in head["link"]["roster"].values())
    shapes = jax.eval_shape(lambda: _start(problem, algorithm, seed, clients))
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
