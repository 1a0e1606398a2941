"""What a server does about sites whose answers cannot be right, though their shapes are.

Answers of a site are compared with what the other sites have ever sent in that exchange, and with
what it sent before. Clients differ, so the bounds are wide: an answer within them is taken as it
is, and a robust aggregation (`run.aggregation`) limits what such answers can do. `deploy.alarms`
says what is done about an answer beyond them: `refuse` (it counts as missing), `clip` (it is scaled
down to the bound) or `note`. What only looks strange is noted: an answer that suddenly is large, or
one that never changes.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import equinox as eqx
import jax
import numpy as np

from fedsolve.compression import clipping, compressors
from fedsolve.compression.clipping import is_packet
from fedsolve.compression.packets import Dense, Packet, Sparse
from fedsolve.storage.arrays import Refused
from fedsolve.types import PyTree, Table, Vector

REFUSE, CLIP, NOTE = "refuse", "clip", "note"

LEVEL = 6  # times the largest level of another site
NUMBER = 100  # the same for single numbers, which may be near zero at some sites
CLIENT = 20  # times the largest answer of a client at another site
JUMP = 5  # times what a site sent lately, while the others ...
STEADY = 2  # ... did not grow by more than this
FADES = 0.9  # by which "lately" becomes smaller in each round
SETTLED = 5  # answers after which "lately" is known
SAME = 5  # equal answers in a row that are worth a note
MOST_WATCHED = 1000  # clients of a site whose last answers are remembered


class Alarm(NamedTuple):
    """What is wrong with a site's answer, whether it is refused, or to which norm it is clipped."""

    why: str
    refused: bool
    most: float | None = None


class Level:
    """How large a site's answers in one exchange are: their medians over its clients."""

    def __init__(
        self,
        most: float = 0.0,
        lately: float = 0.0,
        client: float = 0.0,
        seen: float = 0.0,
        refused: float = 0.0,
    ):
        self.most = most  # the largest median so far
        self.lately = lately  # the largest one, faded
        self.client = client  # the largest answer of one client so far
        self.seen = seen  # answers so far
        self.refused = refused  # and those that were refused

    def saved(self) -> list[float]:
        """Return the numbers from which it can be made again."""
        return [self.most, self.lately, self.client, self.seen, self.refused]


class Alarms:
    """Compares answers of sites with each other, and with what each of them sent before.

    Args:
        policy: `refuse`, `clip` or `note`.
    """

    def __init__(self, policy: str = REFUSE):
        self.policy = policy
        self._levels: dict[str, dict[str, Level]] = {}  # by exchange and site
        self._last: dict[tuple[str, str], dict[int, tuple[bytes, int]]] = {}  # by client
        self._ws: dict[str, bytes] = {}  # the w of each exchange when it was last looked at

    def sizes(
        self, name: str, norms: Mapping[str, np.ndarray], numbers: bool = False
    ) -> dict[str, Alarm]:
        """Return which sites' answers are out of all proportion; remember the others.

        Args:
            name: What they are.
            norms: The norm of each client's answer, by site.
            numbers: Whether they are single numbers.
        """
        levels = self._levels.setdefault(name, {})
        now = {site: float(np.median(own)) for site, own in norms.items() if len(own)}
        found: dict[str, Alarm] = {}
        for site in sorted(now, key=lambda site: -now[site]):  # of several liars each is found
            others = {other: now[other] for other in now.keys() - found.keys() - {site}}
            largest = float(np.max(norms[site]))
            alarm = self._too_large(name, site, now[site], largest, others, numbers)
            if alarm is not None:
                found[site] = alarm
        for site in now:
            level = levels.setdefault(site, Level())
            if site in found and (found[site].refused or found[site].most is not None):
                level.refused += 1
                continue
            level.most = max(level.most, now[site])
            level.lately = max(now[site], FADES * level.lately)
            level.client = max(level.client, float(np.max(norms[site])))
            level.seen += 1
        return found

    def _too_large(
        self,
        name: str,
        site: str,
        own: float,
        largest: float,
        others: Mapping[str, float],
        numbers: bool,
    ) -> Alarm | None:
        """Return what is wrong with the level and the largest of a site's answers, if anything."""
        levels = self._levels[name]
        mine = levels.get(site, Level())
        before = [level for other, level in levels.items() if other != site]
        most = max([*others.values(), *(level.most for level in before)], default=0.0)
        if most <= 0:
            return None  # there is nothing to compare with
        times = NUMBER if numbers else LEVEL
        lately = max([*others.values(), *(level.lately for level in before)], default=0.0)
        grew = mine.seen >= SETTLED and own > STEADY * mine.lately
        # A site where the others' optimum is none stays as large as it was.
        bound = times * (lately if grew or mine.refused else most)
        if own > bound:
            why = f"{name} is more than {times} times as large as other sites'"
            return self._beyond(why, bound)
        times = NUMBER if numbers else CLIENT
        bound = times * max([most, *(level.client for level in before)])
        if largest > bound:
            why = f"a client's {name} is more than {times} times as large as any at other sites"
            return self._beyond(why, bound)
        if numbers or mine.seen < SETTLED or mine.lately <= 0:
            return None
        known = {o: levels[o].lately for o in others if o in levels and levels[o].lately > 0}
        grown = max((others[o] / lately for o, lately in known.items()), default=math.inf)
        if own > JUMP * mine.lately and grown < STEADY:
            why = f"{name} became more than {JUMP} times as large as lately; others' did not"
            return Alarm(why, False)  # a client that is seldom asked may be like that
        return None

    def _beyond(self, why: str, bound: float) -> Alarm:
        """Return the alarm of an answer beyond a bound."""
        return Alarm(why, self.policy == REFUSE, bound if self.policy == CLIP else None)

    def unchanged(
        self, name: str, w: np.ndarray, answers: Mapping[str, Mapping[int, bytes]]
    ) -> dict[str, Alarm]:
        """Return which sites go on sending the same, while w moves and others' answers change.

        Args:
            name: The exchange.
            w: The parameters.
            answers: By site, the digest of each client's answer.
        """
        at = np.ascontiguousarray(w).tobytes()
        moved, self._ws[name] = self._ws.get(name) not in (None, at), at
        same: dict[str, int] = {}
        for site, own in answers.items():
            last, counts = self._last.setdefault((name, site), {}), []
            for client, digest in own.items():
                before, count = last.pop(client, (b"", 0))
                counts.append(count + 1 if moved and digest and digest == before else 0)
                last[client] = digest, counts[-1]
            while len(last) > MOST_WATCHED:
                last.pop(next(iter(last)))
            same[site] = min(counts)
        if min(same.values(), default=0) > 0:
            return {}  # nobody's change
        why = f"{name} is the same in round after round, while w moves and others' changes"
        return {site: Alarm(why, False) for site, count in same.items() if count >= SAME}

    def saved(self) -> Table:
        """Return what it remembers of sizes, as a table."""
        return {
            name: {site: level.saved() for site, level in sites.items()}
            for name, sites in self._levels.items()
        }

    def restore(self, table: Table) -> None:
        """Continue from a table."""
        self._levels = {
            name: {site: Level(*numbers) for site, numbers in sites.items()}
            for name, sites in table.items()
        }


