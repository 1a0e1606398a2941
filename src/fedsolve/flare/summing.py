"""The server's end of secure sums: it adds up masked vectors, and learns their sum.

Members of a sum are the sites whose clients are asked. A sum takes four messages to each: `keys`
and `shares`, which are for several sums at once where the same sites are asked again and again, the
question itself, and `unmask`. See `fedsolve.flare.site_sums` for the other end.

Before sites have masked their answers, a round with too few of them is refused, and asked again
later. From then on an answer is part of this sum or of none. A sum that fails there is one to
which nobody answered, and the run goes on. A sum is on the disk before it is used, so that a server
that is started again has it, and does not ask again.
"""

from __future__ import annotations

import dataclasses
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from fedsolve.algorithms.base import Algorithm
from fedsolve.errors import InvalidInput
from fedsolve.flare.alarms import REFUSE
from fedsolve.flare.roster import Parameters, Roster, TooFew, Transport, who_is_asked
from fedsolve.flare.site_sums import KEY, Position, as_bytes, use_name, view_of
from fedsolve.privacy import encoding
from fedsolve.privacy.encoding import LEAST_MEMBERS, SEALED_BYTES, SHARE_BYTES, Words
from fedsolve.privacy.masking import Collector
from fedsolve.privacy.secure import SecureSum, dense_shapes, unflattened
from fedsolve.problem.problem import Problem
from fedsolve.storage.arrays import Refused, decode, encode, nothing_left, size_of, take
from fedsolve.storage.atomic import write_atomically
from fedsolve.types import Message, Table

BATCH = 8  # sums for which keys are agreed at once
FAILURES = 2  # sums in a row that may fail before the run waits


class Sum(NamedTuple):
    """A sum that was computed."""

    words: Words
    there: list[str]  # the sites that are in it
    moved: list[str]  # those of them whose clients' states move


@dataclasses.dataclass
class Batch:
    """Keys of some sites for some sums."""

    name: str
    asked: list[str]  # in the order of their numbers
    threshold: int
    collectors: list[Collector]
    next: int = 0


