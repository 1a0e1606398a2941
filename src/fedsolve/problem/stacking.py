"""All clients' data as one structure of stacked arrays, or as those of one client."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Bool

from fedsolve.data.clients import read_clients, tensors_as_arrays
from fedsolve.errors import InvalidInput
from fedsolve.problem.samples import Leaf, Mask, Pieces, Samples, is_pieces
from fedsolve.types import PyTree


def as_samples(clients: object) -> Samples:
    """Return the data that a user gave for all clients as samples with their mask.

    Clients that are given one by one have a mask only if they differ in size.
    """
    if isinstance(clients, Samples):
        return clients
    if (each := read_clients(clients)) is not None:
        stacked = _stack(each)
        return stacked if _is_padded(stacked.mask) else Samples(stacked.values)
    clients = tensors_as_arrays(clients)
    if isinstance(clients, dict) and all(np.ndim(m) == 2 for m in _leaves(clients.get("mask"))):
        return Samples({k: v for k, v in clients.items() if k != "mask"}, clients["mask"])
    return Samples(clients)


def stack_clients(clients: object) -> dict[str, PyTree] | Samples:
    """Stack clients' data on a leading axis, and pad clients that have fewer samples.

    Padding repeats a client's first sample, so it is never a value that the client does not have.

    Args:
        clients: The data of each client, in a list: arrays with samples on their first axis, as one
            array or as a tuple or dict of arrays; or another form that `Problem` takes (a PyTorch
            `Dataset` or `DataLoader`, or a pandas `DataFrame`).

    Returns:
        For dicts, a dict with one more entry, `"mask"`: true for real samples, of shape (clients,
        samples); if the entries have different numbers of samples (two classes, say), a dict of
        such masks. Other structures are returned as `Samples`, whose mask Fedsolve applies by
        itself. Both can be given to `Problem` as its clients.

    Raises:
        InvalidInput: If there are no clients, if they differ in structure, shape or type, or if one
            has no samples.

    Example:
        >>> import fedsolve as fs
        >>> import numpy as np
        >>> data = fs.stack_clients([{"y": np.array([1, 2, 3])}, {"y": np.array([4])}])
        >>> data["y"].tolist()
        [[1, 2, 3], [4, 4, 4]]
        >>> data["mask"].tolist()
        [[True, True, True], [True, False, False]]
    """
    if isinstance(clients, Iterator | tuple):
        clients = list(clients)
    each = read_clients(clients, arrays=True)
    if each is None:
        raise InvalidInput("stack_clients needs a list with the data of each client.")
    stacked = _stack(each)
    if isinstance(stacked.values, dict):
        return {**stacked.values, "mask": stacked.mask}
    return stacked


def _stack(clients: Sequence[PyTree]) -> Samples:
    """Stack clients' arrays, with a mask of the real samples."""
    _check_same_structure(clients)
    _check_have_samples(clients)
    _check_same_shapes(clients)
    _warn_of_padding(clients)
    return Samples(jax.tree.map(lambda *leaves: _pad(leaves), *clients), _mask_of(clients))


MUCH = 256 * 2**20  # bytes of padded data below which nobody is warned
MANY = 4  # times the size of the data


def _warn_of_padding(clients: Sequence[PyTree]) -> None:
    """Warn if padding to the largest client multiplies the memory of the data."""
    each = [jax.tree.leaves(client) for client in clients]
    real = sum(leaf.nbytes for leaves in each for leaf in leaves)
    padded = len(each) * sum(max(leaf.nbytes for leaf in row) for row in zip(*each, strict=True))
    if padded < MUCH or padded < MANY * real:
        return
    sizes = [max(len(leaf) for leaf in leaves) for leaves in each]
    largest = int(np.argmax(sizes))
    warnings.warn(
        f"Padding {len(each)} clients to the largest (client {largest}, {max(sizes)} samples; the "
        f"median has {int(np.median(sizes))}) takes {padded / 1e9:.1f} GB for {real / 1e6:.0f} MB "
        "of data. Divide the largest clients' samples over several clients, or take some of them.",
        stacklevel=4,
    )


def _leaves(mask: Mask) -> list[PyTree]:
    """Return the mask's leaves; for no mask, one leaf without axes."""
    return jax.tree.leaves(mask) or [None]


def _is_padded(mask: Mask) -> bool:
    """Return whether some sample is not real."""
    return not all(leaf.all() for leaf in jax.tree.leaves(mask))


def pool(samples: Samples) -> Samples:
    """Return all clients' samples as those of one client.

    That client has a mask, all true, if there was one before, as losses may use it.
    """

    def join(leaf: Leaf, mask: Mask) -> np.ndarray:
        leaf = np.asarray(leaf)
        if leaf.ndim < 2:
            raise InvalidInput("Only samples can be pooled: an array has one value a client.")
        rows = leaf.reshape(-1, *leaf.shape[2:]) if mask is None else leaf[np.asarray(mask)]
        return rows[None]

    mask = samples.mask

    def join_any(leaf: Leaf | Pieces, mask: Mask) -> np.ndarray | Pieces:
        return _pool_pieces(leaf, mask) if isinstance(leaf, Pieces) else join(leaf, mask)

    if isinstance(mask, dict):
        values = {
            name: jax.tree.map(
                lambda leaf, name=name: join_any(leaf, mask[name]), entry, is_leaf=is_pieces
            )
            for name, entry in samples.values.items()
        }
    else:
        values = jax.tree.map(lambda leaf: join_any(leaf, mask), samples.values, is_leaf=is_pieces)
    return Samples(values, jax.tree.map(lambda real: join(real, real), mask))


