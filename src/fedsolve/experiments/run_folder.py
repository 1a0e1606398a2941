"""The folder of an experiment: configuration, versions, history, parameters, pictures, a card."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import platform
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np
import tomli_w
from jaxtyping import PyTree
from safetensors import SafetensorError
from safetensors.numpy import load_file
from safetensors.numpy import save as as_safetensors

from fedsolve.errors import InvalidInput
from fedsolve.experiments.model_card import FILE as CARD
from fedsolve.experiments.model_card import kind_of_model, model_card
from fedsolve.plots import effort, has_numbers, plot, tradeoff
from fedsolve.problem.layout import name_of
from fedsolve.problems.tables import TabularLoss
from fedsolve.solving.result import Run, tidy
from fedsolve.storage.atomic import open_locked, write_atomically
from fedsolve.types import Table

if TYPE_CHECKING:  # a slow import
    from pandas import DataFrame

Runs = Mapping[str, list[Run]]  # by variant
PREPROCESSING = "preprocessing.json"


def new_folder(wanted: str | Path | None, name: str) -> Path:
    """Make an empty folder: the one that the user named, or a new one below `runs/`."""
    if wanted is None:
        number = 1
        while (path := Path("runs", name if number == 1 else f"{name}-{number}")).exists():
            number += 1
    else:
        path = Path(wanted)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise InvalidInput(f"{path} exists and is not empty; choose another folder with --out.")
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / "run.json").write_text("{}")
    except OSError as error:
        raise InvalidInput(f"Cannot write to {path}: {error.strerror}.") from error
    return path


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold the folder's lock, so that no other process works in it at the same time."""
    lock = open_locked(path / ".lock")
    if lock is None:
        raise InvalidInput(f"Another process is working in {path}; wait for its end.")
    with lock:
        yield


def begin(path: Path, config: Table) -> None:
    """Write what is about to be run, so that a killed run can be identified and resumed."""
    write_atomically(path / "config.toml", tomli_w.dumps(config).encode())
    write_atomically(path / "run.json", _json({"status": "running", **_facts()}))


def checkpoint_of(path: Path, number: int) -> Path:
    """Return the path of a run's checkpoint, given the run's number in the experiment."""
    return path / "checkpoints" / f"run-{number}"


def save(
    path: Path,
    runs: Runs,
    config: Table,
    status: str,
    message: str = "",
    data_here: bool = True,
    participation: Mapping[tuple[str, int], Table] | None = None,
) -> None:
    """Write configuration, history, parameters, pictures and facts of these runs.

    Certificates need the clients' data: they are left out if `data_here` is false.
    `participation` has, by variant and seed, the record of a deployed run's sites.
    """
    write_atomically(path / "config.toml", tomli_w.dumps(config).encode())
    facts: Table = {
        "status": status,
        "message": message,
        "rounds": {_name(v, run): run.rounds for v, all in runs.items() for run in all},
        "seconds": {_name(v, run): round(run.seconds, 3) for v, all in runs.items() for run in all},
        **_facts(),
    }
    if participation:
        facts["participation"] = {
            f"{v}/seed-{s}".lstrip("/"): x for (v, s), x in participation.items()
        }
    labelled = [(v, run) for v, all in runs.items() for run in all if run.evaluated]
    said = {_name(v, run): _certificates(run, data_here) for v, run in labelled}
    facts["certificates"] = {name: "\n".join(texts) for name, texts in said.items() if texts}
    tolerances = {_name(v, run): getattr(run.algorithm, "tolerance", None) for v, run in labelled}
    facts["tolerances"] = {name: float(t) for name, t in tolerances.items() if t is not None}
    bests = {_name(v, run): best for v, run in labelled if (best := run.best) is not None}
    facts["best"] = {
        name: {k: getattr(best, k) for k in ("round", "objective", "constraint", "feasible")}
        | {"text": str(best)}
        for name, best in bests.items()
    }
    if labelled:
        _save_results(path, runs, labelled, "stop" in config["run"])
        _save_models(path, labelled)
        _save_preprocessing(path, labelled)
        title = str(config.get("title") or path.resolve().name)
        card = model_card(_evaluated(runs), title, facts, data_here)
        write_atomically(path / CARD, card.encode())
    write_atomically(path / "run.json", _json(facts))  # last: then all is there


def _save_results(path: Path, runs: Runs, labelled: list[tuple[str, Run]], stops: bool) -> None:
    table = tidy([({"variant": v} if v else {}, run) for v, run in labelled])
    write_atomically(path / "history.csv", table.to_csv(index=False).encode())
    arrays: dict[str, np.ndarray] = {}
    best: dict[str, np.ndarray] = {}
    wide: dict[str, np.ndarray] = {}
    for variant, run in labelled:
        name = _name(variant, run)
        arrays |= named_arrays(f"{name}/params", run.params)
        if run.average is not None:
            arrays |= named_arrays(f"{name}/average", run.average)
        if run.best is not None:
            best |= named_arrays(f"{name}/params", run.best.params)
            best |= named_arrays(f"{name}/buffers", run.best.buffers)
        wide |= {f"{name}/{k}": v for k, v in run.history.items() if v.ndim > 1}
        limits = run.algorithm.limits().items()
        wide |= {f"{name}/{k}/settles": np.asarray(v) for k, v in limits if k in run.history}
    write_atomically(path / "params.safetensors", as_safetensors(arrays))
    if best:
        write_atomically(path / "best.safetensors", as_safetensors(best))
    if wide:
        write_atomically(path / "history.safetensors", as_safetensors(wide))
    groups = _evaluated(runs)
    plot(groups, path / "plot.png")
    if all("seconds_total" in run.history for _, run in labelled):
        plot(groups, path / "time.png", against="seconds_total")
    if stops and has_numbers(groups):
        effort(groups, path / "rounds.png")
    if len(groups) > 1 and all("constraint" in run.history for _, run in labelled):
        tradeoff(groups, path / "trade-off.png")


