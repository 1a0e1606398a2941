"""Participation: weights of clients, selection of a cohort, and availability.

Every `Participating` algorithm takes one of each. A new class is a name in `__all__` here:
algorithms and configuration files can then refer to it by name.
"""

from fedsolve.participation.availability import (
    Availability,
    Bernoulli,
    DayNight,
    FirstAnswers,
    Markov,
    Trace,
)
from fedsolve.participation.covering import Covering
from fedsolve.participation.divfl import DivFL
from fedsolve.participation.oort import Oort
from fedsolve.participation.sampling import sample
from fedsolve.participation.selection import (
    Cyclic,
    Everyone,
    Importance,
    Poisson,
    Proportional,
    Random,
    Selection,
    Top,
)
from fedsolve.participation.strategic import Strategic
from fedsolve.participation.weighting import (
    BANT,
    FOLB,
    DataSize,
    GradientNorm,
    PowerOfChoice,
    Uniform,
    Weighting,
)

__all__ = [
    "BANT",
    "FOLB",
    "Availability",
    "Bernoulli",
    "Covering",
    "Cyclic",
    "DataSize",
    "DayNight",
    "DivFL",
    "Everyone",
    "FirstAnswers",
    "GradientNorm",
    "Importance",
    "Markov",
    "Oort",
    "Poisson",
    "PowerOfChoice",
    "Proportional",
    "Random",
    "Selection",
    "Strategic",
    "Top",
    "Trace",
    "Uniform",
    "Weighting",
    "sample",
]


def __getattr__(name: str) -> object:
    """Find the base classes of algorithms, which were part of this package in version 0.1."""
    if name in ("Drawn", "Participating", "SelectingTwice"):
        from fedsolve import algorithms

        return getattr(algorithms, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
