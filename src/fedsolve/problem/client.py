"""The client that a client method sees."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from fedsolve.errors import InvalidInput
from fedsolve.problem.constraints import Constraint
from fedsolve.problem.samples import Samples
from fedsolve.types import Number, PRNGKey, PyTree, Vector

if TYPE_CHECKING:
    from fedsolve.problem.problem import Problem


class Client:
    """One client during one exchange, as a client method sees it.

    It gives values and gradients of f_j and g_j on the client's data. They use all samples, or a
    minibatch if the problem has a `batch_size`; then give each call a different `key`, or it draws
    the same samples again.

    Fedsolve makes clients and hands them to client methods; `Problem.client` makes one by hand.

    Args:
        problem: The problem.
        samples: This client's samples.
        w: The parameters that every client holds, as a vector.
        round: The round, counted from 0.
        index: This client's index, from 0 to n − 1.
        key: This client's key in this exchange.
        memory: What the client keeps between rounds, such as a value network. It belongs to the
            problem (`Problem.init_memory`), not to the algorithm. Like the algorithm's client
            state, it changes if and only if the reply arrived.

    Example:
        >>> import fedsolve as fs
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> def loss(w, data):
        ...     return 0.5 * jnp.mean((data["y"] - w) ** 2)
        >>> data = {"y": np.array([[1.0, 3.0], [4.0, 6.0]])}
        >>> problem = fs.Problem(loss, data, params=np.zeros(1)).on_device()
        >>> own = jax.tree.map(lambda leaf: leaf[1], problem.samples)
        >>> client = problem.client(
        ...     own, problem.start(), jnp.int32(0), jnp.int32(1), jax.random.key(0)
        ... )
        >>> client.samples_count, float(client.objective(client.w)), client.grad(client.w).tolist()
        (2, 13.0, [-5.0])
    """

    _uses_all_samples = False

    def __init__(
        self,
        problem: Problem,
        samples: Samples,
        w: Vector,
        round: Int[Array, ""],
        index: Int[Array, ""],
        key: PRNGKey,
        memory: PyTree = None,
    ):
        self.w = w
        self.round = round
        self.index = index
        self.key = key
        self.memory = memory
        self._problem = problem
        self._samples = samples

    @property
    def samples_count(self) -> Int[Array, ""] | int:
        """The number of samples of this client."""
        return self._samples.size

    @property
    def size(self) -> Int[Array, ""] | int:
        """An alias of `samples_count`, kept for this version."""
        return self.samples_count

    @property
    def unconstrained(self) -> bool:
        """Whether the problem has no constraint."""
        return self._problem.constraint is None

    def objective(self, w: Vector, key: PRNGKey | None = None) -> Float[Array, ""]:
        """Compute f_j(w).

        Args:
            w: Where to evaluate.
            key: Key of the minibatch; by default this client's `key`.

        Returns:
            The value, a scalar.
        """
        return self._problem.value(w, self._draw_samples(key))

    def grad(self, w: Vector, key: PRNGKey | None = None) -> Vector:
        """Compute ∇f_j(w).

        Args:
            w: Where to evaluate.
            key: Key of the minibatch; by default this client's `key`.

        Returns:
            The gradient.
        """
        return jax.grad(self.objective)(w, key)

    def measure(self, w: Vector, key: PRNGKey | None = None) -> PyTree:
        """Compute what the server needs from this client to evaluate g(w).

        Args:
            w: Where to evaluate.
            key: Key of the minibatch; by default this client's `key`.

        Returns:
            A measurement, which depends on the kind of constraint (`Constraint.measure`).

        Raises:
            InvalidInput: If the problem has no constraint.
        """
        samples, batch = self._draw_samples(key), self._problem.batch_size
        scale = 1
        if batch is not None and not self._uses_all_samples:
            scale = self.samples_count / batch if self._samples.is_one_set else None
        return self._constraint.measure(self._problem.layout.unravel(w), samples, scale)

    def representation(
        self, w: Vector, key: PRNGKey | None = None
    ) -> tuple[Float[Array, "samples features"], Float[Array, " samples"]]:
        """Compute the samples' representations at w.

        Args:
            w: Where to evaluate.
            key: Key of the minibatch; by default this client's `key`.

        Returns:
            One row for each sample, and the weight of each sample in a mean over them.

        Raises:
            InvalidInput: If the problem has no `representation`, or several sets of samples.
        """
        samples, represent = self._draw_samples(key), self._problem.representation
        if represent is None or isinstance(samples.mask, dict):
            raise InvalidInput("Representations need the problem's function of one set of samples.")
        rows = represent(self._problem.layout.unravel(w), samples.values)
        real = jnp.ones(len(rows), bool) if samples.mask is None else samples.mask
        return rows.reshape(len(rows), -1), real / jnp.sum(real)

    def constraint(
        self, w: Vector, focus: PyTree = None, key: PRNGKey | None = None
    ) -> Float[Array, ""]:
        """Compute this client's part of g(w), whose gradient it follows to reduce g.

        Args:
            w: Where to evaluate.
            focus: What `Constraint.combine` returned for the clients.
            key: Key of the minibatch; by default this client's `key`.

        Returns:
            The value, a scalar.

        Raises:
            InvalidInput: If the problem has no constraint.
        """
        params = self._problem.layout.unravel(w)
        return self._constraint.local(params, self._draw_samples(key), focus)

    def constraint_grad(
        self, w: Vector, focus: PyTree = None, key: PRNGKey | None = None
    ) -> Vector:
        """Compute ∇g_j(w).

        Args:
            w: Where to evaluate.
            focus: As for `constraint`.
            key: Key of the minibatch; by default this client's `key`.

        Returns:
            The gradient.
        """
        return jax.grad(self.constraint)(w, focus, key)

    def direction(
        self, w: Vector, sigma: Number | int, focus: PyTree = None, key: PRNGKey | None = None
    ) -> Vector:
        """Compute (1 − σ)∇f_j(w) + σ∇g_j(w); a gradient of weight 0 is not computed.

        Args:
            w: Where to evaluate.
            sigma: The weight σ of the constraint, from 0 to 1.
            focus: As for `constraint`.
            key: Key of the minibatch; by default this client's `key`.

        Returns:
            The mixed gradient; ∇f_j(w) if the problem has no constraint.
        """

        def objective() -> Vector:
            return self.grad(w, key)

        def constraint() -> Vector:
            return self.constraint_grad(w, focus, key)

        def blend() -> Vector:
            return (1 - sigma) * objective() + sigma * constraint()

        if self.unconstrained:
            return objective()
        which = jnp.where(sigma <= 0, 0, jnp.where(sigma >= 1, 1, 2))
        return lax.switch(which, (objective, constraint, blend))

    def restricted(self, count: Number | int, key: PRNGKey) -> Client:
        """Return this client with only some of its samples, drawn without replacement.

        Args:
            count: The number of samples to keep.
            key: Key of the draw.

        Returns:
            A client that uses no other samples.
        """
        other = copy.copy(self)
        other._samples = self._samples.subset(key, count)
        return other

    def with_all_samples(self) -> Client:
        """Return this client computing from all of its samples, whatever the batch size.

        Returns:
            A client that draws no minibatches.
        """
        other = copy.copy(self)
        other._uses_all_samples = True
        return other

    def remember(self, memory: PyTree) -> None:
        """Replace what this client keeps between rounds.

        Args:
            memory: The new memory, of the structure that `Problem.init_memory` returns. It must not
                be set inside `lax.scan`, `lax.cond` or other functions that JAX traces.
        """
        self.memory = memory

    @property
    def _constraint(self) -> Constraint:
        """The problem's constraint; raise if it has none."""
        if self._problem.constraint is None:
            raise InvalidInput("This algorithm asks for a constraint, and the problem has none.")
        return self._problem.constraint

    def _draw_samples(self, key: PRNGKey | None) -> Samples:
        """Return all samples, or a minibatch if the problem has a batch size."""
        if self._problem.batch_size is None or self._uses_all_samples:
            return self._samples
        return self._samples.draw(self.key if key is None else key, self._problem.batch_size)
