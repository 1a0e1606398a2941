"""Games of data participation: payoffs, costs, payments, equilibria and welfare."""

from fedsolve.games.auctions import Auction, Misreports, auction, misreports
from fedsolve.games.game import Game, Monotonicity
from fedsolve.games.learning import (
    AccuracyPayoff,
    FittedCurve,
    LearningCurve,
    LeaveOneOutPayoff,
    ShapleyPayoff,
    fit_learning_curve,
)
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
from fedsolve.games.prices import BestPrices, best_prices
from fedsolve.games.turnout import Turnout
from fedsolve.games.valuation import Valuation, gtg_shapley, leave_one_out, shapley
from fedsolve.games.welfare import (
    Anarchy,
    Stay,
    anarchy,
    externality_prices,
    social_optimum,
    who_stays,
)

__all__ = [
    "AccuracyPayoff",
    "Anarchy",
    "Auction",
    "BestPrices",
    "FittedCurve",
    "Game",
    "LearningCurve",
    "LeaveOneOutPayoff",
    "LinearCost",
    "Misreports",
    "Monotonicity",
    "Part",
    "PricePerSample",
    "PrivacyCost",
    "QuadraticCost",
    "RandomCoverage",
    "RandomDiscovery",
    "ShapleyPayoff",
    "SharedBudget",
    "Stay",
    "Turnout",
    "Valuation",
    "anarchy",
    "auction",
    "best_prices",
    "class_distributions",
    "externality_prices",
    "fit_learning_curve",
    "gtg_shapley",
    "leave_one_out",
    "misreports",
    "shapley",
    "social_optimum",
    "who_stays",
]
