"""Read CSV files by a schema that all sites share.

A schema says which columns a table has, and what may be in them. A site may have other names, units
and words in its own file: its `Source` says how they are turned into those of the schema.
"""

from __future__ import annotations

import difflib
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedsolve.data.schema import Feature, Schema, Words
from fedsolve.data.table_files import Source, held_out, read_rows
from fedsolve.errors import InvalidInput


class Issue(NamedTuple):
    """Something in a file that does not fit the schema."""

    kind: str  # such as "missing value"
    row: int  # as a spreadsheet counts: the header is row 1
    column: str
    text: str  # what is wrong there, without the file's name


def load_table(
    schema: Schema,
    path: Path,
    source: Source | None = None,
    labelled: bool = True,
    part: str = "train",
) -> dict[str, np.ndarray]:
    """Return the columns of a file; raise for the first value that does not fit the schema.

    `part` is `"train"`, `"test"` (the rows that the source holds out) or `"all"`.
    """
    columns, issues = read_table(schema, path, source, labelled, part)
    if issues:
        first, others = issues[0], len(issues) - 1
        more = f" ({others} more like this: run `fedsolve deploy check`)" if others else ""
        place = f"{path.name}, row {first.row}, column {first.column!r}"
        raise InvalidInput(f"{place}: {first.text}{more}.")
    return columns


def read_table(
    schema: Schema,
    path: Path,
    source: Source | None = None,
    labelled: bool = True,
    part: str = "all",
) -> tuple[dict[str, np.ndarray], list[Issue]]:
    """Return the columns of a file, and what in it does not fit the schema.

    Numbers are float64, with NaN for missing ones; words are their codes, with −1 for missing ones.
    Categories that are collected stay texts, "" for missing ones.
    """
    source = source or Source()
    for name in source.own.keys() - {c.name for c in schema.columns().values()}:
        raise InvalidInput(f"[data.columns] has {name!r}, which is not a column of the schema.")
    header, rows = read_rows(path, source)
    numbers = np.arange(2, len(rows) + 2)  # as a spreadsheet counts
    if part != "all":
        here = held_out(path, header, rows, source) == (part == "test")
        rows, numbers = [rows[at] for at in np.flatnonzero(here)], numbers[here]
    places: dict[str, int] = {}
    for column in schema.columns(labelled).values():
        places[column.name] = _place(path, header, column.name, source)
    found: dict[str, np.ndarray] = {}
    issues: list[Issue] = []
    for entry, column in schema.columns(labelled).items():
        at, own = places[column.name], source.column(column.name)
        refuses = isinstance(column, Words) or column.missing is None
        if isinstance(column, Feature) and column.collects:
            read = (row[at].strip() for row in rows)
            texts = ["" if text in source.missing else own.words.get(text, text) for text in read]
            found[entry] = np.array(texts, object)
            gaps = np.flatnonzero(found[entry] == "") if refuses else ()
            issues += [Issue("missing value", numbers[g], own.name, NO_VALUE) for g in gaps]
            continue
        values = np.empty(len(rows))
        for number, (place, row) in enumerate(zip(numbers.tolist(), rows, strict=True)):
            text = row[at].strip()
            if text in source.missing:
                value, kind, what = math.nan, "missing value" if refuses else "", NO_VALUE
            else:
                value, kind, what = column.parse(text, source, own)
            values[number] = value
            if kind:
                issues.append(Issue(kind, place, own.name, what))
        is_number = isinstance(column, Feature) and column.is_number
        codes = np.where(np.isnan(values), -1, values).astype(np.int32)
        found[entry] = values if is_number else codes
    return found, sorted(issues, key=lambda issue: issue.row)


NO_VALUE = "the value is missing, and the schema has no `missing` for it"


def _place(path: Path, header: list[str], name: str, source: Source) -> int:
    """Return where a column is in a file."""
    own = source.column(name).name
    if header.count(own) == 1:
        return header.index(own)
    if own in header:
        raise InvalidInput(f"{path.name} has {header.count(own)} columns named {own!r}.")
    close = difflib.get_close_matches(own, header, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]!r}? " if close else f"it has {', '.join(header[:20])}. "
    if len(header) == 1:
        hint = f"it has only {header[0]!r}: is the separator {source.separator!r}? "
    raise InvalidInput(
        f"{path.name} has no column {own!r}; {hint}A site names its own columns in [data.columns]."
    )
