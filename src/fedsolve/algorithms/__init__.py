"""The algorithms, one file each."""

from fedsolve.algorithms.fedadmm import FedADMM
from fedsolve.algorithms.fedavg import FedAvg
from fedsolve.algorithms.fedsgm import FedSGM

__all__ = ["FedADMM", "FedAvg", "FedSGM"]
