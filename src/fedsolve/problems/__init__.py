"""Ready problems."""

from fedsolve.problems.cartpole import cartpole
from fedsolve.problems.fairness import adult, fairness_report
from fedsolve.problems.images import discovery_game, images
from fedsolve.problems.neyman_pearson import neyman_pearson
from fedsolve.problems.phase_retrieval import phase_retrieval
from fedsolve.problems.regression import linear_regression

__all__ = [
    "adult",
    "cartpole",
    "discovery_game",
    "fairness_report",
    "images",
    "linear_regression",
    "neyman_pearson",
    "phase_retrieval",
]
