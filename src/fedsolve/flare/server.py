"""The server's end: `round` runs here, compiled, and every exchange goes to the sites."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jaxtyping import PyTree

from fedsolve.algorithms.base import Algorithm
from fedsolve.compression.packets import Packet
from fedsolve.errors import Diverged, Interrupted, InvalidInput
from fedsolve.federation.best import Best, with_best
from fedsolve.federation.exchange import Exchange
from fedsolve.federation.federation import Federation
from fedsolve.federation.options import RoundOptions
from fedsolve.federation.replies import Replies
from fedsolve.federation.rules import Rule, Summed
from fedsolve.federation.state import SeedWords, State
from fedsolve.flare.journal import Journal, Parts, read
from fedsolve.flare.participation import clients_expected
from fedsolve.flare.roster import Roster, TooFew
from fedsolve.flare.summing import SummingRoster
from fedsolve.privacy.accounting import Ledger, Spent
from fedsolve.privacy.distributed import Terms
from fedsolve.privacy.private import Private
from fedsolve.privacy.secure import SecureSum, dense_shapes
from fedsolve.problem.problem import Problem
from fedsolve.runtimes.base import Advanced, Fault, Runtime
from fedsolve.runtimes.chunks import Spans
from fedsolve.runtimes.compilation import prepared
from fedsolve.runtimes.evaluation import Shares, Through, Values, client_values, combined
from fedsolve.runtimes.history import History, entry_history, joined, no_history
from fedsolve.runtimes.placement import numbers_on_device, precision_of
from fedsolve.solving.loop import Loop
from fedsolve.solving.result import Run
from fedsolve.storage.arrays import Refused, decode, in_order, parts, take
from fedsolve.types import Cohort, Flag, Flags, Info, PRNGKey, Reply, Table, Vector

FOLDER = "server"  # in a run's home: the server's journal
ASK_AGAIN = 1.0  # seconds between two attempts to get a last evaluation from everyone
MAKE_ROOM = "told to make room for the next job"


class Deployment(Federation):
    """A federation of sites, inside the server's compiled round.

    An exchange is a call out of the program, in the order in which the algorithm makes them.
    """

    def __init__(
        self, problem: Problem, state: State, link: Roster, options: RoundOptions | None = None
    ):
        super().__init__(problem, state, options)
        self._link, self._publications = link, 0

    @property
    def clients(self) -> int:
        return self._link.clients

    def _deliver(self, exchange: Exchange, cohort: Cohort, asked: Flags) -> tuple[Reply, Flags]:
        if isinstance(self._link, SummingRoster):
            return self._deliver_sum(self._link, exchange, cohort, asked)
        template = self._link.protocol.exchanges[exchange.number].reply
        size = len(cohort)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape), x.dtype), template)

        def ask(
            round: np.ndarray, cohort: np.ndarray, asked: np.ndarray, message: PyTree, w: np.ndarray
        ) -> tuple[Reply, np.ndarray]:
            found = []
            if asked.any():
                found = self._link.ask(int(round), exchange.number, cohort[asked], message, w)
            return _in_cohort_order(found, cohort, asked, shapes)

        here = jax.ShapeDtypeStruct((size,), bool)
        arguments = (self.round, cohort, asked, exchange.message, self.w)
        return self._call(ask, (shapes, here), *arguments)

    def _deliver_sum(
        self, link: SummingRoster, exchange: Exchange, cohort: Cohort, asked: Flags
    ) -> tuple[Summed, Flags]:
        """Get the sum of the cohort's answers, and whose answers are in it."""
        like = link.protocol.exchanges[exchange.number].reply
        template = dense_shapes(like)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), np.uint32), template)
        size = len(cohort)

        def ask(
            round: np.ndarray, cohort: np.ndarray, asked: np.ndarray, message: PyTree, w: np.ndarray
        ) -> tuple[PyTree, np.ndarray]:
            if not asked.any():
                return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes), asked
            number, clients = exchange.number, cohort[asked]
            total, there = link.ask_sum(int(round), number, clients, message, w, size)
            return total, asked & np.isin(cohort, list(there))

        here = jax.ShapeDtypeStruct((size,), bool)
        arguments = (self.round, cohort, asked, exchange.message, self.w)
        total, arrived = self._call(ask, (shapes, here), *arguments)
        return Summed(total, like, jax.random.key_data(exchange.shared_key)), arrived

    def publish(self, packet: Packet, when: Flag = True) -> None:
        super().publish(packet, when)
        kind, whole = self._publications, self.w.size * self.w.dtype.itemsize
        self._publications += 1

        def tell(when: np.ndarray, packet: Packet) -> None:
            if when:
                self._link.publish(kind, packet, whole)

        self._call(tell, None, jnp.asarray(when), packet)

    def _call(self, function: Callable, shapes: PyTree, *arguments: PyTree) -> PyTree:
        """Call a function from inside the program.

        A program must not fail half-way: an error is kept for later, the rest of the round then
        asks nobody, and the round does not count.
        """

        def safely(*given: PyTree) -> PyTree:
            try:
                if self._link.trouble is None:
                    return function(*jax.tree.map(np.asarray, given))
            except BaseException as error:
                self._link.trouble = error
            return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)

        return io_callback(safely, shapes, *arguments, ordered=True)


