"""Federated algorithms, one file each."""

from fedsolve.algorithms.conex import IPPConEx
from fedsolve.algorithms.fedsgm import FedSGM
from fedsolve.algorithms.penalty import PenaltyFedAvg

__all__ = ["FedSGM", "IPPConEx", "PenaltyFedAvg"]
