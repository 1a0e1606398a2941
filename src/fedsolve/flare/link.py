"""What the server knows of its sites, and how it asks them."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from fedsolve.algorithm import Algorithm
from fedsolve.flare.site import START
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
from fedsolve.packets import Packet
from fedsolve.problem import Problem


class TooFew(Exception):
    """Fewer answers than the quorum: the round does not count and will be asked again."""


Transport = Callable[[dict[str, bytes]], Mapping[str, bytes | Exception]]  # to sites, and back


class Link:
    """The server's end of the lines to its sites.

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
        self._wish: tuple[int, Any, PyTree] | None = None  # values that no question carried yet
        self._values: dict[str, PyTree] = {}  # each site's, when it was last asked for them

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
    ) -> list[tuple[list[int], PyTree]]:
        """Asks those clients: those that answered, site by site, and their replies, stacked."""
        exchange = self.protocol.exchanges[number]
        wanted = {
            site: [int(c) for c in clients if first <= c < first + count]
            for site, (first, count) in self.roster.items()
        }
        wanted = {site: own for site, own in wanted.items() if own}
        wish, self._wish = self._wish, None
        heads: dict[str, dict] = {
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
        if wish is not None:
            self._values = {}
            looks = self._looks(wish[0])
            heads = {s: heads[s] | {"look": wish[0]} if s in heads else looks[s] for s in looks}
            most += self.clients * size_of(wish[2])
        found: list[tuple[list[int], PyTree]] = []
        arrived = self._deliver(heads, {"message": message}, w, most)
        for site, (head, arrays) in arrived.items():
            try:
                if wish is not None:
                    self._take_values(site, arrays, wish[2])
                if site not in wanted:
                    continue
                if (head.get("round"), head.get("exchange")) != (round, number):
                    raise Refused("it is for another round or exchange")
                reply = take(arrays, "reply", exchange.reply, rows=len(wanted[site]))
                nothing_left(arrays)
            except Refused as refused:
                self._log(f"{site}: refused its reply: {refused}")
                continue
            if head.get("moved") is not False:  # where nothing moved, there is nothing to keep
                self.used.setdefault(site, []).append(number)
            found.append((wanted[site], reply))
        self.answered = sorted(arrived.keys() & wanted.keys())
        count = sum(len(own) for own, _ in found)
        if count < max(1, math.ceil(self._quorum * len(clients))):
            raise TooFew(f"{count} of {len(clients)} clients answered in round {round + 1}")
        return found

    def look(self, round: int, w: Any, template: PyTree) -> None:
        """Every site is to tell the values of its clients at w: with the next question, as a
        message of its own costs as much as a question."""
        self._wish = round, w, template

    def values(self) -> dict[str, PyTree]:
        """What the sites told when they were to look; they are asked now if no question went out
        since."""
        wish, self._wish = self._wish, None
        if wish is not None:
            self._values = {}
            round, w, template = wish
            most = self.clients * size_of(template)
            for site, (_, arrays) in self._deliver(self._looks(round), {}, w, most).items():
                self._take_values(site, arrays, template)
        return self._values

    def _looks(self, round: int) -> dict[str, dict]:
        return {
            site: {"kind": "evaluate", "round": round, "first": first}
            for site, (first, _) in self.roster.items()
        }

    def _take_values(self, site: str, arrays: dict[str, Any], template: PyTree) -> None:
        own = {name: arrays.pop(name) for name in list(arrays) if name.startswith("values.")}
        try:
            self._values[site] = take(own, "values", template, rows=self.roster[site][1])
        except Refused as refused:  # a reply that came with them may be sound
            self._log(f"{site}: refused its values: {refused}")

    def publish(self, kind: int, packet: Packet, whole: int) -> None:
        """Remembers a publication, as long as sending it can be worth it."""
        self.values()  # those that are still wanted are of the w before it
        self._packets.append((kind, jax.tree.map(np.asarray, packet)))
        self._names.append(uuid.uuid4().hex)
        while self._packets and sum(size_of(p) for _, p in self._packets) >= whole:
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
        """Sends each its head, the common arrays of a question, and what it lacks of w."""
        arrived: dict[str, tuple[dict, dict]] = {}
        waiting = dict(heads)
        for whole in (False, True):  # a site that is not where it was thought gets all of w
            messages = {
                s: self._message(s, head, arrays if head["kind"] == "ask" else {}, w, whole)
                for s, head in waiting.items()
            }
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
