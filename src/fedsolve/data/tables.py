"""Read CSV files by a schema that all sites share.

A schema says which columns a table has, and what may be in them. A site may have other names, units
and words in its own file: its `Source` says how they are turned into those of the schema.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import difflib
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedsolve.errors import InvalidInput
from fedsolve.types import Table

KINDS = {
    "numeric": ("missing", "least", "most", "units"),
    "date": ("missing", "least", "most"),
    "categorical": ("missing", "categories"),
    "binary": ("missing", "values"),
}
MISSING = ("", "NA", "N/A", "NaN", "nan", "null")
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
        _check_keys(where, table, ("kind", *KINDS[kind]))
        key = {"categorical": "categories", "binary": "values"}.get(kind)
        words = () if key is None else _words(f"{where}.{key}", table.get(key))
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
        _check_keys(where, table, ("column", *keys))
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
        label: What it predicts.
        group: A sensitive group; None for none.
    """

    features: tuple[Feature, ...]
    label: Words
    group: Words | None = None

    @classmethod
    def of(cls, features: object, label: object, group: object = None) -> Schema:
        """Return the schema that the tables of an experiment describe."""
        if not isinstance(features, Mapping) or not features:
            raise InvalidInput("features takes a table with an entry for each column.")
        made = cls(
            tuple(Feature.of(str(name), table) for name, table in features.items()),
            Words.of("label", label, ("negative", "positive")),
            None if group is None else Words.of("group", group, ("unprotected", "protected")),
        )
        if made.label.name in features:
            raise InvalidInput(f"The label {made.label.name!r} must not be among the features.")
        return made

    @property
    def numbers(self) -> tuple[Feature, ...]:
        """The features whose values are numbers."""
        return tuple(feature for feature in self.features if feature.is_number)

    def columns(self, labelled: bool = True) -> dict[str, Feature | Words]:
        """Return what is read, by entry; those of a row without a label leave out the rest."""
        found: dict[str, Feature | Words] = {f"feature {f.name}": f for f in self.features}
        if labelled:
            found["label"] = self.label
            if self.group is not None:
                found["group"] = self.group
        return found


class Column(NamedTuple):
    """How a site's own column becomes one of the schema: value · factor + offset."""

    name: str
    factor: float = 1.0
    offset: float = 0.0
    words: Mapping[str, str] = {}


@dataclasses.dataclass(frozen=True)
class Source:
    """How a site's file is written.

    Args:
        separator: What stands between the values of a row.
        decimal: The decimal sign.
        encoding: The file's encoding.
        missing: The texts that mean a missing value.
        own: The site's own columns, by the names of the schema.
    """

    separator: str = ","
    decimal: str = "."
    encoding: str = "utf-8-sig"
    missing: tuple[str, ...] = MISSING
    own: Mapping[str, Column] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, table: Table) -> Source:
        """Return what a site's table [data] says about its files."""
        keys = ("separator", "decimal", "encoding", "missing", "columns")
        _check_keys("[data]", table, ("loader", "path", *keys))
        found: Table = {}
        for key in ("separator", "decimal", "encoding"):
            if key in table:
                if not isinstance(table[key], str) or not table[key]:
                    raise InvalidInput(f"[data] {key} takes a text, got {table[key]!r}.")
                found[key] = table[key]
        for key in ("separator", "decimal"):
            if len(found.get(key, ",")) != 1:
                raise InvalidInput(f"[data] {key} takes one character, got {found[key]!r}.")
        if "missing" in table:
            found["missing"] = ("", *_words("[data] missing", table["missing"]))
        own = table.get("columns", {})
        if not isinstance(own, Mapping):
            raise InvalidInput(f"[data] columns takes a table, got {own!r}.")
        found["own"] = {name: _column(name, entry) for name, entry in own.items()}
        return cls(**found)

    def column(self, name: str) -> Column:
        """Return the site's own column for one of the schema."""
        return self.own.get(name, Column(name))

    def number(self, text: str) -> float:
        """Return a text as a number; raise `ValueError` if it is none."""
        if self.decimal != ".":
            text = text.replace(".", "?").replace(self.decimal, ".")
        value = math.nan if "_" in text else float(text)
        if not math.isfinite(value):
            raise ValueError(text)
        return value


def load_table(
    schema: Schema, path: Path, source: Source | None = None, labelled: bool = True
) -> dict[str, np.ndarray]:
    """Return the columns of a file; raise for the first value that does not fit the schema."""
    columns, issues = read_table(schema, path, source, labelled)
    if issues:
        first, others = issues[0], len(issues) - 1
        more = f" ({others} more like this: run `fedsolve deploy check`)" if others else ""
        place = f"{path.name}, row {first.row}, column {first.column!r}"
        raise InvalidInput(f"{place}: {first.text}{more}.")
    return columns


