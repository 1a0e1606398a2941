"""A site's part in secure sums: it answers in masked vectors, and each question once.

A site is one member of `fedsolve.privacy.masking`, whose vector is the sum over its own clients.
Its keys are for a few sums and are never on the disk: a site that is started again has new ones.
What is on the disk is the last question that it has masked an answer to, so that no answer is ever
part of two sums, whatever the server asks and whoever is started again.

| question | answer |
|---|---|
| `keys` | public keys for some sums |
| `shares`, with everyone's public keys | encrypted shares for each of the others |
| `ask` or `evaluate`, with the shares for this site | the masked vector |
| `unmask`, with the members who are in the sum | shares of the seeds or keys of each |
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from jaxtyping import UInt8, UInt32

from fedsolve.compression.clipping import summand
from fedsolve.federation.rules import EVALUATION
from fedsolve.flare.signatures import Identity
from fedsolve.privacy import encoding
from fedsolve.privacy.encoding import SEALED_BYTES, Words
from fedsolve.privacy.masking import Member
from fedsolve.privacy.secure import SecureSum
from fedsolve.storage.arrays import Refused, encode, nothing_left
from fedsolve.storage.atomic import write_atomically
from fedsolve.types import PyTree, Table

MOST_USES = 64  # sums in one batch of keys
MOST_MEMBERS = 10_000
MOST_CLIENTS = 10_000_000
MOST_BYTES = 2**24  # of keys and shares in one question
KEY = 32  # bytes of a public key
Bytes = UInt8[np.ndarray, "..."]
Position = list[int]  # a round and an exchange; or the rounds before an evaluation


class Spent(Refused):
    """A question to which this site has masked an answer before."""

    spent = True


def view_of(question: Sequence[object], w: np.ndarray, message: PyTree = None) -> bytes:
    """Return a digest of a question, which all members of a sum must have been asked."""
    digest = hashlib.sha256(json.dumps(list(question)).encode())
    for leaf in [w, *jax.tree.leaves(message)]:
        array = np.ascontiguousarray(leaf)
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.digest()


def use_name(batch: str, number: int) -> bytes:
    """Return the name of a sum in a batch of keys."""
    return f"{batch} {number}".encode()


def as_bytes(values: Sequence[bytes], *shape: int) -> Bytes:
    """Return equally long byte strings as an array."""
    return np.frombuffer(b"".join(values), np.uint8).reshape(shape)


class SiteSums:
    """Masks a site's answers.

    Args:
        home: The folder of the run at this site.
        rule: The run's aggregation.
        identity: What this site signs its keys with; all members must then have signed theirs.
    """

    def __init__(self, home: Path, rule: SecureSum, identity: Identity | None = None):
        self.rule, self._identity = rule, identity
        self.last: int | None = None  # how many rounds a budget allows
        self._path = home / "masked.json"
        self._masked: dict[str, Position] = {}  # by kind of question, the last one masked
        if self._path.exists():
            self._masked = json.loads(self._path.read_text())
        self._member, self._batch = Member(0), ""
        self._now: dict[str, tuple[Position, bytes]] = {}  # that and its use, if it was just now

    def answer(self, head: Table, arrays: dict[str, np.ndarray]) -> bytes | None:
        """Answer a question that is about keys and shares; return None for any other."""
        kinds = {"keys": self._keys, "shares": self._shares, "unmask": self._unmask}
        if (found := kinds.get(str(head.get("kind")))) is None:
            return None
        told: Table = {"status": "ok"}
        with _refusing():
            reply = found(head, arrays)
        if self._identity is not None and head.get("kind") == "keys":
            data = _signed_data(self._batch, self._member.number, reply["channel"], reply["keys"])
            told["signed"] = [self._identity.certificate, self._identity.sign(data).hex()]
        return encode(told, reply)

    def _keys(self, head: Table, arrays: dict[str, np.ndarray]) -> dict[str, PyTree]:
        nothing_left(arrays)
        batch, number = head.get("batch"), _below(head.get("number"), MOST_MEMBERS)
        count = _below(head.get("count"), MOST_USES + 1)
        if not isinstance(batch, str):
            raise Refused("it does not name its batch of keys")
        if batch != self._batch or number != self._member.number:
            self._member, self._batch = Member(number), batch
            self._now = {}
        adverts = [self._member.advertise(use_name(batch, each)) for each in range(count)]
        return {
            "channel": as_bytes([self._member.channel], KEY),
            "keys": as_bytes(adverts, -1, KEY),
        }

    def _shares(self, head: Table, arrays: dict[str, np.ndarray]) -> dict[str, PyTree]:
        self._check_batch(head)
        members = _increasing(head.get("members"))
        threshold = _below(head.get("threshold"), MOST_MEMBERS + 1)
        count = len(members)
        channels = _take(arrays, "channels.0", (count, KEY))
        keys = _take(arrays, "keys.0", (None, count, KEY))
        nothing_left(arrays)
        if threshold < self.rule.needed(count):
            raise Refused(
                f"its threshold is {threshold} of {count} members, and this run's is "
                f"{self.rule.needed(count)}"
            )
        if self._identity is not None:
            self._check_signed(self._identity, head.get("signed"), members, channels, keys)
        known = dict(zip(members, (row.tobytes() for row in channels), strict=True))
        self._member.join(known, threshold)
        found = []
        for each, rows in enumerate(keys):
            adverts = dict(zip(members, (row.tobytes() for row in rows), strict=True))
            sealed = self._member.share(use_name(self._batch, each), adverts)
            found += [sealed[member] for member in members]
        return {"sealed": as_bytes(found, -1, count, SEALED_BYTES)}

    def _check_signed(
        self, identity: Identity, signed: object, members: list[int], channels: Bytes, keys: Bytes
    ) -> None:
        """Raise unless every member's keys are signed by a site, each by another one."""
        if not isinstance(signed, list) or len(signed) != len(members):
            raise Refused("its members' keys are not signed")
        names = set()
        for place, (member, entry) in enumerate(zip(members, signed, strict=True)):
            if not isinstance(entry, list) or not all(isinstance(x, str) for x in entry):
                raise Refused("its members' keys are not signed")
            try:
                certificate, signature = entry[0], bytes.fromhex(entry[1])
            except (ValueError, IndexError):
                raise Refused("its members' keys are not signed") from None
            data = _signed_data(self._batch, member, channels[place], keys[:, place])
            names.add(identity.check(certificate, signature, data))
        if len(names) < len(members):
            raise Refused("a site is a member twice")

    def _unmask(self, head: Table, arrays: dict[str, np.ndarray]) -> dict[str, PyTree]:
        self._check_batch(head)
        nothing_left(arrays)
        use = use_name(self._batch, _below(head.get("use"), MOST_USES))
        told = self._member.unmask(use, _increasing(head.get("there")))
        return {"told": as_bytes([told[member] for member in sorted(told)], len(told), -1)}

    def check(self, kind: str, position: Position, head: Table) -> bytes:
        """Return the sum's name, if an answer to the question may be masked for it.

        Args:
            kind: `"exchange"` or `"evaluation"`.
            position: Which question it is; questions of a kind come in increasing order.
            head: The question.

        Raises:
            Refused: If not.
        """
        wish = self._wish(head)
        self._check_batch(wish)
        use = use_name(self._batch, _below(wish.get("use"), MOST_USES))
        if self.last is not None and position[0] >= self.last + (kind == "evaluation"):
            raise Refused(f"the run's budget is for {self.last} rounds")
        if position <= self._masked.get(kind, [-1]) and self._now.get(kind) != (position, use):
            raise Spent("it has masked its answer to this question before, or to a later one")
        return use

    def mask(
        self,
        kind: str,
        position: Position,
        use: bytes,
        head: Table,
        arrays: dict[str, np.ndarray],
        words: Words,
        view: bytes,
    ) -> Words:
        """Return a vector masked, after a note on the disk that it was."""
        senders, _ = self.named(head)
        rows = _take(arrays, "inbox.0", (len(senders), SEALED_BYTES))
        inbox = dict(zip(senders, (row.tobytes() for row in rows), strict=True))
        with _refusing():
            masked = self._member.mask(use, inbox, words, view)
        if self._now.get(kind) != (position, use):
            self._now[kind] = position, use
            self._masked[kind] = position
            write_atomically(self._path, json.dumps(self._masked).encode())
        return masked

    def named(self, head: Table) -> tuple[list[int], int]:
        """Return the members of the sum, and over how many clients it is."""
        wish = self._wish(head)
        size = _below(wish.get("size"), MOST_CLIENTS + 1)
        if size == 0:
            raise Refused("its sum is over nobody")
        return _increasing(wish.get("members")), size

    def words_of_replies(self, method: str, rows: PyTree, size: int) -> Words:
        """Return the sum of some clients' answers as ring elements."""
        known = jax.vmap(summand)(rows)
        with _refusing():
            return self.rule.words(method, known, size, self._member.threshold)

    def words_of_values(self, rows: PyTree, size: int) -> UInt32[np.ndarray, " words"]:
        """Return the sum of some clients' evaluated values as ring elements."""
        return self.words_of_replies(EVALUATION, rows, size)

    def _wish(self, head: Table) -> Table:
        wish = head.get("sum")
        if not isinstance(wish, dict):
            raise Refused("it asks for single answers, and they leave this site in sums only")
        if "look" in head:
            raise Refused("it asks for single values, and they leave this site in sums only")
        return wish

    def _check_batch(self, head: Table) -> None:
        if not self._batch or head.get("batch") != self._batch:
            raise Refused("this site has no keys for that sum: it was started again, or is late")


