"""The algorithms, one file each."""

from fedsolve.algorithms.fedavg import FedAvg
from fedsolve.algorithms.fedsgm import FedSGM

__all__ = ["FedAvg", "FedSGM"]
