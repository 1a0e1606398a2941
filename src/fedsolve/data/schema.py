"""The columns that every site's table must have: kinds, words, ranges, missing values.

An experiment states a schema once; see `tables` for reading a site's own file by it.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Mapping, Sequence

from fedsolve.data.table_files import Column, Source, check_keys, words_in
from fedsolve.errors import InvalidInput
from fedsolve.types import Table

KINDS = {
    "numeric": ("missing", "least", "most", "scaling", "bins", "units"),
    "date": ("missing", "least", "most", "scaling", "bins"),
    "categorical": ("missing", "categories"),
    "binary": ("missing", "values"),
}
SCALINGS = ("deviation", "quartiles")
COLLECT = "collect"  # in place of a list of categories: those that the sites have
MOST_BINS = 100_000
FIRST_DAY = datetime.date(1970, 1, 1).toordinal()


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
        scaling: How a number is made comparable: `"deviation"`, (value − mean) / deviation, or
            `"quartiles"`, (value − median) / (third quartile − first).
        bins: The bins of the histogram from `least` to `most` that gives the median and quartiles.
        collects: Whether its categories are those that the sites have.
    """

    name: str
    kind: str
    words: tuple[str, ...] = ()
    missing: float | str | None = None
    least: float | None = None
    most: float | None = None
    scaling: str = SCALINGS[0]
    bins: int = 1000
    collects: bool = False

    @classmethod
    def of(cls, name: str, table: object) -> Feature:
        """Return the feature that a table of a schema describes."""
        where = f"features.{name}"
        kind = _kind(where, table)
        assert isinstance(table, Mapping)
        check_keys(where, table, ("kind", *KINDS[kind]))
        key = {"categorical": "categories", "binary": "values"}.get(kind)
        collects = kind == "categorical" and table.get(key) == COLLECT
        given = key is not None and not collects
        words = words_in(f"{where}.{key}", table.get(key)) if given else ()
        if kind == "binary" and len(words) != 2:
            raise InvalidInput(f"{where}.values takes two words, got {len(words)}.")
        scaling, bins = table.get("scaling", SCALINGS[0]), table.get("bins", 1000)
        if scaling not in SCALINGS:
            raise InvalidInput(f'{where}.scaling is "deviation" or "quartiles", got {scaling!r}.')
        if type(bins) is not int or not 2 <= bins <= MOST_BINS:
            raise InvalidInput(f"{where}.bins is a number from 2 to {MOST_BINS}, got {bins!r}.")
        made = cls(name, kind, words, scaling=scaling, bins=bins, collects=collects)
        limits = {
            k: made._number(f"{where}.{k}", table[k]) for k in ("least", "most") if k in table
        }
        if limits.get("least", -math.inf) > limits.get("most", math.inf):
            raise InvalidInput(f"{where}.least is above {where}.most.")
        missing = made._substitute(f"{where}.missing", table.get("missing"))
        made = dataclasses.replace(made, missing=missing, **limits)
        if made.needs_quartiles and not limits.get("least", 0.0) < limits.get("most", 0.0):
            raise InvalidInput(
                f"{where} needs least and most, least below most: the median and the quartiles are "
                "taken from a histogram between them."
            )
        return made

    @property
    def table(self) -> Table:
        """The table of a schema that describes this feature."""
        words = {"categorical": "categories", "binary": "values"}.get(self.kind)
        found = {"kind": self.kind, **({words: list(self.words)} if words else {})}
        if self.collects:
            found["categories"] = COLLECT
        for key in ("scaling", "bins"):
            if self.is_number and getattr(self, key) != getattr(Feature, key):
                found[key] = getattr(self, key)
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

    @property
    def needs_quartiles(self) -> bool:
        """Whether its median, or its quartiles, are used."""
        return self.missing == "median" or self.scaling == "quartiles"

    @property
    def ends(self) -> tuple[float, float]:
        """Between which values a histogram is taken."""
        assert self.least is not None
        assert self.most is not None
        return self.least, self.most

    @property
    def is_category(self) -> bool:
        """Whether it has an input for each of its words."""
        return self.kind == "categorical"

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
        if value is None or (self.is_number and value in ("mean", "median")):
            return value  # type: ignore[return-value]
        if self.is_number:
            return self._number(where, value)
        if value in self.words or (self.kind == "categorical" and value == "category"):
            return value  # type: ignore[return-value]
        if self.collects:
            raise InvalidInput(f'{where} takes "category" where categories are collected.')
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
    """A column of few words: a label, or a group. The first word is 0, the second is 1."""

    name: str
    words: tuple[str, ...]
    named: bool = False  # whether a group has a list of categories

    @classmethod
    def of_group(cls, where: str, table: object) -> Words:
        """Return the column of a group: with two words, or with a list of `categories`."""
        if not isinstance(table, Mapping) or "categories" not in table:
            return cls.of(where, table, ("unprotected", "protected"))
        check_keys(where, table, ("column", "categories"))
        if not isinstance(table.get("column"), str) or not table["column"]:
            raise InvalidInput(f"{where}.column takes a word, got {table.get('column')!r}.")
        words = words_in(f"{where}.categories", table["categories"])
        if len(words) < 2:
            raise InvalidInput(f"{where}.categories takes two words or more.")
        return cls(table["column"], words, named=True)

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

    @property
    def group_table(self) -> Table:
        """The table of an experiment that describes this column as a group."""
        if self.named:
            return {"column": self.name, "categories": list(self.words)}
        low, high = self.words
        return {"column": self.name, "unprotected": low, "protected": high}

    def parse(self, text: str, source: Source, own: Column) -> tuple[float, str, str]:
        """Return the value of a text, the kind of what is wrong with it, and what that is."""
        return _code(self.words, own.words.get(text, text))


