"""Ready problems."""

from fedsolve.problems.neyman_pearson import neyman_pearson
from fedsolve.problems.phase_retrieval import phase_retrieval
from fedsolve.problems.regression import linear_regression

__all__ = ["linear_regression", "neyman_pearson", "phase_retrieval"]