def _in_cohort_order(
    found: list[tuple[list[int], Reply]], cohort: np.ndarray, asked: np.ndarray, shapes: PyTree
) -> tuple[Reply, np.ndarray]:
    """Put the replies of all sites in the order of the cohort; zeros where none arrived."""
    values = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), shapes)
    arrived = np.zeros(len(cohort), bool)
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


class Record(NamedTuple):
    """One record of the journal."""

    head: Table
    arrays: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a run waits, after its last round, for sites that do not answer.

    Args:
        patience: The seconds to wait, counted from the end of the last round.
        waiting: Called with the sites that are waited for.
        go_on: Whether to go on waiting.
    """

    patience: float = 0.0
    waiting: Callable[[list[str]], None] = lambda sites: None
    go_on: Callable[[], bool] = lambda: True


class Deployed(Runtime):
    """Clients at sites, behind a link.

    Sites evaluate f and g with the next question that they are asked, so an entry of the history is
    complete one round later: `waiting` is the newest one until then.
    """

    lags = True

    def __init__(
        self,
        problem: Problem,
        algorithm: Algorithm,
        link: Roster,
        sites: list[str],
        seed: int,
        ending: Ending | None = None,
        aggregation: Rule | None = None,
        terms: Terms | None = None,
    ):
        super().__init__(problem, algorithm, RoundOptions(aggregation=aggregation))
        self.ledger: Ledger | None = None
        self._terms = terms
        self.link, self._sites, self._seed = link, sites, seed
        self._ending = Ending() if ending is None else ending
        self.waiting = History()
        self.news: Table = {}  # facts about the round of the entry that waits
        self.told: Table = {}  # and about that of the newest complete entry

        self._prepare()
        self._values = jax.eval_shape(self._one_clients_values)
        self._began, self._rounds = time.perf_counter(), 0  # since the last evaluation

    def _prepare(self) -> None:
        """Prepare the programs of this process."""
        link, problem = self.link, self.problem

        def play(
            problem: Problem, algorithm: Algorithm, options: RoundOptions, state: State
        ) -> tuple[State, Info]:
            return Deployment(problem, state, link, options).play(algorithm)

        self._play = prepared(play, problem, self.algorithm, self.options)
        self._combined = prepared(_combined, problem)
        self._combined_sum = prepared(_combined_sum, problem, self.options)

    def _agree(self) -> None:
        """Fix the noise of a private run, for which the number of clients must be known."""
        if self._terms is None:
            return
        clients = self.link.clients
        rule, self.ledger = self._terms.agreed(self.problem, self.algorithm, clients)
        self.options = RoundOptions(aggregation=rule)
        self._prepare()

    def start(self, seed: SeedWords) -> State:
        self.link.hello(self._sites)
        self._agree()
        key = jax.random.wrap_key_data(seed)
        state = _start(self.problem, self.algorithm, key, self.link.clients)
        return state if self.ledger is None else self.ledger.start(state)

    def resume(self, saved: Record) -> State:
        """Go on from a record of the journal, with the sites that are there now."""
        link, head, arrays = self.link, saved.head, saved.arrays
        link.restore(head["link"])
        before = link.clients
        state = _restored(saved, self.problem, self.algorithm, self._terms is not None)
        self.waiting = _named(arrays, "waiting", head["waiting"])
        self.news = head["news"]
        link.hello(self._sites, self._may_grow)
        self._agree()
        if self.ledger is not None:
            self.ledger.check(state)
        link.restore_packets(head["link"], arrays)
        if self.waiting:
            link.request_values(int(state.round), state.w, self._values, state.buffers)
        return _grown(state, link.clients - before)

    def advance(self, state: State, spans: Spans) -> Advanced:
        link, complete = self.link, []
        answered: list[str] = []
        info: Info = {}
        for start, stop, evaluate in spans.tolist():
            for _ in range(start, stop):
                after, info = jax.block_until_ready(self._play(state))
                if link.trouble is not None:
                    raise link.trouble
                answered = sorted(link.answered)
                link.end_round(int(state.round))
                found, best = self._complete(state)
                complete += found
                state = dataclasses.replace(after, best=best)
                self._rounds += 1
            if evaluate:
                self.news = self._news(answered)
                self.waiting = entry_history(info, stop)
                link.request_values(stop, state.w, self._values, state.buffers)
                self._began, self._rounds = time.perf_counter(), 0
        return Advanced(state, joined(complete) or no_history())

    def finish(self, state: State) -> tuple[State, History | None]:
        if self.waiting:
            self._wait_for_everyone(state)
        found, best = self._complete(state)
        return dataclasses.replace(state, best=best), next(iter(found), None)

    def _wait_for_everyone(self, state: State) -> None:
        """Ask everyone for the last evaluation; wait for silent sites while there is patience."""
        found, told = self.link.values(), False
        if isinstance(self.link, SummingRoster):
            return  # a site that was not there is not in the sum, and can be in no other
        end = self.news.get("ended", 0.0) + self._ending.patience
        while (silent := sorted(self.link.silent - found.keys())) and time.time() < end:
            if not told:
                self._ending.waiting(silent)
                told = True
            if not self._ending.go_on():
                raise TooFew(MAKE_ROOM)
            time.sleep(min(ASK_AGAIN, max(end - time.time(), 0)))
            found = self.link.values_again(int(state.round), state.w, self._values)

    def gather(self, state: State) -> State:
        return state

    def fault(self, before: State, after: State, history: History) -> Fault | None:
        """Return whether w is not finite. An objective is NaN where no site told it."""
        round = int(after.fault[0])
        return Fault(round + 1, int(before.round)) if round >= 0 else None

    def saved(self) -> tuple[Table, dict[str, PyTree]]:
        """Return what a record of the journal needs beside state and history."""
        head, arrays = self.link.saved()
        arrays["waiting"] = list(self.waiting.values())
        return {"link": head, "news": self.news, "waiting": list(self.waiting)}, arrays

    def _complete(self, state: State) -> tuple[list[History], Best]:
        """Return the entry that waits, with the values at the end of its round, in that state.

        Also return the best round. One in which some client was not heard is never feasible.
        """
        if not self.waiting:
            return [], state.best
        shares = self.algorithm.objective_weights(state.server, state.participation)
        found = self.link.values()
        self.link.end_evaluation()
        if found and isinstance(self.link, SummingRoster):
            values = self._over_sum(self.link, state, shares)
        elif found:
            values = self._over_sites(state, found, shares)
        else:
            values = self._unknown(state.w, shares)
        complete = bool(values["clients_evaluated"] == self.news["clients"])
        state = with_best(state, values, self.algorithm.feasible_up_to, complete)
        self.told = self.news
        entry = {name: column[0] for name, column in self.waiting.items() if name != "round"}
        round, self.waiting = self.waiting["round"].item(), History()
        return [entry_history(entry | values, round)], state.best

    def _news(self, answered: list[str]) -> Table:
        exchanges = max(len(self.link.protocol.exchanges), 1) * self._rounds
        return {
            "answered": answered,
            "missing": self.link.troubles,
            "clients": clients_expected(self.link.participation.sites),
            "ended": time.time(),
            "milliseconds": 1e3 * (time.perf_counter() - self._began) / exchanges,
            "wire_sent": self.link.sent,
            "wire_received": self.link.received,
        }

    def _one_clients_values(self) -> Values:
        key, w = jax.random.key(self._seed), self.problem.start()
        n, kept = self.problem.n, self.problem.init_memory()
        memory = jax.tree.map(lambda x: jnp.broadcast_to(x, (n, *jnp.shape(x))), kept)
        return jax.tree.map(
            lambda leaf: leaf[0], client_values(self.problem, w, key, memory=memory)
        )

    def _over_sites(self, state: State, found: dict[str, Values], shares: Shares) -> Info:
        """Return f and g over all clients that were heard; `shares` are of all clients."""
        heard = sorted(found)
        values = jax.tree.map(lambda *leaves: np.concatenate(leaves), *(found[s] for s in heard))
        if shares is None:
            return self._combined(state.buffers, state.w, values)
        places = [self.link.ranges[site] for site in heard]
        rows = np.concatenate([np.arange(first, first + count) for first, count in places])
        return self._combined(state.buffers, state.w, values, shares[rows])

    def _over_sum(self, link: SummingRoster, state: State, shares: Shares) -> Info:
        """Return f and g over all clients whose values are in the sum."""
        heard = np.zeros(link.clients, bool)
        for site in link.values():
            first, count = link.ranges[site]
            heard[first : first + count] = True
        return self._combined_sum(state.w, link.evaluated, heard, shares)

    def _unknown(self, w: Vector, shares: Shares) -> Info:
        """Return NaN for each column of an evaluation: nobody was heard."""
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), self._values)
        part = None if shares is None else shares[:1]
        shapes = jax.eval_shape(lambda v: combined(self.problem, w, v, part), one)
        types = {name: x.dtype if x.dtype.kind == "f" else float for name, x in shapes.items()}
        unknown = {name: np.full(x.shape, np.nan, types[name]) for name, x in shapes.items()}
        return unknown | {"clients_evaluated": np.int32(0)}

    def _may_grow(self, clients: int) -> bool:
        """Return whether the algorithm can take new clients in the middle of a run."""
        if self._terms is not None:
            return False  # their number decides on the noise
        now, then = (_shapes(self.problem, self.algorithm, n) for n in (clients, self.link.clients))
        return (now.server, now.participation) == (then.server, then.participation)


def _combined(
    problem: Problem, buffers: PyTree, w: Vector, values: Values, shares: Shares = None
) -> Info:
    now = problem if buffers is None else problem.with_state(buffers)
    return combined(now, w, values, shares)


class _Told(Through):
    """The rules of an evaluation of which the sum is known, and no client's values."""

    total: Values  # as ring elements
    arrived: Flags

    def heard(self, values: Values) -> dict[str, Replies]:
        return {name: Replies(Summed(each), self.arrived) for name, each in self.total.items()}


