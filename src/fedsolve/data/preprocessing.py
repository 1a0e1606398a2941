"""From columns of a table to the inputs of a model, in the same way at every site.

Numbers are standardised, x = (value − mean) / deviation, with the mean and the deviation over the
values that are there, of all sites together. Sites send three sums of each column: how many values
are there, Σ value, and then Σ (value − mean)². The result is that of the pooled table. Where a
schema wants a median or quartiles, sites send a histogram, too; see `histograms`.

Categories are those of the schema, or those that the sites have (`collected`); one input for each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from fedsolve.data.collected import cells_of, together, words_in_cells, words_of
from fedsolve.data.histograms import histogram_of, quantiles_of
from fedsolve.data.schema import Feature, Schema
from fedsolve.data.table_files import SAMPLES, Source
from fedsolve.errors import InvalidInput
from fedsolve.types import Table

Columns = Mapping[str, np.ndarray]
Arrays = dict[str, np.ndarray]
Fitted = dict[str, Table]  # of each number: mean and deviation; of categories: their list
QUARTILES = (0.25, 0.5, 0.75)


@dataclasses.dataclass(frozen=True)
class Number:
    """What is known of a feature that is a number, over all sites."""

    mean: float
    deviation: float
    quartiles: tuple[float, float, float] | None = None

    @classmethod
    def of(cls, feature: Feature, entry: object) -> Number:
        """Return what a table of a configuration says."""
        wanted = "mean and deviation" + (", and quartiles" if feature.needs_quartiles else "")
        try:
            assert isinstance(entry, Mapping)
            found = cls(float(entry["mean"]), float(entry["deviation"]))
            if feature.needs_quartiles:
                low, median, high = map(float, entry["quartiles"])
                found = dataclasses.replace(found, quartiles=(low, median, high))
        except (AssertionError, KeyError, TypeError, ValueError):
            raise InvalidInput(f"fitted.{feature.name} takes a table with {wanted}.") from None
        values = (found.mean, found.deviation, *(found.quartiles or ()))
        if not np.isfinite(values).all() or not found.deviation > 0:
            raise InvalidInput(f"fitted.{feature.name} must be finite, its deviation positive.")
        if found.quartiles is not None and list(found.quartiles) != sorted(found.quartiles):
            raise InvalidInput(f"fitted.{feature.name}.quartiles must not decrease.")
        return found

    @property
    def table(self) -> Table:
        """The table of a configuration that says the same."""
        found: Table = {"mean": self.mean, "deviation": self.deviation}
        return found | ({} if self.quartiles is None else {"quartiles": list(self.quartiles)})

    def inputs(self, feature: Feature, values: np.ndarray) -> np.ndarray:
        """Fill missing values, and make the others comparable."""
        low, median, high = self.quartiles or (np.nan, np.nan, np.nan)
        own = {"mean": self.mean, "median": median}
        instead = feature.missing
        instead = instead if isinstance(instead, float) else own.get(str(instead), np.nan)
        values = np.where(np.isnan(values), instead, values)
        if feature.scaling == "quartiles":
            return (values - median) / (high - low if high > low else 1.0)
        return (values - self.mean) / self.deviation


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """Turns columns into inputs.

    Args:
        schema: The columns, with collected categories filled in.
        numbers: What is known of each feature that is a number, by name.
    """

    schema: Schema
    numbers: tuple[tuple[str, Number], ...]

    @classmethod
    def of(cls, schema: Schema, fitted: Mapping[str, object]) -> Preprocessing:
        """Return what means, deviations and categories from a configuration describe."""
        numbers = [(each.name, Number.of(each, fitted.get(each.name))) for each in schema.numbers]
        words = {each.name: _categories(each, fitted.get(each.name)) for each in schema.collected}
        if unknown := fitted.keys() - {name for name, _ in numbers} - words.keys():
            raise InvalidInput(f"fitted.{min(unknown)} is not a numeric feature, nor collected.")
        return cls(schema.with_words(words), tuple(numbers))

    @classmethod
    def neutral(cls, schema: Schema) -> Preprocessing:
        """Return what leaves numbers as they are, for the shapes of inputs alone."""
        fitted: Fitted = {each.name: {"categories": []} for each in schema.collected}
        for each in schema.numbers:
            quartiles = (-1.0, 0.0, 1.0) if each.needs_quartiles else None
            fitted[each.name] = Number(0.0, 1.0, quartiles).table
        return cls.of(schema, fitted)

    @property
    def fitted(self) -> Fitted:
        """The means, deviations and categories, as a configuration has them."""
        words: Fitted = {f.name: {"categories": list(f.words)} for f in self.schema.collected}
        return {name: number.table for name, number in self.numbers} | words

    def to_json(self) -> Table:
        """Return the schema, and what was found of the sites' rows, for `from_json`."""
        return {**self.schema.tables, "fitted": self.fitted}

    @classmethod
    def from_json(cls, found: Mapping[str, Table]) -> Preprocessing:
        """Return what `to_json` has described."""
        schema = Schema.of(found["features"], found["label"], found.get("group"))
        return cls.of(schema, found["fitted"])

    @property
    def names(self) -> list[str]:
        """The names of the inputs."""
        found = []
        for feature in self.schema.features:
            words = (*feature.words, *_own_inputs(feature)) if feature.is_category else ()
            found += [f"{feature.name}={word}" for word in words] or [feature.name]
        return found

    def inputs(self, columns: Columns) -> np.ndarray:
        """Compute the inputs of every row."""
        numbers = dict(self.numbers)
        found = []
        for feature in self.schema.features:
            values = columns[f"feature {feature.name}"]
            if feature.is_number:
                found.append(numbers[feature.name].inputs(feature, values)[:, None])
            else:
                found.append(_word_inputs(feature, values))
        return np.concatenate(found, axis=1)

    def arrays(self, columns: Columns) -> Arrays:
        """Compute inputs `x`, labels `y` and, for groups, `protected` or `group_COLUMN`.

        With a time it is `time` and `event` in place of `y`.
        """
        label = columns["label"].astype(np.int8)
        found = {"x": self.inputs(columns)}
        found |= {"event": label, "time": columns["time"]} if "time" in columns else {"y": label}
        for name, (entry, _) in self.schema.group_entries.items():
            if f"group {name}" in columns:
                found[entry] = columns[f"group {name}"].astype(np.int8)
        return found