def _pool_pieces(pieces: Pieces, mask: Mask) -> Pieces:
    """Return all clients' pieces as those of one client, without the ones that pad."""
    real, owner = np.asarray(mask), np.asarray(pieces.owner)
    place = np.cumsum(real.ravel()).reshape(real.shape) - 1  # of each sample in the pool
    kept = owner < real.shape[1]
    client = np.nonzero(kept)[0]
    values = jax.tree.map(lambda leaf: np.asarray(leaf)[kept][None], pieces.values)
    return Pieces(values, place[client, owner[kept]].astype(np.int32)[None], pieces.most)


def _check_same_structure(clients: Sequence[PyTree]) -> None:
    """Raise if there are no clients, or they cannot be stacked entry by entry."""
    if not clients:
        raise InvalidInput("There are no clients: stack_clients needs at least one.")
    for index, client in enumerate(clients):
        if jax.tree.structure(client) != jax.tree.structure(clients[0]):
            raise InvalidInput(
                "Every client's data must have the same structure (the same entries): client 0 has "
                f"{_entries(clients[0])}, client {index} has {_entries(client)}."
            )
    if isinstance(clients[0], Mapping) and "mask" in clients[0]:
        raise InvalidInput(
            'stack_clients adds an entry "mask"; the data must not have one already.'
        )


def _entries(data: PyTree) -> str:
    """Return the names of a client's entries as text."""
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(data)]
    return ", ".join(name or "an array" for name in names) or "none"


def _check_have_samples(arrays: Sequence[PyTree]) -> None:
    """Raise if an array of a client has no axis of samples, or none on it."""
    for index, client in enumerate(arrays):
        for path, leaf in jax.tree.leaves_with_path(client):
            name = jax.tree_util.keystr(path) or "its data"
            if leaf.ndim == 0:
                raise InvalidInput(f"Client {index}: {name} is a scalar; samples need an axis.")
            if len(leaf) == 0:
                raise InvalidInput(f"Client {index} has no samples in {name}.")


def _check_same_shapes(arrays: Sequence[PyTree]) -> None:
    """Raise if clients' samples differ in shape or type."""
    first = jax.tree.leaves(arrays[0])
    for index, client in enumerate(arrays):
        for (path, leaf), wanted in zip(jax.tree.leaves_with_path(client), first, strict=True):
            if (leaf.shape[1:], leaf.dtype) != (wanted.shape[1:], wanted.dtype):
                name = jax.tree_util.keystr(path) or "its data"
                what = "shape" if leaf.shape[1:] != wanted.shape[1:] else "type"
                first, other = (
                    (wanted.shape[1:], leaf.shape[1:])
                    if what == "shape"
                    else (wanted.dtype, leaf.dtype)
                )
                raise InvalidInput(
                    f"Clients' samples must have the same {what}: {name} of client 0 has {what} "
                    f"{first}, {name} of client {index} has {what} {other}."
                )


def _mask_of(arrays: Sequence[PyTree]) -> Mask:
    """Return which samples will be real: one mask, or one for each entry if entries differ."""
    lengths = [[len(leaf) for leaf in jax.tree.leaves(client)] for client in arrays]
    if all(len(set(row)) == 1 for row in lengths):
        return _is_real([row[0] for row in lengths])
    if not isinstance(arrays[0], dict):
        raise InvalidInput(
            "Arrays of one client differ in their number of samples; "
            "name each set of samples by an entry of a dict."
        )
    mask = {}
    for name in arrays[0]:
        counts = [{len(leaf) for leaf in jax.tree.leaves(client[name])} for client in arrays]
        if any(len(count) != 1 for count in counts):
            raise InvalidInput(f"The arrays in {name!r} differ in their number of samples.")
        mask[name] = _is_real([count.pop() for count in counts])
    return mask


def _pad(leaves: Sequence[np.ndarray]) -> np.ndarray:
    """Stack one array of each client, padded to the longest."""
    longest = max(map(len, leaves))
    stacked = np.empty((len(leaves), longest, *leaves[0].shape[1:]), leaves[0].dtype)
    for row, leaf in zip(stacked, leaves, strict=True):
        row[: len(leaf)], row[len(leaf) :] = leaf, leaf[0]
    return stacked


def _is_real(counts: Sequence[int]) -> Bool[np.ndarray, "clients samples"]:
    """Return the mask of clients with these numbers of samples."""
    return np.arange(max(counts)) < np.asarray(counts)[:, None]
