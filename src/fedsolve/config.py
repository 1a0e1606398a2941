"""Experiments as text: TOML to objects and back, with a sentence for everything that does not fit.

A table with a `kind` is an object, its other keys are the object's own fields:

    uplink = { kind = "TopK", fraction = 0.1 }      # or "Identity" where there is nothing to say
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import importlib
import inspect
import tomllib
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import fedsolve as fs
from fedsolve.errors import InvalidInput
from fedsolve.fields import check_count, check_kind, check_positive

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
SEED_KEYS = ("seed", "seeds", "instances")
HOW_KEYS = ("evaluate_every", "precision", "clients_at_once", "stop", "devices")
RUN_KEYS = ("rounds", *SEED_KEYS, *HOW_KEYS)
DEPLOY_KEYS = ("deadline", "quorum", "sites")
SECTIONS = ("title", "problem", "algorithm", "clock", "run", "variants", "deploy")
Allowed = Collection[str] | None  # `module:name`s that may be imported; None for any


class Cells(Mapping[str, tuple[fs.Problem, fs.Algorithm]]):
    """Problem and algorithm by variant. A problem that `kept` does not have is made whenever it is
    asked for: instances can be large."""

    def __init__(
        self,
        makers: dict[str, Callable[[], fs.Problem]],
        kept: dict[str, fs.Problem],
        algorithms: dict[str, fs.Algorithm],
    ):
        self._makers, self._kept, self.algorithms = makers, kept, algorithms

    def __getitem__(self, variant: str) -> tuple[fs.Problem, fs.Algorithm]:
        algorithm = self.algorithms[variant]
        return self._kept.get(variant) or self._makers[variant](), algorithm

    def __iter__(self) -> Iterator[str]:
        return iter(self.algorithms)

    def __len__(self) -> int:
        return len(self.algorithms)


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One problem and algorithm (or several variants of them), ready to run."""

    name: str
    cells: Cells  # by variant; "" if there are none
    clocks: dict[str, fs.Clock | None]  # by variant too
    seeds: list[int]
    options: dict[str, Any]  # for `solve`
    deploy: dict[str, Any]  # for a deployment
    resolved: dict[str, Any]  # the configuration with every default filled in
    instances: dict[str, dict[str, Any]] | None = None  # the problem's table, if seeds make others
    allowed: Allowed = None

    def cell(self, variant: str, seed: int) -> tuple[fs.Problem, fs.Algorithm]:
        """What to run for that variant and seed: with `run.instances` the seed is the problem's,
        too."""
        if self.instances is None or seed == self.seeds[0]:
            return self.cells[variant]
        make = _problem(self.instances[variant] | {"seed": seed}, self.allowed)[0]
        return make(), self.cells.algorithms[variant]

    @property
    def runs(self) -> list[tuple[str, int]]:
        """Every variant with every seed."""
        return [(variant, seed) for variant in self.cells for seed in self.seeds]


def experiment_names() -> list[str]:
    """The experiments that come with the package."""
    folder = resources.files("fedsolve") / "experiments"
    return sorted(
        f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")
    )


def read(name: str) -> dict[str, Any]:
    """The configuration of that name, or in that file."""
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise InvalidInput(f"There is no file {name}.")
    else:
        check_known(name, experiment_names(), "experiment")
        path = resources.files("fedsolve") / "experiments" / f"{name}.toml"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{name} is not valid TOML: {error}.") from error


def override(config: dict[str, Any], assignment: str) -> dict[str, Any]:
    """The configuration with `some.key=value` set."""
    key, equals, text = assignment.partition("=")
    if not equals or not key.strip():
        raise InvalidInput(f"--set takes key=value, got {assignment!r}.")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a bare word is a string
    return with_key(config, key.strip(), value)