def _combined_sum(
    problem: Problem,
    options: RoundOptions,
    w: Vector,
    total: Values,
    arrived: Flags,
    shares: Shares = None,
) -> Info:
    rules = tuple(rule for rule in options.rules if rule.covers_evaluation())
    told = _Told(rules, jnp.zeros(2, jnp.uint32), 0, total, arrived)
    nobodys = jax.tree.map(lambda x: jnp.zeros((len(arrived), *x.shape[1:]), float), total)
    found = combined(problem, w, nobodys, shares, told)
    return found | {"clients_evaluated": jnp.sum(arrived, dtype=jnp.int32)}


class JournalSaver:
    """Writes a deployed run to the server's journal after every round."""

    def __init__(self, journal: Journal, runtime: Deployed, rounds: int, chunks: list[History]):
        self._journal, self._runtime, self._rounds = journal, runtime, rounds
        self._written = len(chunks)  # parts of the history that are on disk

    def at_most(self, budget: int, done: int) -> int:
        return 1

    def due(self, done: int) -> bool:
        return True

    def write(self, state: State, chunks: list[History], seconds: float, stopped: bool) -> None:
        """Append what is new; begin anew with everything where that is much shorter."""
        over = int(state.round) == self._rounds and not self._runtime.waiting
        if not over:
            self._journal.append(self._record(state, chunks[self._written :], seconds))
        self._written = len(chunks)
        if over or self._journal.is_long():
            self._journal.restart(self._record(state, chunks, seconds))

    def _record(self, state: State, chunks: list[History], seconds: float) -> Parts:
        head, arrays = self._runtime.saved()
        history = _history([chunk for chunk in chunks if len(chunk["round"])])
        head |= {"seconds": seconds, "history": list(history)}
        return parts(head, arrays | {"history": list(history.values()), "state": state})


