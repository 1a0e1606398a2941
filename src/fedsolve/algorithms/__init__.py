"""The algorithms, one file each."""

from fedsolve.algorithms.fedsgm import FedSGM

__all__ = ["FedSGM"]
