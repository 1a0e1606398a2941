"""Experiments: TOML configurations, the registry of names, runs and their folders, trackers."""

from fedsolve.experiments.config import Experiment, names, read, resolve
from fedsolve.experiments.prediction import predict
from fedsolve.experiments.runner import Result, run

__all__ = ["Experiment", "Result", "names", "predict", "read", "resolve", "run"]