MISSING_INPUT, OTHER_INPUT = "(missing)", "(other)"


def _categories(feature: Feature, entry: object) -> tuple[str, ...]:
    """Return the list of collected categories that a table of a configuration has."""
    words = entry.get("categories") if isinstance(entry, Mapping) else None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise InvalidInput(f"fitted.{feature.name} takes a table with a list of categories.")
    return tuple(words)


def _own_inputs(feature: Feature) -> tuple[str, ...]:
    """Return the inputs of categories beside their words: for others, and for missing ones."""
    other = (OTHER_INPUT,) if feature.collects else ()
    is_own = feature.missing == "category" and "category" not in feature.words
    return (*other, MISSING_INPUT) if is_own or (other and feature.missing) else other


def _word_inputs(feature: Feature, codes: np.ndarray) -> np.ndarray:
    """Return one column for each word; for a feature of two values, one column of 0 and 1."""
    own = _own_inputs(feature)
    if feature.collects:
        place = {word: code for code, word in enumerate(feature.words)} | {"": -1}
        codes = np.array([place.get(text, len(place) - 1) for text in codes.tolist()], int)
    if MISSING_INPUT in own:
        codes = np.where(codes < 0, len(feature.words) + len(own) - 1, codes)
    elif feature.missing is not None:
        codes = np.where(codes < 0, feature.words.index(str(feature.missing)), codes)
    if feature.kind == "binary":
        return codes[:, None].astype(float)
    return np.eye(len(feature.words) + len(own))[codes]


def numbers_of(schema: Schema, columns: Columns) -> Arrays:
    """Return the values of all numbers, 0 where one is missing, and which are `known`."""
    found = [columns[f"feature {feature.name}"] for feature in schema.numbers]
    values = np.stack(found, axis=1)
    return {"values": np.nan_to_num(values, nan=0.0), "known": ~np.isnan(values)}


