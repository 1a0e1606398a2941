"""`fedsolve new`: ask for a table, its label and a constraint, and write an experiment's files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import tomli_w
import typer

from fedsolve.cli.console import out
from fedsolve.data.table_files import MISSING, Source, read_rows
from fedsolve.errors import InvalidInput
from fedsolve.experiments.config import resolve
from fedsolve.types import Table

MOST_WORDS = 20  # different words of a column that is taken as categories
CONSTRAINTS = ("none", "sensitivity", "specificity", "demographic_parity", "equal_opportunity")
GAPS = CONSTRAINTS[3:]


def start(folder: Path) -> None:
    """Ask the questions, and write NAME.toml and site.toml into the folder."""
    name = typer.prompt("Name of the experiment", default="study")
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise InvalidInput(f"A name has letters, digits, - and _, got {name!r}.")
    files = [folder / f"{name}.toml", folder / "site.toml"]
    if there := [file for file in files if file.exists()]:
        raise InvalidInput(f"{there[0]} exists already.")
    data = Path(typer.prompt("A CSV or Parquet file, or a folder with one for each site"))
    tables = (
        sorted(data.glob("*.csv")) + sorted(data.glob("*.parquet")) if data.is_dir() else [data]
    )
    if not tables:
        raise InvalidInput(f"There are no CSV or Parquet files in {data}.")
    columns = _columns(tables)
    out.print(f"Its columns: {', '.join(columns)}", markup=False)
    label = _choice("Column to predict", list(columns))
    words = _two_words(label, columns.pop(label))
    positive = _choice("Which of its words is positive", words)
    (negative,) = {*words} - {positive}
    constraint, group = _constraint(columns)
    features = {column: kind for column, values in columns.items() if (kind := _kind(values))}
    left_out = sorted(columns.keys() - features.keys())
    for column in left_out:
        out.print(f"Left out: {column} has too many different words.", markup=False)
    if not features:
        raise InvalidInput("No column is left to predict from.")
    problem: Table = {
        "kind": "tabular",
        "folder": str(data if data.is_dir() else data.parent),
        "test": 0.2,
        "label": {"column": label, "positive": positive, "negative": negative},
        "features": features,
        **constraint,
        **group,
    }
    config: Table = {
        "title": name,
        "run": {"rounds": 100},
        "problem": problem,
        "algorithm": {"kind": "FedSGM", "step_size": 0.5, "tolerance": 0.01, "local_steps": 5}
        if constraint
        else {"kind": "FedAvg", "step_size": 0.5, "local_steps": 5},
    }
    resolve(name, config)  # raises if the files do not fit
    own = {"data": {"loader": "csv", "path": tables[0].name, "test": 0.2}}
    if tables[0].suffix == ".parquet":
        own["data"]["loader"] = "parquet"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files[0].write_text(tomli_w.dumps(config), encoding="utf-8")
        files[1].write_text(tomli_w.dumps(own), encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"Cannot write to {folder}: {error.strerror}.") from None
    out.print(f"Written: {files[0]} and {files[1]} (a start for each site)", markup=False)
    out.print(f"Next: fedsolve run {shlex.quote(str(files[0]))}", markup=False, soft_wrap=True)


def _columns(tables: list[Path]) -> dict[str, list[str]]:
    """Return the columns that all tables have, with their values."""
    found: dict[str, list[str]] = {}
    for number, table in enumerate(tables):
        header, rows = read_rows(table, Source())
        here = {name: [row[at].strip() for row in rows] for at, name in enumerate(header)}
        names = here if number == 0 else found.keys() & here.keys()
        found = {name: found.get(name, []) + here[name] for name in here if name in names}
    return found


def _choice(question: str, among: list[str]) -> str:
    answer = typer.prompt(f"{question} ({', '.join(among)})")
    if answer not in among:
        raise InvalidInput(f"{answer!r} is not one of {', '.join(among)}.")
    return answer


def _two_words(label: str, values: list[str]) -> list[str]:
    words = sorted({*values} - {*MISSING})
    if len(words) != 2:
        shown = ", ".join(words[:MOST_WORDS])
        raise InvalidInput(f"The column {label!r} needs two words, and has {shown}.")
    return words


def _constraint(columns: dict[str, list[str]]) -> tuple[Table, Table]:
    """Ask for a constraint; return its keys of [problem], and those of its group."""
    name = _choice("Constraint", list(CONSTRAINTS))
    if name == "none":
        return {}, {}
    kind = "at_most" if name in GAPS else "at_least"
    bound = typer.prompt(f"{name} must be {kind.replace('_', ' ')}", type=float)
    constraint = {"constraint": {"kind": name, kind: bound}}
    if name not in GAPS:
        return constraint, {}
    two = [column for column, values in columns.items() if len({*values} - {*MISSING}) == 2]
    group = _choice("Column of the groups", two)
    words = sorted({*columns.pop(group)} - {*MISSING})
    of = {"column": group, "unprotected": words[0], "protected": words[1]}
    return constraint, {"group": of}


def _kind(values: list[str]) -> Table | None:
    """Return the table of a feature with these values; None if it cannot be one."""
    there = [value for value in values if value not in MISSING]
    has_gaps = len(there) < len(values)
    words = sorted({*there})
    if words and all(_is_number(value) for value in there):
        return {"kind": "numeric", **({"missing": "mean"} if has_gaps else {})}
    if len(words) == 2 and not has_gaps:
        return {"kind": "binary", "values": words}
    if words and len(words) <= MOST_WORDS:
        own = {"missing": "category"} if has_gaps else {}
        return {"kind": "categorical", "categories": words, **own}
    return None


def _is_number(text: str) -> bool:
    try:
        Source().number(text)
    except ValueError:
        return False
    return True
