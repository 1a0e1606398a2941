"""Ready problems."""

from fedsolve.problems.cartpole import cartpole
from fedsolve.problems.neyman_pearson import neyman_pearson

__all__ = ["cartpole", "neyman_pearson"]