@functools.cache
def _unpacked() -> Callable[[Packet], Vector]:
    return jax.jit(jax.vmap(lambda packet: packet.dense()))


def _vectors(leaf: Packet | np.ndarray) -> np.ndarray:
    """Return rows that have the norms of clients' packets, or of their arrays."""
    while isinstance(leaf, Sparse):
        leaf = leaf.values  # at different positions
    if isinstance(leaf, Dense):
        leaf = np.asarray(leaf.vector)
    if isinstance(leaf, Packet):  # few different numbers of rows, as each compiles
        size = len(jax.tree.leaves(leaf)[0])
        more = (1 << (size - 1).bit_length()) - size

        def padded(array: np.ndarray) -> np.ndarray:
            return np.pad(array, [(0, more), *[(0, 0)] * (array.ndim - 1)])

        leaf = np.asarray(_unpacked()(jax.tree.map(padded, leaf)))[:size]
    return leaf.reshape(len(leaf), -1)


def norms_of(replies: PyTree) -> np.ndarray:
    """Return the Euclidean norm of each client's answer."""
    total: np.ndarray | float = 0.0
    with np.errstate(over="ignore"):  # infinite is large enough
        for leaf in jax.tree.leaves(replies, is_leaf=is_packet):
            rows = _vectors(leaf)
            if not np.issubdtype(rows.dtype, np.floating):
                rows = rows.astype(float)
            total = total + np.einsum("ij,ij->i", rows, rows).astype(float)
    return np.sqrt(np.atleast_1d(total))


def clipped(replies: PyTree, most: float) -> PyTree:
    """Scale each client's answer to a Euclidean norm of at most `most`, as `norms_of` computes it.

    Raises:
        Refused: If it has parts that cannot be scaled.
    """
    norms = norms_of(replies)
    factors = np.minimum(1.0, most / np.where(norms > 0, norms, 1.0))

    def scaled(rows: np.ndarray) -> np.ndarray:
        if not np.issubdtype(rows.dtype, np.floating):
            raise Refused("it is too large, and cannot be clipped")
        return rows * factors.reshape(-1, *[1] * (rows.ndim - 1)).astype(rows.dtype)

    def one(leaf: Packet | np.ndarray) -> Packet | np.ndarray:
        if isinstance(leaf, Packet):
            return eqx.tree_at(_scale, leaf, replace_fn=scaled)
        return scaled(np.asarray(leaf))

    return jax.tree.map(one, replies, is_leaf=is_packet)


def _scale(packet: Packet) -> PyTree:
    """Return the array of a packet, or of stacked packets, to which its vector is proportional."""
    while isinstance(packet, Sparse):
        packet = packet.values
    if isinstance(packet, Dense):
        return packet.vector
    if isinstance(packet, compressors.Scaled):
        return packet.scale
    if isinstance(packet, clipping.Scaled):
        return packet.factor
    raise Refused("it is too large, and cannot be clipped")


def digests_of(clients: Iterable[int], replies: PyTree) -> dict[int, bytes]:
    """Return a digest of each client's answer; none of one that is zero."""
    leaves = [leaf.reshape(len(leaf), -1) for leaf in map(np.asarray, jax.tree.leaves(replies))]
    told = [leaf for leaf in leaves if np.issubdtype(leaf.dtype, np.floating)] or leaves
    some = np.logical_or.reduce([leaf.any(1) for leaf in told]) if told else []
    found = {}
    for place, client in enumerate(clients):
        digest = hashlib.blake2b(digest_size=8)
        for leaf in leaves:
            digest.update(leaf[place].tobytes())
        found[client] = digest.digest() if len(some) and some[place] else b""
    return found
