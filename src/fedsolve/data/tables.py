"""Read CSV files by a schema that all sites share.

A schema says which columns a table has, and what may be in them. A site may have other names, units
and words in its own file: its `Source` says how they are turned into those of the schema.
"""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedsolve.data.table_files import (
    Column,
    Source,
    check_keys,
    held_out,
    read_rows,
    words_in,
)
from fedsolve.errors import InvalidInput
from fedsolve.types import Table

KINDS = {
    "numeric": ("missing", "least", "most", "units"),
    "date": ("missing", "least", "most"),
    "categorical": ("missing", "categories"),
    "binary": ("missing", "values"),
}
FIRST_DAY = datetime.date(1970, 1, 1).toordinal()


class Issue(NamedTuple):
    """Something in a file that does not fit the schema."""

    kind: str  # such as "missing value"
    row: int  # as a spreadsheet counts: the header is row 1
    column: str
    text: str  # what is wrong there, without the file's name


@dataclasses.dataclass(frozen=True)
class Feature:
    """A column that a model uses.

    Args:
        name: The column's name.
        kind: `"numeric"`, `"date"` (as 2024-05-31), `"categorical"` or `"binary"`.
        words: What may be in a column of categories, or of two values.
        missing: What stands for a missing value; None if there must be none.
        least: The least value of a number; None for any.
        most: The largest value of a number; None for any.
    """

    name: str
    kind: str
    words: tuple[str, ...] = ()
    missing: float | str | None = None
    least: float | None = None
    most: float | None = None

    @classmethod
    def of(cls, name: str, table: object) -> Feature:
        """Return the feature that a table of a schema describes."""
        where = f"features.{name}"
        kind = _kind(where, table)
        assert isinstance(table, Mapping)
        check_keys(where, table, ("kind", *KINDS[kind]))
        key = {"categorical": "categories", "binary": "values"}.get(kind)
        words = () if key is None else words_in(f"{where}.{key}", table.get(key))
        if kind == "binary" and len(words) != 2:
            raise InvalidInput(f"{where}.values takes two words, got {len(words)}.")
        made = cls(name, kind, words)
        limits = {
            k: made._number(f"{where}.{k}", table[k]) for k in ("least", "most") if k in table
        }
        if limits.get("least", -math.inf) > limits.get("most", math.inf):
            raise InvalidInput(f"{where}.least is above {where}.most.")
        missing = made._substitute(f"{where}.missing", table.get("missing"))
        return dataclasses.replace(made, missing=missing, **limits)

    @property
    def table(self) -> Table:
        """The table of a schema that describes this feature."""
        words = {"categorical": "categories", "binary": "values"}.get(self.kind)
        found = {"kind": self.kind, **({words: list(self.words)} if words else {})}
        for key in ("missing", "least", "most"):
            value = getattr(self, key)
            if isinstance(value, float) and self.kind == "date":
                value = datetime.date.fromordinal(round(value) + FIRST_DAY).isoformat()
            found |= {} if value is None else {key: value}
        return found

    @property
    def is_number(self) -> bool:
        """Whether its values are numbers (a date is one of days)."""
        return self.kind in ("numeric", "date")

    def _number(self, where: str, value: object) -> float:
        """Return a number, or a date as its number, of the schema."""
        if self.kind == "date" and isinstance(value, str):
            return _days(value, where)
        if self.kind == "numeric" and type(value) in (int, float) and math.isfinite(value):  # type: ignore[arg-type]
            return float(value)  # type: ignore[arg-type]
        wanted = 'a date, such as "2024-05-31"' if self.kind == "date" else "a number"
        raise InvalidInput(f"{where} takes {wanted}, got {value!r}.")

    def _substitute(self, where: str, value: object) -> float | str | None:
        """Return what stands for a missing value."""
        if value is None or (self.is_number and value == "mean"):
            return value  # type: ignore[return-value]
        if self.is_number:
            return self._number(where, value)
        if value in self.words or (self.kind == "categorical" and value == "category"):
            return value  # type: ignore[return-value]
        own = ', or "category"' if self.kind == "categorical" else ""
        raise InvalidInput(f"{where} takes one of {', '.join(self.words)}{own}, got {value!r}.")

    def parse(self, text: str, source: Source, own: Column) -> tuple[float, str, str]:
        """Return the value of a text, the kind of what is wrong with it, and what that is."""
        if not self.is_number:
            return _code(self.words, own.words.get(text, text))
        try:
            value = _days(text, "") if self.kind == "date" else source.number(text)
        except (ValueError, InvalidInput):
            what = "a date, such as 2024-05-31" if self.kind == "date" else "a number"
            return math.nan, f"not {what.partition(',')[0]}", f"{text!r} is not {what}"
        if self.kind == "numeric":
            value = value * own.factor + own.offset
        if self.least is not None and value < self.least:
            return math.nan, "out of range", f"{text!r} is below the least value of the schema"
        if self.most is not None and value > self.most:
            return math.nan, "out of range", f"{text!r} is above the largest value of the schema"
        return value, "", ""


