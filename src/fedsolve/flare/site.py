"""A site: some of the clients, with their data and states. It answers one question at a time.

Every answer counts exactly once: a client's state moves if and only if the server used its reply.
The state that would follow an answer is on disk before the answer is sent; the base state has only
what the server is known to have used. Every question says which answers of its round were used, and
which of the last round in which this site answered; the site keeps those and discards the rest. A
repeated question gets the same bytes again. The answer itself is not on disk: it is computed again,
and is the same if the same state follows. An answer that moves no state writes nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from fedsolve.algorithms.base import Algorithm
from fedsolve.compression.packets import Packet
from fedsolve.errors import InvalidInput
from fedsolve.federation.exchange import Exchange
from fedsolve.federation.state import SeedWords, evaluation_key
from fedsolve.fields import Scalar
from fedsolve.flare.journal import CannotWrite, Journal, Parts
from fedsolve.flare.limits import Guard
from fedsolve.flare.protocol import Protocol, protocol, version
from fedsolve.flare.signatures import Identity
from fedsolve.flare.site_sums import MOST_BYTES, SiteSums, view_of
from fedsolve.participation.strategic import check_bounds, game_of
from fedsolve.privacy.distributed import Terms
from fedsolve.privacy.secure import SecureSum
from fedsolve.problem.problem import Problem
from fedsolve.runtimes.compilation import prepared
from fedsolve.runtimes.evaluation import Values, client_values, values_limited
from fedsolve.runtimes.placement import numbers_on_device, precision_of
from fedsolve.storage.arrays import (
    Refused,
    decode,
    encode,
    in_order,
    nothing_left,
    parts,
    size_of,
    take,
)
from fedsolve.storage.atomic import write_atomically
from fedsolve.types import Message, Reply, Round, Table, Vector

MOST_CLIENTS = 10_000_000
FEW = 8  # clients of a site that share a program, however many are asked
EXCHANGES = 1000  # more than a round can have
START = "start"  # the name of w before anything was published


class SiteClients:
    """The clients of a site: their data, their states, and the journal of their answers.

    `answer(bytes) -> bytes` is all that the network sees of it.

    Args:
        home: The folder of the journal.
        problem: The problem, with this site's clients.
        algorithm: The algorithm.
        seed: The run's seed.
        precision: The run's precision.
        say: Called with a sentence for this machine's owner if a question is refused, or if the
            answer cannot be used.
        guard: The owner's limits; None for none.
        seen: Called with a round that is evaluated, and the parameters; returns what this site's
            owner allows to be sent about it, if anything.
        aggregation: The secure sum in which answers leave; None where they leave as they are.
        terms: Those of a private run, in which this site adds noise.
        identity: What this site signs its keys for secure sums with.
    """

    def __init__(
        self,
        home: Path,
        problem: Problem,
        algorithm: Algorithm,
        seed: int,
        precision: str | None = None,
        say: Callable[[str], None] = lambda sentence: None,
        guard: Guard | None = None,
        seen: Callable[[int, Vector], Table | None] | None = None,
        *,
        aggregation: SecureSum | None = None,
        terms: Terms | None = None,
        identity: Identity | None = None,
    ):
        self._say, self._guard, self._seen = say, guard, seen
        self._held_out: Table | None = None  # values of the newest evaluation that may be sent
        self._rule, self._terms = aggregation, terms
        self._lock = threading.Lock()
        self._game = game_of(algorithm)
        self._precision = precision
        with precision_of(precision) as dtype:
            self._problem = problem.on_device(dtype)
            self._algorithm = numbers_on_device(algorithm, dtype)
            self._seed = jax.random.key_data(jax.random.key(seed))
            w = self._problem.start()
            one = self._algorithm.init_client(w), self._problem.init_memory()
            self._client = jax.eval_shape(lambda: one)
        self._evaluate = prepared(_evaluate, self._problem)
        self._work: dict[int, Callable] = {}  # by exchange
        self._count, self._total = problem.n, 0  # here, and of all sites together (0: not known)
        self._protocol = Protocol((), (), self._client, w)
        self._states = jax.tree.map(lambda x: np.tile(x, (self._count, *[1] * np.ndim(x))), one)
        self._w, self._w_name = np.asarray(w), START
        self._settled, self._round = -1, -1
        self._log: dict[int, _Entry] = {}  # answers of the round that is not settled yet
        self._journal = Journal(home)
        _check_data(home, problem)
        self._sums = None if aggregation is None else SiteSums(home, aggregation, identity)
        base, records = self._journal.load()
        try:
            if base is not None:
                self._restore(base)
            for record in records:
                self._replay(record)
        except Refused as refused:
            raise InvalidInput(f"What this site kept is another run's: {refused}.") from None

    def answer(self, data: bytes) -> bytes:
        """Answer a question; one that cannot be answered gets the reason."""
        with self._lock, precision_of(self._precision):
            head: Table = {}
            try:
                head, arrays = decode(data, self._most())
                answer = self._answer(head, arrays)
                self._note(head, f"{len(answer)} bytes")
                return answer
            except Refused as refused:
                self._say(str(refused))
                self._note(head, f"refused: {refused}")
                told = {"status": "refused", "reason": str(refused), "spent": refused.spent}
                return encode(told, {})
            except CannotWrite as error:  # its path is this machine's affair
                print(error, file=sys.stderr, flush=True)
                self._note(head, f"refused: {error.why}")
                return encode({"status": "refused", "reason": error.why}, {})

    def _answer(self, head: Table, arrays: dict[str, np.ndarray]) -> bytes:
        kind = head.get("kind")
        if kind == "hello":
            _check_version(head)
            self._know(_whole(head, "total"))
            return encode({"status": "ok", "clients": self._count}, {})
        if self._sums is not None and (answer := self._sums.answer(head, arrays)) is not None:
            return answer
        if kind not in ("ask", "evaluate"):
            raise Refused(f"no such kind of question: {str(kind)[:40]}")
        if not self._catch_up(head, arrays):
            return encode({"status": "behind"}, {})
        if kind == "evaluate":
            if self._problem.keeps_own:  # the values depend on what clients keep
                self._settle(_whole(head, "round"), head.get("settled"))
            if self._sums is not None:
                return self._masked_values(self._sums, head, arrays)
            values = self._values(head, "round", arrays)
            return encode({"status": "ok"} | self._shared(), values)
        return self._ask(head, arrays)

    def _note(self, head: Table, answer: str) -> None:
        if self._guard is not None:
            self._guard.log(head, answer)

    def _know(self, total: int) -> None:
        """Learn how many clients all sites have together, which can decide shapes of messages."""
        if total not in (0, self._total):
            if total > MOST_CLIENTS:
                raise Refused(f"{total} clients, where {MOST_CLIENTS} is the most")
            if self._game is not None and self._game.players != total:
                raise Refused(
                    f"the game has {self._game.players} players, the sites {total} clients"
                )
            if self._terms is not None and self._sums is not None:
                self._rule, _ = self._terms.agreed(self._problem, self._algorithm, total)
                self._sums.rule = self._rule
                self._sums.last = self._terms.rounds
            self._protocol = protocol(self._problem, self._algorithm, total, self._rule)
            self._total = total
            self._work = {
                number: prepared(
                    _work,
                    self._problem,
                    self._algorithm,
                    number,
                    exchange.method,
                    None if self._rule is None else self._rule.clip_of(exchange.method),
                )
                for number, exchange in enumerate(self._protocol.exchanges)
            }

    def _most(self) -> int:
        """Return the bytes of arrays in the largest message that can be right."""
        messages = [exchange.message for exchange in self._protocol.exchanges]
        news = max(map(size_of, self._protocol.packets), default=0)
        asked = self._count * np.dtype(np.int32).itemsize
        state = 0 if self._problem.state is None else size_of(self._problem.state)
        keys = 0 if self._sums is None else MOST_BYTES
        return size_of(messages) + 2 * size_of(self._protocol.w) + 4 * news + asked + state + keys

    def _values(self, head: Table, name: str, arrays: dict[str, np.ndarray]) -> dict[str, PyTree]:
        """Return the clients' values at w, at the end of the round with that name in the head."""
        round, first = (_whole(head, each) for each in (name, "first"))
        state, memory = None, None
        if self._problem.averages_state:
            state = take(arrays, "state", self._problem.state)
        if self._problem.keeps_own:
            memory = jax.tree.map(jnp.asarray, self._states[1])
        if self._guard is not None:
            self._guard.evaluation(round, (self._w, state))
        at = jnp.int32(round), jnp.int32(first)
        values = self._evaluate(jnp.asarray(self._w), self._seed, *at, state, memory)
        self._check_finite("the objective or the constraint", values)
        if self._seen is not None:
            self._held_out = self._seen(round, jnp.asarray(self._w))
        return {"values": values if self._guard is None else self._guard.values(values)}

    def _shared(self) -> Table:
        """Return what this site tells about its held-out rows."""
        return {} if self._held_out is None else {"held_out": self._held_out}

    def _masked_values(self, sums: SiteSums, head: Table, arrays: dict[str, np.ndarray]) -> bytes:
        """Return the sum of the clients' values at w, masked."""
        position = [_whole(head, "round")]
        use = sums.check("evaluation", position, head)
        members, size = sums.named(head)
        inbox = {"inbox.0": arrays.pop("inbox.0", np.zeros(0))}
        found = self._values(head, "round", arrays)["values"]
        rows = values_limited((sums.rule,), jax.tree.map(jnp.asarray, found))
        words = sums.words_of_values(rows, size)
        view = view_of(["evaluation", *position, size, members], self._w)
        masked = sums.mask("evaluation", position, use, head, inbox, words, view)
        return encode({"status": "ok", "view": view.hex()}, {"reply": masked})

    def _ask(self, head: Table, arrays: dict[str, np.ndarray]) -> bytes:
        round, number = _whole(head, "round"), _whole(head, "exchange")
        if number >= len(self._protocol.exchanges):
            raise Refused(f"there is no exchange {number} in a round")
        exchange = self._protocol.exchanges[number]
        if head.get("method") != exchange.method:
            raise Refused(f"exchange {number} is {exchange.method!r}")
        first = _whole(head, "first")
        asked = arrays.pop("clients.0", np.zeros(0))
        if asked.dtype != np.int32 or asked.ndim != 1 or not 0 < len(asked) <= self._count:
            raise Refused("it does not say which clients it asks")
        clients = asked.astype(np.int64)
        local = clients - first
        if local.min() < 0 or local.max() >= self._count:
            raise Refused("it asks for clients that are not here")
        if self._game is not None:
            try:
                check_bounds(self._game, self._problem, first)
            except InvalidInput as error:
                raise Refused(str(error)) from None
        message = take(arrays, "message", exchange.message)
        used, look = _numbers(head.get("used"), number), head.get("look")
        inbox = {"inbox.0": arrays.pop("inbox.0", np.zeros(0))} if self._sums is not None else {}
        seen = {
            k: arrays.pop(k) for k in list(arrays) if look is not None and k.startswith("state.")
        }
        nothing_left(arrays)
        self._settle(round, head.get("settled"))
        digest = hashlib.sha256(
            json.dumps(
                [round, number, clients.tolist(), used, self._w_name, look]
                + ([head["sum"]] if "sum" in head else [])
            ).encode()
            + encode({}, {"message": message} | inbox)
        ).hexdigest()
        known = self._log.get(number)
        known = known if known is not None and known.digest == digest else None
        if known is not None and known.reply is not None:
            return known.reply
        use = b""
        if self._sums is not None:
            use = self._sums.check("exchange", [round, number], head)
        rows = self._before(number, used, local)
        moved, reply = self._compute(number, round, clients, local, rows, message)
        self._check_finite(f"the reply to '{exchange.method}'", reply)
        # Whether a state has moved follows from data; a secure sum must not tell it.
        hidden = self._sums is not None and bool(jax.tree.leaves(rows))
        moves = hidden or not _same(rows, moved)
        told = {"status": "ok", "round": round, "exchange": number, "moved": moves}
        values = {} if look is None else self._values(head, "look", seen)
        if self._sums is None:
            told |= {} if look is None else self._shared()
            answer = encode(told, {"reply": reply} | values)
        else:
            members, size = self._sums.named(head)
            question = ["exchange", round, number, exchange.method, size, members]
            view = view_of(question, self._w, message)
            words = self._sums.words_of_replies(exchange.method, reply, size)
            masked = self._sums.mask("exchange", [round, number], use, head, inbox, words, view)
            answer = encode(told | {"view": view.hex()}, {"reply": masked})
        if known is not None and _same(known.rows, moved):  # given before this process began
            known.reply = answer
            return answer
        if moves:
            kept = {"round": round, "number": number, "digest": digest}
            kept["settled"] = head["settled"]
            self._journal.append(parts(kept, {"local": local, "rows": moved}))
        self._keep(round, number, _Entry(digest, local, moved, answer))
        if self._journal.is_long():
            try:
                self._journal.restart(self._everything())
            except CannotWrite as error:  # the answer is on the disk; the journal stays long
                print(error, file=sys.stderr, flush=True)
        return answer

    def _check_finite(self, what: str, tree: PyTree) -> None:
        """Tell the owner about values that the server will refuse."""
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
        if not all(np.isfinite(x).all() for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)):
            self._say(f"{what} is not finite; check the data")

    def _compute(
        self,
        number: int,
        round: int,
        clients: np.ndarray,
        local: np.ndarray,
        rows: PyTree,
        message: Message,
    ) -> tuple[PyTree, PyTree]:
        """Run the method on some clients, padded to few different numbers, as each compiles."""
        size = len(local)
        padded = min(max(1 << (size - 1).bit_length(), FEW), self._count)
        index = np.append(np.arange(size), np.zeros(padded - size, int))
        moved, reply = self._work[number](
            self._w,
            np.int32(round),
            self._seed,
            np.int32(size),
            clients[index].astype(np.int32),
            local[index].astype(np.int32),
            jax.tree.map(lambda leaf: leaf[in_order(index)], rows),
            message,
        )
        return jax.tree.map(lambda leaf: np.asarray(leaf)[:size], (moved, reply))

    def _catch_up(self, head: Table, arrays: dict[str, np.ndarray]) -> bool:
        """Bring w to where the server says it is; return whether what was sent leads there."""
        news = head.get("w")
        if not isinstance(news, dict) or not isinstance(want := news.get("want"), str):
            raise Refused("it does not say what w is")
        kinds = _numbers(news.get("packets", []), len(self._protocol.packets))
        names = news.get("from", [])
        if not isinstance(names, list) or len(names) != len(kinds):
            raise Refused("it does not say what its packets follow")
        w, here = self._w, self._w_name
        if news.get("whole") is True:
            w, here = np.asarray(take(arrays, "w", self._protocol.w)), want
        for position, (kind, name) in enumerate(zip(kinds, names, strict=True)):
            packet = take(arrays, f"packet{position}", self._protocol.packets[kind])
            if here not in (want, None) and here == name:
                w = np.asarray(_moved(w, packet))
                here = [*names, want][position + 1]
        if here != want:
            return False
        self._w, self._w_name = w, here
        return True

    def _settle(self, round: int, settled: object) -> None:
        """Keep what the server used of the last round in which this site answered."""
        if not isinstance(settled, list) or len(settled) != 2 or type(settled[0]) is not int:
            raise Refused("it does not say what is settled")
        last, used = settled[0], _numbers(settled[1], EXCHANGES)
        if last >= round:
            raise Refused("it settles a round before its end")
        if last < self._settled or round <= self._settled:
            raise Refused(
                f"the server is in round {round + 1} and has used nothing from here since round "
                f"{last + 1}, but it had used an answer of round {self._settled + 1}: its folder "
                "was put back from an older copy; put back the newest, or begin a new run"
            )
        if self._round == round:
            return  # asked again, or the next exchange: nothing of this round is settled yet
        if last > self._settled:
            if self._round != last or any(number not in self._log for number in used):
                raise Refused(
                    f"this site has not the answers that the server used in round {last + 1}: its "
                    "folder was lost or put back from an older copy"
                )
            for number in sorted(used):
                entry = self._log[number]
                put = functools.partial(_put, entry.local)
                self._states = jax.tree.map(put, self._states, entry.rows)
            self._settled = last
        self._log.clear()

    def _before(self, number: int, used: list[int], local: np.ndarray) -> PyTree:
        """Return some clients' states before an exchange, with what was used of this round.

        This takes as long as there are clients asked, however many the site has.
        """
        rows = jax.tree.map(lambda leaf: leaf[in_order(local)], self._states)
        for earlier in sorted(used):
            if earlier < number and earlier in self._log:
                entry = self._log[earlier]
                overlay = functools.partial(_overlay, local, entry.local)
                rows = jax.tree.map(overlay, rows, entry.rows)
        return rows

    def _keep(self, round: int, number: int, entry: _Entry) -> None:
        """Keep an answer in place of any earlier one, and of those that followed it."""
        self._log = {n: e for n, e in self._log.items() if n < number} | {number: entry}
        self._round = round

    # What the disk knows

    def _replay(self, record: bytes) -> None:
        """Restore an answer from the journal, with all that came with it."""
        head, arrays = decode(record, None)
        self._settle(head["round"], head["settled"])
        self._keep(head["round"], head["number"], self._entry(head["digest"], arrays))

    def _everything(self) -> Parts:
        """Return everything, as the base of a new journal."""
        head = {"settled": self._settled, "round": self._round}
        head["log"] = {str(number): entry.digest for number, entry in self._log.items()}
        arrays: dict[str, PyTree] = {"states": self._states}
        for number, entry in self._log.items():
            arrays |= {f"{number}.local": entry.local, f"{number}.rows": entry.rows}
        return parts(head, arrays)

    def _restore(self, base: bytes) -> None:
        head, arrays = decode(base, None)
        self._settled, self._round = head["settled"], head["round"]
        self._states = take(arrays, "states", self._client, rows=self._count, finite=False)
        for number, digest in head["log"].items():
            self._log[int(number)] = self._entry(digest, arrays, f"{number}.")

    def _entry(self, digest: str, arrays: dict[str, np.ndarray], prefix: str = "") -> _Entry:
        local = arrays[f"{prefix}local.0"]
        rows = take(arrays, f"{prefix}rows", self._client, rows=len(local), finite=False)
        return _Entry(digest, local, rows, None)


