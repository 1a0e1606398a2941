"""The base class of algorithms: `init`, `init_client`, methods that run on clients, and `round`.

An algorithm is an `equinox.Module`. Its numbers (step sizes, tolerances) are leaves, so a new value
needs no new compilation and a sweep is a `vmap` over the algorithm itself; what decides shapes or
the program (`participants`, `local_steps`) is `static()`.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedsolve.compression.compressors import Identity
from fedsolve.federation.federation import Federation
from fedsolve.fields import Scalar, at, html_table
from fedsolve.problem.problem import Problem
from fedsolve.types import ClientState, Info, PRNGKey, PyTree, Round, ServerState, Vector

Measured = Float[Array, ""] | Float[np.ndarray, ""] | None  # a number in the history, or none


class Algorithm(eqx.Module):
    """Base class of federated algorithms.

    Subclasses define what the server keeps (`init`), what each client keeps (`init_client`), what
    happens in a round (`round`), and the methods that clients run.

    A client method has the form `method(client, state, message) -> (state, reply)`, without
    `message` if none is sent; `client` is a `fedsolve.Client`.

    `begins_with_gradients` says that clients begin with `client.grad(client.w)`, before anything is
    published in a round. If a stopping rule has evaluated the gradients there, they are used again.
    """

    begins_with_gradients: ClassVar[bool] = False

    def _repr_html_(self) -> str:
        """Return the name and the fields."""
        names = [field.name for field in dataclasses.fields(self)]
        return html_table(type(self).__name__, {name: repr(getattr(self, name)) for name in names})

    @abc.abstractmethod
    def init(self, w: Vector) -> ServerState:
        """Return the server's state before the first round.

        Args:
            w: The initial parameters.
        """

    def init_client(self, w: Vector) -> ClientState:
        """Return one client's state before the first round; None by default.

        Args:
            w: The initial parameters.
        """
        return None

    def init_participation(self, w: Vector, clients: int) -> PyTree:
        """Return the server's state of participation before the first round.

        Args:
            w: The initial parameters.
            clients: The number of clients n.
        """
        return None

    @abc.abstractmethod
    def round(self, fed: Federation, server: ServerState, key: PRNGKey) -> tuple[ServerState, Info]:
        """Play one round, on the server.

        Args:
            fed: The federation: clients to ask, and where parameters are published.
            server: The server's state.
            key: A random key.

        Returns:
            The server's next state, and what to record in the history.
        """

    def average(self, server: ServerState) -> Vector | np.ndarray | None:
        """Return the averaged parameters that theorems are about, or None.

        Args:
            server: The server's state after the run.
        """
        return None

    def compression_error(self, server: ServerState, w: Vector) -> Measured:
        """Return ‖x − w‖ / ‖x‖ if the server has an x and clients a compressed copy of it.

        Args:
            server: The server's state after a round.
            w: The parameters that clients have.
        """
        alone = isinstance(server, jax.Array) and server.shape == w.shape  # x is all it keeps
        x = server if alone else getattr(server, "x", None)
        x = getattr(x, "x", x)  # beside it may be the state of an optimizer
        downlink = getattr(self, "downlink", None)
        if x is None or downlink is None or isinstance(downlink, Identity):
            return None
        return jnp.linalg.norm(x - w) / jnp.maximum(jnp.linalg.norm(x), jnp.finfo(x.dtype).tiny)

    def unsent(self, clients: ClientState) -> Float[Array, "n d"] | None:
        """Return the clients' residuals of error feedback, one row each; None if there are none.

        Args:
            clients: The states of all clients, on a leading axis.
        """
        return None

    def uplink_error(self, clients: ClientState, w: Vector, round: Round) -> Measured:
        """Return η‖(1/n) Σ e_j‖ / ‖w‖: how far w would move if all residuals were sent now.

        Args:
            clients: The states of all clients, on a leading axis.
            w: The parameters.
            round: The round, counted from 0.
        """
        uplink, held = getattr(self, "uplink", None), self.unsent(clients)
        if uplink is None or uplink.unbiased or not isinstance(held, jax.Array):
            return None
        step = at(getattr(self, "step_size", 1.0), round) * getattr(self, "server_step_size", 1.0)
        size = jnp.linalg.norm(w)
        move = jnp.asarray(step * jnp.linalg.norm(jnp.mean(held, axis=0)), w.dtype)
        return jnp.where(size > 0, move / jnp.where(size > 0, size, 1), 0)

    def objective_weights(
        self, server: ServerState, participation: PyTree
    ) -> Float[Array, " n"] | None:
        """Return the clients' weights in the objective, if they are not all equal.

        Histories then have that objective as `weighted_objective`.

        Args:
            server: The server's state after a round.
            participation: The server's state of participation.
        """
        return None

    def limits(self) -> Info:
        """Return known limits of recorded quantities, by name; plots show them."""
        return {}

    @property
    def feasible_up_to(self) -> Scalar:
        """The largest g(w) that counts as feasible: the algorithm's `tolerance`; 0 without one."""
        tolerance = getattr(self, "tolerance", 0.0)
        return getattr(tolerance, "tolerance", tolerance)  # of an `Adaptive` one, ε

    @property
    def trains_models(self) -> bool:
        """Whether clients take local steps, in which parts of a model that are not w can move."""
        return False

    def check(self, problem: Problem) -> None:
        """Raise if the algorithm does not apply to the problem.

        Args:
            problem: The problem.
        """
