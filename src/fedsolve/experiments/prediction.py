"""Predictions of a finished run on a new table: `fedsolve predict`."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Array, Float

from fedsolve.data.preprocessing import Preprocessing
from fedsolve.data.table_files import Source
from fedsolve.data.tables import load_table
from fedsolve.errors import InvalidInput
from fedsolve.experiments.audit import saved_params
from fedsolve.experiments.config import Experiment, read, resolve, with_key
from fedsolve.experiments.run_folder import PREPROCESSING
from fedsolve.storage.atomic import write_atomically


def predict(
    folder: str | Path,
    table: str | Path,
    run: str | None = None,
    model: str = "best",
    source: Source | None = None,
) -> dict[str, np.ndarray]:
    """Predict the rows of a new table by the model and the preprocessing of a finished run.

    Args:
        folder: The folder of a run of the problem `tabular`.
        table: A CSV or Parquet file with the features; it needs no label.
        run: Which run, such as `"soft/seed-0"`; None if there is only one.
        model: The parameters: `"best"`, `"last"` or `"average"`.
        source: How the file is written; None for the schema's own names, units and words.

    Returns:
        By column, one value a row: the `row` of the file (the header is 1), and the `probability`
        of the positive word with the `prediction`; for Cox regression the `risk`, relative to a
        patient with all inputs 0.

    Raises:
        InvalidInput: If the folder has no such run, or the table does not fit its schema.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import fedsolve as fs
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     data = Path(folder, "data")
        ...     data.mkdir()
        ...     text = "age,died 70,yes 30,no".replace(" ", chr(10))
        ...     _ = (data / "north.csv").write_text(text)
        ...     label = {"column": "died", "positive": "yes", "negative": "no"}
        ...     problem = {"kind": "tabular", "folder": str(data), "label": label}
        ...     problem["features"] = {"age": {"kind": "numeric"}}
        ...     config = {"problem": problem, "run": {"rounds": 20}}
        ...     config["algorithm"] = {"kind": "FedAvg", "step_size": 1.0}
        ...     experiment = fs.experiments.resolve("died", config)
        ...     done = fs.experiments.run(experiment, out=Path(folder, "run"))
        ...     _ = (data / "new.csv").write_text("age 80 20".replace(" ", chr(10)))
        ...     found = fs.experiments.predict(done.folder, data / "new.csv")
        >>> found["prediction"].tolist()
        ['yes', 'no']
    """
    folder = Path(folder)
    name, kept = _preprocessing(folder, run)
    problem, _ = _experiment(folder, kept).cell(*_variant_and_seed(name))
    params = saved_params(folder, name, model, problem)
    preprocessing = Preprocessing.from_json(kept)
    columns = load_table(preprocessing.schema, Path(table), source, labelled=False, part="all")
    inputs = preprocessing.inputs(columns)
    scores = np.asarray(_scores(params, inputs), float)
    found = {"row": np.arange(2, len(scores) + 2)}
    if preprocessing.schema.time is not None:
        return found | {"risk": np.exp(scores)}
    words = np.asarray(preprocessing.schema.label.words)
    probability = 1 / (1 + np.exp(-scores))
    return found | {"probability": probability, "prediction": words[(scores > 0).astype(int)]}


def write_csv(found: dict[str, np.ndarray], path: Path) -> None:
    """Write predictions as a CSV file."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(found)
    for row in zip(*(column.tolist() for column in found.values()), strict=True):
        writer.writerow([f"{v:.6g}" if isinstance(v, float) else v for v in row])
    try:
        write_atomically(path, text.getvalue().encode())
    except OSError as error:
        raise InvalidInput(f"Cannot write to {path}: {error.strerror}.") from None


def _scores(params: object, inputs: np.ndarray) -> Float[Array, " rows"]:
    return jax.vmap(params)(inputs.astype(np.float32))  # type: ignore[arg-type]


def _preprocessing(folder: Path, run: str | None) -> tuple[str, dict]:
    """Return a run's name and what it kept of its preprocessing."""
    try:
        found = json.loads((folder / PREPROCESSING).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidInput(
            f"{folder} is not the folder of a finished run on tables: it has no {PREPROCESSING}."
        ) from None
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{folder / PREPROCESSING} cannot be read: {error}.") from None
    if run is None and len(found) > 1:
        raise InvalidInput(f"Say which run with --run: {', '.join(found)}.")
    name = next(iter(found)) if run is None else run
    if name not in found:
        raise InvalidInput(f"There is no run {name!r}; there are {', '.join(found)}.")
    return name, found[name]


def _variant_and_seed(name: str) -> tuple[str, int]:
    variant, _, seed = name.rpartition("seed-")
    return variant.rstrip("/"), int(seed)


def _experiment(folder: Path, kept: dict) -> Experiment:
    """Return the run's experiment without its files, which may be elsewhere by now."""
    config = read(folder / "config.toml")
    problem = {k: v for k, v in config["problem"].items() if k not in ("folder", "test")}
    changed = with_key(config, "problem", problem | {"fitted": kept["fitted"]})
    return resolve(folder.name, changed)