def _signed_data(batch: str, number: int, channel: Bytes, keys: Bytes) -> bytes:
    """Return what a member signs: its keys for a batch."""
    head = json.dumps([batch, number, len(keys)]).encode()
    return head + channel.tobytes() + np.ascontiguousarray(keys).tobytes()


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Turn what the protocol refuses into an answer."""
    try:
        yield
    except encoding.Refused as refused:
        raise Refused(str(refused).rstrip(".")) from None


def _below(value: object, limit: int) -> int:
    if type(value) is not int or not 0 <= value < limit:
        raise Refused("it has a number that cannot be right")
    return value


def _increasing(values: object) -> list[int]:
    if not isinstance(values, list) or not 0 < len(values) <= MOST_MEMBERS:
        raise Refused("it does not say who the members are")
    found = [_below(value, MOST_MEMBERS) for value in values]
    if found != sorted(set(found)):
        raise Refused("its members are not in order")
    return found


def _take(arrays: dict[str, np.ndarray], name: str, shape: tuple[int | None, ...]) -> Bytes:
    """Take an array of bytes; a length that is None is at most that of a batch."""
    array = arrays.pop(name, None)
    good = array is not None and array.dtype == np.uint8 and array.ndim == len(shape)
    if (
        array is None
        or not good
        or not all(
            0 < here <= MOST_USES if wanted is None else here == wanted
            for here, wanted in zip(array.shape, shape, strict=True)
        )
    ):
        raise Refused(f"{name} is not what it must be")
    return array
