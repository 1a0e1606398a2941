"""A machine owner's own file: the site's data, and what jobs may use beside Fedsolve itself.

The server can name a problem, but never a path:

    [data]
    share = [0, 5]            # five clients of the problem's own data, from client 0 on
or
    [data]
    loader = "npz"
    path = "patients.npz"     # arrays with a leading client axis, by the names the problem uses
or
    [data]
    loader = "clinic.data:patients"     # the owner's function of the path; returns such arrays
    path = "patients.csv"
or, for the problem `tabular`
    [data]
    loader = "csv"
    path = "patients.csv"     # or a list of files, a client each
    separator = ";"           # see `fedsolve.data.tables.Source`
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
from collections.abc import Mapping
from pathlib import Path

import equinox as eqx
import jax
import numpy as np

from fedsolve.data.tables import Source, read_rows
from fedsolve.errors import InvalidInput
from fedsolve.problem.problem import Problem
from fedsolve.problems.tables import SumsLoss, TabularLoss
from fedsolve.types import Table


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
    elif loader == "csv":
        csv_files(path)
        Source.of(data)
    elif not isinstance(loader, str) or not isinstance(data.get("path"), str):
        raise InvalidInput(f"{path}: [data] needs `share`, or `loader` and a `path`.")
    elif loader != "npz" and ":" not in loader:
        raise InvalidInput(
            f'{path}: loader takes "csv", "npz" or "module:function", got {loader!r}.'
        )


def csv_files(path: Path) -> list[Path]:
    """Return the CSV files that a site's file names."""
    named = read_owners_file(path)["data"].get("path")
    names = [named] if isinstance(named, str) else named
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise InvalidInput(f'{path}: loader = "csv" needs a path, or a list of paths.')
    return [Path(path.parent, name) for name in names]


def load_clients(path: Path, problem: Problem | None = None) -> Mapping[str, object] | None:
    """Load the arrays that a site's file names; None if it takes a share of the problem's data.

    CSV files are read by the problem's schema; without a problem, they are only opened.
    """
    check_data(path)
    data = read_owners_file(path)["data"]
    if "share" in data:
        return None
    if data["loader"] == "csv":
        return _load_csv(csv_files(path), Source.of(data), problem)
    source, loader = Path(path.parent, data["path"]), data["loader"]
    try:
        if loader == "npz":
            with np.load(source, allow_pickle=False) as arrays:
                found = {name: arrays[name] for name in arrays.files}
        else:
            module, _, name = loader.partition(":")
            found = getattr(importlib.import_module(module), name)(source)
    except Exception as error:  # an owner's loader may raise anything
        raise InvalidInput(f"Cannot load {source}: {type(error).__name__}: {error}.") from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise InvalidInput(f"{source}: {loader} must return a dictionary of arrays.")
    sizes = {np.shape(each)[:1] for each in found.values()}
    if len(sizes) != 1 or not all(size and size[0] for size in sizes):
        shapes = ", ".join(f"{name} {np.shape(each)}" for name, each in found.items())
        raise InvalidInput(f"{source}: arrays need their clients on a leading axis, got {shapes}.")
    return found


def _load_csv(
    files: list[Path], source: Source, problem: Problem | None
) -> Mapping[str, object] | None:
    """Read a client from each file."""
    if problem is None:
        for file in files:
            read_rows(file, source)
        return None
    reader = problem.given[0]
    if not isinstance(reader, TabularLoss | SumsLoss):
        raise InvalidInput('loader = "csv" is for the problem "tabular"; use a loader of your own.')
    return reader.read_clients(files, source)


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


def held_out(path: Path, problem: Problem) -> tuple[Mapping[str, object], int]:
    """Load held-out data for an audit, from an .npz or by a site's file.

    Returns:
        The data, and the number of clients.
    """
    if path.suffix == ".npz":
        try:
            with np.load(path, allow_pickle=False) as arrays:
                found: Mapping[str, object] | None = {name: arrays[name] for name in arrays.files}
        except (OSError, ValueError) as error:
            raise InvalidInput(f"Cannot load {path}: {error}.") from error
    else:
        found = load_clients(path, problem)
    if found is None:
        raise InvalidInput(f"{path}: a share of the training data is not held out; name a loader.")
    leaves = jax.tree.leaves(found)
    if not leaves:
        raise InvalidInput(f"{path} has no held-out data.")
    return found, len(leaves[0])
