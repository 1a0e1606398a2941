"""What algorithms with local steps share: the checks of their fields, and the work of a client.

An algorithm declares these fields itself, at the place where its constructor takes them: a field
of a base class would come before all others, and the order is public. The base classes only say, as
protocols, which fields they need.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax

from fedsolve.algorithms.participating import Participating
from fedsolve.compression.compressors import Compressor
from fedsolve.compression.error_feedback import check_downlink, no_residual, with_feedback
from fedsolve.compression.packets import Packet
from fedsolve.fields import Scalar, at, check_count, check_kind, check_positive
from fedsolve.local_updates.descent import Direction, take_steps
from fedsolve.problem.client import Client
from fedsolve.types import PyTree, Round, Vector


@runtime_checkable
class HasLocalSteps(Protocol):
    """Fields of an algorithm whose clients take local steps."""

    @property
    def step_size(self) -> Any:  # Scalar | Schedule, behind a converter
        """η of the local steps; with a `local_optimizer`, the step size of the server."""
        ...

    @property
    def local_steps(self) -> int:
        """How many steps a client takes in a round."""
        ...

    @property
    def local_optimizer(self) -> Any:  # Optimizer | None, behind a converter
        """The optimizer of the local steps; None for plain gradient descent."""
        ...


@runtime_checkable
class HasLinks(Protocol):
    """Fields of an algorithm whose messages are compressed in both directions."""

    @property
    def local_steps(self) -> int:
        """How many steps a client takes in a round."""
        ...

    @property
    def uplink(self) -> Compressor:
        """The compressor of the clients, with error feedback (EF14) if it is biased."""
        ...

    @property
    def downlink(self) -> Compressor:
        """The compressor of the server (EF21-P)."""
        ...


class LocalTraining(Participating):
    """Base class of algorithms whose clients take local steps.

    Subclasses have the fields of `HasLocalSteps`.
    """

    def __check_init__(self: HasLocalSteps):
        check_positive("step_size", self.step_size)
        check_count("local_steps", self.local_steps)

    def reach(self: HasLocalSteps, round: Round) -> Scalar:
        """Return how far a client moved for each unit of its pseudo-gradient."""
        return at(self.step_size, round) if self.local_optimizer is None else 1.0

    def take_steps(
        self: HasLocalSteps, client: Client, direction: Direction
    ) -> tuple[Vector, Vector]:
        """Take a client's local steps from w; see `fedsolve.local_updates.descent.take_steps`.

        Returns:
            The pseudo-gradient, and the sum of the directions.
        """
        return _steps_of(self, client, direction)

    def descend(self: HasLocalSteps, client: Client, direction: Direction) -> Vector:
        """Take a client's local steps from w and return the pseudo-gradient."""
        return _steps_of(self, client, direction)[0]


class CompressedTraining(LocalTraining):
    """Base class of algorithms with local steps whose messages are compressed in both directions.

    Subclasses have the fields of `HasLocalSteps` and `HasLinks`. The state of a client is the
    residual of the error feedback.
    """

    def __check_init__(self: HasLinks):
        check_kind("uplink", self.uplink, Compressor)
        check_kind("downlink", self.downlink, Compressor)
        check_downlink(self.downlink)

    def init_client(self: HasLinks, w: Vector) -> PyTree:
        return no_residual(self.uplink, w)

    def unsent(self, clients: PyTree) -> PyTree:
        return clients

    def compress(
        self: HasLinks, client: Client, residual: Vector | None, v: Vector
    ) -> tuple[Vector | None, Packet]:
        """Compress what a client sends after its local steps, with error feedback.

        Returns:
            The next residual, and the packet.
        """
        key = jax.random.fold_in(client.key, self.local_steps)  # the steps used the keys below
        return with_feedback(self.uplink, residual, v, key)


def _steps_of(
    algorithm: HasLocalSteps, client: Client, direction: Direction
) -> tuple[Vector, Vector]:
    """Take a client's local steps, for both methods of `LocalTraining`."""
    steps, optimizer = algorithm.local_steps, algorithm.local_optimizer
    return take_steps(
        direction, client.w, steps, client.key, algorithm.step_size, optimizer, client.round
    )
