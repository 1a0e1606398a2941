"""What a client method sees of its client."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key, PyTree

from fedsolve.errors import InvalidInput
from fedsolve.problem.constraints import Constraint
from fedsolve.problem.samples import Samples

if TYPE_CHECKING:
    from fedsolve.problem.problem import Problem


class Client:
    """What a client method sees: its data behind f and g, the parameters that every client holds,
    and a key of its own.

    `grad` and the others use all samples, or a minibatch if the problem has a `batch_size`; give
    each call its own `key` then, or it draws the same samples again.

    `memory` belongs to the problem (`Problem.init_memory`) and not to the algorithm: what the
    client learns for itself, such as a value network. As the algorithm's state does, it moves if
    and only if the reply arrived.
    """

    def __init__(
        self,
        problem: Problem,
        samples: Samples,
        w: Float[Array, " d"],
        round: Int[Array, ""],
        index: Int[Array, ""],
        key: Key[Array, ""],
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
    def size(self) -> Int[Array, ""] | int:
        """How many samples this client has."""
        return self._samples.size

    @property
    def unconstrained(self) -> bool:
        """Whether the problem has no constraint."""
        return self._problem.constraint is None

    def objective(self, w: Float[Array, " d"], key: Any = None) -> Float[Array, ""]:
        """f_j(w)."""
        return self._problem.value(w, self._look(key))

    def grad(self, w: Float[Array, " d"], key: Any = None) -> Float[Array, " d"]:
        """∇f_j(w)."""
        return jax.grad(self.objective)(w, key)

    def measure(self, w: Float[Array, " d"], key: Any = None) -> PyTree:
        """What the server needs to know from this client about g(w)."""
        samples, batch = self._look(key), self._problem.batch_size
        scale = 1
        if batch is not None:
            scale = self.size / batch if self._samples.is_one_set else None
        return self._constraint.measure(self._problem.layout.unravel(w), samples, scale)

    def representation(
        self, w: Float[Array, " d"], key: Any = None
    ) -> tuple[Float[Array, "samples features"], Float[Array, " samples"]]:
        """The samples' representations at w, and what each sample counts in a mean over them."""
        samples, represent = self._look(key), self._problem.representation
        if represent is None or isinstance(samples.mask, dict):
            raise InvalidInput("Representations need the problem's function of one set of samples.")
        rows = represent(self._problem.layout.unravel(w), samples.values)
        real = jnp.ones(len(rows), bool) if samples.mask is None else samples.mask
        return rows.reshape(len(rows), -1), real / jnp.sum(real)

    def constraint(
        self, w: Float[Array, " d"], focus: PyTree = None, key: Any = None
    ) -> Float[Array, ""]:
        """This client's part of g(w); `focus` is what the server said about it."""
        return self._constraint.local(self._problem.layout.unravel(w), self._look(key), focus)

    def constraint_grad(
        self, w: Float[Array, " d"], focus: PyTree = None, key: Any = None
    ) -> Float[Array, " d"]:
        """∇g_j(w)."""
        return jax.grad(self.constraint)(w, focus, key)

    def direction(
        self, w: Float[Array, " d"], sigma: Any, focus: PyTree = None, key: Any = None
    ) -> Float[Array, " d"]:
        """(1 − σ)∇f_j(w) + σ∇g_j(w); a gradient of weight 0 is not computed."""

        def objective() -> Float[Array, " d"]:
            return self.grad(w, key)

        def constraint() -> Float[Array, " d"]:
            return self.constraint_grad(w, focus, key)

        def blend() -> Float[Array, " d"]:
            return (1 - sigma) * objective() + sigma * constraint()

        if self.unconstrained:
            return objective()
        which = jnp.where(sigma <= 0, 0, jnp.where(sigma >= 1, 1, 2))
        return lax.switch(which, (objective, constraint, blend))

    def restricted(self, count: Any, key: Key[Array, ""]) -> Client:
        """The same client with only `count` of its samples, drawn without replacement. No others
        are looked at."""
        other = copy.copy(self)
        other._samples = self._samples.subset(key, count)
        return other

    def remember(self, memory: PyTree) -> None:
        """Replaces what this client remembers. Not inside a loop or a branch of the program."""
        self.memory = memory

    @property
    def _constraint(self) -> Constraint:
        if self._problem.constraint is None:
            raise InvalidInput("This algorithm asks for a constraint, and the problem has none.")
        return self._problem.constraint

    def _look(self, key: Any) -> Samples:
        if self._problem.batch_size is None:
            return self._samples
        return self._samples.draw(self.key if key is None else key, self._problem.batch_size)
