"""How rounds are run, beside the problem and the algorithm."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping

import equinox as eqx
import jax.numpy as jnp
from jax.sharding import Mesh

from fedsolve.federation.clock import Clock
from fedsolve.federation.milestones import Milestones
from fedsolve.federation.rules import Rule
from fedsolve.fields import Scalar
from fedsolve.types import Cohort, Flag, Flags, Function, PyTree, Round

Arrivals = Callable[[Round, int, Cohort], Flags]  # round, exchange, clients -> which answers arrive
Follow = tuple[tuple[str, Function], ...]  # names, and functions of (problem, params)
Stop = Callable[[Mapping[str, PyTree]], Flag]  # a rule on the newest entry of the history


class RoundOptions(eqx.Module):
    """The options of `solve` that are part of the compiled program. Numbers in them are leaves."""

    arrivals: Arrivals | None = None
    clients_at_once: int | None = None
    stop: Stop | None = None
    follow: Follow = ()
    clock: Clock | None = None
    aggregation: Rule | None = None
    privacy: Rule | None = None
    mesh: Mesh | None = eqx.field(static=True, default=None)
    milestones: Milestones | None = None  # None: evaluate every few rounds

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules that answers go through, in this order."""
        return tuple(rule for rule in (self.aggregation, self.privacy) if rule is not None)

    def clip_of(self, name: str) -> Scalar | None:
        """Return the norm to which replies in that exchange are clipped; None for none."""
        return lowest_clip(self.rules, name)

    @property
    def wants_gradient(self) -> bool:
        """Whether the stopping rule looks at ‖∇f(w)‖²."""
        return bool(getattr(self.stop, "gradient", False))


def lowest_clip(rules: Iterable[Rule], name: str) -> Scalar | None:
    """Return the least of the norms that rules allow in an exchange; None for any norm."""
    clips = [clip for rule in rules if (clip := rule.clip_of(name)) is not None]
    return functools.reduce(jnp.minimum, clips) if clips else None
