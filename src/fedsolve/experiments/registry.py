"""What a word in a configuration can name, and the objects that tables describe.

A table with a `kind` is an object, its other keys are the object's own fields:

    uplink = { kind = "TopK", fraction = 0.1 }      # or "Identity" where there is nothing to say
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import typing
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import fedsolve as fs
from fedsolve.errors import InvalidInput
from fedsolve.fields import check_kind

ALGORITHMS: dict[str, Callable] = {
    "F3AST": fs.F3AST,
    "FedADMM": fs.FedADMM,
    "FedAlt": fs.FedAlt,
    "FedAvg": fs.FedAvg,
    "FedAvgAll": fs.FedAvgAll,
    "FedProx": fs.FedProx,
    "FedDyn": fs.FedDyn,
    "FedSGM": fs.FedSGM,
    "FedSGM.from_theory": fs.FedSGM.from_theory,
    "FedSim": fs.FedSim,
    "IPPConEx": fs.IPPConEx,
    "IncentFedAvg": fs.IncentFedAvg,
    "MOON": fs.MOON,
    "PPBC": fs.PPBC,
    "PenaltyFedAvg": fs.PenaltyFedAvg,
    "SCAFFOLD": fs.SCAFFOLD,
}
PROBLEMS: dict[str, Callable] = {
    "adult": fs.problems.adult,
    "cartpole": fs.problems.cartpole,
    "images": fs.problems.images,
    "linear_regression": fs.problems.linear_regression,
    "logistic": fs.problems.logistic,
    "sparse_logistic": fs.problems.sparse_logistic,
    "neyman_pearson": fs.problems.neyman_pearson,
    "phase_retrieval": fs.problems.phase_retrieval,
}
RULES: dict[str, Callable] = {
    part.__name__: part
    for part in (fs.Stationary, fs.StationaryForSize, fs.Reached, fs.NearOptimum)
}
COMPRESSORS: dict[str, Callable] = {
    part.__name__: part
    for part in (
        fs.Identity,
        fs.TopK,
        fs.RandK,
        fs.Float16,
        fs.Float8,
        fs.Float4,
        fs.QSGD,
        fs.Compose,
    )
}
PARTICIPATION: dict[str, Callable] = {
    part.__name__: part
    for part in (
        fs.participation.Uniform,
        fs.participation.DataSize,
        fs.participation.PowerOfChoice,
        fs.participation.BANT,
        fs.participation.FOLB,
        fs.participation.GradientNorm,
        fs.participation.Strategic,
        fs.participation.Everyone,
        fs.participation.Random,
        fs.participation.Top,
        fs.participation.Proportional,
        fs.participation.Cyclic,
        fs.participation.Bernoulli,
        fs.participation.Markov,
        fs.participation.DayNight,
        fs.participation.Trace,
        fs.participation.FirstAnswers,
    )
}
DISTRIBUTIONS: dict[str, Callable] = {part.__name__: part for part in (fs.LogNormal, fs.Mixture)}
PARTS: dict[str, Callable] = (
    COMPRESSORS
    | PARTICIPATION
    | DISTRIBUTIONS
    | {
        part.__name__: part
        for part in (
            fs.problems.discovery_game,
            fs.Hard,
            fs.Soft,
            fs.Cosine,
            fs.Diminishing,
            fs.SGD,
            fs.Adam,
        )
    }
)
Allowed = Collection[str] | None  # `module:name`s that may be imported; None for any


def build(
    table: dict[str, Any],
    registry: dict[str, Callable],
    where: str,
    allowed: Allowed = (),
    around: dict[str, Any] | None = None,
) -> tuple[Any, dict]:
    """The object that a table describes, and the table with all defaults filled in."""
    make, shown = described(table, registry, where, allowed, around)
    return make(), shown


def described(
    table: dict[str, Any],
    registry: dict[str, Callable],
    where: str,
    allowed: Allowed,
    around: dict[str, Any] | None = None,
) -> tuple[Callable[[], Any], dict]:
    """What makes the object that a table describes, and the table with all defaults filled in.
    Fields that stand `around` the table are not written in it."""
    if "kind" not in table:
        raise InvalidInput(f"{where}.kind is missing: one of {', '.join(registry)}.")
    kind = str(table["kind"])
    if registry is PROBLEMS and ":" not in kind:
        kind = kind.replace("-", "_")
    if ":" in kind:
        make = _imported(kind, allowed, where)
    else:
        check_known(kind, registry, "kind", f"{where}.kind: ")
        make = registry[kind]
    around = around or {}
    all_fields = inspect.signature(make).parameters
    fields = {
        name: field
        for name, field in all_fields.items()
        if name not in around and field.kind is not inspect.Parameter.VAR_KEYWORD
    }
    others = {key: value for key, value in table.items() if key not in ("kind", *fields)}
    if len(fields) + len(around) == len(all_fields):  # else it takes others, and checks them
        for key in others:
            check_known(key, fields, f"field of {kind}", f"{where}.")
    hints = typing.get_type_hints(make)
    given: dict[str, Any] = others | around
    shown: dict[str, Any] = {"kind": kind} | others
    for name, field in fields.items():
        if name not in table:
            if field.default is inspect.Parameter.empty:
                raise InvalidInput(f"{where} needs {name} ({kind} has no default for it).")
            shown[name] = _shown(field.default)
            continue
        value = table[name]
        if isinstance(value, str) and allowed is not None and _accepts_files(hints.get(name)):
            raise InvalidInput(f"{where}.{name} would be a file here, which only its owner names.")
        names_part = isinstance(value, str) and _accepts_parts(hints.get(name))
        if (isinstance(value, dict) and not _accepts_tables(hints.get(name))) or names_part:
            part = value if isinstance(value, dict) else {"kind": value}
            value, shown[name] = build(part, PARTS, f"{where}.{name}", allowed)
        else:
            shown[name] = value
        wanted = hints.get(name)
        if inspect.isclass(wanted) and issubclass(wanted, fs.Compressor | fs.Switching):
            check_kind(f"{where}.{name}", value, wanted)
        given[name] = value

    def built() -> Any:
        try:
            return make(**given)
        except InvalidInput as error:
            raise InvalidInput(f"{where}: {error}") from error

    return built, {key: value for key, value in shown.items() if value is not None}


def _imported(kind: str, allowed: Allowed, where: str) -> Callable:
    """A problem or algorithm of another package."""
    if allowed is not None and kind not in allowed:
        raise InvalidInput(f"{where}.kind: {kind!r} is not on this machine's allow-list.")
    module, _, name = kind.partition(":")
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidInput(f"{where}.kind: cannot import {kind!r}: {error}.") from error
    if not callable(make):
        raise InvalidInput(f"{where}.kind: {kind!r} is neither a function nor a class.")
    return make


def _accepts_files(hint: Any) -> bool:
    """What takes a path says so by its type: that is how others are kept from naming one."""
    return Path in (hint, *typing.get_args(hint))


def _accepts_parts(hint: Any) -> bool:
    plain = hint in (str, int, float, bool) or str in typing.get_args(hint)
    return hint is not None and not plain


def _accepts_tables(hint: Any) -> bool:
    return any(typing.get_origin(h) is dict for h in (hint, *typing.get_args(hint)))


def _shown(value: Any) -> Any:
    """A default as it would be written in TOML."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _shown(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"kind": type(value).__name__} | {k: v for k, v in fields.items() if v is not None}
    return value


def summary(thing: Callable) -> str:
    """The first sentence of a docstring."""
    text = " ".join((inspect.getdoc(thing) or "").split())
    return text.partition(". ")[0].rstrip(".") + "."


def check_known(name: str, names: Iterable[str], what: str, where: str = "") -> None:
    """Refuses a name that is none of these, and says which comes nearest."""
    names = [n for n in names if n]
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}."
        raise InvalidInput(f"{where}{name!r} is not a known {what}; {hint}")
