"""A machine owner's own file: the site's data, and what jobs may use beside Fedsolve itself.

The server can name a problem, but never a path:

    [data]
    share = [0, 5]            # five clients of the problem's own data, from client 0 on
or
    [data]
    loader = "npz"            # or "safetensors"
    path = "patients.npz"     # arrays with a leading client axis, by the names the problem uses
or
    [data]
    loader = "parquet"        # or "arrow" (also a folder of Hugging Face), or "images"
    path = "patients.parquet" # samples by the names that the problem uses; a list: a client each
or
    [data]
    loader = "clinic.data:patients"     # the owner's function of the path; returns such arrays,
    path = "patients.csv"               # or what `fs.stack_clients` returns
or, for the problem `tabular`
    [data]
    loader = "csv"            # or "parquet", "arrow"
    path = "patients.csv"     # or a list of files, a client each
    test = 0.2                # held out, chosen by the column "patient"
    key = "patient"
    separator = ";"           # see `fedsolve.data.table_files.Source`
    columns = { age = "Alter", weight = { column = "pounds", factor = 0.4536 } }

    [allow]                   # beside what comes with Fedsolve; nothing unless written here
    problems = ["clinic.models:survival"]
    algorithms = ["clinic.methods:Ours"]

    [limits]                  # see `limits`
    samples = 5
"""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import equinox as eqx
import jax
import numpy as np

from fedsolve.data.loaders import BY_CLIENTS, BY_SAMPLES, check_options, load_npz
from fedsolve.data.table_files import TABLES, Source, files_of, read_rows
from fedsolve.errors import InvalidInput
from fedsolve.problem.problem import Problem
from fedsolve.problem.samples import Samples
from fedsolve.problem.stacking import stack_clients
from fedsolve.problems.table_sums import SumsLoss
from fedsolve.problems.tables import TabularLoss
from fedsolve.types import PyTree, Table


def read_owners_file(path: Path) -> Table:
    """Read an owner's file and check the names of its tables."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidInput(f"Cannot read {path}: {error}.") from error
    for key in table:
        if key not in ("data", "allow", "limits"):
            raise InvalidInput(f"{path}: there is no table [{key}]; known: data, allow, limits.")
    return table


def allowed_names(table: Table) -> list[str]:
    """Return the problems and algorithms of other packages that jobs may use on this machine."""
    entries, keys = table.get("allow", {}), ("problems", "algorithms")
    names = [name for key in keys for name in entries.get(key, [])]
    if not all(isinstance(name, str) for name in names) or entries.keys() - {*keys}:
        raise InvalidInput('[allow] takes `problems` and `algorithms`, lists of "module:name".')
    return names


def check_data(path: Path) -> None:
    """Raise if a site's file cannot be right, without loading its data."""
    table = read_owners_file(path)
    allowed_names(table)
    data = table.get("data", {})
    share, loader = data.get("share"), data.get("loader")
    if share is not None:
        if not (isinstance(share, list) and [type(x) for x in share] == [int, int]):
            raise InvalidInput(f"{path}: share takes [first client, number], got {share!r}.")
        if share[0] < 0 or share[1] < 1:
            raise InvalidInput(
                f"{path}: share takes a first client from 0 on and at least one, got {share!r}."
            )
    elif loader in TABLES or loader in BY_SAMPLES:
        files_of(path)
        if loader == "csv" or not _given(data).keys().isdisjoint(SOURCE_KEYS):
            Source.of(data)
        else:
            check_options(str(path), loader, _given(data))
    elif not isinstance(loader, str) or not isinstance(data.get("path"), str):
        raise InvalidInput(f"{path}: [data] needs `share`, or `loader` and a `path`.")
    elif loader not in BY_CLIENTS and ":" not in loader:
        known = ", ".join(
            f'"{name}"' for name in dict.fromkeys((*TABLES, *BY_CLIENTS, *BY_SAMPLES))
        )
        raise InvalidInput(f'{path}: loader takes {known} or "module:function", got {loader!r}.')


SOURCE_KEYS = ("separator", "decimal", "encoding", "missing", "columns", "test", "key")


