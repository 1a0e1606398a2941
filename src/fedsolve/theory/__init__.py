"""Step sizes and bounds from constants, certificates of runs, and diagnostics."""

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
    "incentfedavg",
    "participation",
]
