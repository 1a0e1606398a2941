"""Ready-made problems, as functions that return a `Problem`."""

from __future__ import annotations

from collections.abc import Callable

from fedsolve.problem import Problem
from fedsolve.problems.cartpole import cartpole
from fedsolve.problems.fairness import adult, fairness_report
from fedsolve.problems.frozen import frozen_features
from fedsolve.problems.images import discovery_game, images
from fedsolve.problems.neyman_pearson import neyman_pearson
from fedsolve.problems.phase_retrieval import phase_retrieval
from fedsolve.problems.regression import linear_regression, logistic, logistic_regression
from fedsolve.problems.sparse import (
    like_real_sim,
    newsgroups,
    read_libsvm,
    sparse_logistic,
    sparse_regression,
)
from fedsolve.problems.survival import tcga_brca
from fedsolve.problems.table_sums import tabular_sums
from fedsolve.problems.tables import tabular

# The problems that a configuration file may name, in the order in which they are listed to users.
BY_NAME: dict[str, Callable[..., Problem]] = {
    "adult": adult,
    "cartpole": cartpole,
    "frozen_features": frozen_features,
    "images": images,
    "linear_regression": linear_regression,
    "logistic": logistic,
    "newsgroups": newsgroups,
    "sparse_logistic": sparse_logistic,
    "neyman_pearson": neyman_pearson,
    "phase_retrieval": phase_retrieval,
    "tcga_brca": tcga_brca,
    "tabular": tabular,
    "tabular_sums": tabular_sums,
}

__all__ = [
    "BY_NAME",
    "adult",
    "cartpole",
    "discovery_game",
    "fairness_report",
    "frozen_features",
    "images",
    "like_real_sim",
    "linear_regression",
    "logistic",
    "logistic_regression",
    "newsgroups",
    "neyman_pearson",
    "phase_retrieval",
    "read_libsvm",
    "sparse_logistic",
    "sparse_regression",
    "tabular",
    "tabular_sums",
    "tcga_brca",
]
