"""A site's data, as its owner's own file says. The server can name a problem, never a path.

    [data]
    share = [0, 5]            # five clients of the problem's own data, from client 0 on
or
    [data]
    loader = "npz"
    path = "patients.npz"     # arrays with a leading client axis, by the names the problem uses
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


def data_table(path: Path) -> dict[str, Any]:
    """What the site's owner wrote."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))["data"]
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise InvalidInput(f"{path} has no table [data] that can be read: {error}.") from error


def site_problem(problem: Problem, path: Path) -> Problem:
    """The problem with this site's clients."""
    table = data_table(path)
    if "share" in table:
        first, count = table["share"]
        if not 0 <= first < first + count <= problem.n:
            raise InvalidInput(f"{path}: the problem has {problem.n} clients, not {first + count}.")
        own = jax.tree.map(lambda leaf: leaf[first : first + count], problem.samples)
        return eqx.tree_at(lambda p: p.samples, problem, own)
    if table.get("loader") != "npz":
        raise InvalidInput(f'{path}: data needs `share`, or `loader = "npz"` and a `path`.')
    source = Path(path.parent, table["path"])
    try:
        with np.load(source, allow_pickle=False) as arrays:
            return problem.with_clients({name: arrays[name] for name in arrays.files})
    except (OSError, ValueError) as error:
        raise InvalidInput(f"Cannot load {source}: {error}.") from error