@dataclasses.dataclass
class _Entry:
    """An answer, and the states that follow if it is used."""

    digest: str
    local: np.ndarray
    rows: PyTree
    reply: bytes | None  # None for one that was given by an earlier process


def _work(
    problem: Problem,
    algorithm: Algorithm,
    number: int,
    method: str,
    clip: Scalar | None,
    w: Vector,
    round: Int[Array, ""],
    seed: SeedWords,
    size: Int[Array, ""],
    clients: Int[Array, " m"],
    local: Int[Array, " m"],
    rows: PyTree,
    message: Message,
) -> tuple[PyTree, Reply]:
    """Compute the first `size` clients' part in one exchange.

    Few clients are computed one after the other, so that those beyond `size` cost nothing; many at
    once.
    """
    key = jax.random.fold_in(jax.random.wrap_key_data(seed), round)
    exchange = Exchange(problem, key, w, round, number, getattr(algorithm, method), message, clip)

    def answer(client: Int[Array, ""], local: Int[Array, ""], row: PyTree) -> tuple[PyTree, PyTree]:
        samples = jax.tree.map(lambda leaf: leaf[local], problem.samples)
        return jax.tree.map(jnp.asarray, exchange.answer(client, samples, row))

    if len(clients) > FEW:
        return jax.vmap(answer)(clients, local, rows)
    first = jax.tree.map(lambda leaf: leaf[0], (clients, local, rows))
    shapes = jax.eval_shape(answer, *first)

    def nothing(*_: PyTree) -> PyTree:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    here = jnp.arange(len(clients)) < size
    return jax.lax.map(
        lambda each: jax.lax.cond(each[0], answer, nothing, *each[1:]), (here, clients, local, rows)
    )


