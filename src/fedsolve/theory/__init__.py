"""Assumptions and guarantees of the papers' theorems, certificates of runs, and diagnostics."""

from fedsolve.algorithms.guarantee import Guarantee
from fedsolve.theory import fedadmm
from fedsolve.theory.certificate import Certificate, certificate
from fedsolve.theory.estimates import Estimates, estimate
from fedsolve.theory.fedsgm import fedsgm
from fedsolve.theory.geometry import Skewness, skewness
from fedsolve.theory.incentfedavg import (
    IncentComplexity,
    IncentGuarantee,
    Participation,
    convex_dissimilarity,
    incentfedavg,
    incentfedavg_rounds,
    participation,
)
from fedsolve.theory.reference import Optimum, optimum
from fedsolve.theory.stationarity import Stationarity, stationarity

__all__ = [
    "Certificate",
    "Estimates",
    "Guarantee",
    "IncentComplexity",
    "IncentGuarantee",
    "Optimum",
    "Participation",
    "Skewness",
    "Stationarity",
    "certificate",
    "convex_dissimilarity",
    "estimate",
    "fedadmm",
    "fedsgm",
    "incentfedavg",
    "incentfedavg_rounds",
    "optimum",
    "participation",
    "skewness",
    "stationarity",
]
