"""The server's list of sites: which clients each has, what it was told, and how to ask it."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterable, Mapping

import jax
import numpy as np
from jaxtyping import PyTree

from fedsolve.algorithms.base import Algorithm
from fedsolve.compression.packets import Packet
from fedsolve.federation.rules import Rule
from fedsolve.flare.alarms import REFUSE, Alarm, Alarms, clipped, digests_of, norms_of
from fedsolve.flare.held_out import is_held_out, text_of
from fedsolve.flare.participation import Participation
from fedsolve.flare.protocol import Protocol, protocol, version
from fedsolve.flare.site import MOST_CLIENTS, START
from fedsolve.problem.problem import Problem
from fedsolve.runtimes.recording import RecordedExchange
from fedsolve.storage.arrays import Refused, decode, encode, nothing_left, size_of, take
from fedsolve.types import Message, Table, Vector

Parameters = Vector | np.ndarray
MOST_OF_A_SITE = 1_000_000  # clients that one site may have
KEPT = 1000  # publications in one message: its head has a line for each
MOST_LOGGED = 20  # different lines about a site that is in trouble


class TooFew(Exception):
    """Raised if fewer clients answer than the quorum, or no site is there.

    The round does not count, and is asked again once some of the sites in `missed` are back.
    """

    def __init__(self, why: str, missed: Iterable[str] = ()):
        super().__init__(why)
        self.missed = sorted(missed)


Transport = Callable[[dict[str, bytes]], Mapping[str, bytes | Exception]]  # to sites, and back


READY = "ready: "  # the beginning of the line that says who is, before the first round
SHOWN = 20  # names in that line
WHY = 40  # characters of a reason in it; the whole reason is logged


def _first(names: list[str]) -> str:
    """Join names, as many as a line takes."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _short(why: str) -> str:
    return why if len(why) <= WHY else why[: WHY - 1] + "…"


