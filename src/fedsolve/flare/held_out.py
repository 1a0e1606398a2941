"""A site's own numbers on its held-out rows, for its owner's console.

They are sent to the coordinator only if the owner says so: `held_out = true` under `[limits]`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeGuard

import jax.numpy as jnp
import numpy as np

from fedsolve.data.table_files import TABLES, Source, files_of
from fedsolve.errors import InvalidInput
from fedsolve.flare.limits import Limits
from fedsolve.flare.site_config import read_owners_file
from fedsolve.problem.problem import Problem
from fedsolve.problem.samples import counts
from fedsolve.problems.fairness import accuracy
from fedsolve.problems.tables import CoxLoss, TabularLoss
from fedsolve.runtimes.compilation import prepared
from fedsolve.runtimes.evaluation import client_values, combined
from fedsolve.runtimes.history import FIRST
from fedsolve.types import Info, Table, Vector

LINES = 20  # of a run, and one for its last round


class HeldOut:
    """Evaluates the parameters on a site's held-out rows, some times in a run.

    Args:
        problem: The problem, with the held-out rows as its clients.
        rounds: The number of rounds of the run.
        say: Called with a line for the owner.
        dtype: The type of numbers.
        limits: The owner's limits, if the values may be sent; None if not.
    """

    def __init__(
        self,
        problem: Problem,
        rounds: int,
        say: Callable[[str], None],
        dtype: np.dtype | None,
        limits: Limits | None = None,
    ):
        self._limits, self._sent = limits, None
        self._rounds, self._every, self._say = rounds, max(rounds // LINES, 1), say
        self._rows, self._last = int(sum(np.asarray(counts(problem.samples)))), 0
        self._values = prepared(_values, problem.on_device(dtype))

    def __call__(self, round: int, w: Vector) -> Table | None:
        """Tell the owner about the parameters after a round, once; return what may be sent."""
        if round == self._last:
            return self._sent
        if round % self._every and round != self._rounds:
            return None
        self._last = round
        found = self._values(jnp.asarray(w))
        order = [name for name in FIRST if name in found]
        values = {name: float(found[name]) for name in dict.fromkeys([*order, *found])}
        self._say(text_of({"round": round, "rows": self._rows, "values": values}, " here"))
        self._sent = None
        if self._limits is not None and self._rows >= self._limits.samples:
            rounded = {k: float(self._limits.rounded(np.asarray(v))) for k, v in values.items()}
            self._sent = {"round": round, "rows": self._rows, "values": rounded}
        return self._sent


def text_of(found: Table, where: str = "") -> str:
    """Return a line about values on held-out rows."""
    facts = [f"{name} {value:.4g}" for name, value in found["values"].items()]
    return f"round {found['round']}, {found['rows']} held-out rows{where}: {', '.join(facts)}"


def is_held_out(found: object) -> TypeGuard[Table]:
    """Return whether something that a site sent has the form of values on held-out rows."""
    if not isinstance(found, dict) or found.keys() != {"round", "rows", "values"}:
        return False
    values = found["values"]
    return (
        type(found["round"]) is int
        and type(found["rows"]) is int
        and isinstance(values, dict)
        and 0 < len(values) <= len(SENT)
        and values.keys() <= {*SENT}
        and all(type(value) is float for value in values.values())
    )


SENT = ("objective", "constraint", "accuracy")


def _values(problem: Problem, w: Vector) -> Info:
    """Return f, g and, of decisions, the share of correct ones."""
    found = combined(problem, w, client_values(problem, w))
    chosen = {k: v for k, v in found.items() if k in ("objective", "constraint")}
    if not isinstance(problem.given[0], CoxLoss) and not isinstance(problem.samples.mask, dict):
        values = problem.samples.values
        pooled = {k: v.reshape(-1, *v.shape[2:]) for k, v in values.items()}
        pooled["mask"] = problem.samples.mask.reshape(-1)
        chosen["accuracy"] = accuracy(problem.params_at(w), pooled)
    return chosen


def held_out_rows(problem: Problem, owners: Path) -> Problem | None:
    """Return the problem over a site's held-out rows; None if it holds out none, or too few."""
    data, reader = read_owners_file(owners)["data"], problem.given[0]
    if data.get("loader") not in TABLES or not data.get("test"):
        return None
    if not isinstance(reader, TabularLoss):
        return None
    try:
        own = reader.read_clients(files_of(owners), Source.of(data), "test")
        return problem.with_clients(own)
    except InvalidInput:  # no row of some client, or of a class that the constraint needs
        return None
