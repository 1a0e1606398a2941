"""The client that a client method sees."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Key

from fedsolve.compression.clipping import limit
from fedsolve.compression.packets import Packet
from fedsolve.errors import InvalidInput
from fedsolve.fields import Scalar
from fedsolve.problem.constraints import Constraint
from fedsolve.problem.local_pass import Batches, Follows, HasLocalPass, LocalWork, Walked
from fedsolve.problem.passes import Passes
from fedsolve.problem.samples import Samples
from fedsolve.types import Flag, Number, Personal, PRNGKey, PyTree, Round, Vector

if TYPE_CHECKING:
    from fedsolve.problem.problem import Problem

ORDER = 2**31 - 3  # folded into the key of the steps for the order of the samples
NOISE = 2**31 - 2  # folded into the key of a minibatch for the noise of a random loss
Slope = tuple[Vector, Any, PyTree]  # by w, by the personal parameters; the next state


@dataclasses.dataclass
class _Now:
    """What moves while a client computes; shared with the clients that it is restricted to."""

    memory: PyTree
    state: PyTree  # of the loss, where the client does not keep one of its own
    training: bool = False  # whether gradients are those of local steps, which move the rest
    stepped: bool = False
    batch: Samples | None = None  # the minibatch of a pass without replacement
    own_slope: Personal | None = None


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
    _has_parts = False  # whether the samples are the first rows, to be taken in parts

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
        self._problem = problem
        self._samples = samples
        self._now = _Now(memory, problem.state)
        self.shared_key = key  # one that all clients of the exchange have, where there are others
        self.clip: Scalar | None = None  # the largest norm of a reply, where replies are clipped

    @property
    def memory(self) -> PyTree:
        """What the client keeps between rounds."""
        return self._now.memory

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
        """Compute f_j(w), without noise.

        Args:
            w: Where to evaluate.
            key: Key of the minibatch; by default this client's `key`.

        Returns:
            The value, a scalar.
        """
        return self._problem.objective(self._params(w), self._draw_samples(key))

    def grad(self, w: Vector, key: PRNGKey | None = None) -> Vector:
        """Compute ∇f_j(w); of a random loss, with noise.

        Args:
            w: Where to evaluate.
            key: Key of the minibatch and the noise; by default this client's `key`.

        Returns:
            The gradient.
        """
        return self._moved(lambda: self._objective_slope(w, key))

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
        return self._constraint.measure(self._params(w), samples, scale)

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
        extra = () if self._problem.state is None else (samples.state,)
        rows = represent(self._params(w), samples.values, *extra)
        real = jnp.ones(len(rows), bool) if samples.mask is None else samples.mask
        return rows.reshape(len(rows), -1), real / jnp.sum(real)

    def constraint(
        self, w: Vector, *, focus: PyTree = None, key: PRNGKey | None = None
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
        samples = self._draw_samples(key)
        return self._constraint.descended(self._params(w), samples, focus, self._scale(samples))

    def constraint_grad(
        self, w: Vector, *, focus: PyTree = None, key: PRNGKey | None = None
    ) -> Vector:
        """Compute ∇g_j(w).

        Args:
            w: Where to evaluate.
            focus: As for `constraint`.
            key: Key of the minibatch; by default this client's `key`.

        Returns:
            The gradient.
        """
        return self._moved(lambda: self._constraint_slope(w, focus, key))

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

        def objective() -> Slope:
            return self._objective_slope(w, key)

        def constraint() -> Slope:
            return self._constraint_slope(w, focus, key)

        def blend() -> Slope:
            slope, own, state = objective()
            other, other_own, _ = constraint()
            if own is not None:
                own = (1 - sigma) * own + sigma * other_own
            return (1 - sigma) * slope + sigma * other, own, state

        if self.unconstrained:
            return self._moved(objective)
        which = jnp.where(sigma <= 0, 0, jnp.where(sigma >= 1, 1, 2))
        return self._moved(lambda: lax.switch(which, (objective, constraint, blend)))

    def penalised(
        self, w: Vector, factor: Number | int, focus: PyTree = None, key: PRNGKey | None = None
    ) -> Vector:
        """Compute ∇f_j(w) + factor·∇g_j(w); with a factor of 0, ∇g_j(w) is not computed.

        Args:
            w: Where to evaluate.
            factor: The weight of the constraint, at least 0.
            focus: As for `constraint`.
            key: Key of the minibatch; by default this client's `key`.

        Returns:
            The sum; ∇f_j(w) if the problem has no constraint.
        """

        def add(found: Slope) -> Slope:
            slope, own, state = found
            other, other_own, _ = self._constraint_slope(w, focus, key)
            return slope + factor * other, own if own is None else own + factor * other_own, state

        def penalised() -> Slope:
            objective = self._objective_slope(w, key)
            if self.unconstrained:
                return objective
            return lax.cond(factor > 0, add, lambda found: found, objective)

        return self._moved(penalised)

    # Local steps

    @property
    def personal(self) -> Any:  # Personal | None
        """This client's personal parameters; None if there are none."""
        return self.memory.personal if self._problem.layout.personal_size else None

    @property
    def own_slope(self) -> Any:  # Personal | None
        """The gradient by the personal parameters, of the last call of `grad` or another one."""
        return self._now.own_slope

    @property
    def state(self) -> PyTree:
        """The state of the loss (`Problem.state`), as it is on this client."""
        return self.memory.state if self._problem.keeps_state else self._now.state

    def move_personal(self, step: Personal) -> None:
        """Add to the personal parameters.

        Args:
            step: What to add.
        """
        assert self.personal is not None
        self._now.memory = self.memory._replace(personal=self.personal + step)

    def repeat(
        self,
        steps: Number | int,
        body: Callable[..., PyTree],
        start: PyTree,
        first: Number | int = 0,
    ) -> PyTree:
        """Run a loop of local steps, like `lax.fori_loop`.

        Gradients in the body belong to local steps: they move the state of the loss.

        Args:
            steps: Where the loop ends.
            body: Function of (step, values) that returns the next values.
            start: The values at first.
            first: The first step.

        Returns:
            The values after the last step.
        """
        if self._problem.trains_itself:
            raise InvalidInput(
                "This algorithm takes local steps of its own kind, which a training loop cannot "
                "replace; use FedAvg, PPBC, SCAFFOLD or FedSGM."
            )
        before, self._now.training = self._now.training, True
        if self._moves is None:
            end = lax.fori_loop(first, steps, body, start)
        else:

            def both(step: Round, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
                values, moving = carry
                self._put(moving)
                return body(step, values), self._moves

            end, moving = lax.fori_loop(first, steps, both, (start, self._moves))
            self._put(moving)
        self._now.training = before
        return end

    def each_batch(
        self, epochs: int, key: PRNGKey, body: Callable[..., PyTree], start: PyTree
    ) -> PyTree:
        """Run a loop over shuffled minibatches: each pass uses every sample once.

        Args:
            epochs: The number of passes.
            key: Key of the order of the samples.
            body: Function of (step, values) that returns the next values. Whatever key it gives to
                `grad` and others, they use the minibatch of the step.
            start: The values at first.

        Returns:
            The values after the last step.
        """
        size, drop_last = self._problem.batch_size, self._problem.drop_last
        passes = Passes(self._samples, size, drop_last)

        def one_pass(epoch: Round, values: PyTree) -> PyTree:
            order = passes.shuffled(jax.random.fold_in(key, epoch))
            done = epoch * passes.count

            def full(step: Round, values: PyTree) -> PyTree:
                self._now.batch = passes.full(order, step)
                return body(done + step, values)

            values = self.repeat(passes.full_count, full, values)
            if not passes.has_partial:
                return values

            def partial(values: PyTree) -> PyTree:
                self._now.batch = passes.partial(order)
                return body(done + passes.full_count, values)

            return self._if(passes.partial_size > 0, partial, values)

        end = self.repeat(epochs, one_pass, start)
        self._now.batch = None
        return end

    def count_steps(self, epochs: int) -> Number | int:
        """Return the number of steps of `each_batch`."""
        size, drop_last = self._problem.batch_size, self._problem.drop_last
        return epochs * Passes(self._samples, size, drop_last).count

    def local_pass(
        self,
        epochs: int | None,
        steps: int,
        key: PRNGKey,
        step_size: Scalar | None,
        follows: Follows | None,
        start: Vector,
        moves_personal: bool = True,
    ) -> Walked | None:
        """Take all local steps in one call, if the objective offers that; else return None."""
        problem = self._problem
        objective = problem.objective.function
        if not isinstance(objective, HasLocalPass):
            return None
        if self.personal is not None:
            if not objective.trains_itself:
                return None
            if not moves_personal:
                raise InvalidInput(
                    "A training loop trains personal parameters with the shared ones: use FedAvg."
                )
        samples = self._samples
        if problem.state is not None:
            samples = dataclasses.replace(samples, state=self.state)
        work = LocalWork(
            start,
            self._params(start),
            samples,
            lambda: self._batches(epochs, steps, key),
            jax.random.fold_in(key, NOISE),
            epochs is None and steps == 1,
            step_size,
            follows,
            problem.layout.ravel,
            problem.layout.names(problem.params),
            self.personal is not None,
        )
        walked = objective.local_pass(work)
        if walked is not None and self._moves is not None:
            personal = self.personal
            self._put((personal if personal is None else personal - walked.own, walked.state))
        return walked

    def _batches(self, epochs: int | None, steps: int, key: PRNGKey) -> Batches:
        """Return the minibatches that single steps would have."""
        size, drop_last = self._problem.batch_size, self._problem.drop_last
        if epochs is not None:
            passes = Passes(self._samples, size, drop_last)
            order = jax.random.fold_in(key, ORDER)
            each = jnp.arange(epochs)
            rows = jax.vmap(lambda e: passes.shuffled(jax.random.fold_in(order, e)))(each)
            if self._samples.order is not None:
                rows = self._samples.order[rows]
            most = epochs * -(-rows.shape[1] // passes.size)
            return Batches(None, epochs, passes.size, drop_last, rows, _noise(key, most))
        rows = None
        if size is not None:
            values = self._samples.values
            numbers = jax.tree.map(lambda leaf: jnp.arange(len(leaf), dtype=jnp.int32), values)
            numbered = Samples(numbers, self._samples.mask, self._samples.order)
            folded = jax.vmap(lambda step: jax.random.fold_in(key, step))(jnp.arange(steps))
            rows = jax.vmap(lambda own: numbered.draw(own, size).values)(folded)
        return Batches(steps, 0, 0, False, rows, _noise(key, steps))

    @property
    def moved_state(self) -> PyTree:
        """The state after local steps, where it is for the server to average; else None."""
        return self._now.state if self._problem.averages_state and self._now.stepped else None

    def restricted(self, count: Number | int, key: PRNGKey) -> Client:
        """Return this client with only some of its samples, drawn without replacement.

        Args:
            count: The number of samples to keep.
            key: Key of the draw.

        Returns:
            A client that uses no other samples.
        """
        other, subset = copy.copy(self), self._samples.subset(key, count)
        if self._problem.batch_size is None and self._problem.objective.has_parts(subset):
            subset, other._has_parts = subset.gathered(), True
        other._samples = subset
        return other

    def limited(self, packet: Packet) -> Packet:
        """Return a packet as it may be sent: scaled to the norm to which replies are clipped.

        A method whose state depends on what it sent must compute the state from this packet.

        Args:
            packet: What is to be sent.

        Returns:
            The packet itself where replies are not clipped.
        """
        return packet if self.clip is None else limit(packet, self.clip)

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
        self._now.memory = memory

    @property
    def _moves(self) -> PyTree:
        """What local steps move besides w: the personal parameters and the state, if any."""
        problem = self._problem
        moves_state = problem.averages_state or problem.keeps_state
        if not problem.layout.personal_size and not moves_state:
            return None
        return self.personal, self.state if moves_state else None

    def _put(self, moving: PyTree) -> None:
        """Set what local steps move."""
        personal, state = moving
        if self._problem.keeps_own:
            self._now.memory = self.memory._replace(
                personal=personal, state=state if self._problem.keeps_state else None
            )
        if self._problem.averages_state:
            self._now.state = state
        self._now.stepped = True

    def _if(self, flag: Flag, function: Callable[[PyTree], PyTree], values: PyTree) -> PyTree:
        """Apply a function that takes a local step, if the flag is set."""
        moving = self._moves

        def then(carry: PyTree) -> PyTree:
            values, moving = carry
            if moving is not None:
                self._put(moving)
            return function(values), self._moves

        if isinstance(flag, bool | np.bool_):
            return function(values) if flag else values
        values, moving = lax.cond(flag, then, lambda carry: carry, (values, moving))
        if moving is not None:
            self._put(moving)
        return values

    def _moved(self, slope: Callable[[], Slope]) -> Vector:
        """Return a gradient, and move what it moves."""
        found, own, state = slope()
        self._now.own_slope = own
        if self._now.training and state is not None:
            self._put((self.personal, state))
        return found

    def _objective_slope(self, w: Vector, key: PRNGKey | None) -> Slope:
        """Return ∇f_j by w and by the personal parameters, and the next state."""
        samples, objective = self._draw_to_train(key), self._problem.objective
        if self._moves is None:
            if self._has_parts:
                return objective.slope_by_parts(self._params, w, samples), None, None
            slope = jax.grad(lambda w: objective(self._params(w), samples))(w)
            return slope, None, None

        def loss(w: Vector, personal: Personal | None) -> tuple[Float[Array, ""], PyTree]:
            return objective.moved(self._problem.params_at(w, personal), samples)

        both = None if self.personal is None else 1
        by = 0 if both is None else (0, 1)
        slopes, state = jax.grad(loss, by, has_aux=True)(w, self.personal)
        slope, own = (slopes, None) if both is None else slopes
        return slope, own, state if self._moves[1] is not None else None

    def _constraint_slope(self, w: Vector, focus: PyTree, key: PRNGKey | None) -> Slope:
        """Return ∇g_j by w and by the personal parameters, and the next state.

        The state moves as it does in a step along ∇f_j: by a pass of f_j over the same samples.
        """
        samples, constraint = self._draw_to_train(key), self._constraint
        scale = self._scale(samples)

        def value(w: Vector, personal: Personal | None) -> Float[Array, ""]:
            params = self._problem.params_at(w, personal)
            return constraint.descended(params, samples, focus, scale)

        if self._moves is None:
            return jax.grad(lambda w: value(w, self.personal))(w), None, None

        if self.personal is None:
            slope, own = jax.grad(value)(w, None), None
        else:
            slope, own = jax.grad(value, (0, 1))(w, self.personal)
        state = None
        if self._moves[1] is not None:
            state = self._problem.objective.moved(self._params(w), samples)[1]
        return slope, own, state

    def _params(self, w: Vector) -> PyTree:
        return self._problem.params_at(w, self.personal)

    @property
    def _constraint(self) -> Constraint:
        """The problem's constraint; raise if it has none."""
        if self._problem.constraint is None:
            raise InvalidInput("This algorithm asks for a constraint, and the problem has none.")
        return self._problem.constraint

    def _scale(self, drawn: Samples) -> Number | int | float | None:
        """Return this client's size over that of a minibatch; None if there is no such number."""
        if self._uses_all_samples or (self._problem.batch_size is None and self._now.batch is None):
            return 1
        return self.samples_count / drawn.size if self._samples.is_one_set else None

    def _draw_samples(self, key: PRNGKey | None) -> Samples:
        """Return all samples, or a minibatch if the problem has a batch size."""
        samples, size = self._samples, self._problem.batch_size
        if self._now.batch is not None and not self._uses_all_samples:
            samples = self._now.batch
        elif size is not None and not self._uses_all_samples:
            samples = samples.draw(self.key if key is None else key, size)
        if self._problem.state is None:
            return samples
        return dataclasses.replace(samples, state=self.state)

    def _draw_to_train(self, key: PRNGKey | None) -> Samples:
        """Return samples as for `_draw_samples`, with the key of a random loss."""
        noise = jax.random.fold_in(self.key if key is None else key, NOISE)
        return dataclasses.replace(self._draw_samples(key), noise=noise)


def _noise(key: PRNGKey, steps: int) -> Key[Array, " steps"]:
    """Return the key of each step's noise."""
    return jax.vmap(lambda step: jax.random.fold_in(jax.random.fold_in(key, step), NOISE))(
        jnp.arange(steps)
    )
