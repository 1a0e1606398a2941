"""Audits of a run's folder, and of a deployment by counts that its sites made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from equinox import is_array
from jaxtyping import PyTree
from safetensors import SafetensorError
from safetensors.numpy import load_file

from fedsolve.algorithms.base import Algorithm
from fedsolve.auditing import Audit, Tally, count, judge
from fedsolve.auditing.counting import Ranges
from fedsolve.errors import InvalidInput
from fedsolve.experiments.config import load
from fedsolve.experiments.model_card import FILE as CARD
from fedsolve.experiments.model_card import with_audits
from fedsolve.experiments.run_folder import named_arrays
from fedsolve.problem.problem import Problem
from fedsolve.storage.atomic import write_atomically

FILE = "audit.json"
MODELS = ("last", "average", "best")


class Audited:
    """A model of a finished run, to be audited.

    Args:
        folder: The run's folder.
        run: Which run, such as `"soft/seed-0"`; None if there is only one.
        model: The parameters: `"last"`, `"average"` or `"best"`.
        allow: Names such as `"module:name"` that the configuration may import.

    Raises:
        InvalidInput: If the folder has no such run or parameters.
    """

    def __init__(
        self,
        folder: str | Path,
        run: str | None = None,
        model: str = "last",
        allow: Sequence[str] = (),
    ):
        self.folder = Path(folder)
        if not (self.folder / "config.toml").is_file():
            raise InvalidInput(f"{folder} is not the folder of a run: it has no config.toml.")
        experiment = load(self.folder / "config.toml", allow=allow)
        names = {f"{v}/seed-{s}".lstrip("/"): (v, s) for v, s in experiment.runs}
        if run is None and len(names) > 1:
            raise InvalidInput(f"Say which run to audit with --run: {', '.join(names)}.")
        self.run = next(iter(names)) if run is None else run
        if self.run not in names:
            raise InvalidInput(f"There is no run {run!r}; there are {', '.join(names)}.")
        self.problem: Problem
        self.algorithm: Algorithm
        self.problem, self.algorithm = experiment.cell(*names[self.run])
        self.params = saved_params(self.folder, self.run, model, self.problem)

    def count(
        self, test_clients: object, names: Sequence[str] | None = None, ranges: Ranges = None
    ) -> Tally:
        """Count over held-out data; only these counts need to leave the place where the data are.

        Args:
            test_clients: The clients' held-out data.
            names: The clients' names.
            ranges: The ranges of means, see `fedsolve.auditing.judge`.
        """
        return count(self.problem, self.params, test_clients, names, ranges)

    def judge(
        self, tally: Tally, confidence: float = 0.95, ranges: Ranges = None, sites: bool = True
    ) -> Audit:
        """Judge the counts of all clients; write `audit.json`, and the verdicts to the model card.

        Args:
            tally: The counts.
            confidence: The probability with which all verdicts are right together.
            ranges: The ranges of means.
            sites: Whether to judge every client as well.
        """
        tolerance = float(getattr(self.algorithm, "tolerance", 0.0))
        found = judge(tally, confidence, ranges, tolerance, sites)
        path = self.folder / FILE
        audits = read_audits(self.folder) | {self.run: found}
        text = json.dumps({name: each.to_json() for name, each in audits.items()}, indent=2)
        card = self.folder / CARD
        try:
            write_atomically(path, f"{text}\n".encode())
            if card.is_file():
                told = with_audits(card.read_text(encoding="utf-8"), audits)
                write_atomically(card, told.encode())
        except OSError as error:
            raise InvalidInput(f"Cannot write to {path}: {error.strerror}.") from None
        return found


def read_audits(folder: Path) -> dict[str, Audit]:
    """Return the audits of a folder's runs, by the name of the run."""
    path = folder / FILE
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {name: Audit.from_json(each) for name, each in found.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}.") from None


def read_counts(paths: Sequence[Path]) -> Tally:
    """Read the counts that sites made, and add them up."""
    found: Tally | None = None
    for path in paths:
        try:
            one = Tally.from_json(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise InvalidInput(f"{path} cannot be read: {error}.") from None
        found = one if found is None else found.plus(one)
    if found is None:
        raise InvalidInput("There are no counts to judge.")
    return found


def saved_params(folder: Path, run: str, model: str, problem: Problem) -> PyTree:
    """Return the saved parameters of a run, in the problem's own structure."""
    if model not in MODELS:
        raise InvalidInput(f"model must be one of {', '.join(MODELS)}, got {model!r}.")
    path = folder / ("best.safetensors" if model == "best" else "params.safetensors")
    try:
        arrays = load_file(path)
    except (OSError, SafetensorError):
        raise InvalidInput(f"{folder} has no parameters in {path.name} to audit.") from None
    part = "average" if model == "average" else "params"
    prefixes = [f"{run}/{part}", *([run] if model == "best" else [])]
    params = jax.tree.map(lambda x: np.asarray(x) if is_array(x) else x, problem.params)
    for prefix in prefixes:
        wanted = named_arrays(prefix, params)
        if wanted and wanted.keys() <= arrays.keys():
            leaves, structure = jax.tree.flatten(params)
            found = iter([arrays[name] for name in wanted])
            return structure.unflatten(
                [next(found) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
            )
    raise InvalidInput(f"{path} has no {model} parameters of the run {run!r}.")
