"""Assumptions and guarantees of the papers' theorems, certificates of runs, and diagnostics."""

from fedsolve.algorithms.guarantee import Guarantee, PPBCGuarantee
from fedsolve.theory import fedadmm
from fedsolve.theory.certificate import Certificate, certificate
from fedsolve.theory.estimates import Estimates, estimate
from fedsolve.theory.fedsgm import fedsgm
from fedsolve.theory.geometry import Skewness, skewness
from fedsolve.theory.heterogeneity import Heterogeneity, heterogeneity
from fedsolve.theory.incentfedavg import (
    IncentComplexity,
    IncentGuarantee,
    Participation,
    convex_dissimilarity,
    incentfedavg,
    incentfedavg_rounds,
    participation,
)
from fedsolve.theory.ppbc import ppbc
from fedsolve.theory.ppbc_runs import PPBCCertificate, ppbc_certificate
from fedsolve.theory.reference import Optimum, optimum
from fedsolve.theory.stationarity import Stationarity, stationarity

__all__ = [
    "Certificate",
    "Estimates",
    "Guarantee",
    "Heterogeneity",
    "IncentComplexity",
    "IncentGuarantee",
    "Optimum",
    "PPBCCertificate",
    "PPBCGuarantee",
    "Participation",
    "Skewness",
    "Stationarity",
    "certificate",
    "convex_dissimilarity",
    "estimate",
    "fedadmm",
    "fedsgm",
    "heterogeneity",
    "incentfedavg",
    "incentfedavg_rounds",
    "optimum",
    "participation",
    "ppbc",
    "ppbc_certificate",
    "skewness",
    "stationarity",
]
