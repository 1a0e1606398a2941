"""Registry of the names that may appear in a configuration file, and construction from tables.

A table with the key `kind` describes an object; its other keys are that object's fields:

    uplink = { kind = "TopK", fraction = 0.1 }      # or "Identity" where no field is to be set

Algorithms, compressors and participation rules are taken from the `__all__` of their packages and
problems from `fedsolve.problems.BY_NAME`, so a new one is registered by adding it there.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import NoReturn, TypeVar

from fedsolve import algorithms, compression, local_updates, participation, problems
from fedsolve.errors import InvalidInput
from fedsolve.experiments.allowed import Allowed
from fedsolve.federation.clock import LogNormal, Mixture
from fedsolve.fields import check_kind
from fedsolve.privacy import Clipped, ExactSum, Krum, Median, Private, SecureSum, Trimmed
from fedsolve.problem.problem import Problem
from fedsolve.solving.stopping import (
    NearFedADMM,
    NearOptimum,
    Reached,
    Spent,
    Stationary,
    StationaryForSize,
)
from fedsolve.types import Table

T = TypeVar("T")
Registry = Mapping[str, Callable[..., T]]


def _by_name(*parts: Callable[..., object]) -> dict[str, Callable[..., object]]:
    return {part.__name__: part for part in parts}


def _subclasses(package: ModuleType, *bases: type[T]) -> dict[str, type[T]]:
    """Return the concrete subclasses of `bases` in the package's `__all__`, by name."""
    exported = {name: getattr(package, name) for name in package.__all__}
    return {
        name: each
        for name, each in exported.items()
        if inspect.isclass(each) and issubclass(each, bases) and each not in bases
        if not inspect.isabstract(each)
    }


ALGORITHMS: dict[str, Callable[..., algorithms.Algorithm]] = {
    name: each
    for name, each in _subclasses(algorithms, algorithms.Algorithm).items()
    if each.round is not algorithms.Algorithm.round  # else it is a base class
}
ALGORITHMS["FedSGM.from_theory"] = algorithms.FedSGM.from_theory
ALGORITHMS = dict(sorted(ALGORITHMS.items(), key=lambda item: item[0].lower()))
PROBLEMS: dict[str, Callable[..., Problem]] = problems.BY_NAME
COMPRESSORS = _subclasses(compression, compression.Compressor)
PARTICIPATION = _subclasses(
    participation, participation.Weighting, participation.Selection, participation.Availability
)
DISTRIBUTIONS = _by_name(LogNormal, Mixture)
RULES = _by_name(Stationary, StationaryForSize, Reached, NearOptimum, NearFedADMM, Spent)
AGGREGATIONS = _by_name(Trimmed, Median, Clipped, Krum, SecureSum, ExactSum)
PRIVACY = _by_name(Private)
PARTS: dict[str, Callable[..., object]] = {
    **COMPRESSORS,
    **PARTICIPATION,
    **DISTRIBUTIONS,
    **_subclasses(algorithms, algorithms.Switching),
    **_subclasses(local_updates, local_updates.Optimizer),
    **_by_name(
        algorithms.Adaptive,
        algorithms.L1,
        algorithms.ResidualBalancing,
        local_updates.Cosine,
        local_updates.Diminishing,
        problems.discovery_game,
    ),
}


def build(
    table: Table,
    registry: Registry[T],
    where: str,
    allowed: Allowed,
    around: Table | None = None,
) -> tuple[T, Table]:
    """Return the object that a table describes, and the table with all defaults filled in."""
    make, shown = described(table, registry, where, allowed, around)
    return make(), shown


def described(
    table: Table,
    registry: Registry[T],
    where: str,
    allowed: Allowed,
    around: Table | None = None,
) -> tuple[Callable[[], T], Table]:
    """Return a function that builds what a table describes, and the table with all defaults.

    `around` has arguments that come from the rest of the configuration: they are passed on, and do
    not appear in the table.
    """
    if not allowed.builds and ":" in str(table.get("kind")):
        return _not_built, table
    kind, make = _kind(table, registry, where, allowed)
    around = around or {}
    accepted = inspect.signature(make).parameters
    fields = {
        name: field
        for name, field in accepted.items()
        if name not in around and field.kind is not inspect.Parameter.VAR_KEYWORD
    }
    others = {key: value for key, value in table.items() if key not in ("kind", *fields)}
    if len(fields) + len(around) == len(accepted):  # else it takes others, and checks them
        for key in others:
            check_known(key, fields, f"field of {kind}", f"{where}.")
    hints = typing.get_type_hints(make)
    given, shown = others | around, {"kind": kind} | others
    for name, field in fields.items():
        if name in table:
            given[name], shown[name] = _value(
                table[name], hints.get(name), f"{where}.{name}", allowed
            )
        elif field.default is not inspect.Parameter.empty:
            shown[name] = _shown(field.default)
        else:
            raise InvalidInput(f"{where} needs {name} ({kind} has no default for it).")

    def built() -> T:
        try:
            return make(**given)
        except InvalidInput as error:
            raise InvalidInput(f"{where}: {error}") from error

    return built, {key: value for key, value in shown.items() if value is not None}