@dataclasses.dataclass(frozen=True)
class Words:
    """A column with two words: a label, or a group. The first word is 0, the second is 1."""

    name: str
    words: tuple[str, str]

    @classmethod
    def of(cls, where: str, table: object, keys: tuple[str, str]) -> Words:
        """Return the column that a table describes, with the words under these two keys."""
        if not isinstance(table, Mapping):
            raise InvalidInput(f"{where} takes a table with column, {keys[1]} and {keys[0]}.")
        check_keys(where, table, ("column", *keys))
        for key in ("column", *keys):
            if not isinstance(table.get(key), str) or not table[key]:
                raise InvalidInput(f"{where}.{key} takes a word, got {table.get(key)!r}.")
        words = table[keys[0]], table[keys[1]]
        if words[0] == words[1]:
            raise InvalidInput(f"{where}.{keys[0]} and {where}.{keys[1]} are the same word.")
        return cls(table["column"], words)

    def parse(self, text: str, source: Source, own: Column) -> tuple[float, str, str]:
        """Return the value of a text, the kind of what is wrong with it, and what that is."""
        return _code(self.words, own.words.get(text, text))


@dataclasses.dataclass(frozen=True)
class Schema:
    """The columns that every site's table must have.

    Args:
        features: What the model uses.
        label: What it predicts; with a `time`, whether the event was seen then.
        group: A sensitive group; None for none.
        time: The time of an event, or of the last look, for survival analysis; None for none.
    """

    features: tuple[Feature, ...]
    label: Words
    group: Words | None = None
    time: Feature | None = None

    @classmethod
    def of(cls, features: object, label: object, group: object = None) -> Schema:
        """Return the schema that the tables of an experiment describe."""
        if not isinstance(features, Mapping) or not features:
            raise InvalidInput("features takes a table with an entry for each column.")
        time = None
        if isinstance(label, Mapping) and "time" in label:
            if not isinstance(label["time"], str) or not label["time"]:
                raise InvalidInput(f"label.time takes a column's name, got {label['time']!r}.")
            time = Feature(label["time"], "numeric", least=0.0)
            label = {key: value for key, value in label.items() if key != "time"}
        made = cls(
            tuple(Feature.of(str(name), table) for name, table in features.items()),
            Words.of("label", label, ("negative", "positive")),
            None if group is None else Words.of("group", group, ("unprotected", "protected")),
            time,
        )
        for name in (made.label.name, time.name if time else made.label.name):
            if name in features:
                raise InvalidInput(f"The label {name!r} must not be among the features.")
        return made

    @property
    def tables(self) -> dict[str, Table]:
        """The tables of an experiment that describe this schema."""
        label = {"column": self.label.name, "negative": self.label.words[0]}
        label |= {"positive": self.label.words[1]}
        found: dict[str, Table] = {
            "features": {feature.name: feature.table for feature in self.features},
            "label": label | ({"time": self.time.name} if self.time else {}),
        }
        if self.group is not None:
            low, high = self.group.words
            own = {"column": self.group.name, "unprotected": low, "protected": high}
            found["group"] = own
        return found

    @property
    def numbers(self) -> tuple[Feature, ...]:
        """The features whose values are numbers."""
        return tuple(feature for feature in self.features if feature.is_number)

    def columns(self, labelled: bool = True) -> dict[str, Feature | Words]:
        """Return what is read, by entry; those of a row without a label leave out the rest."""
        found: dict[str, Feature | Words] = {f"feature {f.name}": f for f in self.features}
        if labelled:
            found["label"] = self.label
            if self.time is not None:
                found["time"] = self.time
            if self.group is not None:
                found["group"] = self.group
        return found


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


def _code(words: Sequence[str], text: str) -> tuple[float, str, str]:
    if text in words:
        return float(words.index(text)), "", ""
    known = ", ".join(words[:20])
    return math.nan, "unknown category", f"{text!r} is not one of {known}"


def _days(text: str, where: str) -> float:
    """Return a date as days since 1970."""
    try:
        return float(datetime.date.fromisoformat(text).toordinal() - FIRST_DAY)
    except ValueError:
        raise InvalidInput(f'{where} takes a date, such as "2024-05-31", got {text!r}.') from None


def _kind(where: str, table: object) -> str:
    kind = table.get("kind") if isinstance(table, Mapping) else None
    if kind not in KINDS:
        raise InvalidInput(f"{where} needs a kind: {', '.join(KINDS)}; got {kind!r}.")
    return str(kind)
