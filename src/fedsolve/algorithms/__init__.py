"""The algorithms, one file each."""

from fedsolve.algorithms.fedavg import FedAvg
from fedsolve.algorithms.fedsgm import FedSGM
from fedsolve.algorithms.incentfedavg import IncentFedAvg

__all__ = ["FedAvg", "FedSGM", "IncentFedAvg"]
