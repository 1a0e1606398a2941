"""Step sizes and bounds from constants, certificates of runs, and diagnostics."""

from fedsolve.theory.certificate import Certificate, certificate
from fedsolve.theory.estimates import Estimates, estimate
from fedsolve.theory.fedsgm import fedsgm
from fedsolve.theory.geometry import Skewness, skewness
from fedsolve.theory.guarantee import Guarantee
from fedsolve.theory.reference import Optimum, optimum
from fedsolve.theory.stationarity import Stationarity, stationarity

__all__ = [
    "Certificate",
    "Estimates",
    "Guarantee",
    "Optimum",
    "Skewness",
    "Stationarity",
    "certificate",
    "estimate",
    "fedsgm",
    "optimum",
    "skewness",
    "stationarity",
]
