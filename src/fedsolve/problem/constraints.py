"""Functional constraints g(w) ≤ 0.

A constraint says what a client measures, how the server combines it, and what a client descends.

| kind | clients send | g(w) |
|---|---|---|
| `Mean` | g_j(w) | (1/n) Σ g_j(w) |
| `Statistics` | sums over their samples | a function of the sums over all clients |
| `Maximum` | what each of its parts sends | max_k g^(k)(w) |

A plain function given as a problem's constraint is a `Mean`.
"""

from __future__ import annotations

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedsolve.errors import InvalidInput
from fedsolve.federation.replies import Replies
from fedsolve.problem.samples import Samples
from fedsolve.types import Function, Number, PyTree

Weights = Float[Array, " m"] | None
Scale = Number | int | None
Exact = Callable[..., Function]  # function, sums=False -> the same, exact on padded samples


class Constraint(eqx.Module):
    """Base class of constraints g(w) ≤ 0, divided between clients and server.

    Subclass it for a constraint that is not a `Mean`, `Statistics` or `Maximum`.
    """

    def measure(self, params: PyTree, samples: Samples, scale: Scale) -> PyTree:
        """Compute, on a client, what it sends about g.

        Args:
            params: Where to evaluate.
            samples: The client's samples, or a minibatch of them.
            scale: The client's size over the number of those samples; None if they are several sets
                of samples, for which there is no such number.

        Returns:
            The client's reply, any structure of arrays.
        """
        raise NotImplementedError

    def combine(self, replies: Replies, weights: Weights = None) -> tuple[Float[Array, ""], PyTree]:
        """Compute, on the server, g from the clients' measurements.

        Args:
            replies: The measurements of the clients that replied.
            weights: The clients' weights in means; equal by default. Sums over samples do not use
                them.

        Returns:
            The value of g, and what clients must know to descend it (the `focus`; None if nothing).
        """
        raise NotImplementedError

    def local(self, params: PyTree, samples: Samples, focus: PyTree) -> Float[Array, ""]:
        """Compute, on a client, the function whose gradient it follows to reduce g.

        Args:
            params: Where to evaluate.
            samples: The client's samples, or a minibatch of them.
            focus: What `combine` returned for the clients.

        Returns:
            The value, a scalar.
        """
        raise NotImplementedError

    def descended(
        self, params: PyTree, samples: Samples, focus: PyTree, scale: Scale
    ) -> Float[Array, ""]:
        """Compute `local` where samples may be a minibatch; override it if sums must be scaled.

        Args:
            params: Where to evaluate.
            samples: The client's samples, or a minibatch of them.
            focus: What `combine` returned for the clients.
            scale: As in `measure`.

        Returns:
            The value, a scalar.
        """
        return self.local(params, samples, focus)

    @property
    def has_deviation(self) -> bool:
        """Whether `deviation` is known."""
        return type(self).deviation is not Constraint.deviation

    def deviation(self, replies: Replies, clients: int) -> Float[Array, ""]:
        """Estimate the standard deviation of g over cohorts, from one cohort.

        Args:
            replies: The measurements of a cohort that was drawn uniformly.
            clients: The number of all clients.

        Returns:
            The estimate; infinite if fewer than two clients answered and there are more.
        """
        raise InvalidInput(f"The sampling error of a {type(self).__name__} is not known.")

    def renamed(self, name: str) -> Constraint:
        """Return the constraint with another name in the history, if it has one there.

        Args:
            name: The name.

        Returns:
            The constraint.
        """
        return self

    def report(self, replies: Replies) -> dict[str, Array]:
        """Compute what the history has of this constraint besides g, such as exact rates.

        Args:
            replies: The measurements of all clients, from all of their samples.

        Returns:
            Numbers by the name of their column; none by default.
        """
        return {}

    def fitted(self, samples: Samples) -> Constraint:
        """Return the constraint for these clients, or raise if it does not fit their data.

        Args:
            samples: All clients' samples.

        Returns:
            The constraint, with what it takes from the data, such as the groups that there are.
        """
        return self

    def check_each(self, samples: Samples) -> None:
        """Raise if g is not known at some client alone.

        Args:
            samples: All clients' samples.
        """

    def adapt(self, exact: Exact) -> Constraint:
        """Return the same constraint with its functions made exact on padded samples.

        Args:
            exact: Function that makes a user's function of (params, data) exact; with `sums=True`
                for one that returns sums over samples.

        Returns:
            The constraint to use; its functions take `Samples` in place of data.
        """
        raise NotImplementedError


