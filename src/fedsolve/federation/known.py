"""Clients whose gradient at w is known from the evaluation there."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jax import lax
from jaxtyping import Array, Float, Int

from fedsolve.problem.client import Client
from fedsolve.problem.padding import PerClient
from fedsolve.problem.problem import Problem
from fedsolve.problem.samples import Samples
from fedsolve.types import Flag, PRNGKey, PyTree, Vector


class Known(NamedTuple):
    """∇f_j at the w of the last evaluation, one row for each client or one of them."""

    valid: Flag  # whether w is still that of the evaluation
    gradients: Float[Array, "*n d"]


def can_be_known(problem: Problem) -> bool:
    """Return whether a client's gradient is what evaluation computes.

    It is not that of a minibatch, of a random loss, or of a loss that keeps a state, and clients
    have no parameters of their own.
    """
    plain = type(problem).client is Problem.client and type(problem).values is Problem.values
    objective = problem.objective
    fixed = isinstance(objective, PerClient) and not (objective.is_random or objective.has_state)
    return plain and fixed and problem.batch_size is None and not problem.keeps_own


class InformedClient(Client):
    """A client that is told its gradient at w, and reads its samples only where it needs them.

    Args:
        problem: The problem.
        read: Function of this client's index that returns its samples.
        w, round, index, key, memory: As for `Client`.
        known: Its gradient at w, and whether it is valid.
    """

    def __init__(
        self,
        problem: Problem,
        read: Callable[[Int[Array, ""]], Samples],
        w: Vector,
        round: Int[Array, ""],
        index: Int[Array, ""],
        key: PRNGKey,
        memory: PyTree,
        known: Known,
    ):
        super().__init__(problem, Samples(None), w, round, index, key, memory)
        self._read: Callable[[Int[Array, ""]], Samples] = read
        self._known: Known | None = known

    @property
    def _samples(self) -> Samples:
        return self._read(self.index)

    @_samples.setter
    def _samples(self, samples: Samples) -> None:
        self._read, self._known = lambda _: samples, None  # other samples have another gradient

    def grad(self, w: Vector, key: PRNGKey | None = None) -> Vector:
        known = self._known
        if known is None or w is not self.w or key is not None:
            return super().grad(w, key)
        compute = super().grad
        return lax.cond(known.valid, lambda: known.gradients, lambda: compute(w))

    def reading(self, after: Array) -> Client:
        """Return this client with its samples read here, for a loop that uses them repeatedly.

        Args:
            after: A value that the loop changes. The index is made to depend on it, or the compiler
                would read the samples before the loop, even if the loop does not run.
        """
        index, _ = lax.optimization_barrier((self.index, after))
        samples = self._read(index)
        return Client(self._problem, samples, self.w, self.round, self.index, self.key, self.memory)