def serve(
    link: Roster,
    sites: list[str],
    problem: Problem,
    algorithm: Algorithm,
    rounds: int,
    seed: int,
    home: Path,
    evaluate_every: int = 1,
    precision: str | None = None,
    progress: Callable[[Table], None] | None = None,
    go_on: Callable[[], bool] = lambda: True,
    patience: float = 0.0,
    waiting: Callable[[list[str]], None] = lambda sites: None,
    aggregation: Rule | None = None,
    privacy: Private | None = None,
) -> Run:
    """Run the algorithm over the link, from the beginning or from where `home` says it stopped.

    Args:
        link: The lines to the sites.
        sites: The sites that are there.
        problem: The problem; its clients' data are the sites' own.
        algorithm: The algorithm.
        rounds: The number of rounds, counted from the beginning of the run.
        seed: The seed.
        home: The run's folder on the server.
        evaluate_every: Evaluate after this many rounds, and after the last.
        precision: The run's precision.
        progress: Called with every new entry of the history, and facts about its round.
        go_on: Whether to go on with the next round.
        patience: The seconds to wait, after the last round, for sites that do not answer.
        waiting: Called with their names then.
        aggregation: What replaces the mean of answers; None for the mean.
        privacy: Differential privacy of clients, whose noise sites add before a secure sum.

    Returns:
        The run; `link.participation` says which sites took part.

    Raises:
        TooFew: If too few sites answer, or if not `go_on()`.
        InvalidInput: If w is not finite.
    """
    journal, began = Journal(home / FOLDER), time.perf_counter()
    with precision_of(precision) as dtype:
        placed, tuned = problem.on_device(dtype), numbers_on_device(algorithm, dtype)
        ending = Ending(patience, waiting, go_on)
        rule = numbers_on_device(aggregation, dtype)
        terms = terms_of(aggregation, privacy, rounds, evaluate_every)
        runtime = Deployed(placed, tuned, link, sites, seed, ending, rule, terms)
        saved, chunks = _loaded(*journal.load())
        if saved is None:
            state = runtime.start(jax.random.key_data(jax.random.key(seed)))
        else:
            state = runtime.resume(saved)

        def tell(done: int, rounds: int, entries: History) -> None:
            if progress is not None and len(entries["round"]):
                newest = {k: v[-1].item() for k, v in entries.items() if v.ndim == 1}
                progress(newest | runtime.told)

        def result(state: State, chunks: list[History], seconds: float) -> Run:
            return Run.of(problem, algorithm, state, _history(chunks), seed, seconds)

        loop = Loop(
            runtime=runtime,
            rounds=rounds,
            evaluate_every=evaluate_every,
            began=began,
            result=result,
            interrupted=lambda: not go_on(),
            saver=JournalSaver(journal, runtime, rounds, chunks),
            progress=tell,
            ledger=runtime.ledger,
        )
        try:
            return loop.run(state, chunks)
        except Interrupted as error:
            raise TooFew(MAKE_ROOM) from error
        except Diverged as error:
            raise InvalidInput(str(error)) from error