def resolve(name: str, config: dict[str, Any], allowed: Allowed = None) -> Experiment:
    """Builds what the configuration describes, and says what it comes to.

    A problem or algorithm of another installed package is named as `module:name`; `allowed` says
    which of those may be imported.
    """
    for key in config:
        check_known(key, SECTIONS, "key", "")
    run = _table(config, "run", "")
    for key in run:
        check_known(key, RUN_KEYS, "key", "run.")
    if "rounds" not in run:
        raise InvalidInput("run.rounds is missing: say how many rounds to run.")
    seeds = run.get("seeds", [run.get("seed", 0)])
    if not isinstance(seeds, list) or not seeds or not all(type(s) is int for s in seeds):
        raise InvalidInput(f"run.seeds must be a list of whole numbers, got {seeds!r}.")
    check_count("run.rounds", run["rounds"])
    instances = run.get("instances", False)
    if not isinstance(instances, bool):
        raise InvalidInput(f"run.instances must be true or false, got {instances!r}.")
    variants = _table(config, "variants", "") if "variants" in config else {"": {}}
    algorithms, clocks, resolved = {}, {}, {k: v for k, v in config.items() if k == "title"}
    problems: dict[str, tuple[Callable[[], fs.Problem], dict[str, Any]]] = {}
    makers, kept = {}, {}
    tables: dict[str, dict[str, Any]] = {}
    for variant, changes in variants.items():
        if not isinstance(changes, dict):
            raise InvalidInput(f"variants.{variant} must be a table of keys to change.")
        changed = config
        for key, value in changes.items():
            changed = with_key(changed, key, value)
        described = _table(changed, "problem", "")
        if instances:
            described = described | {"seed": seeds[0]}
        tables[variant] = described
        if (known := repr(described)) not in problems:  # variants mostly share one
            make, problem_table = _problem(described, allowed)
            problems[known] = functools.cache(make) if not instances else make, problem_table
        makers[variant], problem_table = problems[known]
        if not instances:
            kept[variant] = makers[variant]()
        table = _table(changed, "algorithm", "")
        around: dict[str, Any] = {}
        if table.get("kind") == "FedSGM.from_theory":
            if instances:
                raise InvalidInput(
                    "FedSGM.from_theory is for one problem; leave out run.instances."
                )
            around = {"problem": makers[variant](), "rounds": run["rounds"]}
        algorithms[variant], algorithm_table = _build(
            table, ALGORITHMS, "algorithm", allowed, around
        )
        described = {"kind": "Clock"} | _table(changed, "clock", "") if "clock" in changed else {}
        clocks[variant], clock_table = None, {}
        if described:
            clocks[variant], clock_table = _build(described, {"Clock": fs.Clock}, "clock")
        if not changes:  # variants change what is here: it must not be one of the changed
            resolved |= {"problem": problem_table, "algorithm": algorithm_table}
            resolved |= {"clock": clock_table} if clock_table else {}
    if "problem" not in resolved:
        resolved |= {key: config[key] for key in ("problem", "algorithm", "clock") if key in config}
    resolved["run"] = {key: run[key] for key in RUN_KEYS if key in run}
    if variants.keys() != {""}:
        resolved["variants"] = variants
    options = {key: value for key, value in run.items() if key not in SEED_KEYS}
    if "stop" in run:
        options["stop"], resolved["run"]["stop"] = _build(
            _table(run, "stop", "run."), RULES, "run.stop"
        )
    deploy = _table(config, "deploy", "") if "deploy" in config else {}
    for key, value in deploy.items():
        check_known(key, DEPLOY_KEYS, "key", "deploy.")
        check_positive(f"deploy.{key}", value, zero=key == "quorum")
    if deploy:
        resolved["deploy"] = deploy
    instance_tables, cells = tables if instances else None, Cells(makers, kept, algorithms)
    return Experiment(
        name, cells, clocks, seeds, options, deploy, resolved, instance_tables, allowed
    )


def summary(thing: Callable) -> str:
    """The first sentence of a docstring."""
    text = " ".join((inspect.getdoc(thing) or "").split())
    return text.partition(". ")[0].rstrip(".") + "."


def _problem(
    table: dict[str, Any], allowed: Allowed
) -> tuple[Callable[[], fs.Problem], dict[str, Any]]:
    """What makes the problem that a table describes, and the table with all defaults filled in;
    `pooled = true` puts all samples in one place."""
    pooled = table.get("pooled", False)
    if not isinstance(pooled, bool):
        raise InvalidInput(f"problem.pooled must be true or false, got {pooled!r}.")
    rest = {key: value for key, value in table.items() if key != "pooled"}
    make, shown = _described(rest, PROBLEMS, "problem", allowed)
    return (lambda: make().pooled(), shown | {"pooled": True}) if pooled else (make, shown)


def _build(
    table: dict[str, Any],
    registry: dict[str, Callable],
    where: str,
    allowed: Allowed = (),
    around: dict[str, Any] | None = None,
) -> tuple[Any, dict]:
    """The object that a table describes, and the table with all defaults filled in."""
    make, shown = _described(table, registry, where, allowed, around)
    return make(), shown


def _described(
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
        names_part = isinstance(value, str) and _accepts_parts(hints.get(name))
        if (isinstance(value, dict) and not _accepts_tables(hints.get(name))) or names_part:
            part = value if isinstance(value, dict) else {"kind": value}
            value, shown[name] = _build(part, PARTS, f"{where}.{name}")
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


def _table(config: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    if not isinstance(config.get(key), dict):
        raise InvalidInput(f"The table [{where}{key}] is missing.")
    return config[key]


def with_key(config: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """The configuration with that dotted key set."""
    changed = copy.deepcopy(config)
    *path, last = key.split(".")
    table = changed
    for name in path:
        if not isinstance(table.setdefault(name, {}), dict):
            table[name] = {"kind": table[name]} if isinstance(table[name], str) else {}
        table = table[name]
    table[last] = value
    return changed


def settings_of(config: dict[str, Any], variant: str) -> dict[str, Any]:
    """What a variant runs, tables in tables as dotted keys; `kind` is its table's own value."""
    shown = {key: config[key] for key in ("problem", "algorithm", "run") if key in config}
    for key, value in config.get("variants", {}).get(variant, {}).items():
        shown = with_key(shown, key, value)
    return _flat(shown)


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        name = prefix.removesuffix(".") if key == "kind" else prefix + key
        flat |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


def check_known(name: str, names: Iterable[str], what: str, where: str = "") -> None:
    """Refuses a name that is none of these, and says which comes nearest."""
    names = [n for n in names if n]
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}."
        raise InvalidInput(f"{where}{name!r} is not a known {what}; {hint}")
