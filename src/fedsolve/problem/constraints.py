"""Functional constraints g(w) ≤ 0: what a client measures, what the server makes of it, and what a
client descends.

| kind | clients send | g(w) |
|---|---|---|
| `Mean` | g_j(w) | (1/n) Σ g_j(w) |
| `Statistics` | sums over their samples | a function of the sums over all clients |
| `Maximum` | what each of its parts sends | max_k g^(k)(w) |

A plain function given as a problem's constraint is a `Mean`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from fedsolve.errors import InvalidInput
from fedsolve.federation.replies import Replies
from fedsolve.problem.samples import Samples

Weights = Float[Array, " m"] | None
Exact = Callable[..., Callable]  # function, sums=False -> the same, exact on padded samples


class Constraint(eqx.Module):
    """g(w) ≤ 0, split between clients and server."""

    def measure(self, params: PyTree, samples: Samples, scale: Any) -> PyTree:
        """On a client: what it sends about g at `params`.

        `scale` is its size over the number of samples looked at (None: there is no such number).
        """
        raise NotImplementedError

    def combine(self, replies: Replies, weights: Weights = None) -> tuple[Float[Array, ""], PyTree]:
        """On the server: g, and what clients must know to descend it (None: nothing). `weights` are
        what clients count in means; sums over samples have theirs."""
        raise NotImplementedError

    def local(self, params: PyTree, samples: Samples, focus: PyTree) -> Float[Array, ""]:
        """On a client: the function whose gradient it follows to reduce g."""
        raise NotImplementedError

    def adapt(self, exact: Exact) -> Constraint:
        """The same constraint with its functions made exact on padded samples."""
        raise NotImplementedError


class Mean(Constraint):
    """g(w) = (1/n) Σ g_j(w), with `function(params, one client's data)` as g_j."""

    function: Callable = eqx.field(static=True)

    def measure(self, params: PyTree, samples: Samples, scale: Any) -> Float[Array, ""]:
        return self.function(params, samples)

    def combine(self, replies: Replies, weights: Weights = None) -> tuple[Float[Array, ""], None]:
        return replies.mean(weights), None

    def local(self, params: PyTree, samples: Samples, focus: None) -> Float[Array, ""]:
        return self.function(params, samples)

    def adapt(self, exact: Exact) -> Mean:
        return Mean(exact(self.function))


class Statistics(Constraint):
    """g is a function of sums over all clients' samples, such as a gap between two rates.

    `statistics(params, one client's data)` gives sums over that client's samples (any pytree; on
    clients of different sizes it must look at `data["mask"]`), and `combine_sums(sums)` gives g
    from their totals. A client descends `combine_sums` of its own sums, so a client whose own sums
    cannot be combined (it has nobody of one group) must be given a finite value there.
    """

    statistics: Callable = eqx.field(static=True)
    combine_sums: Callable = eqx.field(static=True)

    def measure(self, params: PyTree, samples: Samples, scale: Any) -> PyTree:
        if scale is None:
            raise InvalidInput(
                "A minibatch cannot stand for sums over several sets of samples; "
                "keep all of a client's samples in arrays of one length, or use full batches."
            )
        return jax.tree.map(lambda total: total * scale, self.statistics(params, samples))

    def combine(self, replies: Replies, weights: Weights = None) -> tuple[Float[Array, ""], None]:
        return self.combine_sums(replies.sum()), None

    def local(self, params: PyTree, samples: Samples, focus: None) -> Float[Array, ""]:
        return self.combine_sums(self.statistics(params, samples))

    def adapt(self, exact: Exact) -> Statistics:
        return Statistics(exact(self.statistics, sums=True), self.combine_sums)


class Maximum(Constraint):
    """g(w) = max_k g^(k)(w). Clients descend the part that is largest over all of them."""

    parts: tuple[Constraint, ...]

    def __init__(self, *parts: Constraint | Callable):
        if not parts:
            raise InvalidInput("Maximum needs at least one constraint.")
        self.parts = tuple(as_constraint(part) for part in parts)

    def measure(self, params: PyTree, samples: Samples, scale: Any) -> tuple:
        return tuple(part.measure(params, samples, scale) for part in self.parts)

    def combine(self, replies: Replies, weights: Weights = None) -> tuple[Float[Array, ""], tuple]:
        combined = [part.combine(replies.pick(k), weights) for k, part in enumerate(self.parts)]
        values = jnp.stack([value for value, _ in combined])
        largest = jnp.argmax(values).astype(jnp.uint8)
        return jnp.max(values), (largest, tuple(focus for _, focus in combined))

    def local(self, params: PyTree, samples: Samples, focus: tuple) -> Float[Array, ""]:
        largest, inner = focus
        branches = [
            lambda p, part=part, look=look: part.local(p, samples, look)
            for part, look in zip(self.parts, inner, strict=True)
        ]
        return jax.lax.switch(largest, branches, params)

    def adapt(self, exact: Exact) -> Maximum:
        return Maximum(*(part.adapt(exact) for part in self.parts))


def as_constraint(constraint: Constraint | Callable) -> Constraint:
    """A constraint as the user may give it: a plain function of (params, data) is a mean."""
    return constraint if isinstance(constraint, Constraint) else Mean(constraint)