class Roster:
    """The sites of a run, as the server sees them.

    Args:
        transport: Delivers one message to each of some sites, and returns the answers that came in
            time, by site.
        problem: The problem.
        algorithm: The algorithm.
        log: Called with one line about whatever goes wrong.
        quorum: The share of a cohort that must answer, and of the expected sites that must be ready
            when a job begins.
        sites: The number of sites that must be ready before a run begins.
        alarms: What is done about answers out of all proportion: `refuse`, `clip` or `note`.
        aggregation: What replaces the sums of answers, if it changes what sites send.
    """

    sends_changes = True  # of w, where that is cheaper than all of it

    def __init__(
        self,
        transport: Transport,
        problem: Problem,
        algorithm: Algorithm,
        log: Callable[[str], None],
        quorum: float = 0.0,
        sites: int = 1,
        alarms: str = REFUSE,
        aggregation: Rule | None = None,
    ):
        self.protocol = Protocol((), (), None, None)
        # By site: its first client, and how many it has
        self.ranges: dict[str, tuple[int, int]] = {}
        # By site: the last round in which it answered, and which of its answers were used
        self.settled: dict[str, tuple[int, list[int]]] = {}
        self.used: dict[str, list[int]] = {}  # by site: answers used in this round
        self.sent = self.received = 0  # all bytes of messages
        self.answered: set[str] = set()  # sites whose replies were taken in this round
        self.rounds = 0  # rounds in which some site answered
        self.participation = Participation()
        self.alarms = Alarms(alarms)
        self.trouble: BaseException | None = None  # what went wrong outside the compiled round
        self._transport, self._log, self._quorum = transport, log, quorum
        self._at_first, self._aggregation = sites, aggregation
        self._problem, self._algorithm = problem, algorithm
        self._names = [START]  # names of w, after each publication that is still kept
        self._packets: list[tuple[int, Packet]] = []
        self._silent: set[str] = set()  # sites that did not answer when last asked
        self._why: dict[str, str] = {}  # what was wrong with a site, when last asked
        self._no_values: dict[str, str] = {}  # and with its newest values
        self._logged: dict[str, set[str]] = {}  # what was logged about it since it answered
        self._spent: set[str] = set()  # sites whose answer to a question is in no other sum
        self._asked: set[str] = set()  # sites with clients that were asked in this round
        self._holds: dict[str, str] = {}  # the w that each site was last known to hold
        # An evaluation to ask for with the next question
        self._wish: tuple[int, Parameters, PyTree] | None = None
        self._state: PyTree = None  # of the loss, for that evaluation
        self._values: dict[str, PyTree] = {}  # each site's, when it was last asked for them

    @property
    def clients(self) -> int:
        return sum(count for _, count in self.ranges.values())

    def hello(self, sites: list[str], may_grow: Callable[[int], bool] = bool) -> None:
        """Ask sites how many clients they have, and number the clients.

        Args:
            sites: The sites. All of them are expected from now on if the run is new, else those
                that are taken in. Clients of a new run are numbered in the order of their sites;
                those of new sites come after the others.
            may_grow: Whether the algorithm can take that many clients in the middle of a run.

        Raises:
            TooFew: If fewer sites are ready than must be.
        """
        found: dict[str, int] = {}
        known, expected = self.ranges, self.participation.sites
        if first := not expected:
            self.participation.expect(sorted(sites))
        sites = sorted({*sites, *expected})
        room = MOST_CLIENTS - self.clients
        for site, (head, _) in self._greet(sites, 0).items():
            count = head.get("clients")
            most = room if site not in known else MOST_CLIENTS
            if type(count) is not int or not 0 < count <= min(most, MOST_OF_A_SITE):
                self._complain(site, f"refused its greeting: {str(count)[:40]} clients")
                continue
            found[site] = count
            room -= count if site not in known else 0
        for site in sorted(found.keys() & known.keys()):
            if (count := found[site]) != known[site][1]:
                self._complain(
                    site, f"it had {known[site][1]} clients in this run, and has {count}"
                )
                del found[site]
        new = sorted(found.keys() - known.keys())
        if known and new and not may_grow(self.clients + sum(found[site] for site in new)):
            for site in new:
                self._complain(site, "new, and not taken in before the next run")
                del found[site]
            new = []
        self._check_ready(found, first)
        if first:
            self._log(self._readiness(found))
        self.participation.expect(new)
        for site in new:
            known[site] = (self.clients, found[site])
            expected[site]["clients"] = found[site]
        self.protocol = protocol(self._problem, self._algorithm, self.clients, self._aggregation)
        self._greet([site for site in found if site in known], self.clients)

    def _check_ready(self, ready: Iterable[str], first: bool) -> None:
        """Raise if fewer of the expected sites are ready than must be."""
        expected, ready = self.participation.sites.keys(), set(ready)
        needed = max(1, math.ceil(self._quorum * len(expected)), self._at_first if first else 1)
        if len(ready & expected) < needed:
            text = "no site is ready" if not ready else f"{len(ready)} sites are ready"
            why = f"{text} of {len(expected)}, and {needed} must be{self._whys(expected)}"
            raise TooFew(why, self._silent & expected)

    def _readiness(self, ready: Mapping[str, int]) -> str:
        """Return who is ready before the first round, and who is not and why."""
        told = [f"{site} ({n} client{'s' * (n != 1)})" for site, n in sorted(ready.items())]
        away = sorted(self.participation.sites.keys() - ready.keys())
        whys = [
            f"{site} ({_short(self._why[site])})" if site in self._why else site for site in away
        ]
        others = f"; not ready: {_first(whys)}" if away else ""
        return f"{READY}{_first(told)}{others}"

    def _greet(self, sites: list[str], total: int) -> dict[str, tuple[dict, dict]]:
        hello = encode({"kind": "hello", "total": total, "version": version()}, {})
        sent = dict.fromkeys(sites, hello)
        found = {}
        for site, (head, arrays) in self._send(sent, 0).items():
            if head["status"] == "ok":
                found[site] = head, arrays
            else:
                self._complain(site, str(head.get("reason", head["status"])))
        return found

    def ask(
        self, round: int, number: int, clients: np.ndarray, message: Message, w: np.ndarray
    ) -> list[tuple[list[int], PyTree]]:
        """Ask some clients a question.

        Args:
            round: The round.
            number: The number of the exchange in the round.
            clients: The clients' indices.
            message: What they are sent.
            w: The parameters that they are to hold.

        Returns:
            For each site that answered, the clients and their replies, stacked.

        Raises:
            TooFew: If fewer clients answer than the quorum.
        """
        exchange = self.protocol.exchanges[number]
        wanted, heads = self._questions(round, number, clients)
        wish, self._wish = self._wish, None
        most = max(map(len, wanted.values()), default=0) * size_of(exchange.reply)
        if wish is not None:
            self._values = {}
            looks = self._evaluations(wish[0])
            heads = {s: heads[s] | {"look": wish[0]} if s in heads else looks[s] for s in looks}
            most += self.clients * size_of(wish[2])
        replies: dict[str, PyTree] = {}
        moved: set[str] = set()
        arrived = self._deliver(heads, {"message": message}, w, most, who_is_asked(wanted))
        for site, (head, arrays) in arrived.items():
            try:
                if wish is not None:
                    self._take_values(site, arrays, wish[2])
                    self._take_held_out(site, head)
                if site not in wanted:
                    continue
                if (head.get("round"), head.get("exchange")) != (round, number):
                    raise Refused("it is for another round or exchange")
                reply = take(arrays, "reply", exchange.reply, rows=len(wanted[site]))
                nothing_left(arrays)
            except Refused as refused:
                self._complain(site, f"refused its reply: {refused}")
                continue
            replies[site] = reply
            moved |= {site} if head.get("moved") is not False else set()
        if wish is not None:
            self._judge_values()
        for site, why in self._suspects(round, exchange, w, wanted, replies).items():
            self._complain(site, f"refused its reply: {why}")
            del replies[site]
        for site in replies.keys() & moved:  # where nothing moved, there is nothing to keep
            self.used.setdefault(site, []).append(number)
        found = [(wanted[site], reply) for site, reply in replies.items()]
        self.answered |= replies.keys()
        count = sum(len(own) for own, _ in found)
        few = f"{count} of {len(clients)} clients answered in round {round + 1}"
        if count < math.ceil(self._quorum * len(clients)):
            raise TooFew(f"{few}{self._whys(wanted)}", self._silent & wanted.keys())
        # A cohort whose sites are all gone is one without arrivals, as in a simulation. But rounds
        # must not go by while nobody is there, nor because sites refuse to take part.
        if not found and (wanted.keys() - self._silent or not self._anyone()):
            raise TooFew(f"{few}{self._whys(wanted)}", self._silent & self.ranges.keys())
        return found

    def _questions(
        self, round: int, number: int, clients: np.ndarray
    ) -> tuple[dict[str, list[int]], dict[str, Table]]:
        """Return the clients that are asked, by site, and the heads of the questions."""
        wanted = {
            site: [int(c) for c in clients if first <= c < first + count]
            for site, (first, count) in self.ranges.items()
        }
        wanted = {site: own for site, own in wanted.items() if own}
        self._asked |= wanted.keys()
        heads: dict[str, Table] = {
            site: {
                "kind": "ask",
                "round": round,
                "exchange": number,
                "method": self.protocol.exchanges[number].method,
                "first": self.ranges[site][0],
                "used": self.used.get(site, []),
                "settled": self.settled.get(site, (-1, [])),
            }
            for site in wanted
        }
        return wanted, heads

    def _suspects(
        self,
        round: int,
        exchange: RecordedExchange,
        w: np.ndarray,
        clients: Mapping[str, list[int]],
        replies: dict[str, PyTree],
    ) -> dict[str, str]:
        """Raise alarms about replies, and clip those that are to be clipped.

        Returns:
            The sites whose replies are refused, and why.
        """
        name, alarms = f"its answer to {exchange.method!r}", self.alarms
        numbers = all(leaf.ndim == 0 for leaf in jax.tree.leaves(exchange.reply))
        digests = {site: digests_of(clients[site], reply) for site, reply in replies.items()}
        self._alarm(round + 1, alarms.unchanged(name, w, digests))
        norms = {site: norms_of(reply) for site, reply in replies.items()}
        found = alarms.sizes(name, norms, numbers)
        refused = self._alarm(round + 1, found)
        for site, alarm in found.items():
            if alarm.most is not None:
                try:
                    replies[site] = clipped(replies[site], alarm.most)
                except Refused as why:
                    refused[site] = str(why)
        return refused

    def _judge_values(self) -> None:
        """Raise alarms about the newest values of f and g, and drop those that are refused."""
        for name in ("objective", "constraint"):
            norms = {s: norms_of(v[name]) for s, v in self._values.items() if name in v}
            found = self.alarms.sizes(f"its {name}", norms, numbers=True)
            # What is only reported is never changed.
            alarms = {
                s: a._replace(refused=True, most=None) if a.most is not None else a
                for s, a in found.items()
            }
            for site, why in self._alarm(self.participation.rounds, alarms).items():
                del self._values[site]
                self._no_values[site] = self._log_once(site, f"refused its values: {why}")

    def _alarm(self, round: int, alarms: Mapping[str, Alarm]) -> dict[str, str]:
        """Record alarms; return the sites whose answers are refused, and why."""
        for site, alarm in sorted(alarms.items()):
            clips = alarm.most is not None
            new = self.participation.alarm(site, round, alarm.why, alarm.refused, clips)
            if new and not alarm.refused:
                self._log(f"{site}: alarm: {alarm.why}")
        return {site: alarm.why for site, alarm in alarms.items() if alarm.refused}

    def _anyone(self) -> bool:
        """Return whether some other site answers."""
        return bool(self._greet([s for s in self.ranges if s not in self._why], 0))

    def _whys(self, sites: Iterable[str]) -> str:
        whys = [f"{site}: {self._why[site]}" for site in sorted(sites) if site in self._why]
        return f" ({'; '.join(whys)})" if whys else ""

    def request_values(
        self, round: int, w: Parameters, template: PyTree, state: PyTree = None
    ) -> None:
        """Ask every site for the values of its clients at w, along with the next question.

        A message of its own would cost as much as a question. `state` is the loss's, if the server
        averages it.
        """
        self._wish, self._state = (round, w, template), state

    def values(self) -> dict[str, PyTree]:
        """Return the values that sites sent, by site; ask now if no question was sent since."""
        wish, self._wish = self._wish, None
        if wish is not None:
            self._values = {}
            self._evaluate(wish, self.ranges)
        return self._values

    def values_again(self, round: int, w: Parameters, template: PyTree) -> dict[str, PyTree]:
        """Ask the sites that have not sent their values once more, and return all values."""
        self._evaluate((round, w, template), self.ranges.keys() - self._values.keys())
        return self._values

    def end_evaluation(self) -> None:
        """Record whose values there are."""
        self.participation.end_evaluation(self._values, self._no_values | self._why)

    @property
    def silent(self) -> set[str]:
        """The expected sites that did not answer when they were last asked."""
        return self._silent & self.participation.sites.keys()

    @property
    def troubles(self) -> dict[str, str]:
        """What is wrong with expected sites at the moment."""
        expected = self.participation.sites
        return {site: why for site, why in sorted(self._why.items()) if site in expected}

    def _evaluate(self, wish: tuple[int, Parameters, PyTree], sites: Iterable[str]) -> None:
        """Ask some sites for their values, and nothing else."""
        round, w, template = wish
        most = self.clients * size_of(template)
        everyone = self._evaluations(round)
        heads = {site: everyone[site] for site in sites}
        for site, (head, arrays) in self._deliver(heads, {}, w, most, {}).items():
            self._take_values(site, arrays, template)
            self._take_held_out(site, head)
        self._judge_values()

    def _evaluations(self, round: int) -> dict[str, dict]:
        return {
            site: {
                "kind": "evaluate",
                "round": round,
                "first": first,
                "settled": self.settled.get(site, (-1, [])),
            }
            for site, (first, _) in self.ranges.items()
        }

    def _take_values(self, site: str, arrays: dict[str, np.ndarray], template: PyTree) -> None:
        own = {name: arrays.pop(name) for name in list(arrays) if name.startswith("values.")}
        try:
            self._values[site] = take(own, "values", template, rows=self.ranges[site][1])
            self._no_values.pop(site, None)
        except Refused as refused:  # a reply that came with them may be sound
            self._no_values[site] = self._log_once(site, f"refused its values: {refused}")

    def _take_held_out(self, site: str, head: Table) -> None:
        """Note the values on a site's held-out rows, which its owner allows it to send."""
        found = head.get("held_out")
        record = self.participation.sites.get(site)
        if record is None or not is_held_out(found) or record.get("held_out") == found:
            return
        record["held_out"] = found
        self._log(f"{site}: {text_of(found)}")

    def publish(self, kind: int, packet: Packet, whole: int) -> None:
        """Remember a publication, as long as sending it can be cheaper than sending w."""
        self.values()  # those that are still wanted are of the w before it
        self._packets.append((kind, jax.tree.map(np.asarray, packet)))
        self._names.append(uuid.uuid4().hex)
        sizes = [size_of(p) for p in self.protocol.packets]
        held = sum(sizes[kind] for kind, _ in self._packets)
        while self._packets and (held >= whole or len(self._packets) > KEPT):
            held -= sizes[self._packets.pop(0)[0]]
            self._names.pop(0)

    def end_round(self, round: int) -> None:
        """Settle the answers of a round that is complete."""
        # A site that was not heard may not have heard either: what it was to be told still stands.
        self.settled |= {site: (round, used) for site, used in self.used.items() if used}
        self.rounds += bool(self.answered)
        self.participation.end_round(round, self._asked, self.answered, self._silent, self._why)
        for site in sorted(self.answered - self._why.keys() - self._no_values.keys()):
            if self._logged.pop(site, None) is not None:
                self._log(f"{site}: it answers again")
        self.used, self.answered, self._asked = {}, set(), set()

    def _deliver(
        self,
        heads: dict[str, dict],
        arrays: dict[str, PyTree],
        w: Parameters,
        most: int,
        own: Mapping[str, dict[str, PyTree]],
    ) -> dict[str, tuple[dict, dict]]:
        """Send each site its head, the arrays of a question, its own, and what it lacks of w."""
        arrived: dict[str, tuple[dict, dict]] = {}
        waiting = dict(heads)
        # A site that is not where it was thought gets all of w.
        for whole in (False, True) if self.sends_changes else (True,):
            messages = {
                s: self._message(s, head, arrays | own[s] if s in own else {}, w, whole)
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
                    self._complain(site, str(head.get("reason", head["status"])))
                    self._spent |= {site} if head.get("spent") is True else set()
            waiting = {s: h for s, h in waiting.items() if s in self._behind}
            if not waiting:
                break
        return arrived

    def _message(
        self, site: str, head: Table, arrays: dict[str, PyTree], w: Parameters, whole: bool
    ) -> bytes:
        news: Table = {"want": self._names[-1]}
        extra: dict[str, PyTree] = {}
        if self._state is not None and ("look" in head or head["kind"] == "evaluate"):
            extra["state"] = self._state
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
        answers = self._transport(messages)
        self._silent = (self._silent - answers.keys()) | (messages.keys() - answers.keys())
        for site in sorted(messages.keys() - answers.keys()):
            self._complain(site, "no answer")
        for site, data in answers.items():
            try:
                if isinstance(data, Exception):
                    self._silent.add(site)
                    raise Refused(f"no answer ({data})")
                if site not in messages:
                    raise Refused("it was not asked")
                head, arrays = decode(data, most)
                self.received += len(data)
                if head.get("status") not in ("ok", "behind", "refused"):
                    raise Refused("its reply has no status")
                if head["status"] == "behind":
                    self._behind.add(site)
                self._why.pop(site, None)
                found[site] = head, arrays
            except Refused as refused:
                self._complain(site, str(refused))
        return found

    def _complain(self, site: str, why: str) -> None:
        """Log what is wrong with a site, once, in one line of printable characters."""
        self._why[site] = self._log_once(site, why)

    def _log_once(self, site: str, why: str) -> str:
        text = "".join(c if c.isprintable() else " " for c in why)[:300]
        logged = self._logged.setdefault(site, set())
        if text not in logged and len(logged) < MOST_LOGGED:
            logged.add(text)
            self._log(f"{site}: {text}")
        return text

    # For the checkpoint

    def saved(self) -> tuple[Table, dict[str, PyTree]]:
        head = {
            "roster": self.ranges,
            "settled": self.settled,
            "names": self._names,
            "kinds": [kind for kind, _ in self._packets],
            "holds": self._holds,
            "participation": self.participation.saved(),
            "alarms": self.alarms.saved(),
        }
        return head, {f"packet{i}": packet for i, (_, packet) in enumerate(self._packets)}

    def restore(self, head: Table) -> None:
        self.ranges = {site: (first, count) for site, (first, count) in head["roster"].items()}
        self.settled = {site: (last, used) for site, (last, used) in head["settled"].items()}
        self._names, self._holds = head["names"], head["holds"]
        self.alarms.restore(head.get("alarms", {}))
        if "participation" in head:  # versions before 0.2 kept none
            self.participation.restore(head["participation"])
        else:
            self.participation.expect(self.ranges)
            for site, (_, count) in self.ranges.items():
                self.participation.sites[site]["clients"] = count

    def restore_packets(self, head: Table, arrays: dict[str, np.ndarray]) -> None:
        """Once a round's packets are known again."""
        self._packets = [
            (kind, take(arrays, f"packet{i}", self.protocol.packets[kind], finite=False))
            for i, kind in enumerate(head["kinds"])
        ]


def who_is_asked(clients: dict[str, list[int]]) -> dict[str, dict[str, PyTree]]:
    """Return, by site, the array that says which of its clients are asked."""
    return {site: {"clients": np.asarray(own, np.int32)} for site, own in clients.items()}
