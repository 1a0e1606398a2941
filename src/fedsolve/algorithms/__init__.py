"""Federated algorithms, one file each."""

from fedsolve.algorithms.conex import IPPConEx
from fedsolve.algorithms.fedadmm import FedADMM
from fedsolve.algorithms.fedavg import FedAvg
from fedsolve.algorithms.fedsgm import FedSGM
from fedsolve.algorithms.incentfedavg import IncentFedAvg
from fedsolve.algorithms.penalty import PenaltyFedAvg
from fedsolve.algorithms.ppbc import PPBC

__all__ = ["PPBC", "FedADMM", "FedAvg", "FedSGM", "IPPConEx", "IncentFedAvg", "PenaltyFedAvg"]