def _given(data: Table) -> Table:
    """Return the options of a loader."""
    return {key: value for key, value in data.items() if key not in ("loader", "path")}


def load_clients(path: Path, problem: Problem | None = None, part: str = "train") -> PyTree:
    """Load the arrays that a site's file names; None if it takes a share of the problem's data.

    Tables are read by the problem's schema; without a problem, they are only opened. `part` is the
    part of a table's rows: `"train"`, `"test"` or `"all"`.
    """
    check_data(path)
    data = read_owners_file(path)["data"]
    if "share" in data:
        return None
    loader = data["loader"]
    reader = None if problem is None else problem.given[0]
    is_table = problem is None or loader == "csv" or isinstance(reader, TabularLoss | SumsLoss)
    if loader in TABLES and is_table:
        return _load_tables(files_of(path), Source.of_site(path), problem, part)
    if loader in BY_SAMPLES:
        return _stacked(path, loader, _given(data))
    source = Path(path.parent, data["path"])
    try:
        if loader in BY_CLIENTS:
            found = BY_CLIENTS[loader](source)
        else:
            module, _, name = loader.partition(":")
            found = getattr(importlib.import_module(module), name)(source)
    except Exception as error:  # an owner's loader may raise anything
        raise InvalidInput(f"Cannot load {source}: {type(error).__name__}: {error}.") from error
    if isinstance(found, Samples):
        return found
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise InvalidInput(f"{source}: {loader} must return a dictionary of arrays.")
    leaves = jax.tree.leaves(found)
    sizes = {np.shape(each)[:1] for each in leaves}
    if len(sizes) != 1 or not all(size and size[0] for size in sizes):
        shapes = ", ".join(f"{name} {np.shape(each)}" for name, each in found.items())
        raise InvalidInput(f"{source}: arrays need their clients on a leading axis, got {shapes}.")
    return found


def _stacked(path: Path, loader: str, options: Table) -> PyTree:
    """Read a client's samples from each file or folder."""
    clients = []
    for source in files_of(path):
        try:
            clients.append(BY_SAMPLES[loader](source, options))
        except OSError as error:
            raise InvalidInput(f"Cannot load {source}: {error.strerror or error}.") from error
    return stack_clients(clients)


def _load_tables(files: list[Path], source: Source, problem: Problem | None, part: str) -> PyTree:
    """Read a client from each file."""
    if problem is None:
        for file in files:
            read_rows(file, source)
        return None
    reader = problem.given[0]
    if not isinstance(reader, TabularLoss | SumsLoss):
        raise InvalidInput('loader = "csv" is for the problem "tabular"; use a loader of your own.')
    return reader.read_clients(files, source, part)


def site_problem(problem: Problem, path: Path) -> Problem:
    """Return the problem with this site's clients in place of all."""
    found = load_clients(path, problem)
    if found is not None:
        return problem.with_clients(found)
    first, count = read_owners_file(path)["data"]["share"]
    if first + count > problem.n:
        raise InvalidInput(f"{path}: the problem has {problem.n} clients, not {first + count}.")
    own = jax.tree.map(lambda leaf: leaf[first : first + count], problem.samples)
    return eqx.tree_at(lambda p: p.samples, problem, own)


def held_out(path: Path, problem: Problem) -> tuple[PyTree, int]:
    """Load held-out data for an audit, from an .npz or by a site's file.

    Returns:
        The data, and the number of clients.
    """
    if path.suffix == ".npz":
        try:
            found: PyTree = load_npz(path)
        except (OSError, ValueError) as error:
            raise InvalidInput(f"Cannot load {path}: {error}.") from error
    else:
        data = read_owners_file(path).get("data", {})
        found = load_clients(path, problem, "test" if data.get("test") else "all")
    if found is None:
        raise InvalidInput(f"{path}: a share of the training data is not held out; name a loader.")
    leaves = jax.tree.leaves(found)
    if not leaves:
        raise InvalidInput(f"{path} has no held-out data.")
    return found, len(leaves[0])
