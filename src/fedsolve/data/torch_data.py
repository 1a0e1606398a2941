"""PyTorch's datasets and loaders as arrays, read once, without an import of PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped

from fedsolve.errors import InvalidInput
from fedsolve.types import PyTree

READ_TWICE = 3  # samples read twice, to see whether a dataset draws them anew each time


def is_loader(data: object) -> bool:
    """Return whether this is a PyTorch DataLoader."""
    torch = _torch()
    return torch is not None and isinstance(data, torch.utils.data.DataLoader)


def is_dataset(data: object) -> bool:
    """Return whether this is a PyTorch dataset, or anything else with items and a length."""
    torch = _torch()
    if torch is not None and isinstance(data, torch.utils.data.Dataset):
        return True
    if isinstance(data, str | bytes | range | Mapping | Sequence) or hasattr(data, "__array__"):
        return False
    has_items = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    return has_items and jax.tree_util.all_leaves([data])


def as_array(where: str, leaf: Any) -> Shaped[np.ndarray, "..."]:
    """Return an array, a tensor or a number as a NumPy array; raise if its type is no number's."""
    torch = sys.modules.get("torch")
    try:
        if torch is not None and isinstance(leaf, torch.Tensor):
            leaf = leaf.detach().cpu().numpy()
        array = np.asarray(leaf)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise InvalidInput(f"{where} cannot be read as an array of numbers: {reason}.") from error
    if not (array.dtype == bool or jnp.issubdtype(array.dtype, jnp.number)):
        raise InvalidInput(f"{where} is of type {array.dtype}; data are numbers: encode it.")
    return array


def read_loader(name: str, loader: Any) -> PyTree:
    """Return all samples that a DataLoader can give, in its dataset's order.

    Its batches do not matter: a `collate_fn` is applied to each sample alone.
    """
    torch = _torch()
    assert torch is not None
    data, batches, sampler = torch.utils.data, loader.batch_sampler, loader.sampler
    if batches is not None and type(batches) is data.BatchSampler:
        sampler = batches.sampler
    elif batches is not None:
        sampler = batches
    if isinstance(loader.dataset, data.IterableDataset):
        order = None
    elif type(sampler) is data.SubsetRandomSampler:
        order = [int(index) for index in sampler.indices]
    elif type(sampler) in (data.SequentialSampler, data.RandomSampler):
        order = None
    else:
        raise InvalidInput(
            f"The DataLoader of {name} has a {type(sampler).__name__}, which chooses among the "
            "samples; give the dataset, or a torch.utils.data.Subset of it."
        )
    collate = loader.collate_fn
    if collate in (data.default_collate, data.default_convert):
        return read_dataset(name, loader.dataset, order)

    def alone(sample: object) -> PyTree:
        if batches is None:
            return collate(sample)
        batch = collate([sample])
        if any(np.shape(leaf)[:1] != (1,) for leaf in jax.tree.leaves(batch)):
            raise InvalidInput(
                f"The collate_fn of {name}'s DataLoader makes no batch of one sample from one "
                "sample; do its work in the dataset."
            )
        return jax.tree.map(lambda leaf: leaf[0], batch)

    return read_dataset(name, loader.dataset, order, alone)


def read_dataset(
    name: str,
    dataset: Any,
    order: Sequence[int] | None = None,
    change: Callable[[object], PyTree] | None = None,
) -> PyTree:
    """Return the samples of a dataset, stacked on the first axis of each array.

    Args:
        name: The client, for messages.
        dataset: The dataset.
        order: The indices of the samples to read; all if None.
        change: What is done to each sample first.
    """
    if change is None and (found := _tensors(name, dataset)) is not None:
        rows = slice(None) if order is None else np.asarray(order, int)
        found = tuple(array[rows] for array in found)
        if not len(found[0]):
            raise InvalidInput(f"The dataset of {name} is empty.")
        return found
    read = _reader(name, dataset)
    if read is None:
        samples, count = iter(dataset), None
    else:
        order = range(_length(name, dataset)) if order is None else order
        samples, count = map(read, order), len(order)
        _check_repeats(name, read, order[:READ_TWICE])
    return _stacked(name, map(change, samples) if change else samples, count)


def _stacked(name: str, samples: Iterator[object], count: int | None) -> PyTree:
    """Stack samples; `count` is their number if it is known."""
    structure: Any = None
    places: list[str] = []
    columns: list[Any] = []
    position = -1
    for position, sample in enumerate(samples):
        paths, own = jax.tree.flatten_with_path(sample)
        if position == 0:
            structure, places = own, [jax.tree_util.keystr(path) for path, _ in paths]
        elif own != structure:
            raise InvalidInput(
                f"Sample {position} of {name} has the structure {_shown(own)}, its first one "
                f"{_shown(structure)}; all samples must have the same."
            )
        leaves = [
            _leaf(f"Sample {position}{place} of {name}", leaf)
            for place, (_, leaf) in zip(places, paths, strict=True)
        ]
        if position == 0:
            columns = [_Column(leaf, count) for leaf in leaves]
        for place, column, leaf in zip(places, columns, leaves, strict=True):
            column.append(f"{position}{place} of {name}", leaf)
    if position < 0:
        raise InvalidInput(f"The dataset of {name} is empty.")
    if not columns:
        raise InvalidInput(f"The samples of {name} have no arrays or numbers.")
    return jax.tree.unflatten(structure, [column.array() for column in columns])