def _save_preprocessing(path: Path, labelled: list[tuple[str, Run]]) -> None:
    """Write what turns tables into inputs, for runs on tables; see `predict`."""
    found = {
        _name(variant, run): loss.preprocessing.to_json()
        for variant, run in labelled
        if isinstance(loss := run.problem.given[0], TabularLoss)
    }
    if found:
        write_atomically(path / PREPROCESSING, _json(found))


def _save_models(path: Path, labelled: list[tuple[str, Run]]) -> None:
    """Write the models of PyTorch and Equinox in files of their own, by the names they have there.

    Those of a PyTorch module are the names of its `state_dict`.
    """
    for variant, run in labelled:
        if kind_of_model(run.problem):
            file = path / "models" / f"{_name(variant, run)}.safetensors"
            file.parent.mkdir(parents=True, exist_ok=True)
            named = [
                (name_of(place), np.ascontiguousarray(leaf))
                for tree in (run.params, None if run.problem.keeps_state else run.buffers)
                for place, leaf in jax.tree.leaves_with_path(tree)
                if isinstance(leaf, np.ndarray | jax.Array)
            ]
            write_atomically(file, as_safetensors(dict(named)))


def _evaluated(runs: Runs) -> Runs:
    """Return the runs that have an evaluation: if the experiment was stopped, some have none."""
    there = {v: [run for run in all if run.evaluated] for v, all in runs.items()}
    return {v: all for v, all in there.items() if all}


@dataclasses.dataclass(frozen=True)
class Contents:
    """The contents of an experiment's folder."""

    config: Table
    facts: Table  # run.json
    table: DataFrame  # the tidy history; `variant` is "" where there are none
    wide: dict[str, np.ndarray]  # by `variant/seed-0/name`: history columns of arrays


def read(path: Path) -> Contents:
    """Read the folder of a finished experiment."""
    import pandas as pd

    try:
        config = tomllib.loads((path / "config.toml").read_text(encoding="utf-8"))
        facts = json.loads((path / "run.json").read_text(encoding="utf-8"))
        table = pd.read_csv(path / "history.csv", keep_default_na=False, na_values=[""])
        wide = load_file(file) if (file := path / "history.safetensors").exists() else {}
    except FileNotFoundError as error:
        name = Path(error.filename).name
        raise InvalidInput(
            f"{path} is not the folder of a finished run: it has no {name}."
        ) from None
    except (OSError, ValueError, SafetensorError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}.") from None
    if "variant" not in table:
        table.insert(0, "variant", "")
    table["variant"] = table["variant"].astype(str)
    return Contents(config, facts, table, wide)


def _facts() -> Table:
    """Return the command, and the versions and devices that the numbers depend on."""
    return {
        "command": " ".join(["fedsolve", *sys.argv[1:]]),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "devices": [str(device) for device in jax.devices()],
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("fedsolve", "jax", "jaxlib", "equinox", "numpy", "scikit-learn")
        },
    }


def _certificates(run: Run, data_here: bool) -> list[str]:
    """Compare what a theorem promised with what was reached.

    If clients play a game, also state how much a client could still gain by deviating.
    """
    found = []
    if data_here and getattr(run.algorithm, "guarantee", None) is not None:
        try:
            found.append(str(run.certificate()))
        except InvalidInput as error:
            found.append(f"No certificate: {error}")
    holders = (run.algorithm, getattr(run.algorithm, "weighting", None))
    game = next((g for each in holders if (g := getattr(each, "game", None)) is not None), None)
    if game is not None and "participation" in run.history:
        gain = game.regret(run.history["participation"][-1])
        found.append(f"At the end no client gains more than {gain:.3g} by deviating alone.")
    return found


def _json(facts: Table) -> bytes:
    return (json.dumps(facts, indent=2) + "\n").encode()


def _name(variant: str, run: Run) -> str:
    return f"{variant}/seed-{run.seed}".lstrip("/")


def named_arrays(prefix: str, tree: PyTree) -> dict[str, np.ndarray]:
    """Return the arrays of a tree, named by their paths in it."""
    return {
        "/".join([prefix, *(str(getattr(k, "key", getattr(k, "idx", k))) for k in path)]): (
            np.ascontiguousarray(leaf)
        )
        for path, leaf in jax.tree.leaves_with_path(tree)
        if isinstance(leaf, np.ndarray)
    }
