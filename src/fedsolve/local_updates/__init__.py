"""Local optimizers, step-size schedules, and the loop of local steps."""

from fedsolve.local_updates.optimizers import SGD, Adam, Optimizer
from fedsolve.local_updates.schedules import Cosine, Diminishing

__all__ = ["SGD", "Adam", "Cosine", "Diminishing", "Optimizer"]
