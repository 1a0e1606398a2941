"""Files of tables, as their owners keep them: CSV, Parquet, Arrow, and the parts held out of them.

A `Source` says how a site's file is written, which names, units and words it has, and which rows
are held out for tests. All kinds of files become a header and rows of texts.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import hashlib
import io
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedsolve.errors import InvalidInput
from fedsolve.fields import check_count
from fedsolve.types import Table

if TYPE_CHECKING:
    import pyarrow

MISSING = ("", "NA", "N/A", "NaN", "nan", "null")
PARTS = ("train", "test", "all")
SAMPLES = 5  # the least rows behind what leaves a site, if its owner says nothing else
TABLES = ("csv", "parquet", "arrow")  # loaders of tables


def read_toml(path: Path) -> Table:
    """Return a site's file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidInput(f"Cannot read {path}: {error}.") from error


def data_of(path: Path) -> Table:
    """Return the table [data] of a site's file."""
    data = read_toml(path).get("data")
    if not isinstance(data, dict):
        raise InvalidInput(f"{path}: there is no table [data].")
    return data


def files_of(path: Path) -> list[Path]:
    """Return the files that a site's file names, relative to its own folder."""
    data = data_of(path)
    named = data.get("path")
    names = [named] if isinstance(named, str) else named
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        loader = data.get("loader")
        raise InvalidInput(f'{path}: loader = "{loader}" needs a path, or a list of paths.')
    return [Path(path.parent, name) for name in names]


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
        test: The part of the rows that is held out for tests.
        key: The site's own columns, such as a patient's number, that decide which rows are held
            out; empty for all columns. Rows of equal keys go to the same part, whatever other
            rows there are.
        samples: The least rows behind a category, or behind a part of a histogram, that this site
            sends (`samples` under `[limits]`).
        sends_words: Whether it sends categories at all (`words` under `[limits]`).
    """

    separator: str = ","
    decimal: str = "."
    encoding: str = "utf-8-sig"
    missing: tuple[str, ...] = MISSING
    own: Mapping[str, Column] = dataclasses.field(default_factory=dict)
    test: float = 0.0
    key: tuple[str, ...] = ()
    samples: int = SAMPLES
    sends_words: bool = True

    @classmethod
    def of_site(cls, path: Path) -> Source:
        """Return what a site's file says in [data] and [limits]."""
        limits = read_toml(path).get("limits", {})
        samples, words = limits.get("samples", SAMPLES), limits.get("words", True)
        check_count("limits.samples", samples)
        if not isinstance(words, bool):
            raise InvalidInput("limits.words takes true or false.")
        return dataclasses.replace(cls.of(data_of(path)), samples=samples, sends_words=words)

    @classmethod
    def of(cls, table: Table) -> Source:
        """Return what a site's table [data] says about its files."""
        keys = ("separator", "decimal", "encoding", "missing", "columns", "test", "key")
        check_keys("[data]", table, ("loader", "path", *keys))
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
            found["missing"] = ("", *words_in("[data] missing", table["missing"]))
        found["test"] = held_out_part("[data] test", table.get("test", 0.0))
        key = table.get("key", [])
        found["key"] = words_in("[data] key", [key] if isinstance(key, str) else key) if key else ()
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


Rows = tuple[list[str], list[list[str]]]  # a header, and rows of the same length


def held_out_part(where: str, value: object) -> float:
    """Return the part of the rows that is held out; raise unless it is from 0 to below 1."""
    if type(value) not in (int, float) or not 0 <= value < 1:  # type: ignore[operator]
        raise InvalidInput(f"{where} is a part of the rows, at least 0 and below 1, got {value!r}.")
    return float(value)  # type: ignore[arg-type]


def held_out(path: Path, header: list[str], rows: list[list[str]], source: Source) -> np.ndarray:
    """Return which rows are held out for tests: those whose key has a small SHA-256.

    So it depends on nothing but the key: rows that come or go later move no other row.
    """
    if source.test == 0:
        return np.zeros(len(rows), bool)
    if absent := [name for name in source.key if name not in header]:
        raise InvalidInput(f"{path.name} has no column {absent[0]!r}, which is [data] key.")
    places = [header.index(name) for name in source.key] or range(len(header))
    keys = ("\x1f".join(row[at].strip() for at in places) for row in rows)
    return np.array([_share(key) < source.test for key in keys], bool)


