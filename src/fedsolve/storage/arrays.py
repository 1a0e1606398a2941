"""Arrays as bytes: a short JSON head and named arrays, as safetensors. No pickle, no code."""

from __future__ import annotations

import json
import math

import jax
import jax.numpy as jnp
import numpy as np

from fedsolve.types import PyTree, Table

HEAD = 2**20  # bytes allowed for the head and the arrays' names
TYPES = {"BOOL": np.dtype("?")} | {  # safetensors' words for them
    f"{word}{8 * width}": np.dtype(f"<{kind}{width}")
    for word, kind, widths in (
        ("U", "u", (1, 2, 4, 8)),
        ("I", "i", (1, 2, 4, 8)),
        ("F", "f", (2, 4, 8)),
    )
    for width in widths
}
WORDS = {dtype: word for word, dtype in TYPES.items()}


class Refused(Exception):
    """Raised for bytes that are not what was expected; the message says why."""

    spent = False  # whether an answer was refused as the question has had its answer


def encode(head: Table, arrays: dict[str, PyTree]) -> bytes:
    """Encode a head, and trees of arrays by name. Each array is copied once."""
    return b"".join(parts(head, arrays))


def parts(head: Table, arrays: dict[str, PyTree]) -> list[bytes | memoryview]:
    """Return the same bytes in parts, without a copy."""
    flat = [
        (f"{name}.{number}", _plain(np.asarray(leaf)))
        for name, tree in arrays.items()
        for number, leaf in enumerate(jax.tree.leaves(tree))
    ]
    flat.sort(key=lambda item: -item[1].itemsize)  # so that each begins at a multiple of its width
    table: Table = {"__metadata__": {"head": json.dumps(head)}}
    end = 0
    for name, array in flat:
        start, end = end, end + array.nbytes
        kind = WORDS[array.dtype]
        table[name] = {"dtype": kind, "shape": array.shape, "data_offsets": (start, end)}
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return [
        len(text).to_bytes(8, "little") + text,
        *(array.reshape(-1).view(np.uint8).data for _, array in flat),
    ]


def decode(data: object, most: int | None) -> tuple[Table, dict[str, np.ndarray]]:
    """Decode the head and the flat arrays of `encode`. The arrays are views of the bytes.

    Args:
        data: The bytes.
        most: The most bytes of arrays that can be right; None for data that this machine wrote.

    Raises:
        Refused: If the bytes are malformed or too many.
    """
    if not isinstance(data, bytes):
        raise Refused(f"not bytes but {type(data).__name__}")
    if most is not None and len(data) > most + HEAD:
        raise Refused(f"{len(data)} bytes, where at most {most + HEAD} can be right")
    longest = len(data) - 8 if most is None else min(HEAD, len(data) - 8)
    if len(data) < 8 or (size := int.from_bytes(data[:8], "little")) > longest:
        raise Refused("not safetensors")
    try:
        table = json.loads(data[8 : 8 + size])
        head = json.loads(table.pop("__metadata__")["head"])
        arrays = _arrays(data, 8 + size, table)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Refused(f"not safetensors with a head ({type(error).__name__})") from None
    if not isinstance(head, dict):
        raise Refused("its head is not a table")
    return head, arrays


def _arrays(data: bytes, begin: int, table: Table) -> dict[str, np.ndarray]:
    """Return the arrays of the table, which must fill the bytes without gap or overlap."""
    found, here = {}, 0
    for name, entry in sorted(table.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape, (start, end) = TYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if not all(type(n) is int and n >= 0 for n in (*shape, start, end)):
            raise ValueError("no whole numbers")
        count = math.prod(shape)
        if start != here or end - start != count * dtype.itemsize or end > len(data) - begin:
            raise ValueError("arrays out of place")
        found[name] = np.frombuffer(data, dtype, count, begin + start).reshape(shape)
        here = end
    if here != len(data) - begin:
        raise ValueError("bytes that are no array's")
    return found


def take(
    arrays: dict[str, np.ndarray],
    name: str,
    template: PyTree,
    rows: int | None = None,
    finite: bool = True,
) -> PyTree:
    """Take the tree of a name out of the arrays, if it is what the template says.

    Args:
        arrays: Flat arrays by name; those of the tree are removed.
        name: The name.
        template: A tree of arrays or shapes.
        rows: The length of one more axis in front.
        finite: Whether all numbers must be finite.

    Raises:
        Refused: If an array is missing, or differs in shape or type, or is not finite.
    """
    leaves, structure = jax.tree.flatten(template)
    found = []
    for number, leaf in enumerate(leaves):
        key = f"{name}.{number}"
        if key not in arrays:
            raise Refused(f"{key} is missing")
        shape = leaf.shape if rows is None else (rows, *leaf.shape)
        dtype, array = np.dtype(leaf.dtype), arrays.pop(key)
        if array.shape != shape or array.dtype != _plain_type(dtype):
            raise Refused(f"{key} is {array.dtype}{array.shape}, not {dtype}{shape}")
        array = array.view(dtype)
        if finite and jnp.issubdtype(dtype, jnp.floating) and not np.isfinite(array).all():
            raise Refused(f"{key} is not finite")
        found.append(array)
    return jax.tree.unflatten(structure, found)


def in_order(rows: np.ndarray) -> np.ndarray | slice:
    """Return rows' numbers, as a slice where they are consecutive: it picks without a copy."""
    count = len(rows)
    if count and rows[-1] - rows[0] == count - 1 and (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[0]) + count)
    return rows


def nothing_left(arrays: dict[str, np.ndarray]) -> None:
    """Raise if there are arrays that nobody took."""
    if arrays:
        raise Refused(f"it has arrays that do not belong: {', '.join(sorted(arrays))[:100]}")


def size_of(template: PyTree) -> int:
    """Return the bytes of a tree's arrays."""
    return sum(
        int(np.prod(x.shape)) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(template)
    )


def _plain_type(dtype: np.dtype) -> np.dtype:
    """Return the type as which an array is stored: unsigned integers for small floats."""
    return dtype if dtype.kind in "biuf" and dtype.isbuiltin else np.dtype(f"u{dtype.itemsize}")


def _plain(array: np.ndarray) -> np.ndarray:
    return np.asarray(array, order="C").view(_plain_type(array.dtype))
