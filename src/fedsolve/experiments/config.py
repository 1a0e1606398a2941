"""Experiments as text, from TOML and back; what does not fit gets a sentence."""

from __future__ import annotations

import copy
import dataclasses
import functools
import tomllib
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import fedsolve as fs
from fedsolve.errors import InvalidInput
from fedsolve.experiments.registry import (
    ALGORITHMS,
    PROBLEMS,
    RULES,
    Allowed,
    build,
    check_known,
    described,
)
from fedsolve.fields import check_count, check_positive, scalar

SEED_KEYS = ("seed", "seeds", "instances")
HOW_KEYS = ("evaluate_every", "precision", "clients_at_once", "stop", "devices")
RUN_KEYS = ("rounds", *SEED_KEYS, *HOW_KEYS)
DEPLOY_KEYS = ("deadline", "quorum", "sites")
SECTIONS = ("title", "problem", "algorithm", "clock", "run", "variants", "deploy")


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
    folder = resources.files("fedsolve.experiments") / "configs"
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
        path = resources.files("fedsolve.experiments") / "configs" / f"{name}.toml"
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

    A problem, algorithm or part of another installed package is named as `module:name`; `allowed`
    says which of those may be imported. Where it says so (it is not None) the configuration is
    another machine's, and may not name a file.
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
        algorithms[variant], algorithm_table = build(
            table, ALGORITHMS, "algorithm", allowed, around
        )
        described = {"kind": "Clock"} | _table(changed, "clock", "") if "clock" in changed else {}
        clocks[variant], clock_table = None, {}
        if described:
            clocks[variant], clock_table = build(described, {"Clock": fs.Clock}, "clock", allowed)
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
        options["stop"], resolved["run"]["stop"] = build(
            _table(run, "stop", "run."), RULES, "run.stop", allowed
        )
    deploy = _table(config, "deploy", "") if "deploy" in config else {}
    for key, value in deploy.items():
        check_known(key, DEPLOY_KEYS, "key", "deploy.")
        _check_deploy(key, value)
    if deploy:
        resolved["deploy"] = deploy
    instance_tables, cells = tables if instances else None, Cells(makers, kept, algorithms)
    return Experiment(
        name, cells, clocks, seeds, options, deploy, resolved, instance_tables, allowed
    )


def _check_deploy(key: str, value: Any) -> None:
    name = f"deploy.{key}"
    if key == "sites":
        check_count(name, value)
    else:
        check_positive(name, scalar(name)(value), zero=key == "quorum")
        if key == "quorum" and value > 1:
            raise InvalidInput(f"{name} is a part of the clients asked, 1 at most, got {value}.")


def _problem(
    table: dict[str, Any], allowed: Allowed
) -> tuple[Callable[[], fs.Problem], dict[str, Any]]:
    """What makes the problem that a table describes, and the table with all defaults filled in;
    `pooled = true` puts all samples in one place."""
    pooled = table.get("pooled", False)
    if not isinstance(pooled, bool):
        raise InvalidInput(f"problem.pooled must be true or false, got {pooled!r}.")
    rest = {key: value for key, value in table.items() if key != "pooled"}
    make, shown = described(rest, PROBLEMS, "problem", allowed)
    return (lambda: make().pooled(), shown | {"pooled": True}) if pooled else (make, shown)


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
    shown = {key: config[key] for key in ("problem", "algorithm", "clock", "run") if key in config}
    for key, value in config.get("variants", {}).get(variant, {}).items():
        shown = with_key(shown, key, value)
    return _flat(shown)


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        name = prefix.removesuffix(".") if key == "kind" else prefix + key
        flat |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat
