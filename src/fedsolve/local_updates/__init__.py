"""Optimizers, step-size schedules, and the loop of local steps."""

from fedsolve.local_updates.optimizers import SGD, Adagrad, Adam, AdaptiveStep, Optimizer, Yogi
from fedsolve.local_updates.schedules import Cosine, Diminishing

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdaptiveStep",
    "Cosine",
    "Diminishing",
    "Optimizer",
    "Yogi",
]
