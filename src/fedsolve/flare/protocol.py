"""What crosses the network: a short JSON head and arrays, as safetensors. No pickle, no code.

A receiver knows beforehand what the arrays must be: both ends have the algorithm, so both can trace
a round and see every message and reply of it (`protocol`). Whatever differs from that is refused.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from fedsolve.algorithms.base import Algorithm
from fedsolve.compression.packets import Packet
from fedsolve.federation.exchange import Question
from fedsolve.federation.state import State
from fedsolve.problem.problem import Problem
from fedsolve.problem.samples import Samples
from fedsolve.runtimes.simulation import Simulation
from fedsolve.types import Flags


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One exchange of a round: the method, and what one client is sent and sends back."""

    method: str
    message: PyTree
    reply: PyTree


@dataclasses.dataclass(frozen=True)
class Protocol:
    """Everything that a round can send: its exchanges, its publications; a client's state and
    memory, which stay there."""

    exchanges: tuple[Exchange, ...]
    packets: tuple[Packet, ...]
    client: PyTree
    w: Any


def protocol(problem: Problem, algorithm: Algorithm, clients: int) -> Protocol:
    """Found by tracing one round with so many clients, as its program would be compiled."""
    exchanges: list[Exchange] = []
    packets: list[Any] = []

    def shapes(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)

    class Listening(Simulation):
        def _exchange(self, question: Question) -> tuple[PyTree, Flags]:
            values, arrived = super()._exchange(question)
            one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), values)
            exchanges.append(Exchange(self.exchanges[-1], shapes(question.message), one))
            return values, arrived

        def publish(self, packet: Packet, when: Any = True) -> None:
            packets.append(shapes(packet))
            super().publish(packet, when)

    def look(words: Any, samples: Samples) -> Any:
        whole = eqx.tree_at(lambda p: p.samples, problem, samples)
        state = State.start(whole, algorithm, jax.random.wrap_key_data(words))
        Listening(whole, state).play(algorithm)
        return state.w, (algorithm.init_client(state.w), problem.init_memory())

    everyones = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((clients, *x.shape[1:]), x.dtype), problem.samples
    )
    w, client = jax.eval_shape(look, jax.random.key_data(jax.random.key(0)), everyones)
    return Protocol(tuple(exchanges), tuple(packets), client, w)
