"""Ready problems."""

from fedsolve.problems.neyman_pearson import neyman_pearson
from fedsolve.problems.phase_retrieval import phase_retrieval

__all__ = ["neyman_pearson", "phase_retrieval"]