def _not_built() -> NoReturn:
    """Stand for what a configuration describes, where nothing is imported."""
    raise AssertionError("nothing is built from a configuration that is only shown")


def _kind(
    table: Table, registry: Registry[T], where: str, allowed: Allowed
) -> tuple[str, Callable[..., T]]:
    """Return the name that a table gives as its `kind`, and the function or class behind it."""
    if "kind" not in table:
        raise InvalidInput(f"{where}.kind is missing: one of {', '.join(registry)}.")
    kind = str(table["kind"])
    if ":" in kind:
        return kind, _imported(kind, allowed, where)
    if registry is PROBLEMS:
        kind = kind.replace("-", "_")
    check_known(kind, registry, "kind", f"{where}.kind: ")
    return kind, registry[kind]


def _value(value: object, hint: object, where: str, allowed: Allowed) -> tuple[object, object]:
    """Return a field's value, built where a table or a name describes it, and how to write it."""
    if isinstance(value, str) and not allowed.files and _accepts_files(hint):
        raise InvalidInput(f"{where} would be a path on this machine, which only its owner names.")
    shown = value
    names_part = isinstance(value, str) and _accepts_parts(hint)
    if isinstance(value, str) and names_part and float in typing.get_args(hint):
        _check_number(value, where)
    if names_part or (isinstance(value, dict) and not _accepts_tables(hint)):
        part = value if isinstance(value, dict) else {"kind": value}
        make, shown = described(part, PARTS, where, allowed)
        if not allowed.builds:
            return None, shown
        value = make()
    if inspect.isclass(hint) and issubclass(hint, compression.Compressor | algorithms.Switching):
        check_kind(where, value, hint)
    return value, shown


def _check_number(text: str, where: str) -> None:
    """Raise if a text stands where a number is wanted and is not near the name of a part."""
    if ":" not in text and not difflib.get_close_matches(text, PARTS, n=1, cutoff=0.6):
        raise InvalidInput(f"{where} takes a number or the name of a part, got {text!r}.")


def _imported(kind: str, allowed: Allowed, where: str) -> Callable:
    """Import a problem or algorithm of another package, named as `module:name`."""
    allowed.check(kind, f"{where}.kind")
    module, _, name = kind.partition(":")
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidInput(f"{where}.kind: cannot import {kind!r}: {error}.") from error
    if not callable(make):
        raise InvalidInput(f"{where}.kind: {kind!r} is neither a function nor a class.")
    return make


def _accepts_files(hint: object) -> bool:
    """Return whether a field may be a path.

    Fields that take paths must say so in their type: a configuration from another machine may then
    not set them to a string.
    """
    return Path in (hint, *typing.get_args(hint))


def _accepts_parts(hint: object) -> bool:
    plain = hint in (str, int, float, bool) or str in typing.get_args(hint)
    return hint is not None and not plain


def _accepts_tables(hint: object) -> bool:
    return any(typing.get_origin(each) is dict for each in (hint, *typing.get_args(hint)))


def _shown(value: object) -> object:
    """Return a default as it would be written in TOML."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _shown(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"kind": type(value).__name__} | {k: v for k, v in fields.items() if v is not None}
    return value


def summary(thing: Callable[..., object]) -> str:
    """Return the first sentence of a docstring."""
    text = " ".join((inspect.getdoc(thing) or "").split())
    return text.partition(". ")[0].rstrip(".") + "."


def check_known(name: str, names: Iterable[str], what: str, where: str = "") -> None:
    """Raise for an unknown name and suggest the closest match."""
    names = [n for n in names if n]
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}."
        raise InvalidInput(f"{where}{name!r} is not a known {what}; {hint}")
