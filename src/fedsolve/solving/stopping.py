"""Stopping rules for `solve(..., stop=rule)`.

A rule is a function of a history entry, `rule(entry) -> flag`. It is called after every evaluation,
inside the compiled program; `entry` has the objective, the constraint, the metrics and the
algorithm's own columns by name. If a rule has `gradient = True`, the entry has ‖∇f(w)‖² over all
clients as `squared_gradient`, and so does the history.

A rule that depends on the problem has a method `of(problem)`, which returns the rule to apply. So
one line of a configuration serves problems of all sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import equinox as eqx

from fedsolve.errors import InvalidInput
from fedsolve.federation.options import Stop
from fedsolve.fields import Scalar, check_positive, optional, scalar
from fedsolve.problem.problem import Problem
from fedsolve.types import Flag, PyTree


class Stationary(eqx.Module):
    """Stop when ‖∇f(w)‖² < `below`, with ∇f over all clients and samples.

    Args:
        below: The bound.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.linear_regression(clients=4, size=3)
        >>> run = fs.solve(problem, fs.FedAvg(0.1), 200, stop=fs.Stationary(below=1e-2))
        >>> bool(run.history["squared_gradient"][-1] < 1e-2)
        True
    """

    below: Scalar = eqx.field(converter=scalar("below"))
    gradient: ClassVar[bool] = True

    def __check_init__(self):
        check_positive("below", self.below)

    def __call__(self, entry: Mapping[str, PyTree]) -> Flag:
        return entry["squared_gradient"] < self.below


class Reached(eqx.Module):
    """Stop when f(w) ≤ `objective`.

    Args:
        objective: The bound.

    Example:
        >>> import fedsolve as fs
        >>> bool(fs.Reached(0.5)({"objective": 0.4}))
        True
    """

    objective: Scalar = eqx.field(converter=scalar("objective"))

    def __call__(self, entry: Mapping[str, PyTree]) -> Flag:
        return entry["objective"] <= self.objective


class NearOptimum(eqx.Module):
    """Stop when f(w) − f* ≤ `within`·(1 + |f*|), for a convex problem without constraint.

    f* is the problem's `optimum` where it has one; else it is found by a quasi-Newton method before
    the run.

    Args:
        within: The accuracy. 2e-4 is what FedADMM's paper allows the methods that it compares.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.linear_regression(clients=4, size=3)
        >>> type(fs.NearOptimum().of(problem)).__name__
        'Reached'
    """

    within: Scalar = eqx.field(converter=scalar("within"), default=2e-4)

    def __check_init__(self):
        check_positive("within", self.within)

    def of(self, problem: Problem) -> Reached:
        """Return the rule for a problem."""
        from fedsolve.theory.reference import least

        best = least(problem) if problem.optimum is None else problem.optimum
        return Reached(best + float(self.within) * (1 + abs(best)))

    def __call__(self, entry: Mapping[str, PyTree]) -> Flag:
        raise InvalidInput("NearOptimum is a rule for a problem: NearOptimum(...).of(problem).")


class StationaryForSize(eqx.Module):
    """Stop when ‖∇f(w)‖² < min(‖∇f(w_0)‖²/5, 5εn/(md)), (30) of FedADMM's paper.

    There are n parameters, m clients and d samples.

    Args:
        accuracy: ε; None for that of Example 5.1, see `fedsolve.theory.fedadmm.tolerance`.
        test: `"paper"`; or `"code"` for the test of the authors' program.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.linear_regression(clients=4, size=3)
        >>> type(fs.StationaryForSize().of(problem)).__name__
        'Stationary'
    """

    accuracy: Scalar | None = eqx.field(converter=optional(scalar("accuracy")), default=None)
    test: str = eqx.field(static=True, default="paper")

    def __check_init__(self):
        if self.accuracy is not None:
            check_positive("accuracy", self.accuracy)

    def of(self, problem: Problem) -> Stationary:
        """Return the rule for a problem."""
        from fedsolve.theory.fedadmm import tolerance

        accuracy = None if self.accuracy is None else float(self.accuracy)
        return Stationary(tolerance(problem, accuracy, self.test))

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