class Mean(Constraint):
    """The constraint g(w) = (1/n) Σ g_j(w).

    Args:
        function: g_j, a function of (params, one client's data) that returns a scalar.

    Example:
        >>> import fedsolve as fs
        >>> import numpy as np
        >>> problem = fs.Problem(
        ...     lambda w, data: -w[0],
        ...     {"limit": np.array([1.0, 3.0])},
        ...     params=np.zeros(1),
        ...     constraint=fs.Mean(lambda w, data: w[0] - data["limit"]),
        ... )
        >>> type(problem.constraint).__name__
        'Mean'
    """

    function: Callable = eqx.field(static=True)

    def measure(self, params: PyTree, samples: Samples, scale: Scale) -> Float[Array, ""]:
        """Compute g_j."""
        return self.function(params, samples)

    def combine(self, replies: Replies, weights: Weights = None) -> tuple[Float[Array, ""], None]:
        """Compute the mean of the clients' values."""
        return replies.mean(weights), None

    def deviation(self, replies: Replies, clients: int) -> Float[Array, ""]:
        """Estimate the standard deviation of the cohort's mean."""
        count = jnp.asarray(replies.count)
        distance = jnp.where(replies.arrived, replies.values - replies.mean(), 0)
        variance = jnp.sum(distance**2) / jnp.maximum(count - 1, 1) / jnp.maximum(count, 1)
        return _of_cohort(variance, count, clients)

    def local(self, params: PyTree, samples: Samples, focus: None) -> Float[Array, ""]:
        """Compute g_j."""
        return self.function(params, samples)

    def adapt(self, exact: Exact) -> Mean:
        """Return the constraint with its function made exact on padded samples."""
        return Mean(exact(self.function))


class Statistics(Constraint):
    """A constraint on sums over all clients' samples, such as a gap between two rates.

    A client descends `combine_sums` of its own sums, so `combine_sums` must return a finite value
    also for a client that has, say, no samples of one group.

    Args:
        statistics: Function of (params, one client's data) that returns sums over that client's
            samples, in any structure. On clients of different sizes it must use `data["mask"]`.
        combine_sums: Function that computes g from the totals of those sums.

    Example:
        >>> import fedsolve as fs
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> def sums(w, data):
        ...     return jnp.sum(data["x"] * w), jnp.float32(data["x"].size)
        >>> problem = fs.Problem(
        ...     lambda w, data: -w[0],
        ...     {"x": np.ones((2, 3))},
        ...     params=np.zeros(1),
        ...     constraint=fs.Statistics(sums, lambda totals: totals[0] / totals[1] - 0.5),
        ... )
        >>> type(problem.constraint).__name__
        'Statistics'
    """

    statistics: Callable = eqx.field(static=True)
    combine_sums: Callable = eqx.field(static=True)

    def measure(self, params: PyTree, samples: Samples, scale: Scale) -> PyTree:
        """Compute the client's sums, scaled up from a minibatch to all of its samples."""
        if scale is None:
            raise InvalidInput(
                "A minibatch cannot stand for sums over several sets of samples; "
                "keep all of a client's samples in arrays of one length, or use full batches."
            )
        return jax.tree.map(lambda total: total * scale, self.statistics(params, samples))

    def combine(self, replies: Replies, weights: Weights = None) -> tuple[Float[Array, ""], None]:
        """Compute g from the totals over clients."""
        return self.combine_sums(replies.sum()), None

    def deviation(self, replies: Replies, clients: int) -> Float[Array, ""]:
        """Estimate the standard deviation of g over cohorts by the jackknife."""
        return jackknife(self.combine_sums, replies, clients)

    def local(self, params: PyTree, samples: Samples, focus: None) -> Float[Array, ""]:
        """Compute g from the client's sums alone."""
        return self.combine_sums(self.statistics(params, samples))

    def adapt(self, exact: Exact) -> Statistics:
        """Return the constraint with its sums made exact on padded samples."""
        return Statistics(exact(self.statistics, sums=True), self.combine_sums)


