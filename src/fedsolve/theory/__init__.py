"""What the papers' theorems ask for and promise."""

from fedsolve.theory import fedadmm
from fedsolve.theory.incentfedavg import (
    IncentGuarantee,
    Participation,
    convex_dissimilarity,
    incentfedavg,
    participation,
)

__all__ = [
    "IncentGuarantee",
    "Participation",
    "convex_dissimilarity",
    "fedadmm",
    "incentfedavg",
    "participation",
]