@dataclasses.dataclass(frozen=True)
class Schema:
    """The columns that every site's table must have.

    Args:
        features: What the model uses.
        label: What it predicts; with a `time`, whether the event was seen then.
        groups: Columns of sensitive groups.
        time: The time of an event, or of the last look, for survival analysis; None for none.
    """

    features: tuple[Feature, ...]
    label: Words
    groups: tuple[Words, ...] = ()
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
            _groups(group),
            time,
        )
        for name in (made.label.name, time.name if time else made.label.name):
            if name in features:
                raise InvalidInput(f"The label {name!r} must not be among the features.")
        return made

    @property
    def tables(self) -> Table:
        """The tables of an experiment that describe this schema."""
        label = {"column": self.label.name, "negative": self.label.words[0]}
        label |= {"positive": self.label.words[1]}
        found: Table = {
            "features": {feature.name: feature.table for feature in self.features},
            "label": label | ({"time": self.time.name} if self.time else {}),
        }
        if self.groups:
            own = [group.group_table for group in self.groups]
            found["group"] = own[0] if len(own) == 1 else own
        return found

    @property
    def group_entries(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """Of each group's column: the entry of a site's arrays, and the words of its codes."""
        return {
            group.name: (
                "protected" if number == 0 and not group.named else f"group_{group.name}",
                group.words,
            )
            for number, group in enumerate(self.groups)
        }

    @property
    def collected(self) -> tuple[Feature, ...]:
        """The features whose categories are collected from the sites."""
        return tuple(feature for feature in self.features if feature.collects)

    def with_words(self, words: Mapping[str, tuple[str, ...]]) -> Schema:
        """Return the schema with these categories for collected features."""
        features = (
            dataclasses.replace(feature, words=words.get(feature.name, feature.words))
            for feature in self.features
        )
        return dataclasses.replace(self, features=tuple(features))

    @property
    def is_exchanged(self) -> bool:
        """Whether something of the features is to be found from all sites' rows."""
        return bool(self.numbers or self.collected)

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
            found |= {f"group {group.name}": group for group in self.groups}
        return found


def _groups(given: object) -> tuple[Words, ...]:
    """Return the columns of groups that a table, or a list of tables, describes."""
    if given is None:
        return ()
    if not isinstance(given, list):
        return (Words.of_group("group", given),)
    found = tuple(Words.of_group(f"group[{n}]", table) for n, table in enumerate(given))
    names = [group.name for group in found]
    if len({*names}) < len(names):
        raise InvalidInput(f"group has a column twice: {', '.join(names)}.")
    return found


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
