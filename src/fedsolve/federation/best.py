"""The best evaluated round of a run, kept while it goes on.

A round is better than another one if, in this order,

1. it is feasible, g(w) ≤ tolerance, and the other one is not;
2. it was evaluated over all clients, and the other one was not;
3. both are feasible and its f is less; or neither is and its g is less.

A constraint that was evaluated over some of the clients only is never feasible.
"""

from __future__ import annotations

from collections.abc import Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from fedsolve.fields import Scalar
from fedsolve.types import Flag, PyTree, Round, Vector

KEPT = ("objective", "constraint", "weighted_objective", "weighted_constraint")


class Best(eqx.Module):
    """The best evaluated round so far; `round` is 0 as long as there is none."""

    w: Vector
    round: Int[Array, ""]  # how many rounds were done
    objective: Float[Array, ""]
    constraint: Float[Array, ""]  # 0 where there is none
    feasible: Bool[Array, ""]
    complete: Bool[Array, ""]  # whether it was evaluated over all clients
    buffers: PyTree = None  # the state of the loss, where the server averages it

    @classmethod
    def none(cls, w: Vector, buffers: PyTree) -> Best:
        """Return what there is before the first evaluation."""
        zero, no = jnp.zeros((), w.dtype), jnp.asarray(False)
        return cls(w, jnp.int32(0), zero, zero, no, no, buffers)

    def improved(
        self,
        w: Vector,
        buffers: PyTree,
        round: Round,
        entry: Mapping[str, PyTree],
        tolerance: Scalar,
        complete: Flag = True,
        counts: Flag = True,
    ) -> Best:
        """Return the better of this round and one that has been evaluated.

        Args:
            w: The parameters after that round.
            buffers: The state of the loss then.
            round: How many rounds were done.
            entry: What the evaluation found. Where clients have weights, the weighted objective and
                constraint count, which are what is solved.
            tolerance: The largest g that is feasible.
            complete: Whether all clients were evaluated.
            counts: Whether this evaluation counts at all.
        """
        kind = self.objective.dtype
        known = not any(
            isinstance(leaf, Tracer)
            for leaf in jax.tree.leaves((self.objective, dict(entry), round, complete, counts))
        )
        xp = np if known else jnp  # where numbers are known, JAX would dispatch them one by one
        f = xp.asarray(entry.get("weighted_objective", entry["objective"]), kind)
        g, feasible = xp.zeros((), kind), xp.asarray(True)
        if "constraint" in entry:
            g = xp.asarray(entry.get("weighted_constraint", entry["constraint"]), kind)
            feasible = xp.asarray(complete) & (g <= tolerance)
        complete = xp.asarray(complete)
        less = xp.where(feasible, f < self.objective, g < self.constraint)
        fuller = xp.where(complete == self.complete, less, complete)
        is_better = (self.round == 0) | xp.where(feasible == self.feasible, fuller, feasible)
        is_better = is_better & xp.isfinite(f) & xp.isfinite(g) & counts
        if known and not bool(is_better):
            return self
        played, f, g = (jnp.asarray(v) for v in (xp.asarray(round, np.int32), f, g))
        other = Best(w, played, f, g, jnp.asarray(feasible), jnp.asarray(complete), buffers)
        if known:
            return other
        return lax.cond(is_better, lambda a, b: a, lambda a, b: b, other, self)


def with_best(
    state: PyTree,
    entry: Mapping[str, PyTree],
    tolerance: Scalar,
    complete: Flag = True,
    counts: Flag = True,
) -> PyTree:
    """Return the state after a round, with the best of it and the rounds before."""
    before, w, buffers = jax.tree.map(jnp.asarray, (state.best, state.w, state.buffers))
    best = before.improved(w, buffers, state.round, entry, tolerance, complete, counts)
    return eqx.tree_at(lambda state: state.best, state, best)
