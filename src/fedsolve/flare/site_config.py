"""What a machine's owner says in its own file. The server can name a problem, never a path.

    [data]
    share = [0, 5]            # five clients of the problem's own data, from client 0 on
or
    [data]
    loader = "npz"
    path = "patients.npz"     # arrays with a leading client axis, by the names the problem uses
or
    [data]
    loader = "clinic.data:patients"     # the owner's own function of the path; gives such arrays
    path = "patients.csv"

    [allow]                   # beside what comes with the package; nothing unless written here
    problems = ["clinic.models:survival"]
    algorithms = ["clinic.methods:Ours"]
"""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np

from fedsolve.errors import InvalidInput
from fedsolve.problem.problem import Problem


def owners_file(path: Path) -> dict[str, Any]:
    """What the owner wrote."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidInput(f"Cannot read {path}: {error}.") from error
    for key in table:
        if key not in ("data", "allow"):
            raise InvalidInput(f"{path}: there is no table [{key}]; known: data, allow.")
    return table


def allowed(table: dict[str, Any]) -> list[str]:
    """Problems and algorithms outside the package that the owner lets others run here."""
    entries = table.get("allow", {})
    names = [name for key in ("problems", "algorithms") for name in entries.get(key, [])]
    if not all(isinstance(name, str) for name in names) or entries.keys() - {
        "problems",
        "algorithms",
    }:
        raise InvalidInput('[allow] takes `problems` and `algorithms`, lists of "module:name".')
    return names


def check_data(path: Path) -> None:
    """Refuses a site's file that cannot be right."""
    table = owners_file(path)
    allowed(table)
    data = table.get("data", {})
    share, loader = data.get("share"), data.get("loader")
    if share is not None:
        if not (isinstance(share, list) and [type(x) for x in share] == [int, int]):
            raise InvalidInput(f"{path}: share takes [first client, how many], got {share!r}.")
        if share[0] < 0 or share[1] < 1:
            raise InvalidInput(f"{path}: share takes some clients, got {share!r}.")
    elif not isinstance(loader, str) or not isinstance(data.get("path"), str):
        raise InvalidInput(f"{path}: [data] needs `share`, or `loader` and a `path`.")
    elif loader != "npz" and ":" not in loader:
        raise InvalidInput(f'{path}: loader takes "npz" or "module:function", got {loader!r}.')


def own_clients(path: Path) -> dict[str, Any] | None:
    """The arrays that a site's file names, looked at; None for a share of the problem's own."""
    check_data(path)
    data = owners_file(path)["data"]
    if "share" in data:
        return None
    source, loader = Path(path.parent, data["path"]), data["loader"]
    try:
        if loader == "npz":
            with np.load(source, allow_pickle=False) as arrays:
                found = {name: arrays[name] for name in arrays.files}
        else:
            module, _, name = loader.partition(":")
            found = getattr(importlib.import_module(module), name)(source)
    except Exception as error:  # a loader is its owner's: whatever it does, they are told
        raise InvalidInput(f"Cannot load {source}: {type(error).__name__}: {error}.") from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise InvalidInput(f"{source}: {loader} must give arrays by name.")
    sizes = {np.shape(each)[:1] for each in found.values()}
    if len(sizes) != 1 or not all(size and size[0] for size in sizes):
        shapes = ", ".join(f"{name} {np.shape(each)}" for name, each in found.items())
        raise InvalidInput(f"{source}: arrays need their clients on a leading axis, got {shapes}.")
    return found


def site_problem(problem: Problem, path: Path) -> Problem:
    """The problem with this site's clients."""
    found = own_clients(path)
    if found is not None:
        return problem.with_clients(found)
    first, count = owners_file(path)["data"]["share"]
    if first + count > problem.n:
        raise InvalidInput(f"{path}: the problem has {problem.n} clients, not {first + count}.")
    own = jax.tree.map(lambda leaf: leaf[first : first + count], problem.samples)
    return eqx.tree_at(lambda p: p.samples, problem, own)
