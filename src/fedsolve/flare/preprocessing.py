"""Means and deviations of tables that stay at their sites, before the first round of a deployment.

An experiment of the kind `tabular` without `fitted` gets it from two rounds of `FedAvg` on
`tabular_sums`, in which every site must answer. They are a run of their own, so what was sent is in
its folder on the server, and a command that is repeated finds it done.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import NamedTuple

from fedsolve.data.preprocessing import Preprocessing
from fedsolve.data.schema import Schema
from fedsolve.data.table_files import Source, data_of, files_of
from fedsolve.errors import InvalidInput
from fedsolve.experiments.config import with_key
from fedsolve.problems.table_sums import fitted_at
from fedsolve.problems.tables import files_in, owners_files
from fedsolve.solving.result import Run
from fedsolve.types import Table

SUFFIX = "-preprocessing"  # of the run's name
SCHEMA = ("features", "label", "group")


class Tables(NamedTuple):
    """A configuration of the kind `tabular`, as its user wrote it."""

    config: Table

    @property
    def schema(self) -> Schema:
        """The columns."""
        return Schema.of(*(self.config["problem"].get(key) for key in SCHEMA))

    @property
    def is_fitted(self) -> bool:
        """Whether it has means and deviations."""
        return "fitted" in self.config["problem"]

    def blank(self) -> Table:
        """Return a configuration that can be checked before anything is known of the data."""
        if self.is_fitted:
            return self.fitted(self.config["problem"]["fitted"])
        return self.fitted(Preprocessing.neutral(self.schema).fitted)

    def fitted(self, fitted: Table) -> Table:
        """Return a configuration with these means and deviations, and without files."""
        problem = {k: v for k, v in self.config["problem"].items() if k not in ("folder", "test")}
        return with_key(self.config, "problem", problem | {"fitted": fitted})

    def sums(self) -> Table | None:
        """Return the configuration that adds up sites' numbers; None if none are to be added."""
        if self.is_fitted or not self.schema.is_exchanged:
            return None
        schema = {k: self.config["problem"][k] for k in SCHEMA if k in self.config["problem"]}
        return {
            "problem": {"kind": "tabular_sums", **schema},
            "algorithm": {"kind": "FedAvg", "step_size": 1.0},
            "run": {"rounds": 2, "precision": "float64"},
            # Sums grow with the rows of a site, so large ones are no reason to refuse it.
            "deploy": self.config.get("deploy", {}) | {"quorum": 1.0, "alarms": "note"},
        }

    def local_sites(self, sites: int) -> list[Table]:
        """Return [data] and [limits] of each site of a federation on this machine.

        Of the owners' limits it has those that decide what is found of all rows together.
        """
        folder = self.config["problem"].get("folder")
        if folder is None:
            raise InvalidInput("--local needs problem.folder, with the sites' files.")
        if owned := owners_files(folder):
            if len(owned) != sites:
                raise InvalidInput(f"{folder} has {len(owned)} sites; use --local {len(owned)}.")
            return [
                _site(data_of(path) | {"path": _absolute(files_of(path))}, Source.of_site(path))
                for path in owned
            ]
        files = files_in(folder)
        if not 1 <= sites <= len(files):
            raise InvalidInput(f"Cannot distribute {len(files)} files over {sites} sites.")
        ends = [len(files) * number // sites for number in range(sites + 1)]
        test = self.config["problem"].get("test", 0.0)
        return [
            _site({"loader": "csv", "path": _absolute(files[first:end]), "test": test}, Source())
            for first, end in itertools.pairwise(ends)
        ]


def tables_in(config: Table) -> Tables | None:
    """Return a configuration of the kind `tabular`; None if it is of another kind."""
    problem = config.get("problem")
    is_tabular = isinstance(problem, dict) and problem.get("kind") == "tabular"
    return Tables(config) if is_tabular else None


def _site(data: Table, source: Source) -> Table:
    limits = {"samples": source.samples, "words": source.sends_words}
    return {"data": data, "limits": limits}


def _absolute(files: list[Path]) -> list[str]:
    return [str(file.resolve()) for file in files]


def fitted_by(run: Run, record: Table) -> Table:
    """Return the means and deviations of a run on sums; raise if a site was missing."""
    heard = run.history["messages_up"]
    if run.rounds != 2 or record.get("missing") or len({*heard.tolist()}) != 1:
        away = ", ".join(record.get("missing", ())) or "a site"
        raise InvalidInput(
            f"Means and deviations need all sites, and {away} did not answer; start it again."
        )
    return fitted_at(run.problem, run.params, int(heard[0]))
