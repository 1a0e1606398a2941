"""Federated algorithms, one file each.

A new algorithm is a file in this folder and a name here: `fedsolve` exports every name of
`__all__`, and configuration files can name every algorithm among them.
"""

from fedsolve.algorithms.adaptive import Adaptive
from fedsolve.algorithms.balancing import ResidualBalancing
from fedsolve.algorithms.base import Algorithm
from fedsolve.algorithms.conex import IPPConEx
from fedsolve.algorithms.f3ast import F3AST
from fedsolve.algorithms.fedadmm import FedADMM
from fedsolve.algorithms.fedalt import FedAlt
from fedsolve.algorithms.fedamd import FedAMD
from fedsolve.algorithms.fedavg import FedAvg
from fedsolve.algorithms.fedavg_all import FedAvgAll
from fedsolve.algorithms.feddyn import FedDyn
from fedsolve.algorithms.fednova import FedNova
from fedsolve.algorithms.fedprox import FedProx
from fedsolve.algorithms.fedsgm import FedSGM
from fedsolve.algorithms.fedsim import FedSim
from fedsolve.algorithms.fedvarp import FedVARP
from fedsolve.algorithms.incentfedavg import IncentFedAvg
from fedsolve.algorithms.lagrangian import LagrangianFedAvg
from fedsolve.algorithms.mifa import MIFA
from fedsolve.algorithms.moon import MOON
from fedsolve.algorithms.participating import Drawn, Participating
from fedsolve.algorithms.penalty import PenaltyFedAvg
from fedsolve.algorithms.ppbc import PPBC
from fedsolve.algorithms.regularizers import L1, Regularizer
from fedsolve.algorithms.scaffold import SCAFFOLD
from fedsolve.algorithms.switching import Hard, Soft, Switching
from fedsolve.algorithms.two_level import SelectingTwice

__all__ = [
    "F3AST",
    "L1",
    "MIFA",
    "MOON",
    "PPBC",
    "SCAFFOLD",
    "Adaptive",
    "Algorithm",
    "Drawn",
    "FedADMM",
    "FedAMD",
    "FedAlt",
    "FedAvg",
    "FedAvgAll",
    "FedDyn",
    "FedNova",
    "FedProx",
    "FedSGM",
    "FedSim",
    "FedVARP",
    "Hard",
    "IPPConEx",
    "IncentFedAvg",
    "LagrangianFedAvg",
    "Participating",
    "PenaltyFedAvg",
    "Regularizer",
    "ResidualBalancing",
    "SelectingTwice",
    "Soft",
    "Switching",
]
