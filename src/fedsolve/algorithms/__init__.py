"""The algorithms, one file each."""

from fedsolve.algorithms.fedavg import FedAvg
from fedsolve.algorithms.fedsgm import FedSGM
from fedsolve.algorithms.ppbc import PPBC

__all__ = ["PPBC", "FedAvg", "FedSGM"]