def _share(key: str) -> float:
    """Return a number from 0 to 1 that a key always has."""
    digest = hashlib.sha256(f"fedsolve held out {key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def read_rows(path: Path, source: Source) -> Rows:
    """Return a file's header and its rows as texts: CSV, or Parquet or Arrow by its name."""
    if path.is_dir() or path.suffix in (".parquet", ".arrow"):
        return _read_arrow_rows(path)
    return _read_csv_rows(path, source)


def arrow_files(path: Path) -> list[Path]:
    """Return the files of a Parquet or Arrow data set: itself, or those of its folder, by name.

    A folder may be one that `datasets.Dataset.save_to_disk` of Hugging Face has written.
    """
    if not path.is_dir():
        return [path]
    found = sorted(f for f in path.iterdir() if f.suffix in (".parquet", ".arrow"))
    if not found:
        raise InvalidInput(f"{path.name} has no .parquet or .arrow files.")
    return found


def arrow_table(path: Path) -> pyarrow.Table:
    """Read the Parquet or Arrow files of a path as one table."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise InvalidInput(
            "Parquet and Arrow files need pyarrow: pip install 'fedsolve[tables]'."
        ) from None
    tables = []
    for file in arrow_files(path):
        try:
            if file.suffix == ".parquet":
                tables.append(pq.read_table(file))
            else:
                with pa.memory_map(str(file)) as mapped:
                    tables.append(_opened(pa, mapped).read_all())
        except (OSError, pa.ArrowInvalid) as error:
            raise InvalidInput(f"{file.name} cannot be read: {str(error).rstrip('.')}.") from None
    try:
        return pa.concat_tables(tables)
    except pa.ArrowInvalid:
        raise InvalidInput(f"The files in {path.name} have different columns.") from None


def _opened(pa: ModuleType, mapped: pyarrow.MemoryMappedFile) -> pyarrow.RecordBatchReader:
    """Open an Arrow file of either format: a stream, as Hugging Face writes it, or a file."""
    try:
        return pa.ipc.open_stream(mapped)
    except pa.ArrowInvalid:
        mapped.seek(0)
        return pa.ipc.open_file(mapped)


def _read_arrow_rows(path: Path) -> Rows:
    """Return the header and the rows of Parquet or Arrow files as texts."""
    table = arrow_table(path)
    if table.num_rows == 0:
        raise InvalidInput(f"{path.name} has a header but no rows.")
    columns = [[_text(value) for value in column.to_pylist()] for column in table.columns]
    return list(table.column_names), [list(row) for row in zip(*columns, strict=True)]


def _text(value: object) -> str:
    """Return a value of a typed table as a CSV file would have it."""
    if value is None or value != value:  # NaN
        return ""
    if isinstance(value, datetime.datetime):
        value = value.date() if value.time() == datetime.time() else value
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _read_csv_rows(path: Path, source: Source) -> Rows:
    """Return a CSV file's header and its rows."""
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


def words_in(where: str, value: object) -> tuple[str, ...]:
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
    check_keys(where, entry, Column._fields, {"name": "column"})
    words = entry.get("words", {})
    if not isinstance(words, Mapping) or not all(isinstance(w, str) for w in words.values()):
        raise InvalidInput(f"{where}: words takes a table of words, got {words!r}.")
    for key in ("factor", "offset"):
        if type(entry.get(key, 1.0)) not in (int, float):
            raise InvalidInput(f"{where}: {key} takes a number, got {entry[key]!r}.")
    own = str(entry.get("column", name))
    factor, offset = float(entry.get("factor", 1.0)), float(entry.get("offset", 0.0))
    return Column(own, factor, offset, dict(words))


def check_keys(
    where: str, table: Mapping, known: Sequence[str], other: Mapping[str, str] | None = None
) -> None:
    """Raise for a key that is not known."""
    names = [(other or {}).get(key, key) for key in known]
    for key in table:
        if key not in names:
            raise InvalidInput(f"{where} has no key {key!r}; known: {', '.join(names)}.")
