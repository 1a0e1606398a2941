"""Ready problems."""

from fedsolve.problems.cartpole import cartpole
from fedsolve.problems.fairness import adult, fairness_report
from fedsolve.problems.images import discovery_game, images
from fedsolve.problems.neyman_pearson import neyman_pearson
from fedsolve.problems.phase_retrieval import phase_retrieval
from fedsolve.problems.regression import linear_regression, logistic, logistic_regression
from fedsolve.problems.sparse import like_real_sim, read_libsvm, sparse_logistic, sparse_regression

__all__ = [
    "adult",
    "cartpole",
    "discovery_game",
    "fairness_report",
    "images",
    "like_real_sim",
    "linear_regression",
    "logistic",
    "logistic_regression",
    "neyman_pearson",
    "phase_retrieval",
    "read_libsvm",
    "sparse_logistic",
    "sparse_regression",
]