def tables_of(schema: Schema, columns: Columns, samples: int) -> Arrays:
    """Return a client's histograms and cells of words, by entry."""
    found: Arrays = {}
    for feature in schema.features:
        values = columns[f"feature {feature.name}"]
        if feature.collects:
            found[f"words {feature.name}"] = cells_of(words_of(feature.name, values, samples))
        elif feature.needs_quartiles:
            known = values[~np.isnan(values)]
            least, most = feature.ends
            found[f"histogram {feature.name}"] = histogram_of(
                known, least, most, feature.bins, samples
            )
    return found


def fit(schema: Schema, clients: Sequence[Columns], sources: Sequence[Source] = ()) -> Fitted:
    """Return means, deviations, quartiles and categories from what all clients have.

    `sources` has the owner's limits for each client; without it, they are those that hold if an
    owner says nothing.
    """
    limits = [source.samples for source in sources] or [SAMPLES] * len(clients)
    words: Fitted = {}
    for feature in schema.collected:
        check_sends_words(feature, sources)
        own = (
            words_of(feature.name, columns[f"feature {feature.name}"], samples)
            for columns, samples in zip(clients, limits, strict=True)
        )
        together_here = together(feature.name, (word for each in own for word in each))
        words[feature.name] = {"categories": together_here}
    if not schema.numbers:
        return words
    each = [numbers_of(schema, columns) for columns in clients]
    count = np.sum([data["known"].sum(0) for data in each], axis=0).astype(float)
    total = np.sum([data["values"].sum(0) for data in each], axis=0)
    mean = total / np.maximum(count, 1)
    square = np.sum([centred_squares(data, mean) for data in each], axis=0)
    tables: Arrays = {}
    for columns, samples in zip(clients, limits, strict=True):
        for name, values in tables_of(schema, columns, samples).items():
            tables[name] = tables.get(name, 0) + values
    return fitted_from(schema, count, total, square, tables) | words


def check_sends_words(feature: Feature, sources: Sequence[Source]) -> None:
    """Raise if an owner does not want categories to be sent."""
    if not all(source.sends_words for source in sources):
        raise InvalidInput(
            f"A site's owner does not send the categories of its rows (`limits.words`): name those "
            f"of {feature.name!r} in the schema."
        )


def centred_squares(data: Arrays, mean: np.ndarray) -> np.ndarray:
    """Compute Σ (value − mean)² of each column of a client."""
    return np.where(data["known"], (data["values"] - mean) ** 2, 0).sum(0)


def collected_from(schema: Schema, tables: Mapping[str, np.ndarray], clients: int) -> Fitted:
    """Return the categories in the mean of the clients' cells."""
    return {
        feature.name: {
            "categories": words_in_cells(feature.name, tables[f"words {feature.name}"], clients)
        }
        for feature in schema.collected
    }


def fitted_from(
    schema: Schema,
    count: np.ndarray,
    total: np.ndarray,
    square: np.ndarray,
    tables: Mapping[str, np.ndarray],
) -> Fitted:
    """Return means, deviations and quartiles from sums, or from sums divided by one number.

    A column whose values are all equal is not divided: its deviation is taken as 1.
    """
    found: Fitted = {}
    for number, feature in enumerate(schema.numbers):
        if not count[number] > 0:
            raise InvalidInput(f"No site has a value in the column {feature.name!r}.")
        mean = float(total[number] / count[number])
        deviation = float(np.sqrt(square[number] / count[number]))
        equal = deviation <= EQUAL * max(abs(mean), np.finfo(float).tiny)
        found[feature.name] = {"mean": mean, "deviation": 1.0 if equal else deviation}
        if feature.needs_quartiles:
            least, most = feature.ends
            histogram = tables[f"histogram {feature.name}"]
            found[feature.name]["quartiles"] = quantiles_of(histogram, least, most, QUARTILES)
    return found


EQUAL = 1e-12  # a deviation below this part of the mean is that of equal values, rounded
