"""Fedsolve: federated optimization under constraints, compression and partial participation."""

import os as _os

# JAX 0.10's CPU scheduler can stop for ever in a scan with several mapped loops inside. The choice
# must be made before JAX starts its CPU backend; a user who set the flag keeps their own.
_FLAG = "--xla_cpu_enable_concurrency_optimized_scheduler"
if _FLAG not in _os.environ.get("XLA_FLAGS", ""):
    _os.environ["XLA_FLAGS"] = f"{_os.environ.get('XLA_FLAGS', '')} {_FLAG}=false".strip()

from fedsolve import (
    algorithms,
    auditing,
    compression,
    constraints,
    experiments,
    games,
    local_updates,
    models,
    participation,
    privacy,
    problems,
    theory,
)
from fedsolve.algorithms import *  # noqa: F403
from fedsolve.compression import *  # noqa: F403
from fedsolve.data import datasets, partitions
from fedsolve.errors import ClientError, Diverged, Interrupted, InvalidInput, ProcessLost
from fedsolve.experiments.tracking import Follower, Tracked, Tracker
from fedsolve.federation.clock import Clock, LogNormal, Mixture
from fedsolve.federation.federation import Federation
from fedsolve.federation.replies import Replies
from fedsolve.fields import static
from fedsolve.games import Game
from fedsolve.local_updates import *  # noqa: F403
from fedsolve.participation import Strategic, sample
from fedsolve.privacy import *  # noqa: F403
from fedsolve.problem import Client, Problem
from fedsolve.problem.constraints import Constraint, Maximum, Mean, Statistics
from fedsolve.problem.each_client import EachClient
from fedsolve.problem.domains import Ball, Box, Domain, Simplex, WholeSpace
from fedsolve.problem.several import Several
from fedsolve.problem.stacking import stack_clients
from fedsolve.solving.result import BestRound, Run, Sweep
from fedsolve.solving.solve import solve
from fedsolve.solving.stopping import (
    NearFedADMM,
    NearOptimum,
    Reached,
    Spent,
    Stationary,
    StationaryForSize,
)
from fedsolve.solving.sweep import sweep

__version__ = "0.2.0.dev0"

__all__ = [
    "Ball",
    "BestRound",
    "Box",
    "Client",
    "ClientError",
    "Clock",
    "Constraint",
    "Diverged",
    "Domain",
    "EachClient",
    "Federation",
    "Follower",
    "Game",
    "Interrupted",
    "InvalidInput",
    "LogNormal",
    "Maximum",
    "Mean",
    "Mixture",
    "NearFedADMM",
    "NearOptimum",
    "Problem",
    "ProcessLost",
    "Reached",
    "Replies",
    "Run",
    "Several",
    "Simplex",
    "Spent",
    "Stationary",
    "StationaryForSize",
    "Statistics",
    "Strategic",
    "Sweep",
    "Tracked",
    "Tracker",
    "WholeSpace",
    "auditing",
    "constraints",
    "datasets",
    "experiments",
    "games",
    "models",
    "participation",
    "partitions",
    "privacy",
    "problems",
    "sample",
    "solve",
    "stack_clients",
    "static",
    "sweep",
    "theory",
]
__all__ += algorithms.__all__
__all__ += compression.__all__
__all__ += local_updates.__all__
__all__ += privacy.__all__


def __getattr__(name: str):
    if name in ("nnx", "torch"):  # extras, and slow imports: only for those who use them
        import importlib

        return importlib.import_module(f"fedsolve.{name}")
    raise AttributeError(f"module 'fedsolve' has no attribute {name!r}")