class Maximum(Constraint):
    """The constraint g(w) = max_k g^(k)(w).

    Clients descend the part that is largest over all clients.

    Args:
        *parts: The constraints g^(k), or plain functions of (params, one client's data).

    Raises:
        InvalidInput: If there are no parts.

    Example:
        >>> import fedsolve as fs
        >>> both = fs.Maximum(lambda w, data: w[0] - 1, fs.Mean(lambda w, data: -w[0]))
        >>> [type(part).__name__ for part in both.parts]
        ['Mean', 'Mean']
    """

    parts: tuple[Constraint, ...]

    def __init__(self, *parts: Constraint | Function):
        if not parts:
            raise InvalidInput("Maximum needs at least one constraint.")
        self.parts = tuple(as_constraint(part) for part in parts)

    def measure(self, params: PyTree, samples: Samples, scale: Scale) -> tuple[PyTree, ...]:
        """Compute the measurements of all parts."""
        return tuple(part.measure(params, samples, scale) for part in self.parts)

    def combine(
        self, replies: Replies, weights: Weights = None
    ) -> tuple[Float[Array, ""], tuple[PyTree, ...]]:
        """Compute the largest part, and tell clients which one it is."""
        combined = [part.combine(replies.pick(k), weights) for k, part in enumerate(self.parts)]
        values = jnp.stack([value for value, _ in combined])
        largest = jnp.argmax(values).astype(jnp.uint8)
        return jnp.max(values), (largest, tuple(focus for _, focus in combined))

    def local(
        self, params: PyTree, samples: Samples, focus: tuple[PyTree, ...]
    ) -> Float[Array, ""]:
        """Compute the client's part of the constraint that is largest."""
        return self.descended(params, samples, focus, 1)

    def descended(
        self, params: PyTree, samples: Samples, focus: tuple[PyTree, ...], scale: Scale
    ) -> Float[Array, ""]:
        """Compute the client's part of the constraint that is largest."""
        largest, inner = focus
        branches = [
            lambda part=part, own=own: part.descended(params, samples, own, scale)
            for part, own in zip(self.parts, inner, strict=True)
        ]
        return jax.lax.switch(largest, branches)

    def report(self, replies: Replies) -> dict[str, Array]:
        """Compute what the history has of the parts."""
        found: dict[str, Array] = {}
        for number, part in enumerate(self.parts):
            found |= part.report(replies.pick(number))
        return found

    def fitted(self, samples: Samples) -> Maximum:
        """Return the constraint for these clients."""
        return Maximum(*(part.fitted(samples) for part in self.parts))

    def adapt(self, exact: Exact) -> Maximum:
        """Return the constraint with its parts made exact on padded samples."""
        return Maximum(*(part.adapt(exact) for part in self.parts))


def jackknife(function: Function, replies: Replies, clients: int) -> Float[Array, ""]:
    """Estimate the standard deviation over cohorts of a function of sums over clients.

    Args:
        function: The function.
        replies: The sums of a cohort's clients.
        clients: The number of all clients.
    """
    total, count = replies.sum(), jnp.asarray(replies.count)

    def without(own: PyTree, arrived: Array) -> Float[Array, ""]:
        return function(jax.tree.map(lambda s, x: s - jnp.where(arrived, x, 0), total, own))

    arrived = jnp.asarray(replies.arrived)
    values = jax.vmap(without)(replies.values, arrived)
    mean = jnp.sum(jnp.where(arrived, values, 0)) / jnp.maximum(count, 1)
    squares = jnp.sum(jnp.where(arrived, (values - mean) ** 2, 0))
    return _of_cohort(squares * (count - 1) / jnp.maximum(count, 1), count, clients)


def _of_cohort(variance: Float[Array, ""], count: Array, clients: int) -> Float[Array, ""]:
    """Return a deviation, corrected for draws without replacement; infinite if not known."""
    deviation = jnp.sqrt(jnp.maximum(variance * (1 - count / clients), 0))
    return jnp.where((count < 2) & (count < clients), jnp.inf, deviation)


def as_constraint(constraint: Constraint | Function) -> Constraint:
    """Return a user's constraint as a `Constraint`; a plain function is a `Mean`."""
    return constraint if isinstance(constraint, Constraint) else Mean(constraint)
