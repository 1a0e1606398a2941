"""What an algorithm is: `init`, `init_client`, methods that run on clients, and `round`.

An algorithm is an `equinox.Module`. Its numbers (step sizes, tolerances) are leaves, so a new value
needs no new compilation and a sweep is a `vmap` over the algorithm itself; what decides shapes or
the program (`participants`, `local_steps`) is `static()`.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from fedsolve.compression.compressors import Identity
from fedsolve.federation.federation import Federation
from fedsolve.fields import at
from fedsolve.problem.problem import Problem


class Algorithm(eqx.Module):
    """A federated algorithm. Subclasses say what the server keeps, what each client keeps, what
    happens in a round, and which methods clients run.

    A client method has the form `method(client, state, message) -> (state, reply)`, without
    `message` where none is sent; `client` is a `fedsolve.problem.Client`.
    """

    def init(self, w: Float[Array, " d"]) -> PyTree:
        """The server's state before the first round."""
        raise NotImplementedError

    def init_client(self, w: Float[Array, " d"]) -> PyTree:
        """One client's state before the first round; by default it keeps nothing."""
        return None

    def init_participation(self, w: Float[Array, " d"], clients: int) -> PyTree:
        """What the server remembers of who takes part, of so many clients; see `Participating`."""
        return None

    def round(
        self, fed: Federation, server: PyTree, key: Key[Array, ""]
    ) -> tuple[PyTree, dict[str, Any]]:
        """One round, on the server: the server's next state, and what to write in the history."""
        raise NotImplementedError

    def average(self, server: PyTree) -> Any:
        """The averaged parameters that the algorithm promises something about, if it has them."""
        return None

    def compression_error(self, server: PyTree, w: Float[Array, " d"]) -> Any:
        """‖x − w‖ / ‖x‖, where the server has an x and clients a compressed copy of it."""
        alone = isinstance(server, jax.Array) and server.shape == w.shape  # x is all it keeps
        x = server if alone else getattr(server, "x", None)
        downlink = getattr(self, "downlink", None)
        if x is None or downlink is None or isinstance(downlink, Identity):
            return None
        return jnp.linalg.norm(x - w) / jnp.maximum(jnp.linalg.norm(x), jnp.finfo(x.dtype).tiny)

    def unsent(self, clients: PyTree) -> Any:
        """What each client's biased uplink has not sent yet, a row each, from the states of all
        clients; None where nothing is kept for later."""
        return None

    def uplink_error(self, clients: PyTree, w: Float[Array, " d"], round: Any) -> Any:
        """η‖(1/n) Σ e_j‖ / ‖w‖: how far w would move if all clients sent what they hold back."""
        uplink, held = getattr(self, "uplink", None), self.unsent(clients)
        if uplink is None or uplink.unbiased or not isinstance(held, jax.Array):
            return None
        step = at(getattr(self, "step_size", 1.0), round) * getattr(self, "server_step_size", 1.0)
        size = jnp.linalg.norm(w)
        move = jnp.asarray(step * jnp.linalg.norm(jnp.mean(held, axis=0)), w.dtype)
        return jnp.where(size > 0, move / jnp.where(size > 0, size, 1), 0)

    def objective_weights(self, server: PyTree, participation: PyTree) -> Any:
        """What each client counts in the f that is minimised, after a round: histories then have
        that f as `weighted_objective`. None where it is the plain mean."""
        return None

    def limits(self) -> dict[str, Any]:
        """Where entries of the history are known to settle, by name: pictures show them."""
        return {}

    def check(self, problem: Problem) -> None:
        """Refuses, with a sentence, a problem that this algorithm cannot take."""
