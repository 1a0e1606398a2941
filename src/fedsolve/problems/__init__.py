"""Ready problems."""

from fedsolve.problems.fairness import adult, fairness_report
from fedsolve.problems.neyman_pearson import neyman_pearson

__all__ = ["adult", "fairness_report", "neyman_pearson"]
