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
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from fedsolve.errors import InvalidInput
from fedsolve.federation.options import Stop
from fedsolve.fields import Scalar, check_count, check_positive, optional, scalar
from fedsolve.problem.problem import Problem
from fedsolve.types import Flag, PyTree

Limit = UInt32[Array, "2"] | UInt32[np.ndarray, "2"] | None  # in units of 2^16, and the rest


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


class NearFedADMM(eqx.Module):
    """Stop when f(w) − f_A ≤ `within`·(1 + |f_A|), where f_A is what FedADMM reaches at (30).

    So FedADMM's paper stops the methods that it compares: FedADMM runs first, until
    `StationaryForSize(accuracy)`, and says how low f must be. It runs with the paper's penalties.

    Args:
        accuracy: ε of (30).
        within: The accuracy relative to 1 + |f_A|.
        share: ρ of the FedADMM that runs first.
        local_iterations: Its k_0.
        rounds: The most averagings that it may take.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.linear_regression(clients=4, size=20)
        >>> type(fs.NearFedADMM(accuracy=1e-3).of(problem)).__name__
        'Reached'
    """

    accuracy: Scalar = eqx.field(converter=scalar("accuracy"))
    within: Scalar = eqx.field(converter=scalar("within"), default=2e-4)
    share: Scalar = eqx.field(converter=scalar("share"), default=0.5)
    local_iterations: int = eqx.field(static=True, default=10)
    rounds: int = eqx.field(static=True, default=1000)

    def __check_init__(self):
        for name in ("accuracy", "within", "share"):
            check_positive(name, getattr(self, name))
        if float(self.share) > 1:
            raise InvalidInput(f"share must be at most 1, got {self.share}.")
        check_count("local_iterations", self.local_iterations)
        check_count("rounds", self.rounds)

    def of(self, problem: Problem) -> Reached:
        """Return the rule for a problem."""
        from fedsolve.algorithms.fedadmm import FedADMM
        from fedsolve.solving.solve import solve

        participants = max(round(float(self.share) * problem.n), 1)
        method = FedADMM(participants=participants, local_iterations=self.local_iterations)
        rule = StationaryForSize(float(self.accuracy)).of(problem)
        run = solve(problem, method, self.rounds, stop=rule)
        if not run.history["squared_gradient"][-1] < rule.below:
            raise InvalidInput(f"FedADMM does not meet (30) within {self.rounds} averagings.")
        reached = float(run.history["objective"][-1])
        return Reached(reached + float(self.within) * (1 + abs(reached)))

    def __call__(self, entry: Mapping[str, PyTree]) -> Flag:
        raise InvalidInput("NearFedADMM is a rule for a problem: use its of(problem).")


class Spent(eqx.Module):
    """Stop when a budget is used up: after the first evaluated round with so much or more.

    So runs of different algorithms can be compared at equal communication. A round is not cut: the
    history's totals say by how much the last one went beyond.

    Args:
        messages: Messages from clients with a vector in them, as PPBC's paper counts
            communications: `vectors_up_total`.
        bytes_up: Bytes from clients: `bytes_up_total`.
        bytes_down: Bytes to clients: `bytes_down_total`.
        seconds: Simulated seconds, for runs with a clock: `seconds_total`.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.linear_regression(clients=4, size=3)
        >>> run = fs.solve(problem, fs.FedAvg(0.1), rounds=50, stop=fs.Spent(messages=20))
        >>> run.rounds, int(run.history["vectors_up_total"][-1])
        (5, 20)
    """

    messages: Limit = eqx.field(converter=lambda v: _limit("messages", v), default=None)
    bytes_up: Limit = eqx.field(converter=lambda v: _limit("bytes_up", v), default=None)
    bytes_down: Limit = eqx.field(converter=lambda v: _limit("bytes_down", v), default=None)
    seconds: Scalar | None = eqx.field(converter=optional(scalar("seconds")), default=None)

    def __check_init__(self):
        if self.seconds is not None:
            check_positive("seconds", self.seconds)
        if all(value is None for value in self._limits.values()) and self.seconds is None:
            raise InvalidInput("Spent needs a budget: messages, bytes_up, bytes_down or seconds.")

    @property
    def _limits(self) -> dict[str, Limit]:
        """The limits by the columns that they are about."""
        return {
            "vectors_up_total": self.messages,
            "bytes_up_total": self.bytes_up,
            "bytes_down_total": self.bytes_down,
        }

    def __call__(self, entry: Mapping[str, PyTree]) -> Flag:
        over: Flag = jnp.asarray(False)
        for name, limit in self._limits.items():
            if limit is not None:
                so_far, (high, low) = entry[name], jnp.asarray(limit)
                more = (so_far.high > high) | ((so_far.high == high) & (so_far.low >= low))
                over = over | more
        if self.seconds is not None:
            if "seconds_total" not in entry:
                raise InvalidInput("Spent(seconds=...) counts simulated time: give a clock.")
            passed = entry["seconds_total"]
            over = over | (passed.total + passed.rest >= self.seconds)
        return over


def _limit(name: str, value: object) -> Limit:
    """Convert a budget to the two parts of a `Count`; as an array, a new one compiles nothing."""
    if value is None or isinstance(value, jax.Array | np.ndarray):
        return value
    check_count(name, value)
    assert isinstance(value, int | np.integer)  # as checked
    count = int(value)
    if count >= 2**48:
        raise InvalidInput(f"{name} must be below 2^48, got {count}.")
    return np.asarray([count >> 16, count & 0xFFFF], np.uint32)


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
