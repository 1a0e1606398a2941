"""Ready problems."""

from fedsolve.problems.neyman_pearson import neyman_pearson

__all__ = ["neyman_pearson"]
