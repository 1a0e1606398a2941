"""What algorithms with local steps share: the checks of their fields, and the work of a client.

An algorithm declares these fields itself, at the place where its constructor takes them: a field
of a base class would come before all others, and the order is public. The base classes only say, as
protocols, which fields they need.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import numpy as np

from fedsolve.algorithms.participating import Participating
from fedsolve.compression.compressors import Compressor
from fedsolve.compression.error_feedback import check_downlink, no_residual, with_feedback
from fedsolve.compression.packets import Packet
from fedsolve.errors import InvalidInput
from fedsolve.fields import Scalar, at, check_count, check_flag, check_kind, check_positive
from fedsolve.local_updates.descent import Direction, Epochs, Steps, take_steps
from fedsolve.problem.client import Client
from fedsolve.problem.local_pass import Follows
from fedsolve.problem.passes import rows_of
from fedsolve.problem.problem import Problem
from fedsolve.problem.samples import counts
from fedsolve.types import Number, PRNGKey, PyTree, Round, Vector

AFTER_STEPS = 2**31 - 4  # folded into a client's key for what it draws after passes


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
    def local_epochs(self) -> int | None:
        """How many passes over its samples a client makes, in place of `local_steps`."""
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
    def local_epochs(self) -> int | None:
        """How many passes over its samples a client makes, in place of `local_steps`."""
        ...

    @property
    def uplink(self) -> Compressor:
        """The compressor of the clients, with error feedback (EF14) if it is biased."""
        ...

    @property
    def downlink(self) -> Compressor:
        """The compressor of the server (EF21-P)."""
        ...

    @property
    def error_feedback(self) -> bool:
        """Whether clients send later what a biased uplink drops."""
        ...


class LocalTraining(Participating):
    """Base class of algorithms whose clients take local steps.

    Subclasses have the fields of `HasLocalSteps`.

    Args:
        local_epochs: Passes over a client's samples in a round, in shuffled minibatches of the
            problem's `batch_size` without replacement, in place of `local_steps`, whose minibatches
            are drawn with replacement.
    """

    local_epochs: int | None = eqx.field(static=True, default=None, kw_only=True)

    def __check_init__(self: HasLocalSteps):
        check_positive("step_size", self.step_size)
        check_count("local_steps", self.local_steps)
        if self.local_epochs is not None:
            check_count("local_epochs", self.local_epochs)
            if self.local_steps != 1:
                raise InvalidInput("Give local_steps or local_epochs, not both.")

    @property
    def trains_models(self) -> bool:
        return True

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if problem.trains_itself:
            _check_training(self)
        elif self.local_epochs is not None:
            check_passes(problem)

    def reach(self: HasLocalSteps, round: Round) -> Scalar:
        """Return how far a client moved for each unit of its pseudo-gradient."""
        return at(self.step_size, round) if self.local_optimizer is None else 1.0

    def take_steps(
        self: HasLocalSteps, client: Client, direction: Direction, follows: Follows | None = None
    ) -> tuple[Vector, Vector]:
        """Take a client's local steps from w; see `fedsolve.local_updates.descent.take_steps`.

        Args:
            client: The client.
            direction: The direction of a step.
            follows: What it is, if it is a gradient of the objective with a correction.

        Returns:
            The pseudo-gradient, and the sum of the directions.
        """
        return _steps_of(self, client, direction, follows)

    def descend(
        self: HasLocalSteps, client: Client, direction: Direction, follows: Follows | None = None
    ) -> Vector:
        """Take a client's local steps from w and return the pseudo-gradient."""
        return _steps_of(self, client, direction, follows)[0]

    def count_steps(self: HasLocalSteps, client: Client) -> Number | int:
        """Return how many local steps the client takes in a round."""
        if self.local_epochs is None:
            return self.local_steps
        return client.count_steps(self.local_epochs)

    def after_steps(self: HasLocalSteps, client: Client) -> PRNGKey:
        """Return a key of the client that none of its local steps has."""
        return _after_steps(self, client)


class CompressedTraining(LocalTraining):
    """Base class of algorithms with local steps whose messages are compressed in both directions.

    Subclasses have the fields of `HasLocalSteps` and `HasLinks`. The state of a client is the
    residual of the error feedback.

    Args:
        error_feedback: Whether clients with a biased uplink add what it dropped to what they send
            next (EF14). False is for ablations: then what is dropped is lost.
    """

    error_feedback: bool = eqx.field(static=True, default=True, kw_only=True)

    def __check_init__(self: HasLinks):
        check_kind("uplink", self.uplink, Compressor)
        check_kind("downlink", self.downlink, Compressor)
        check_downlink(self.downlink)
        check_flag("error_feedback", self.error_feedback)

    def init_client(self: HasLinks, w: Vector) -> PyTree:
        return residual_of(self, w)

    def unsent(self, clients: PyTree) -> PyTree:
        return clients

    def compress(
        self: HasLinks, client: Client, residual: Vector | None, v: Vector
    ) -> tuple[Vector | None, Packet]:
        """Compress what a client sends after its local steps, with error feedback.

        Returns:
            The next residual, and the packet.
        """
        uplink = self.uplink.bound(client.shared_key)
        return with_feedback(uplink, residual, v, _after_steps(self, client), client.clip)


def _steps_of(
    algorithm: HasLocalSteps, client: Client, direction: Direction, follows: Follows | None
) -> tuple[Vector, Vector]:
    """Take a client's local steps, for both methods of `LocalTraining`."""
    return take_steps(
        direction,
        client,
        steps_of(algorithm),
        client.key,
        algorithm.step_size,
        algorithm.local_optimizer,
        follows=follows,
    )


def steps_of(algorithm: HasLocalSteps | HasLinks) -> Steps:
    """Return the local steps of an algorithm: a number, or passes over the samples."""
    epochs = algorithm.local_epochs
    return algorithm.local_steps if epochs is None else Epochs(epochs)


def _after_steps(algorithm: HasLocalSteps | HasLinks, client: Client) -> PRNGKey:
    """Return a key of the client that none of its local steps has."""
    epochs = algorithm.local_epochs
    return jax.random.fold_in(client.key, algorithm.local_steps if epochs is None else AFTER_STEPS)


def residual_of(algorithm: HasLinks, w: Vector) -> Vector | None:
    """Return a client's residual before the first round; None without error feedback."""
    return no_residual(algorithm.uplink, w) if algorithm.error_feedback else None


def check_passes(problem: Problem) -> None:
    """Raise if clients cannot make passes over their samples in minibatches."""
    rows_of(jax.tree.map(lambda leaf: leaf[0], problem.samples))
    if problem.drop_last and problem.batch_size is not None:
        fewest = int(np.min(counts(problem.samples)))
        if fewest < problem.batch_size:
            raise InvalidInput(
                f"With drop_last, a client of {fewest} samples takes no step: batch_size is "
                f"{problem.batch_size}."
            )
    if problem.samples.mask is not None and not problem.drop_last and problem.objective.has_state:
        raise InvalidInput(
            "A loss with a state cannot train on a padded batch, and clients differ in size: give "
            "the problem drop_last=True."
        )


def _check_training(algorithm: Any) -> None:
    """Raise if an algorithm is to take steps that a training loop takes."""
    epochs, optimizer = algorithm.local_epochs, algorithm.local_optimizer
    if algorithm.local_steps != 1 or epochs is not None or optimizer is not None:
        raise InvalidInput(
            "The training loop decides steps and optimizer: leave out local_steps, local_epochs "
            "and local_optimizer; step_size is the server's (1.0 averages the clients' models)."
        )
