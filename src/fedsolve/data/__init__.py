"""Data sets by name, and partitions of samples among clients."""

from fedsolve.data import datasets, partitions

__all__ = ["datasets", "partitions"]