def terms_of(
    aggregation: object, privacy: Private | None, rounds: int, evaluate_every: int
) -> Terms | None:
    """Return the terms of a private run; raise if it cannot be one."""
    if privacy is None:
        return None
    if not isinstance(aggregation, SecureSum):
        raise InvalidInput(
            "A deployment adds the noise of run.privacy at its sites, before a secure sum: give "
            "run.aggregation=SecureSum too."
        )
    return Terms(aggregation, privacy, rounds, evaluate_every)


def saved_run(
    path: Path, problem: Problem, algorithm: Algorithm, seed: int, precision: str | None
) -> Run | None:
    """Return the run as far as the server's journal has it, or its last base alone."""
    saved, chunks = _loaded(*(read(path) if path.is_dir() else (path.read_bytes(), [])))
    if saved is None:
        return None
    with precision_of(precision) as dtype:
        placed, tuned = problem.on_device(dtype), numbers_on_device(algorithm, dtype)
        state = _restored(saved, placed, tuned)
        return Run.of(problem, algorithm, state, _history(chunks), seed, saved.head["seconds"])


def saved_participation(path: Path) -> Table:
    """Return the record of a run's expected sites from the server's journal, or its last base."""
    saved, _ = _loaded(*(read(path) if path.is_dir() else (path.read_bytes(), [])))
    kept = {} if saved is None else saved.head["link"].get("participation", {})
    return kept.get("sites", {})


