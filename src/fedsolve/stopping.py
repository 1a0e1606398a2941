"""When a run has done enough: rules for `solve(..., stop=rule)`.

A rule is a function of a history entry, `rule(entry) -> flag`, looked at after every evaluation,
inside the compiled program; `entry` has the objective, the constraint, the metrics and the
algorithm's own notes by name. A rule with `gradient = True` finds ‖∇f(w)‖² over all clients there
as `squared_gradient`, and the history keeps it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx

from fedsolve.errors import InvalidInput
from fedsolve.fields import Scalar, check_positive, scalar

Stop = Callable[[dict[str, Any]], Any]


class Stationary(eqx.Module):
    """Stops when ‖∇f(w)‖² < `below`, with ∇f over all clients and samples."""

    below: Scalar = eqx.field(converter=scalar("below"))
    gradient: ClassVar[bool] = True

    def __check_init__(self):
        check_positive("below", self.below)

    def __call__(self, entry: dict[str, Any]) -> Any:
        return entry["squared_gradient"] < self.below


class Reached(eqx.Module):
    """Stops when f(w) ≤ `objective`."""

    objective: Scalar = eqx.field(converter=scalar("objective"))

    def __call__(self, entry: dict[str, Any]) -> Any:
        return entry["objective"] <= self.objective


def wants_gradient(stop: Stop | None) -> bool:
    """Whether the rule looks at ‖∇f(w)‖²."""
    return bool(getattr(stop, "gradient", False))


def check_stop(stop: Any) -> None:
    """Refuses what is no rule."""
    if stop is not None and (not callable(stop) or isinstance(stop, type)):
        raise InvalidInput(
            f"stop must be a rule such as Stationary(below=1e-6), or a function of a history "
            f"entry, got {stop!r}."
        )
