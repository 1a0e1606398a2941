"""What the papers' theorems ask for and promise, certificates of runs, and diagnostics."""

from fedsolve.theory import fedadmm
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
    "fedadmm",
    "fedsgm",
    "optimum",
    "skewness",
    "stationarity",
]