def _start(problem: Problem, algorithm: Algorithm, key: PRNGKey, clients: int) -> State:
    """Return the first state as in a simulation, without clients' states: sites have those."""
    state = State.start(problem, algorithm, key, clients)
    return dataclasses.replace(state, clients=None, memory=None)


def _shapes(problem: Problem, algorithm: Algorithm, clients: int, private: bool = False) -> State:
    def start() -> State:
        state = _start(problem, algorithm, jax.random.key(0), clients)
        return dataclasses.replace(state, spent=Spent.unknown()) if private else state

    return jax.eval_shape(start)


def _grown(state: State, more: int) -> State:
    """Make room for new clients, who have seen nothing yet."""
    seen = jax.tree.map(lambda x: jnp.concatenate([x, jnp.zeros(more, x.dtype)]), state.seen)
    return dataclasses.replace(state, seen=seen)


def _history(chunks: list[History]) -> History:
    """Join parts of a history; entries by client get -1 for clients that were not there yet."""
    chunks = [chunk for chunk in chunks if len(chunk["round"])]
    wide = {k: max(c[k].shape[1:] for c in chunks) for k in (chunks or [{}])[-1]}

    def fit(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        more = [(0, 0), *[(0, a - b) for a, b in zip(shape, values.shape[1:], strict=True)]]
        return np.pad(values, more, constant_values=-1) if any(map(any, more)) else values

    return joined([History({k: fit(v, wide[k]) for k, v in chunk.items()}) for chunk in chunks])


def _loaded(base: bytes | None, records: Sequence[bytes]) -> tuple[Record | None, list[History]]:
    """Return the last record of a journal, and the history that all have together."""
    found = [Record(*decode(data, None)) for data in ([] if base is None else [base]) + [*records]]
    history = [_named(record.arrays, "history", record.head["history"]) for record in found]
    return found[-1] if found else None, [part for part in history if part]


def _restored(
    saved: Record, problem: Problem, algorithm: Algorithm, private: bool = False
) -> State:
    clients = sum(count for _, count in saved.head["link"]["roster"].values())
    shapes = _shapes(problem, algorithm, clients, private)
    try:
        state = take(saved.arrays, "state", shapes, finite=False)
    except Refused as refused:
        raise InvalidInput(
            f"The server's journal is of another run or another version: {refused}."
        ) from None
    return jax.tree.map(jnp.asarray, state)


def _named(arrays: dict[str, np.ndarray], prefix: str, names: list[str]) -> History:
    return History({name: arrays[f"{prefix}.{number}"] for number, name in enumerate(names)})
