"""The state of a run between two rounds."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from fedsolve.federation.best import Best
from fedsolve.federation.clock import Seconds
from fedsolve.federation.counters import Count
from fedsolve.federation.rules import Draw
from fedsolve.problem.problem import Problem
from fedsolve.types import ClientState, Info, PRNGKey, PyTree, Round, ServerState, Vector

if TYPE_CHECKING:
    from fedsolve.federation.federation import Federation

SeedWords = UInt32[Array, " words"]  # a key as integers, which can be saved


@runtime_checkable
class AlgorithmLike(Protocol):
    """What a federation needs of an algorithm; see `fedsolve.Algorithm`."""

    def init(self, w: Vector) -> ServerState: ...

    def init_client(self, w: Vector) -> ClientState: ...

    def init_participation(self, w: Vector, clients: int) -> PyTree: ...

    def round(
        self, fed: Federation, server: ServerState, key: PRNGKey
    ) -> tuple[ServerState, Info]: ...

    def compression_error(
        self, server: ServerState, w: Vector
    ) -> Float[Array, ""] | np.ndarray | None: ...


class State(eqx.Module):
    """Everything that a run is between two rounds. All leaves are arrays, so it can be saved."""

    round: Int[Array, ""]
    seed: SeedWords
    w: Vector  # what every client holds, or will hold when it is next asked
    server: ServerState
    clients: ClientState  # each client's state for the algorithm, on a leading axis
    memory: PyTree  # each client's memory for the problem, on a leading axis
    participation: PyTree  # what the server remembers about participation
    published: Count  # bytes of all publications so far
    seen: Count | None  # bytes of those that each client has, on a leading axis
    bytes_up: Count  # from clients to the server, so far
    bytes_down: Count
    messages_up: Count  # answers
    messages_down: Count  # questions
    vectors_up: Count  # answers that contain more than single numbers
    fault: Int[Array, "3"]  # first non-finite value: round, exchange, client; -1 for none
    seconds: Seconds | None  # of simulated time so far, where there is a clock
    best: Best  # the best evaluated round so far
    buffers: PyTree = None  # the state of the loss, where the server averages it
    spent: PyTree = None  # what a private run has spent

    @classmethod
    def start(
        cls,
        problem: Problem,
        algorithm: AlgorithmLike,
        key: PRNGKey,
        clients: int | None = None,
        timed: bool = False,
    ) -> State:
        """Return the state before the first round.

        Args:
            problem: The problem.
            algorithm: The algorithm.
            key: The run's key.
            clients: The number of clients, where it is not the problem's.
            timed: Whether there is a clock.
        """
        w, n = problem.start(), problem.n if clients is None else clients
        buffers = jax.tree.map(jnp.asarray, problem.state) if problem.averages_state else None
        states, memory = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (n, *jnp.shape(leaf))),
            (algorithm.init_client(w), problem.init_memory()),
        )
        return cls(
            round=jnp.int32(0),
            seed=jax.random.key_data(key),
            w=w,
            server=algorithm.init(w),
            clients=states,
            memory=memory,
            participation=algorithm.init_participation(w, n),
            published=Count.zero(),
            seen=Count(jnp.zeros(n, jnp.uint32), jnp.zeros(n, jnp.uint32)),
            bytes_up=Count.zero(),
            bytes_down=Count.zero(),
            messages_up=Count.zero(),
            messages_down=Count.zero(),
            vectors_up=Count.zero(),
            fault=jnp.full(3, -1, jnp.int32),
            seconds=Seconds.zero() if timed else None,
            best=Best.none(w, buffers),
            buffers=buffers,
        )

    def problem_now(self, problem: Problem) -> Problem:
        """Return the problem with the state of the loss that the server has now."""
        return problem.with_state(self.buffers) if problem.averages_state else problem

    @property
    def evaluation_key(self) -> PRNGKey:
        """The key of an evaluation after this many rounds."""
        return evaluation_key(self.seed, self.round)


NOISE = 2**31 - 5  # in place of a round: keys of noise, which no round and no client has
AT_EVALUATION = 2**31 - 1  # in place of an exchange


def noise_of(seed: SeedWords, round: Round, exchange: int) -> Draw:
    """Return what draws standard normal numbers for a rule, in one exchange of a round.

    Each call draws new numbers. They are a function of (seed, round, exchange, call), so a round
    that is played again has the same noise.
    """
    key = jax.random.fold_in(jax.random.wrap_key_data(seed), NOISE)
    key = jax.random.fold_in(jax.random.fold_in(key, round), exchange)
    calls = itertools.count()

    def draw(shape: tuple[int, ...]) -> Float[Array, "..."]:
        return jax.random.normal(jax.random.fold_in(key, next(calls)), shape)

    return draw


def evaluation_key(seed: SeedWords, round: Round) -> PRNGKey:
    """Return the key of an evaluation, which no exchange has."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(seed), round), 2**31)
