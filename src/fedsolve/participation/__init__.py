"""Who takes part: who is wanted (weighting), who is drawn (selection), who answers (availability).

Any `Participating` algorithm takes one of each.
"""

from fedsolve.participation.availability import (
    Availability,
    Bernoulli,
    DayNight,
    FirstAnswers,
    Markov,
    Trace,
)
from fedsolve.participation.participating import Drawn, Participating
from fedsolve.participation.sampling import sample
from fedsolve.participation.selection import Cyclic, Everyone, Proportional, Random, Selection, Top
from fedsolve.participation.strategic import Strategic
from fedsolve.participation.twice import SelectingTwice
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
    "Cyclic",
    "DataSize",
    "DayNight",
    "Drawn",
    "Everyone",
    "FirstAnswers",
    "GradientNorm",
    "Markov",
    "Participating",
    "PowerOfChoice",
    "Proportional",
    "Random",
    "SelectingTwice",
    "Selection",
    "Strategic",
    "Top",
    "Trace",
    "Uniform",
    "Weighting",
    "sample",
]
