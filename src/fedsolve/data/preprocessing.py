"""From columns of a table to the inputs of a model, in the same way at every site.

Numbers are standardised, x = (value − mean) / deviation, with the mean and the deviation over the
values that are there, of all sites together. Sites send three sums of each column: how many values
are there, Σ value, and then Σ (value − mean)². The result is that of the pooled table.

Categories are those of the schema, one input for each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from fedsolve.data.tables import Feature, Schema
from fedsolve.errors import InvalidInput
from fedsolve.types import Table

Columns = Mapping[str, np.ndarray]
Arrays = dict[str, np.ndarray]
Fitted = dict[str, dict[str, float]]  # of each number: mean and deviation


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """Turns columns into inputs.

    Args:
        schema: The columns.
        numbers: Name, mean and deviation of each feature that is a number.
    """

    schema: Schema
    numbers: tuple[tuple[str, float, float], ...]

    @classmethod
    def of(cls, schema: Schema, fitted: Mapping[str, Mapping[str, float | int]]) -> Preprocessing:
        """Return what means and deviations from a configuration describe."""
        found = []
        for feature in schema.numbers:
            try:
                entry = fitted[feature.name]
                mean, deviation = float(entry["mean"]), float(entry["deviation"])
            except (KeyError, TypeError, ValueError):
                raise InvalidInput(
                    f"fitted.{feature.name} takes a table with mean and deviation."
                ) from None
            if not np.isfinite(mean) or not 0 < deviation < np.inf:
                raise InvalidInput(f"fitted.{feature.name} must be finite, its deviation positive.")
            found.append((feature.name, mean, deviation))
        if unknown := fitted.keys() - {name for name, _, _ in found}:
            raise InvalidInput(f"fitted.{min(unknown)} is not a numeric feature.")
        return cls(schema, tuple(found))

    @classmethod
    def neutral(cls, schema: Schema) -> Preprocessing:
        """Return what leaves numbers as they are, for the shapes of inputs alone."""
        return cls(schema, tuple((feature.name, 0.0, 1.0) for feature in schema.numbers))

    @property
    def fitted(self) -> Fitted:
        """The means and deviations, as a configuration has them."""
        return {name: {"mean": m, "deviation": d} for name, m, d in self.numbers}

    def to_json(self) -> dict[str, Table]:
        """Return the schema and the means and deviations, for `from_json`."""
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
            own = (MISSING_INPUT,) if _has_own_input(feature) else ()
            one_hot = feature.kind == "categorical"
            words = (*feature.words, *own) if one_hot else ()
            found += [f"{feature.name}={word}" for word in words] or [feature.name]
        return found

    def inputs(self, columns: Columns) -> np.ndarray:
        """Compute the inputs of every row."""
        numbers = {name: (mean, deviation) for name, mean, deviation in self.numbers}
        found = []
        for feature in self.schema.features:
            values = columns[f"feature {feature.name}"]
            if feature.is_number:
                mean, deviation = numbers[feature.name]
                instead = mean if feature.missing == "mean" else feature.missing
                values = np.where(np.isnan(values), np.nan if instead is None else instead, values)
                found.append(((values - mean) / deviation)[:, None])
            else:
                found.append(_word_inputs(feature, values))
        return np.concatenate(found, axis=1)

    def arrays(self, columns: Columns) -> Arrays:
        """Compute inputs `x`, labels `y` and, if there are groups, `protected`.

        With a time it is `time` and `event` in place of `y`.
        """
        label = columns["label"].astype(np.int8)
        found = {"x": self.inputs(columns)}
        found |= {"event": label, "time": columns["time"]} if "time" in columns else {"y": label}
        if "group" in columns:
            found["protected"] = columns["group"].astype(np.int8)
        return found


MISSING_INPUT = "(missing)"


def _has_own_input(feature: Feature) -> bool:
    return feature.missing == "category" and "category" not in feature.words


def _word_inputs(feature: Feature, codes: np.ndarray) -> np.ndarray:
    """Return one column for each word; for a feature of two values, one column of 0 and 1."""
    if _has_own_input(feature):
        codes = np.where(codes < 0, len(feature.words), codes)
    elif feature.missing is not None:
        codes = np.where(codes < 0, feature.words.index(str(feature.missing)), codes)
    if feature.kind == "binary":
        return codes[:, None].astype(float)
    return np.eye(len(feature.words) + _has_own_input(feature))[codes]


def numbers_of(schema: Schema, columns: Columns) -> Arrays:
    """Return the values of all numbers, 0 where one is missing, and which are `known`."""
    found = [columns[f"feature {feature.name}"] for feature in schema.numbers]
    values = np.stack(found, axis=1)
    return {"values": np.nan_to_num(values, nan=0.0), "known": ~np.isnan(values)}


def fit(schema: Schema, clients: Sequence[Columns]) -> Fitted:
    """Return means and deviations from the sums of all clients."""
    if not schema.numbers:
        return {}
    each = [numbers_of(schema, columns) for columns in clients]
    count = np.sum([data["known"].sum(0) for data in each], axis=0).astype(float)
    total = np.sum([data["values"].sum(0) for data in each], axis=0)
    mean = total / np.maximum(count, 1)
    square = np.sum([centred_squares(data, mean) for data in each], axis=0)
    return fitted_from(schema, count, total, square)


def centred_squares(data: Arrays, mean: np.ndarray) -> np.ndarray:
    """Compute Σ (value − mean)² of each column of a client."""
    return np.where(data["known"], (data["values"] - mean) ** 2, 0).sum(0)


def fitted_from(schema: Schema, count: np.ndarray, total: np.ndarray, square: np.ndarray) -> Fitted:
    """Return means and deviations from sums, or from all sums divided by one number.

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
    return found


EQUAL = 1e-12  # a deviation below this part of the mean is that of equal values, rounded