class SummingRoster(Roster):
    """The sites of a run whose answers are seen in sums only.

    Args:
        transport, problem, algorithm, log, quorum, sites, alarms: As for `Roster`.
        rule: The run's aggregation.
        home: The run's folder on the server.
    """

    sends_changes = False  # all members must hold the same w to the last bit

    def __init__(
        self,
        transport: Transport,
        problem: Problem,
        algorithm: Algorithm,
        log: Callable[[str], None],
        quorum: float = 0.0,
        sites: int = 1,
        alarms: str = REFUSE,
        *,
        rule: SecureSum,
        home: Path,
    ):
        super().__init__(
            transport, problem, algorithm, log, quorum, sites, alarms, aggregation=rule
        )
        self.evaluated: PyTree = None  # the sum of the newest evaluation, as ring elements
        self._rule, self._kept = rule, KeptSums(home / "sums.safetensors")
        self._batch: Batch | None = None
        self._failed = 0  # sums in a row

    def hello(self, sites: list[str], may_grow: Callable[[int], bool] = bool) -> None:
        known = {*sites, *self.participation.sites}
        if len(known) < LEAST_MEMBERS:
            raise InvalidInput(
                f"A secure sum needs at least {LEAST_MEMBERS} sites, and there are {len(known)}: "
                "of two, each could tell the other's part."
            )
        super().hello(sites, may_grow)

    def ask_sum(
        self,
        round: int,
        number: int,
        clients: np.ndarray,
        message: Message,
        w: Parameters,
        size: int,
    ) -> tuple[PyTree, set[int]]:
        """Ask some clients a question.

        Args:
            round: The round.
            number: The number of the exchange in the round.
            clients: The clients' indices.
            message: What they are sent.
            w: The parameters that they are to hold.
            size: The number of clients of the cohort, asked or not.

        Returns:
            The sum of their answers as ring elements, and whose answers are in it.

        Raises:
            TooFew: If fewer sites or clients are there than must be.
        """
        exchange = self.protocol.exchanges[number]
        wanted, heads = self._questions(round, number, clients)
        template = dense_shapes(exchange.reply)
        length = _length(template)

        def enough(sites: Sequence[str]) -> None:
            count = sum(len(wanted[site]) for site in sites)
            if count < math.ceil(self._quorum * len(clients)):
                few = f"{count} of {len(clients)} clients are there in round {round + 1}"
                raise TooFew(f"{few}{self._whys(wanted)}", self._silent & wanted.keys())

        question = ["exchange", round, number, exchange.method, size]
        found = self._sum(
            question, [round, number], heads, message, w, who_is_asked(wanted), length, enough
        )
        if found is None:
            return unflattened(np.zeros(length, np.uint32), template), set()
        for site in found.there:
            self.answered.add(site)
            if site in found.moved:
                self.used.setdefault(site, []).append(number)
        there = {client for site in found.there for client in wanted[site]}
        return unflattened(found.words, template), there

    def values(self) -> dict[str, PyTree]:
        """Ask for the values that are still wanted; return a dict of the sites in their sum."""
        wish, self._wish = self._wish, None
        if wish is not None:
            round, w, template = wish
            question = ["evaluation", round, self.clients]
            heads = self._evaluations(round)
            nothing: dict[str, dict[str, PyTree]] = {site: {} for site in heads}
            self._values = {}
            found = self._sum(
                question, [round], heads, None, w, nothing, _length(template), lambda sites: None
            )
            if found is not None:
                self._values = dict.fromkeys(found.there)
                self.evaluated = unflattened(found.words, template)
        return self._values

    def values_again(self, round: int, w: Parameters, template: PyTree) -> dict[str, PyTree]:
        """Return the values: a client's are part of one sum, or of none."""
        return self._values

    def _sum(
        self,
        question: list[str | int],
        position: Position,
        heads: dict[str, Table],
        message: Message,
        w: Parameters,
        own: Mapping[str, dict[str, PyTree]],
        length: int,
        enough: Callable[[Sequence[str]], None],
    ) -> Sum | None:
        """Return the sum of all sites' answers to a question; None if there is none."""
        kind, size = str(question[0]), int(question[-1])
        whole = view_of(question, np.asarray(w), message).hex()
        if (known := self._kept.find(kind, position, whole)) is not None:
            return known
        if len(heads) < LEAST_MEMBERS:
            self._log(
                f"clients of {len(heads)} sites are asked, of which there is no secure sum: it is "
                "as if nobody had answered"
            )
            return None
        asked = sorted(heads)
        batch = self._keys_of(asked)
        enough([batch.asked[n] for n in batch.collectors[batch.next].sealed])
        use, collector = batch.next, batch.collectors[batch.next]
        batch.next += 1
        members = sorted(collector.sealed)
        view = view_of([*question, members], np.asarray(w), message)
        collector.view = view
        wish = {"batch": batch.name, "use": use, "size": size, "members": members}
        questions: dict[str, Table] = {}
        arrays: dict[str, dict[str, PyTree]] = {}
        for number in members:
            site, inbox = batch.asked[number], collector.inbox(number)
            questions[site] = heads[site] | {"sum": wish}
            rows = [inbox[sender] for sender in members]
            arrays[site] = own[site] | {"inbox": as_bytes(rows, len(rows), SEALED_BYTES)}
        self._spent = set()
        answers = self._deliver(questions, {"message": message}, w, 4 * length, arrays)
        moved = []
        for site, (head, found) in answers.items():
            try:
                if head.get("view") != view.hex():
                    raise Refused("it is an answer to another question")
                words = take(found, "reply", np.empty(length, np.uint32))
                nothing_left(found)
            except Refused as refused:
                self._complain(site, f"refused its reply: {refused}")
                continue
            collector.masked[batch.asked.index(site)] = words
            moved += [site] if head.get("moved") is not False else []
        if not (collector.masked or self._spent):
            raise TooFew(f"no site answered{self._whys(asked)}", self._silent & {*asked})
        total = self._unmasked(batch, use, collector)
        if total is None or len(collector.masked) < len(members):
            self._batch = None  # some site is gone, or has lost its keys
        if total is None:
            return self._no_sum(asked)
        self._failed = 0
        there = sorted(batch.asked[number] for number in collector.masked)
        found = Sum(total, there, sorted(moved))
        self._kept.put(kind, position, whole, found)
        return found

    def _no_sum(self, asked: list[str]) -> None:
        """Note that a sum failed; wait where that goes on."""
        self._failed += 1
        self._log(f"there is no secure sum, as if nobody had answered{self._whys(asked)}")
        if self._failed >= FAILURES:
            raise TooFew(
                f"{self._failed} secure sums in a row failed{self._whys(asked)}",
                self._silent & {*asked},
            )

    def _keys_of(self, asked: list[str]) -> Batch:
        """Return keys of these sites; agree on new ones if there are none."""
        batch = self._batch
        again = batch is not None and batch.asked == asked
        if batch is not None and again and batch.next < len(batch.collectors):
            here = batch.collectors[batch.next].sealed.keys()
            if not {batch.asked[number] for number in here} & self._silent:
                return batch
        count = BATCH if again or batch is None else 1
        self._batch = self._new_keys(asked, count)
        return self._batch

    def _new_keys(self, asked: list[str], count: int) -> Batch:
        name, threshold = uuid.uuid4().hex, self._rule.needed(len(asked))
        channels: dict[int, bytes] = {}
        keys: dict[int, list[bytes]] = {}
        heads: dict[str, Table] = {
            site: {"kind": "keys", "batch": name, "number": number, "count": count}
            for number, site in enumerate(asked)
        }
        messages = {site: encode(head, {}) for site, head in heads.items()}
        shapes = {"channel": (KEY,), "keys": (count, KEY)}
        signed: dict[int, object] = {}
        for number, (told, found) in self._bytes_of(asked, messages, shapes).items():
            signed[number] = told.get("signed")
            channels[number] = found["channel"].tobytes()
            keys[number] = [row.tobytes() for row in found["keys"]]
        self._check_members(asked, channels, threshold)
        members = sorted(channels)
        head: Table = {"kind": "shares", "batch": name, "members": members, "threshold": threshold}
        head["signed"] = [signed[member] for member in members]
        rows = [keys[member][use] for use in range(count) for member in members]
        public = encode(
            head,
            {
                "channels": as_bytes([channels[member] for member in members], -1, KEY),
                "keys": as_bytes(rows, count, len(members), KEY),
            },
        )
        messages = {asked[member]: public for member in members}
        shape = {"sealed": (count, len(members), SEALED_BYTES)}
        sealed = self._bytes_of(asked, messages, shape)
        self._check_members(asked, sealed, threshold)
        collectors = []

        def by_member(rows: np.ndarray) -> dict[int, bytes]:
            return {member: row.tobytes() for member, row in zip(members, rows, strict=True)}

        for use in range(count):
            adverts = {member: keys[member][use] for member in members}
            shares = {s: by_member(found["sealed"][use]) for s, (_, found) in sealed.items()}
            collectors.append(Collector(use_name(name, use), threshold, adverts, shares))
        return Batch(name, asked, threshold, collectors)

    def _bytes_of(
        self, asked: list[str], messages: dict[str, bytes], shapes: dict[str, tuple[int, ...]]
    ) -> dict[int, tuple[Table, dict[str, np.ndarray]]]:
        """Send messages; return heads and arrays of the answers that are right, by number."""
        templates = {name: np.empty(shape, np.uint8) for name, shape in shapes.items()}
        right: dict[int, tuple[Table, dict[str, np.ndarray]]] = {}
        for site, (head, arrays) in self._send(messages, size_of(templates)).items():
            try:
                if head["status"] != "ok":
                    raise Refused(str(head.get("reason", head["status"])))
                found = {name: take(arrays, name, each) for name, each in templates.items()}
                nothing_left(arrays)
            except Refused as refused:
                self._complain(site, str(refused))
                continue
            right[asked.index(site)] = head, found
        return right

    def _check_members(
        self, asked: list[str], members: Mapping[int, object], threshold: int
    ) -> None:
        if len(members) < threshold:
            raise TooFew(
                f"{len(members)} of {len(asked)} sites can take part in a secure sum, and "
                f"{threshold} must{self._whys(asked)}",
                self._silent & {*asked},
            )

    def _unmasked(self, batch: Batch, use: int, collector: Collector) -> Words | None:
        """Return the sum of the masked vectors, if enough members help to take the masks off."""
        members = sorted(collector.sealed)
        there = sorted(collector.masked)
        if len(there) < batch.threshold:
            return None
        head: Table = {"kind": "unmask", "batch": batch.name, "use": use, "there": there}
        messages = {batch.asked[number]: encode(head, {}) for number in there}
        shape = {"told": (len(members), SHARE_BYTES)}
        told = {
            holder: {m: row.tobytes() for m, row in zip(members, found["told"], strict=True)}
            for holder, (_, found) in self._bytes_of(batch.asked, messages, shape).items()
        }
        if len(told) < len(there):
            self._batch = None
        try:
            return collector.total(told)
        except encoding.Refused as refused:
            self._log(str(refused))
            return None


