"""Choose the step size of every variant of an experiment from a grid, by one rule.

Of the steps with mean g ≤ ε the one with the least mean f; if there is none, the one with the least
mean g. This is how `run.best` chooses a round. Means are over all seeds and the last fifth of the
evaluations. A step with which a run diverges is left out.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from fedsolve.errors import InvalidInput
from fedsolve.experiments.config import Experiment, with_key
from fedsolve.solving.result import Run
from fedsolve.solving.sweep import sweep
from fedsolve.storage.atomic import write_atomically
from fedsolve.types import Table

LATE = 5  # means are over the last fifth of a run
KEY = "algorithm.step_size"
SHARED = ("rounds", "evaluate_every", "precision", "clients_at_once")  # options that sweeps have


@dataclasses.dataclass(frozen=True)
class Tried:
    """A step size, and the means of f and g over seeds; not a number where a run diverged."""

    step: float | int
    objective: float | int
    constraint: float | int


def choose(tried: Iterable[Tried], tolerance: float | int) -> Tried:
    """Return the step size that the rule chooses, with its means.

    Raises:
        InvalidInput: If every one diverges.
    """
    finite = [each for each in tried if np.isfinite([each.objective, each.constraint]).all()]
    if not finite:
        raise InvalidInput("Runs diverge with every step size that was tried.")

    def rank(each: Tried) -> tuple[bool, float | int]:
        over = each.constraint > tolerance
        return over, each.constraint if over else each.objective

    return min(finite, key=rank)


def means(step: float | int, runs: Sequence[Run]) -> Tried:
    """Return the means of f and g over the last fifth of the evaluations of all seeds.

    A problem without a constraint has g = 0.
    """
    late = [slice(-max(len(run.history["round"]) // LATE, 1), None) for run in runs]
    none = np.zeros(1)
    f, g = (
        [np.mean(run.history.get(name, none)[own]) for run, own in zip(runs, late, strict=True)]
        for name in ("objective", "constraint")
    )
    return Tried(step, float(np.mean(f)), float(np.mean(g)))


def try_steps(
    experiment: Experiment, variant: str, steps: Sequence[float | int], seeds: Sequence[int]
) -> list[Tried]:
    """Run a variant with every step size and seed: each seed's steps are one compiled program."""
    options = {key: value for key, value in experiment.options.items() if key in SHARED}
    by_step: dict[float, list[Run]] = {float(step): [] for step in steps}
    for seed in seeds:
        problem, algorithm = experiment.cell(variant, seed)
        grid: Table = {"step_size": list(by_step)}
        for run in sweep(problem, algorithm, seeds=[seed], **options, **grid).runs:
            by_step[float(str(run.settings["step_size"]))].append(run)
    return [means(step, runs) for step, runs in by_step.items()]


def tune(
    experiment: Experiment,
    steps: Sequence[float | int],
    seeds: int | None,
    path: Path,
    progress: Callable[[int], bool] | None = None,
) -> bool:
    """Try the steps of every variant, and write what was found to a file, after each of them.

    Args:
        experiment: The experiment.
        steps: The step sizes to try.
        seeds: With how many of the experiment's seeds; None for all.
        path: The file; variants that it has are not tried again.
        progress: Called with the number of variants that are done; True interrupts.

    Returns:
        Whether all variants are done.
    """
    found = read(path)
    for number, variant in enumerate(experiment.cells):
        if variant in found:
            continue
        if progress is not None and progress(number):
            return False
        tried = try_steps(experiment, variant, steps, experiment.seeds[:seeds])
        tolerance = float(getattr(experiment.cells.algorithms[variant], "tolerance", 0.0))
        found[variant] = {
            "step_size": choose(tried, tolerance).step,
            "tried": [dataclasses.asdict(each) for each in tried],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (json.dumps(found, indent=1) + "\n").encode())
    return True


def read(path: Path) -> dict[str, Table]:
    """Return what was found by variant, as far as it is written."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def with_steps(config: Table, found: Mapping[str, Table]) -> Table:
    """Return an experiment's configuration with the step sizes that were chosen."""
    variants = {name: dict(changes) for name, changes in config["variants"].items()}
    for name, changes in variants.items():
        step = found[name]["step_size"]
        if isinstance(own := changes.get("algorithm"), dict):
            changes["algorithm"] = with_key({"algorithm": own}, KEY, step)["algorithm"]
        else:
            changes[KEY] = step
    return config | {"variants": variants}
