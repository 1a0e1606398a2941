"""What algorithms with local steps share: the checks of their fields, and the work of a client.

An algorithm declares these fields itself, at the place where its constructor takes them: a field
of a base class would come before all others, and the order is public. Hence `AbstractVar`, which
says that a subclass has the field and adds none.
"""

# Without `from __future__ import annotations`: Equinox reads `AbstractVar` when a class is made.

import jax
from equinox import AbstractVar
from jaxtyping import PyTree

from fedsolve.algorithms.participating import Participating
from fedsolve.compression.compressors import Compressor
from fedsolve.compression.error_feedback import check_downlink, no_residual, with_feedback
from fedsolve.compression.packets import Packet
from fedsolve.fields import Scalar, Schedule, at, check_count, check_kind, check_positive
from fedsolve.local_updates.descent import Direction, take_steps
from fedsolve.local_updates.optimizers import Optimizer
from fedsolve.problem.client import Client
from fedsolve.types import Round, Vector


class LocalTraining(Participating):
    """Base class of algorithms whose clients take local steps.

    - `step_size`: η of the local steps, a number or a schedule; with a `local_optimizer`, the
      server's.
    - `local_steps`: how many steps a client takes in a round.
    - `local_optimizer`: the optimizer of the local steps; None for plain gradient descent.
    """

    step_size: AbstractVar[Scalar | Schedule]
    local_steps: AbstractVar[int]
    local_optimizer: AbstractVar[Optimizer | None]

    def __check_init__(self):
        check_positive("step_size", self.step_size)
        check_count("local_steps", self.local_steps)

    def reach(self, round: Round) -> Scalar:
        """Return how far a client moved for each unit of its pseudo-gradient."""
        return at(self.step_size, round) if self.local_optimizer is None else 1.0

    def take_steps(self, client: Client, direction: Direction) -> tuple[Vector, Vector]:
        """Take a client's local steps from w; see `fedsolve.local_updates.descent.take_steps`.

        Returns:
            The pseudo-gradient, and the sum of the directions.
        """
        steps, optimizer = self.local_steps, self.local_optimizer
        return take_steps(
            direction, client.w, steps, client.key, self.step_size, optimizer, client.round
        )

    def descend(self, client: Client, direction: Direction) -> Vector:
        """Take a client's local steps from w and return the pseudo-gradient."""
        return self.take_steps(client, direction)[0]


class CompressedTraining(LocalTraining):
    """Base class of algorithms with local steps whose messages are compressed in both directions.

    - `uplink`: the compressor of the clients, with error feedback (EF14) if it is biased. The
      residual of the error feedback is the client's state.
    - `downlink`: the compressor of the server (EF21-P).
    """

    uplink: AbstractVar[Compressor]
    downlink: AbstractVar[Compressor]

    def __check_init__(self):
        check_kind("uplink", self.uplink, Compressor)
        check_kind("downlink", self.downlink, Compressor)
        check_downlink(self.downlink)

    def init_client(self, w: Vector) -> PyTree:
        return no_residual(self.uplink, w)

    def unsent(self, clients: PyTree) -> PyTree:
        return clients

    def compress(
        self, client: Client, residual: Vector | None, v: Vector
    ) -> tuple[Vector | None, Packet]:
        """Compress what a client sends after its local steps, with error feedback.

        Returns:
            The next residual, and the packet.
        """
        key = jax.random.fold_in(client.key, self.local_steps)  # the steps used the keys below
        return with_feedback(self.uplink, residual, v, key)
