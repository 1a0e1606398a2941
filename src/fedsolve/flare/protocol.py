"""What a round can send over the network, known to both ends beforehand.

Both ends have the algorithm, so both can record a round and see the shapes of every message, reply
and publication. Bytes that differ from that are refused.
"""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import PyTree

from fedsolve.algorithms.base import Algorithm
from fedsolve.compression.packets import Packet
from fedsolve.federation.options import RoundOptions
from fedsolve.federation.rules import Rule
from fedsolve.federation.state import State
from fedsolve.problem.problem import Problem
from fedsolve.runtimes.recording import RecordedExchange, record_round
from fedsolve.types import ClientState


@dataclasses.dataclass(frozen=True)
class Protocol:
    """Shapes of everything that a round sends, and of what stays on a client."""

    exchanges: tuple[RecordedExchange, ...]
    packets: tuple[Packet, ...]
    client: PyTree  # one client's state and memory
    w: PyTree


def version() -> str:
    """Return the version of Fedsolve, which must be the same at both ends."""
    import fedsolve

    return fedsolve.__version__


def protocol(
    problem: Problem, algorithm: Algorithm, clients: int, aggregation: Rule | None = None
) -> Protocol:
    """Record one round with that many clients.

    Args:
        problem: The problem.
        algorithm: The algorithm.
        clients: The number of clients.
        aggregation: What replaces the sums of answers, if it changes what is sent.
    """

    def start() -> tuple[State, tuple[ClientState, PyTree]]:
        state = State.start(problem, algorithm, jax.random.key(0), clients)
        return state, (algorithm.init_client(state.w), problem.init_memory())

    state, client = jax.eval_shape(start)
    options = RoundOptions(aggregation=aggregation)
    record = record_round(problem, algorithm, state, options, clients=clients)
    return Protocol(record.exchanges, record.packets, client, state.w)
