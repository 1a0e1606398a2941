"""Several constraints at once, each with a name and a tolerance of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from fedsolve.errors import InvalidInput
from fedsolve.federation.replies import Replies
from fedsolve.problem.constraints import Constraint, Exact, Scale, Weights, as_constraint
from fedsolve.problem.samples import Samples
from fedsolve.types import PyTree

Parts = Mapping[str, Any] | Sequence[Any]


class Several(Constraint):
    """The constraints g_i(w) ≤ ε_i for i = 1 … k, with names.

    As one constraint it is g(w) = max_i (g_i(w) − ε_i), which is the history's `constraint`; the
    algorithm's own tolerance comes on top. The history has each g_i as `constraint.NAME`. Which of
    them clients reduce in a round is the algorithm's choice: see `among` in `FedSGM`; other
    algorithms take the largest.

    `Problem(constraint=[g1, g2])` and `Problem(constraint={"name": g1, ...})` mean the same without
    tolerances.

    Args:
        constraints: The g_i, functions or constraints, by name or in a list. In a list, constraints
            by name and functions keep their names, and others are `g1`, `g2`, ...
        tolerances: The ε_i, in the same form, or one for all.

    Raises:
        InvalidInput: If there are no constraints, two have one name, or the tolerances do not fit.

    Example:
        >>> import fedsolve as fs
        >>> import numpy as np
        >>> both = fs.Several(
        ...     {"low": lambda w, data: -w[0], "high": lambda w, data: w[0] - 1},
        ...     tolerances=[0.0, 0.1],
        ... )
        >>> problem = fs.Problem(
        ...     lambda w, data: -w[0], {"x": np.ones((2, 1))}, np.zeros(1), constraint=both
        ... )
        >>> run = fs.solve(problem, fs.FedSGM(0.5), rounds=3)
        >>> run.history["constraint.high"].tolist()
        [-0.5, 0.0, 0.5]
    """

    parts: tuple[Constraint, ...]
    names: tuple[str, ...] = eqx.field(static=True)
    tolerances: tuple[float, ...] = eqx.field(static=True)

    def __init__(self, constraints: Parts, tolerances: object = 0.0):
        named = isinstance(constraints, Mapping)
        given = list(constraints.values()) if isinstance(constraints, Mapping) else [*constraints]
        if not given:
            raise InvalidInput("Several needs at least one constraint.")
        names = [str(n) for n in constraints] if named else _names(given)
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidInput(f"Two constraints have the name {twice!r}; give a dict of names.")
        made = [as_constraint(each) for each in given]
        if any(isinstance(each, Several) for each in made):
            raise InvalidInput("Several takes single constraints, not another Several.")
        self.parts = tuple(each.renamed(name) for each, name in zip(made, names, strict=True))
        self.names = tuple(names)
        self.tolerances = _tolerances(tolerances, self.names)

    def excesses(
        self, replies: Replies, weights: Weights = None
    ) -> tuple[Float[Array, " k"], tuple[PyTree, ...]]:
        """Compute, on the server, every g_i − ε_i.

        Args:
            replies: The measurements of the clients that replied.
            weights: The clients' weights in means; equal by default.

        Returns:
            The values, and what clients must know of each constraint.
        """
        found = [part.combine(replies.pick(i), weights) for i, part in enumerate(self.parts)]
        values = jnp.stack([value for value, _ in found])
        return values - jnp.asarray(self.tolerances, values.dtype), tuple(f for _, f in found)

    def focus(self, shares: Float[Array, " k"], focuses: tuple[PyTree, ...]) -> PyTree:
        """Return what clients must know to descend Σ share_i · g_i; see `excesses`."""
        return shares, focuses

    def measure(self, params: PyTree, samples: Samples, scale: Scale) -> tuple[PyTree, ...]:
        """Compute the measurements of all constraints."""
        return tuple(part.measure(params, samples, scale) for part in self.parts)

    def combine(self, replies: Replies, weights: Weights = None) -> tuple[Float[Array, ""], PyTree]:
        """Compute the largest g_i − ε_i, which clients are to descend."""
        values, focuses = self.excesses(replies, weights)
        largest = jax.nn.one_hot(jnp.argmax(values), len(self.parts), dtype=values.dtype)
        return jnp.max(values), self.focus(largest, focuses)

    def deviations(self, replies: Replies, clients: int) -> Float[Array, " k"]:
        """Estimate the standard deviation of every g_i over cohorts."""
        parts = enumerate(self.parts)
        return jnp.stack([part.deviation(replies.pick(i), clients) for i, part in parts])

    @property
    def has_deviation(self) -> bool:
        """Whether the deviations over cohorts can be estimated."""
        return all(part.has_deviation for part in self.parts)

    def local(self, params: PyTree, samples: Samples, focus: PyTree) -> Float[Array, ""]:
        """Compute Σ share_i · g_i of the client."""
        return self.descended(params, samples, focus, 1)

    def descended(
        self, params: PyTree, samples: Samples, focus: PyTree, scale: Scale
    ) -> Float[Array, ""]:
        """Compute Σ share_i · g_i of the client; those of share 0 are not computed."""
        shares, focuses = focus
        kind = shares.dtype
        total = jnp.zeros((), kind)
        for number, (part, own) in enumerate(zip(self.parts, focuses, strict=True)):
            # `params` may hold functions, so they are no argument of the branches
            def value(part: Constraint = part, own: PyTree = own) -> Float[Array, ""]:
                return part.descended(params, samples, own, scale).astype(kind)

            def nothing() -> Float[Array, ""]:
                return jnp.zeros((), kind)

            share = shares[number]
            total = total + share * lax.cond(share != 0, value, nothing)
        return total

    def report(self, replies: Replies) -> dict[str, Array]:
        """Compute every g_i, and what the history has of it."""
        found: dict[str, Array] = {}
        for number, (name, part) in enumerate(zip(self.names, self.parts, strict=True)):
            own = replies.pick(number)
            found[f"constraint.{name}"] = part.combine(own)[0]
            found |= part.report(own)
        return found

    def fitted(self, samples: Samples) -> Several:
        """Return the constraints for these clients."""
        fitted = [part.fitted(samples) for part in self.parts]
        return Several(dict(zip(self.names, fitted, strict=True)), self.tolerances)

    def adapt(self, exact: Exact) -> Several:
        """Return the constraints with their functions made exact on padded samples."""
        adapted = [part.adapt(exact) for part in self.parts]
        return Several(dict(zip(self.names, adapted, strict=True)), self.tolerances)


def _names(given: Sequence[Any]) -> list[str]:
    """Return the names of constraints in a list."""
    own = [getattr(each, "name", None) or getattr(each, "__name__", "") for each in given]
    return [
        name if name and name != "<lambda>" else f"g{number}"
        for number, name in enumerate(own, start=1)
    ]


def _tolerances(given: object, names: tuple[str, ...]) -> tuple[float, ...]:
    """Return one tolerance for each constraint."""
    values: list[Any]
    if isinstance(given, Mapping):
        for name in given:
            if name not in names:
                known = ", ".join(names)
                raise InvalidInput(f"tolerances name {name!r}; the constraints are {known}.")
        values = [given.get(name, 0.0) for name in names]
    elif isinstance(given, Sequence | np.ndarray) and not isinstance(given, str):
        values = list(given)
        if len(values) != len(names):
            raise InvalidInput(
                f"There are {len(names)} constraints and {len(values)} tolerances; give one each."
            )
    else:
        values = [given] * len(names)
    for name, value in zip(names, values, strict=True):
        is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        if not is_number or not np.isfinite(value):
            raise InvalidInput(f"The tolerance of {name} must be a finite number, got {value!r}.")
    return tuple(float(value) for value in values)


def constraint_of(given: Any) -> Constraint:
    """Return what a user gave as a problem's constraint: one, or several in a list or a dict."""
    if isinstance(given, Mapping | list | tuple):
        return Several(given)
    return as_constraint(given)
