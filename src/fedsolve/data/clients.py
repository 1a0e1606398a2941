"""Clients' data as arrays, from lists of datasets, loaders, tables, or dicts and tuples of arrays.

PyTorch and pandas are optional: their classes are recognised only where they are already imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import numpy as np

from fedsolve.data.torch_data import as_array, is_dataset, is_loader, read_dataset, read_loader
from fedsolve.errors import InvalidInput
from fedsolve.types import PyTree

LOADER, DATASET, TABLE = "DataLoader", "Dataset", "DataFrame"
ALONE = {  # how one such thing becomes a list with one for each client
    LOADER: "give a list with one loader for each client",
    DATASET: "give a list with one dataset for each client, such as torch.utils.data.random_split "
    "makes",
    TABLE: "give a list with one table for each client, such as "
    "[part for _, part in table.groupby(...)]",
}


def read_clients(clients: object, arrays: bool = False) -> list[PyTree] | None:
    """Return each client's data as arrays with samples on their first axis.

    Args:
        clients: The data of all clients.
        arrays: Whether the arrays of a list are clients.

    Returns:
        A tree of arrays for each client; None if `clients` is one structure of arrays that has all
        clients on a leading axis.
    """
    if isinstance(clients, Iterator):
        raise InvalidInput("clients is a generator, which can be read only once; give a list.")
    if (form := _form(clients)) is not None:
        raise InvalidInput(f"clients is one {form}; {ALONE[form]}.")
    if isinstance(clients, Mapping):
        items = list(clients.values())
        if not any(map(_form, items)):
            return None
        names = [f"client {name!r}" for name in clients]
    elif isinstance(clients, list) or (isinstance(clients, tuple) and any(map(_form, clients))):
        items, names = list(clients), [f"client {index}" for index in range(len(clients))]
    else:
        return None
    form = _common_form(items, names, arrays)
    read = {LOADER: read_loader, DATASET: read_dataset, TABLE: _read_table, None: _read_arrays}[
        form
    ]
    found = [read(name, item) for name, item in zip(names, items, strict=True)]
    if form == TABLE:
        _check_columns(names, found)
    return found


def tensors_as_arrays(tree: PyTree) -> PyTree:
    """Return the tree with PyTorch's tensors as NumPy arrays."""
    torch = sys.modules.get("torch")
    if torch is None:
        return tree

    def convert(path: jax.tree_util.KeyPath, leaf: PyTree) -> PyTree:
        where = "clients" + jax.tree_util.keystr(path)
        return as_array(where, leaf) if isinstance(leaf, torch.Tensor) else leaf

    return jax.tree.map_with_path(convert, tree)


def _form(data: object) -> str | None:
    """Return which form of a client's data this is; None for arrays in a structure."""
    if is_loader(data):
        return LOADER
    if (pandas := _pandas()) is not None and isinstance(data, pandas.DataFrame):
        return TABLE
    return DATASET if is_dataset(data) else None


def _common_form(items: Sequence[object], names: Sequence[str], arrays: bool) -> str | None:
    """Return the form of all clients' data; raise if they differ, or if one has none."""
    forms = [_form(item) for item in items]
    for name, form, item in zip(names, forms, items, strict=True):
        if form != forms[0]:
            words = [each or type(of).__name__ for each, of in ((forms[0], items[0]), (form, item))]
            raise InvalidInput(
                f"The clients' data have different forms: {names[0]} has a {words[0]}, {name} a "
                f"{words[1]}; give all in one form."
            )
        if form is None and jax.tree_util.all_leaves([item]):
            _check_leaf(name, item, arrays)
    return forms[0] if forms else None


def _check_leaf(name: str, item: object, arrays: bool) -> None:
    """Raise if a client's data are neither a structure of arrays nor another known form."""
    if type(item).__module__.partition(".")[0] in ("polars", "pyarrow"):
        raise InvalidInput(
            f"The data of {name} are a {type(item).__name__}; give its .to_pandas(), or a dict of "
            "arrays."
        )
    if hasattr(item, "__array__"):
        if arrays:
            return
        raise InvalidInput(
            "clients is a list of arrays, which may be clients or entries: give "
            "fs.stack_clients(list) for an array of each client, or a tuple of arrays with all "
            "clients on the leading axis."
        )
    raise InvalidInput(
        f"The data of {name} are a {type(item).__name__}; they must be a dict or tuple of arrays, "
        "a DataFrame, a PyTorch Dataset or a DataLoader."
    )


def _read_arrays(name: str, data: PyTree) -> PyTree:
    """Return a client's structure of arrays and tensors as NumPy arrays."""

    def read(path: jax.tree_util.KeyPath, leaf: PyTree) -> np.ndarray:
        return as_array(f"{jax.tree_util.keystr(path)} of {name}", leaf)

    return jax.tree.map_with_path(read, data)


def _read_table(name: str, table: Any) -> dict[str, np.ndarray]:
    """Return the columns of a client's DataFrame as arrays, by name."""
    pandas = _pandas()
    assert pandas is not None
    columns = list(table.columns)
    if any(not isinstance(column, str) for column in columns) or len({*columns}) < len(columns):
        raise InvalidInput(
            f"The columns of {name}'s table need names that are strings and differ: they become "
            "the entries of its data."
        )
    if not len(table):
        raise InvalidInput(f"The table of {name} has no rows.")
    return {column: _read_column(name, column, table[column]) for column in columns}


def _read_column(name: str, column: str, series: Any) -> np.ndarray:
    """Return a column as an array of numbers without missing values."""
    pandas = _pandas()
    assert pandas is not None
    dtype = series.dtype
    if not pandas.api.types.is_numeric_dtype(dtype):
        raise InvalidInput(
            f"Column {column!r} of {name} is of type {dtype}; encode it as numbers, the same for "
            "all clients (pandas.get_dummies, pandas.factorize), or drop it."
        )
    if series.isna().any():
        raise InvalidInput(
            f"Column {column!r} of {name} has missing values (NaN); fill them, or drop those rows."
        )
    plain = getattr(dtype, "numpy_dtype", getattr(dtype, "subtype", dtype))
    return series.to_numpy(dtype=plain)


def _check_columns(names: Sequence[str], tables: Sequence[Mapping[str, np.ndarray]]) -> None:
    """Raise if a client's table lacks a column that another has, or has it in another type."""
    for name, table in zip(names, tables, strict=True):
        for one, other, lacking in ((table, tables[0], name), (tables[0], table, names[0])):
            if missing := sorted(other.keys() - one.keys()):
                having = names[0] if lacking == name else name
                raise InvalidInput(
                    f"The table of {lacking} has no column {missing[0]!r}, which that of {having} "
                    "has."
                )
        for column, values in table.items():
            if values.dtype != tables[0][column].dtype:
                raise InvalidInput(
                    f"Column {column!r} is {tables[0][column].dtype} on {names[0]} and "
                    f"{values.dtype} on {name}; use one type."
                )


def _pandas() -> ModuleType | None:
    """Return pandas if it is imported: else nothing can be a DataFrame."""
    pandas = sys.modules.get("pandas")
    return pandas if hasattr(pandas, "DataFrame") else None  # half imported


READ: dict[str | None, Callable[[str, Any], PyTree]] = {
    LOADER: read_loader,
    DATASET: read_dataset,
    TABLE: _read_table,
    None: _read_arrays,
}