class KeptSums:
    """The sums of the round that is being played and of the newest evaluation, on the disk.

    Args:
        path: The file.
    """

    def __init__(self, path: Path):
        self._path = path
        self._sums: dict[str, tuple[Position, str, Sum]] = {}
        if not path.exists():
            return
        head, arrays = decode(path.read_bytes(), None)
        for name, (position, question, there, moved) in head["sums"].items():
            self._sums[name] = position, question, Sum(arrays[f"{name}.0"], there, moved)

    def find(self, kind: str, position: Position, question: str) -> Sum | None:
        """Return the sum of the answers to a question, if it is known."""
        known = self._sums.get(f"{kind} {position[1:]}")
        return known[2] if known is not None and known[:2] == (position, question) else None

    def put(self, kind: str, position: Position, question: str, found: Sum) -> None:
        """Keep a sum; forget those of the rounds before."""
        self._sums = {
            name: each
            for name, each in self._sums.items()
            if not name.startswith(kind) or each[0][0] == position[0]
        }
        self._sums[f"{kind} {position[1:]}"] = position, question, found
        head = {
            name: (position, question, each.there, each.moved)
            for name, (position, question, each) in self._sums.items()
        }
        arrays = {name: each.words for name, (_, _, each) in self._sums.items()}
        write_atomically(self._path, encode({"sums": head}, arrays))


def _length(template: PyTree) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(template))
