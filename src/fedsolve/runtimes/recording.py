"""Rounds that are played without clients, to learn what they ask.

What an algorithm's round does between two questions is the server's and small. A `Recorder` plays
it with answers that are already known, and notes every exchange and every publication. One that has
an answer missing stops the round there (`Unanswered`); one that was given no answers at all goes on
with zeros. Nothing is random but by (seed, round, exchange, client), so a round that is played
again asks the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from fedsolve.algorithms.base import Algorithm
from fedsolve.compression.packets import Packet
from fedsolve.federation.exchange import Exchange
from fedsolve.federation.federation import Federation
from fedsolve.federation.options import RoundOptions
from fedsolve.federation.state import State
from fedsolve.fields import Scalar
from fedsolve.problem.problem import Problem
from fedsolve.types import Cohort, Flag, Flags, Message, PyTree, Reply, Vector


class Pending(eqx.Module):
    """An exchange that waits for its answers, with what is needed to compute them elsewhere."""

    method: str = eqx.field(static=True)
    number: int = eqx.field(static=True)
    cohort: Int[Array, " m"]
    message: Message
    w: Vector  # as clients hold it then
    arrived: Bool[Array, " m"]  # whose answers will have arrived
    clip: Scalar | None = None  # the largest norm of an answer


class Unanswered(Exception):
    """Raised where a round that is played from known answers asks something else."""

    def __init__(self, pending: Pending):
        super().__init__(pending.method)
        self.pending = pending


@dataclasses.dataclass(frozen=True)
class RecordedExchange:
    """One exchange of a round: the method, and shapes of what one client is sent and sends back."""

    method: str
    message: Message
    reply: Reply


@dataclasses.dataclass(frozen=True)
class RoundRecord:
    """What a round asks and publishes; all arrays are shapes."""

    exchanges: tuple[RecordedExchange, ...]
    packets: tuple[Packet, ...]
    one_cohort: bool  # whether all questions go to one cohort, drawn before the first of them
    releases: tuple[str, ...] = ()  # the exchange of every sum that a rule computes
    asks_some: bool = False  # whether each question goes to those of its cohort with a flag


class Recorder(Federation):
    """A federation without clients.

    Args:
        problem: The problem, with the data of at least one client.
        state: The state, with the state of at least one client.
        options: How rounds are run.
        clients: The number of clients, where the problem has fewer.
        answers: The replies of the first exchanges; None to go on with zeros for all of them.
    """

    def __init__(
        self,
        problem: Problem,
        state: State,
        options: RoundOptions | None = None,
        clients: int | None = None,
        answers: Sequence[Reply] | None = None,
    ):
        super().__init__(problem, state, options)
        self._clients = problem.n if clients is None else clients
        self._answers = answers
        self.exchanges: list[RecordedExchange] = []
        self.cohorts: list[Cohort] = []
        self.asks_some = True
        self.packets: list[Packet] = []

    @property
    def clients(self) -> int:
        return self._clients

    def _deliver(self, exchange: Exchange, cohort: Cohort, asked: Flags) -> tuple[Reply, Flags]:
        arrived = self._arrived(exchange, cohort, asked)
        self.asks_some &= not isinstance(asked, np.ndarray)
        if self._answers is None:
            reply = self._reply_shapes(exchange)
            self.exchanges.append(RecordedExchange(exchange.name, shapes(exchange.message), reply))
            self.cohorts.append(cohort)
            rows = len(cohort)
            nothing = jax.tree.map(lambda leaf: jnp.zeros((rows, *leaf.shape), leaf.dtype), reply)
            return nothing, arrived
        if exchange.number < len(self._answers):
            return self._answers[exchange.number], arrived
        raise Unanswered(
            Pending(
                exchange.name,
                exchange.number,
                jnp.asarray(cohort),
                exchange.message,
                self.w,
                jnp.asarray(arrived),
                exchange.clip,
            )
        )

    def publish(self, packet: Packet, when: Flag = True) -> None:
        self.packets.append(shapes(packet))
        super().publish(packet, when)

    @property
    def one_cohort(self) -> bool:
        """Whether all questions went to one cohort, drawn before the first of them."""
        first = self.cohorts[0] if self.cohorts else None
        return all(who is first and not isinstance(who, np.ndarray) for who in self.cohorts)


def record_round(
    problem: Problem,
    algorithm: Algorithm,
    state: State,
    options: RoundOptions | None = None,
    clients: int | None = None,
) -> RoundRecord:
    """Trace one round, and return what it asks and publishes. Nothing is computed."""
    records: list[RoundRecord] = []

    def trace(problem: Problem, algorithm: Algorithm, state: State) -> None:
        recorder = Recorder(problem, state, options, clients)
        recorder.play(algorithm)
        records.append(
            RoundRecord(
                tuple(recorder.exchanges),
                tuple(recorder.packets),
                recorder.one_cohort,
                tuple(recorder.releases),
                recorder.asks_some,
            )
        )

    eqx.filter_eval_shape(trace, problem, algorithm, state)
    return records[0]


def shapes(tree: PyTree) -> PyTree:
    """Return a tree's shapes and types."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


@eqx.filter_jit
def first_cohort(
    problem: Problem, algorithm: Algorithm, state: State, clients: int
) -> Int[Array, " m"] | None:
    """Return the cohort of a round's first question; None if it asks nobody."""
    try:
        Recorder(problem, state, None, clients, ()).play(algorithm)
    except Unanswered as unanswered:
        return unanswered.pending.cohort
    return None


@eqx.filter_jit
def play_until_unanswered(
    problem: Problem,
    algorithm: Algorithm,
    state: State,
    options: RoundOptions,
    clients: int,
    answers: Sequence[Reply],
) -> Pending | tuple[State, dict[str, PyTree]]:
    """Play a round from the answers that are known.

    Returns the first exchange without an answer; or, where all are known, the state after the round
    and what the round writes in the history.
    """
    try:
        return Recorder(problem, state, options, clients, answers).play(algorithm)
    except Unanswered as unanswered:
        return unanswered.pending
