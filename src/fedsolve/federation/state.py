"""The state of a run between two rounds."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PyTree, UInt32

from fedsolve.federation.clock import Seconds
from fedsolve.federation.counters import Bytes
from fedsolve.problem.problem import Problem


class State(eqx.Module):
    """Everything that a run is, between two rounds. Arrays only: it can be saved and restored."""

    round: Int[Array, ""]
    seed: UInt32[Array, " words"]  # the key's words
    w: Float[Array, " d"]  # what every client holds, or will when it is next asked
    server: PyTree
    clients: PyTree  # each client's state, on a leading axis
    memory: PyTree  # and what it remembers for the problem
    participation: PyTree  # what the server remembers of who takes part
    published: Bytes  # all publications so far
    seen: Bytes | None  # those that each client has, on a leading axis
    up: Bytes  # all that was sent so far, in both directions
    down: Bytes
    messages: Bytes  # how many that were
    updates: Bytes  # answers with more than numbers in them
    fault: Int[Array, "3"]  # first non-finite value: round, exchange, client; -1 for none
    seconds: Seconds | None  # of simulated time so far, where there is a clock

    @classmethod
    def start(
        cls,
        problem: Problem,
        algorithm: Any,
        key: Key[Array, ""],
        clients: int | None = None,
        timed: bool = False,
    ) -> State:
        """Before the first round; `clients` where there are not as many as the problem has;
        `timed` where there is a clock."""
        w, n = problem.start(), problem.n if clients is None else clients
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
            published=Bytes.zero(),
            seen=Bytes(jnp.zeros(n, jnp.uint32), jnp.zeros(n, jnp.uint32)),
            up=Bytes.zero(),
            down=Bytes.zero(),
            messages=Bytes.zero(),
            updates=Bytes.zero(),
            fault=jnp.full(3, -1, jnp.int32),
            seconds=Seconds.zero() if timed else None,
        )

    @property
    def evaluation_key(self) -> Key[Array, ""]:
        """For an evaluation after this many rounds."""
        return evaluation_key(self.seed, self.round)


def evaluation_key(seed: UInt32[Array, " words"], round: Any) -> Key[Array, ""]:
    """A key that no exchange has."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(seed), round), 2**31)
