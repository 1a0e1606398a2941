"""One exchange of a round: what is asked, and how a client computes its answer.

`Federation.ask` makes an `Exchange`, and every runtime calls its `answer`: the simulation inside a
`vmap`, the debug runtime client by client, the streamed runtime block by block, a FLARE site for
the clients that it has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fedsolve.compression.clipping import limit
from fedsolve.federation.known import InformedClient, Known
from fedsolve.fields import Scalar
from fedsolve.problem.problem import Problem
from fedsolve.problem.samples import Samples
from fedsolve.types import Message, PRNGKey, PyTree, Reply, Vector

SUBSETS = 2**31 - 1  # a key that no exchange has
SHARED = 2**31 - 4  # another one, of what all clients draw alike


class Restricted(eqx.Module):
    """A message, and the number of samples from which each client may compute its answer."""

    contributions: Float[Array, " n"]
    message: Message


class WithState(eqx.Module):
    """A message with the server's state of the loss, or a reply with the client's next one."""

    state: PyTree
    content: PyTree  # the message or the reply


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A question to clients, as a value.

    Randomness is a function of (seed, round, exchange, client): `key` is the round's own key,
    `number` counts the exchanges of a round, and `answer` folds both with the client's index.
    """

    problem: Problem
    key: PRNGKey
    w: Vector  # the parameters that clients hold when they are asked
    round: Int[Array, ""]
    number: int
    method: Callable[..., tuple[PyTree, Reply]]
    message: Message
    clip: Scalar | None = None  # the largest norm of a reply; None where replies are not clipped

    @property
    def name(self) -> str:
        """The name of the method that clients run."""
        return self.method.__name__

    @property
    def shared_key(self) -> PRNGKey:
        """The key of what all clients draw alike."""
        return jax.random.fold_in(jax.random.fold_in(self.key, SHARED), self.number)

    def answer(
        self,
        index: Int[Array, ""],
        samples: Samples | Callable[[Int[Array, ""]], Samples],
        state: PyTree,
        known: Known | None = None,
    ) -> tuple[PyTree, Reply]:
        """Compute one client's answer.

        Args:
            index: The client's index among all clients.
            samples: Its samples; with `known`, a function of the index that returns them.
            state: Its state for the algorithm, and its memory for the problem.
            known: Its gradient at w, if the evaluation has computed it.

        Returns:
            Its next state and memory, and its reply.
        """
        kept, memory = state
        message, key = self.message, jax.random.fold_in(self.key, self.number + 1)
        own, problem = jax.random.fold_in(key, index), self.problem
        if isinstance(message, WithState):
            problem, message = problem.with_state(message.state), message.content
        place = self.w, self.round, index, own, memory
        if isinstance(samples, Samples):
            client = problem.client(samples, *place)
        else:
            assert known is not None
            client = InformedClient(problem, samples, *place, known)
        if isinstance(message, Restricted):
            to_draw = jax.random.fold_in(jax.random.fold_in(self.key, SUBSETS), index)
            client = client.restricted(jnp.ceil(message.contributions[index]), to_draw)
            message = message.message
        client.clip, client.shared_key = self.clip, self.shared_key
        kept, reply = self.method(client, kept, *(() if message is None else (message,)))
        if client.moved_state is not None:
            reply = WithState(client.moved_state, reply)
        elif self.clip is not None:
            reply = limit(reply, self.clip)
        return (kept, client.memory), reply
