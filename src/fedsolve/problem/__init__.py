"""Problems: objective, constraint, domain, and clients' data."""

from fedsolve.problem.client import Client
from fedsolve.problem.problem import Problem

__all__ = ["Client", "Problem"]
