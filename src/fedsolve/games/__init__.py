"""Games of data participation: payoffs, costs, payments, equilibria and welfare."""

from fedsolve.games.game import Game, Monotonicity
from fedsolve.games.parts import (
    LinearCost,
    Part,
    PricePerSample,
    PrivacyCost,
    QuadraticCost,
    RandomCoverage,
    RandomDiscovery,
    SharedBudget,
    class_distributions,
)
from fedsolve.games.welfare import (
    Anarchy,
    Stay,
    anarchy,
    externality_prices,
    social_optimum,
    who_stays,
)

__all__ = [
    "Anarchy",
    "Game",
    "LinearCost",
    "Monotonicity",
    "Part",
    "PricePerSample",
    "PrivacyCost",
    "QuadraticCost",
    "RandomCoverage",
    "RandomDiscovery",
    "SharedBudget",
    "Stay",
    "anarchy",
    "class_distributions",
    "externality_prices",
    "social_optimum",
    "who_stays",
]
