"""What a machine's owner says in its own file. The server can name a problem, never a path.

    [data]
    share = [0, 5]            # five clients of the problem's own data, from client 0 on
or
    [data]
    loader = "npz"
    path = "patients.npz"     # arrays with a leading client axis, by the names the problem uses

    [allow]                   # beside what comes with the package; nothing unless written here
    problems = ["clinic.models:survival"]
    algorithms = ["clinic.methods:Ours"]
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np

from fedsolve.errors import InvalidInput
from fedsolve.problem import Problem


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
    """Refuses a site's file that cannot be right, before anything is started."""
    table = owners_file(path)
    allowed(table)
    data = table.get("data", {})
    share = data.get("share")
    if share is not None:
        if not (isinstance(share, list) and [type(x) for x in share] == [int, int]):
            raise InvalidInput(f"{path}: share takes [first client, how many], got {share!r}.")
    elif data.get("loader") != "npz" or not isinstance(data.get("path"), str):
        raise InvalidInput(f'{path}: [data] needs `share`, or `loader = "npz"` and a `path`.')


def site_problem(problem: Problem, path: Path) -> Problem:
    """The problem with this site's clients."""
    check_data(path)
    data = owners_file(path)["data"]
    if "share" in data:
        first, count = data["share"]
        if not 0 <= first < first + count <= problem.n:
            raise InvalidInput(f"{path}: the problem has {problem.n} clients, not {first + count}.")
        own = jax.tree.map(lambda leaf: leaf[first : first + count], problem.samples)
        return eqx.tree_at(lambda p: p.samples, problem, own)
    source = Path(path.parent, data["path"])
    try:
        with np.load(source, allow_pickle=False) as arrays:
            return problem.with_clients({name: arrays[name] for name in arrays.files})
    except (OSError, ValueError) as error:
        raise InvalidInput(f"Cannot load {source}: {error}.") from error
