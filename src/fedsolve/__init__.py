"""Fedsolve: federated optimization under constraints, compression and partial participation."""

import os as _os

# JAX 0.10's CPU scheduler can stop for ever in a scan with several mapped loops inside. The choice
# must be made before JAX starts its CPU backend; a user who set the flag keeps their own.
_FLAG = "--xla_cpu_enable_concurrency_optimized_scheduler"
if _FLAG not in _os.environ.get("XLA_FLAGS", ""):
    _os.environ["XLA_FLAGS"] = f"{_os.environ.get('XLA_FLAGS', '')} {_FLAG}=false".strip()

from fedsolve import games, models, participation, problems, theory
from fedsolve.algorithms import (
    F3AST,
    MOON,
    PPBC,
    SCAFFOLD,
    Algorithm,
    FedADMM,
    FedAlt,
    FedAvg,
    FedAvgAll,
    FedDyn,
    FedProx,
    FedSGM,
    FedSim,
    IncentFedAvg,
    IPPConEx,
    Participating,
    PenaltyFedAvg,
)
from fedsolve.algorithms.switching import Hard, Soft, Switching
from fedsolve.compression.compressors import (
    QSGD,
    Compose,
    Compressor,
    Float4,
    Float8,
    Float16,
    Identity,
    RandK,
    TopK,
)
from fedsolve.compression.packets import Packet
from fedsolve.data import datasets, partitions
from fedsolve.errors import ClientError, Diverged, Interrupted, InvalidInput, ProcessLost
from fedsolve.experiments.tracking import Follower, Tracked, Tracker
from fedsolve.federation.clock import Clock, LogNormal, Mixture
from fedsolve.federation.federation import Federation
from fedsolve.federation.replies import Replies
from fedsolve.fields import static
from fedsolve.games import Game
from fedsolve.local_updates.optimizers import SGD, Adam, Optimizer
from fedsolve.local_updates.schedules import Cosine, Diminishing
from fedsolve.participation import Strategic, sample
from fedsolve.problem import Client, Problem
from fedsolve.problem.constraints import Constraint, Maximum, Mean, Statistics
from fedsolve.problem.domains import Ball, Box, Domain, Simplex, WholeSpace
from fedsolve.problem.stacking import stack_clients
from fedsolve.solving.result import Run, Sweep
from fedsolve.solving.solve import solve
from fedsolve.solving.stopping import NearOptimum, Reached, Stationary, StationaryForSize
from fedsolve.solving.sweep import sweep

__version__ = "0.1.0"

__all__ = [
    "F3AST",
    "MOON",
    "PPBC",
    "QSGD",
    "SCAFFOLD",
    "SGD",
    "Adam",
    "Algorithm",
    "Ball",
    "Box",
    "Client",
    "ClientError",
    "Clock",
    "Compose",
    "Compressor",
    "Constraint",
    "Cosine",
    "Diminishing",
    "Diverged",
    "Domain",
    "FedADMM",
    "FedAlt",
    "FedAvg",
    "FedAvgAll",
    "FedDyn",
    "FedProx",
    "FedSGM",
    "FedSim",
    "Federation",
    "Float4",
    "Float8",
    "Float16",
    "Follower",
    "Game",
    "Hard",
    "IPPConEx",
    "Identity",
    "IncentFedAvg",
    "Interrupted",
    "InvalidInput",
    "LogNormal",
    "Maximum",
    "Mean",
    "Mixture",
    "NearOptimum",
    "Optimizer",
    "Packet",
    "Participating",
    "PenaltyFedAvg",
    "Problem",
    "ProcessLost",
    "RandK",
    "Reached",
    "Replies",
    "Run",
    "Simplex",
    "Soft",
    "Stationary",
    "StationaryForSize",
    "Statistics",
    "Strategic",
    "Sweep",
    "Switching",
    "TopK",
    "Tracked",
    "Tracker",
    "WholeSpace",
    "datasets",
    "games",
    "models",
    "participation",
    "partitions",
    "problems",
    "sample",
    "solve",
    "stack_clients",
    "static",
    "sweep",
    "theory",
]


def __getattr__(name: str):
    if name == "torch":  # an extra, and a slow import: only for those who use it
        import importlib

        return importlib.import_module("fedsolve.torch")
    raise AttributeError(f"module 'fedsolve' has no attribute {name!r}")
