"""Ready problems."""

from fedsolve.problems.neyman_pearson import neyman_pearson
from fedsolve.problems.regression import linear_regression

__all__ = ["linear_regression", "neyman_pearson"]