def read_table(
    schema: Schema, path: Path, source: Source | None = None, labelled: bool = True
) -> tuple[dict[str, np.ndarray], list[Issue]]:
    """Return the columns of a file, and what in it does not fit the schema.

    Numbers are float64, with NaN for missing ones; words are their codes, with −1 for missing ones.
    """
    source = source or Source()
    for name in source.own.keys() - {c.name for c in schema.columns().values()}:
        raise InvalidInput(f"[data.columns] has {name!r}, which is not a column of the schema.")
    header, rows = read_rows(path, source)
    places: dict[str, int] = {}
    for column in schema.columns(labelled).values():
        places[column.name] = _place(path, header, column.name, source)
    found: dict[str, np.ndarray] = {}
    issues: list[Issue] = []
    for entry, column in schema.columns(labelled).items():
        at, own = places[column.name], source.column(column.name)
        refuses = isinstance(column, Words) or column.missing is None
        values = np.empty(len(rows))
        for number, row in enumerate(rows):
            text = row[at].strip()
            if text in source.missing:
                value, kind, what = math.nan, "missing value" if refuses else "", NO_VALUE
            else:
                value, kind, what = column.parse(text, source, own)
            values[number] = value
            if kind:
                issues.append(Issue(kind, number + 2, own.name, what))
        is_number = isinstance(column, Feature) and column.is_number
        codes = np.where(np.isnan(values), -1, values).astype(np.int32)
        found[entry] = values if is_number else codes
    return found, sorted(issues, key=lambda issue: issue.row)


NO_VALUE = "the value is missing, and the schema has no `missing` for it"


def read_rows(path: Path, source: Source) -> tuple[list[str], list[list[str]]]:
    """Return a file's header and its rows, all of the same length."""
    try:
        raw = path.read_bytes()
        text = raw.decode(source.encoding)
    except OSError as error:
        raise InvalidInput(f"{path.name} cannot be read: {error.strerror}.") from None
    except LookupError:
        raise InvalidInput(f"[data] encoding: there is no {source.encoding!r}.") from None
    except UnicodeDecodeError as error:
        row = error.object[: error.start].count(b"\n") + 1
        name = source.encoding.removesuffix("-sig")
        raise InvalidInput(
            f"{path.name}, row {row}: the text is not {name}; save the file as UTF-8, or name its "
            'encoding in [data], such as encoding = "latin-1".'
        ) from None
    try:
        lines = csv.reader(io.StringIO(text, newline=""), delimiter=source.separator, strict=True)
        found = [line for line in lines if any(each.strip() for each in line)]
    except csv.Error as error:
        raise InvalidInput(f"{path.name} is not a CSV file: {error}.") from None
    if not found:
        raise InvalidInput(f"{path.name} is empty.")
    header, rows = [name.strip() for name in found[0]], found[1:]
    if not rows:
        raise InvalidInput(f"{path.name} has a header but no rows.")
    for number, row in enumerate(rows):
        if len(row) != len(header):
            raise InvalidInput(
                f"{path.name}, row {number + 2}: it has {len(row)} values, and the header has "
                f"{len(header)}."
            )
    return header, rows


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


def _words(where: str, value: object) -> tuple[str, ...]:
    """Return a list of different words."""
    words = value if isinstance(value, list) else []
    if words and all(isinstance(each, str) for each in words) and len({*words}) == len(words):
        return tuple(words)
    raise InvalidInput(f"{where} takes a list of different words, got {value!r}.")


def _column(name: str, entry: object) -> Column:
    """Return a site's own column."""
    where = f"[data.columns] {name}"
    if isinstance(entry, str):
        return Column(entry)
    if not isinstance(entry, Mapping):
        raise InvalidInput(f"{where} takes the name of a column or a table, got {entry!r}.")
    _check_keys(where, entry, Column._fields, {"name": "column"})
    words = entry.get("words", {})
    if not isinstance(words, Mapping) or not all(isinstance(w, str) for w in words.values()):
        raise InvalidInput(f"{where}: words takes a table of words, got {words!r}.")
    for key in ("factor", "offset"):
        if type(entry.get(key, 1.0)) not in (int, float):
            raise InvalidInput(f"{where}: {key} takes a number, got {entry[key]!r}.")
    own = str(entry.get("column", name))
    factor, offset = float(entry.get("factor", 1.0)), float(entry.get("offset", 0.0))
    return Column(own, factor, offset, dict(words))


def _check_keys(
    where: str, table: Mapping, known: Sequence[str], other: Mapping[str, str] | None = None
) -> None:
    """Raise for a key that is not known."""
    names = [(other or {}).get(key, key) for key in known]
    for key in table:
        if key not in names:
            raise InvalidInput(f"{where} has no key {key!r}; known: {', '.join(names)}.")
