"""Clients' Datasets and DataLoaders, which are handed to the user's functions as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import PyTree

from fedsolve.errors import InvalidInput
from fedsolve.problem.samples import Mask, Samples
from fedsolve.torch.called import Host
from fedsolve.torch.randomness import seeded
from fedsolve.types import Function

DATASET = "dataset"  # the entry of the clients' data with the number of a client's Dataset


class Datasets:
    """Clients' Datasets, which stay on the host: only their numbers go through JAX."""

    def __init__(self, each: Sequence[PyTree]):
        self.each = tuple(each)

    def samples(self) -> Samples:
        """Return the clients' data for JAX: numbers, and masks from which sizes follow."""
        sizes = np.array([_size_of(data) for data in self.each])
        mask = np.arange(sizes.max()) < sizes[:, None]
        return Samples({DATASET: np.arange(len(sizes), dtype=np.int32)}, mask)

    def of(self, data: PyTree, mask: Mask = None, order: Host | None = None) -> PyTree:
        """Return the Dataset that the data stand for; where it is restricted, a part of it."""
        dataset = self.each[int(data[DATASET])]
        if order is None:
            return dataset
        if isinstance(dataset, torch.utils.data.DataLoader):
            raise InvalidInput(
                "The algorithm lets clients use a part of their samples: give Datasets as clients, "
                "not DataLoaders."
            )
        return torch.utils.data.Subset(dataset, np.asarray(order)[mask.astype(bool)].tolist())

    def within(self, function: Function) -> Function:
        """Return a function of (module, numbers) for one of (module, Dataset)."""
        if not callable(function):
            raise InvalidInput(f"A function of (module, data) is needed, got {function!r}.")

        def on(module: torch.nn.Module, data: PyTree) -> PyTree:
            with seeded(0):  # a shuffled loader draws an order in evaluation, too
                return function(module, self.of(data))

        return on


def as_datasets(clients: object) -> Datasets | None:
    """Return the clients as Datasets; None if they are arrays."""
    if isinstance(clients, str | bytes) or not isinstance(clients, Sequence) or not clients:
        return None
    kinds = torch.utils.data.Dataset, torch.utils.data.DataLoader
    if not all(isinstance(data, kinds) for data in clients):
        return None
    for index, data in enumerate(clients):
        if _size_of(data) == 0:
            raise InvalidInput(f"Client {index}'s Dataset is empty or has no length.")
    return Datasets(clients)


def _size_of(data: PyTree) -> int:
    """Return the number of samples of a Dataset or DataLoader; 0 if it has no length."""
    dataset: Any = data.dataset if isinstance(data, torch.utils.data.DataLoader) else data
    return len(dataset) if hasattr(dataset, "__len__") else 0
