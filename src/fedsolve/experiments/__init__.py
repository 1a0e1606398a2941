"""Experiments: TOML configurations, the registry of names, runs and their folders, trackers."""

from fedsolve.experiments.config import Experiment, names, read, resolve
from fedsolve.experiments.runner import Result, run

__all__ = ["Experiment", "Result", "names", "read", "resolve", "run"]