class _Column:
    """One array of a client, filled sample by sample."""

    def __init__(self, first: np.ndarray, count: int | None):
        self._first = first
        self._filled = 0
        self._rows = np.empty((count or 64, *first.shape), first.dtype)

    def append(self, where: str, leaf: np.ndarray) -> None:
        """Add a sample; raise if it differs from the first in shape or type."""
        first = self._first
        if leaf.shape != first.shape:
            raise InvalidInput(
                f"Sample {where} has the shape {leaf.shape}, the first one {first.shape}; samples "
                "need one shape: crop, resize or pad them in the dataset's transform."
            )
        if leaf.dtype != first.dtype:
            raise InvalidInput(
                f"Sample {where} is of type {leaf.dtype}, the first one {first.dtype}; samples "
                "need one type."
            )
        if self._filled == len(self._rows):  # of a dataset without a length
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)])
        self._rows[self._filled] = leaf
        self._filled += 1

    def array(self) -> np.ndarray:
        """Return the samples that were added."""
        return self._rows[: self._filled]


def _leaf(where: str, leaf: object) -> np.ndarray:
    """Return a part of a sample as an array; raise if it is neither an array nor a number."""
    is_picture = type(leaf).__module__.startswith("PIL")
    is_number = isinstance(leaf, bool | int | float | np.generic)
    if is_number or (hasattr(leaf, "__array__") and not is_picture):
        return as_array(where, leaf)
    if is_picture:
        kind, remedy = "a PIL image", "such as torchvision.transforms.ToTensor()"
    else:
        kind = f"a {type(leaf).__name__}"
        remedy = "which encodes it as numbers" if isinstance(leaf, str | bytes) else ""
    raise InvalidInput(
        f"{where} is {kind}; give the dataset a transform to tensors{', ' if remedy else ''}"
        f"{remedy}."
    )


def _tensors(name: str, dataset: Any) -> tuple[np.ndarray, ...] | None:
    """Return the arrays behind a TensorDataset, or a part of one, without reading samples."""
    torch = _torch()
    if torch is None:
        return None
    data = torch.utils.data
    if type(dataset) is data.TensorDataset:
        return tuple(as_array(f"A tensor of {name}", tensor) for tensor in dataset.tensors)
    if type(dataset) is data.Subset and (whole := _tensors(name, dataset.dataset)) is not None:
        rows = np.asarray(dataset.indices, int)
        return tuple(array[rows] for array in whole)
    return None


def _reader(name: str, dataset: Any) -> Callable[[int], object] | None:
    """Return a function that reads a sample by its index; None for an iterable dataset."""
    torch = _torch()
    if torch is not None and isinstance(dataset, torch.utils.data.IterableDataset):
        return None

    def read(index: int) -> object:
        try:
            return dataset[index]
        except Exception as error:
            reason = str(error).strip().splitlines()
            raise InvalidInput(
                f"Sample {index} of {name} cannot be read: {type(error).__name__}"
                f"{': ' + reason[0] if reason else ''}"
            ) from error

    return read


def _length(name: str, dataset: Any) -> int:
    """Return the number of samples."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise InvalidInput(
            f"The dataset of {name} has no length; define __len__, or make it an IterableDataset."
        ) from error


def _check_repeats(name: str, read: Callable[[int], object], order: Iterable[int]) -> None:
    """Raise if samples differ when they are read again: each will be read once."""

    def numbers(index: int) -> list[np.ndarray]:
        found = [leaf for leaf in jax.tree.leaves(read(index)) if hasattr(leaf, "__array__")]
        return [as_array(f"Sample {index} of {name}", leaf) for leaf in found]

    for index in order:
        for one, other in zip(numbers(index), numbers(index), strict=False):
            if one.shape != other.shape or not np.array_equal(one, other, equal_nan=True):
                raise InvalidInput(
                    f"The dataset of {name} gives another sample {index} each time; samples are "
                    "read once, so leave random transforms out of it and draw them in the loss, "
                    "which may take a key."
                )


def _shown(structure: object) -> str:
    """Return a structure of a sample as text."""
    return str(structure).removeprefix("PyTreeDef(").removesuffix(")")


def _torch() -> Any:
    """Return PyTorch if it is imported: else nothing can be of its classes."""
    torch: Any = sys.modules.get("torch")
    return torch if hasattr(torch, "utils") and hasattr(torch.utils, "data") else None