@jax.jit
def _moved(w: Vector | np.ndarray, packet: Packet) -> Vector:
    return jnp.asarray(w) + packet.dense()


def _evaluate(
    problem: Problem,
    w: Vector,
    seed: SeedWords,
    round: Round,
    first: Round,
    state: PyTree,
    memory: PyTree,
) -> Values:
    problem = problem if state is None else problem.with_state(state)
    return client_values(problem, w, evaluation_key(seed, round), first, memory=memory)


def _check_version(head: Table) -> None:
    """Raise if the server has another version of Fedsolve."""
    own, theirs = version(), head.get("version")
    if theirs not in (None, own):  # None: older than 0.2
        raise Refused(f"this site has fedsolve {own}, and the server has {str(theirs)[:40]}")


def _check_data(home: Path, problem: Problem) -> None:
    """Raise if the clients' data are not those with which the run began; the states are theirs."""
    digest = hashlib.blake2b()
    for leaf in map(np.asarray, jax.tree.leaves(problem.samples)):
        digest.update(f"{leaf.dtype}{leaf.shape}".encode())
        digest.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
    path, found = home / "data", digest.hexdigest().encode()
    if not path.exists():
        write_atomically(path, found)
    elif path.read_bytes() != found:
        raise InvalidInput(
            "The data here are not those with which this run began: put those back, or begin a"
            " new run."
        )


def _same(one: PyTree, other: PyTree) -> bool:
    return all(map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(other)))


def _put(where: np.ndarray, all: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Replace some rows, in place where that is possible."""
    if len(where) == len(all) and isinstance(in_order(where), slice):
        return new
    if not all.flags.writeable:
        all = np.array(all)
    all[in_order(where)] = new
    return all


def _overlay(
    clients: np.ndarray, others: np.ndarray, rows: np.ndarray, new: np.ndarray
) -> np.ndarray:
    """Return rows of clients, with new ones for those who are among the others."""
    if np.array_equal(clients, others):
        return new
    _, here, there = np.intersect1d(clients, others, return_indices=True)
    changed = np.array(rows)
    changed[here] = new[there]
    return changed


def _whole(head: Table, name: str) -> int:
    value = head.get(name)
    if type(value) is not int or not 0 <= value < 2**31:
        raise Refused(f"its {name} is no whole number")
    return value


def _numbers(values: object, below: int) -> list[int]:
    if not isinstance(values, list) or not all(type(v) is int and 0 <= v < below for v in values):
        raise Refused("it has a list that is none of its numbers")
    return values
