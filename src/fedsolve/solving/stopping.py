"""When a run has done enough: rules for `solve(..., stop=rule)`.

A rule is a function of a history entry, `rule(entry) -> flag`, looked at after every evaluation,
inside the compiled program; `entry` has the objective, the constraint, the metrics and the
algorithm's own notes by name. A rule with `gradient = True` finds ‖∇f(w)‖² over all clients there
as `squared_gradient`, and the history keeps it.

A rule that must know the problem has `of(problem)`, which gives the rule to apply: so one line of a
configuration serves problems of all sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import equinox as eqx
from jaxtyping import PyTree

from fedsolve.errors import InvalidInput
from fedsolve.federation.options import Stop
from fedsolve.fields import Scalar, check_positive, scalar
from fedsolve.problem.problem import Problem
from fedsolve.types import Flag


class Stationary(eqx.Module):
    """Stops when ‖∇f(w)‖² < `below`, with ∇f over all clients and samples."""

    below: Scalar = eqx.field(converter=scalar("below"))
    gradient: ClassVar[bool] = True

    def __check_init__(self):
        check_positive("below", self.below)

    def __call__(self, entry: Mapping[str, PyTree]) -> Flag:
        return entry["squared_gradient"] < self.below


class Reached(eqx.Module):
    """Stops when f(w) ≤ `objective`."""

    objective: Scalar = eqx.field(converter=scalar("objective"))

    def __call__(self, entry: Mapping[str, PyTree]) -> Flag:
        return entry["objective"] <= self.objective


class NearOptimum(eqx.Module):
    """Stops when f(w) − f* ≤ `within`·(1 + |f*|); of a convex problem without constraint.

    f* is the problem's `optimum` where it has one, else it is found by a quasi-Newton method before
    the run. 2e-4 is what FedADMM's paper allows the methods that it compares.
    """

    within: Scalar = eqx.field(converter=scalar("within"), default=2e-4)

    def __check_init__(self):
        check_positive("within", self.within)

    def of(self, problem: Problem) -> Reached:
        from fedsolve.theory.reference import least

        best = least(problem) if problem.optimum is None else problem.optimum
        return Reached(best + float(self.within) * (1 + abs(best)))

    def __call__(self, entry: Mapping[str, PyTree]) -> Flag:
        raise InvalidInput("NearOptimum is a rule for a problem: NearOptimum(...).of(problem).")


class StationaryForSize(eqx.Module):
    """Stops when ‖∇f(w)‖² < min(‖∇f(w_0)‖²/5, 5εn/(md)) for n parameters, m clients and d samples:
    (30) of FedADMM's paper. ε is `accuracy`; `test="code"` compares ‖∇f(w)‖²/m² instead."""

    accuracy: Scalar = eqx.field(converter=scalar("accuracy"), default=1e-3)
    test: str = eqx.field(static=True, default="paper")

    def __check_init__(self):
        check_positive("accuracy", self.accuracy)

    def of(self, problem: Problem) -> Stationary:
        from fedsolve.theory.fedadmm import tolerance

        return Stationary(tolerance(problem, float(self.accuracy), self.test))

    def __call__(self, entry: Mapping[str, PyTree]) -> Flag:
        raise InvalidInput("StationaryForSize is a rule for a problem: use its of(problem).")


def for_problem(stop: Stop | None, problem: Problem) -> Stop | None:
    """Return the rule to apply to a problem."""
    adapt = getattr(stop, "of", None)
    return stop if adapt is None else adapt(problem)


def check_stop(stop: object) -> None:
    """Raise if this is no rule."""
    if stop is not None and (not callable(stop) or isinstance(stop, type)):
        raise InvalidInput(
            f"stop must be a rule such as Stationary(below=1e-6), or a function of a history "
            f"entry, got {stop!r}."
        )
