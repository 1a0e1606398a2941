"""Experiments as TOML: reading, changing and resolving configurations."""

from __future__ import annotations

import copy
import dataclasses
import functools
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path

import tomli_w

from fedsolve.algorithms.base import Algorithm
from fedsolve.errors import InvalidInput
from fedsolve.experiments.allowed import Allowed, allowed_here
from fedsolve.experiments.registry import (
    AGGREGATIONS,
    ALGORITHMS,
    PRIVACY,
    PROBLEMS,
    RULES,
    build,
    check_known,
    described,
)
from fedsolve.federation.clock import Clock
from fedsolve.fields import check_count, check_positive, scalar
from fedsolve.problem.problem import Problem
from fedsolve.types import Table

Settings = Mapping[str, object] | Iterable[str] | None  # by dotted key, or `key=value`

SEED_KEYS = ("seed", "seeds", "instances")
HOW_KEYS = (
    "evaluate_every",
    "evaluate_at",
    "precision",
    "clients_at_once",
    "stop",
    "devices",
    "aggregation",
    "privacy",
)
# Keys of [run] whose value describes an object, and what it may be
PARTS_OF_RUN: dict[str, Mapping[str, Callable[..., object]]] = {
    "stop": RULES,
    "aggregation": AGGREGATIONS,
    "privacy": PRIVACY,
}
RUN_KEYS = ("rounds", *SEED_KEYS, *HOW_KEYS)
DEPLOY_KEYS = ("deadline", "quorum", "sites", "patience", "alarms")
ALARMS = ("refuse", "clip", "note")  # what a server does about answers out of all proportion
SCHEMA_KEYS = ("features", "label", "group")  # of [schema], in place of [problem]
SECTIONS = ("title", "schema", "problem", "algorithm", "clock", "run", "variants", "deploy")


class Cells(Mapping[str, tuple[Problem, Algorithm]]):
    """The problem and algorithm of each variant.

    Problems that are not in `kept` may be large: they are built each time they are asked for.
    """

    def __init__(
        self,
        makers: dict[str, Callable[[], Problem]],
        kept: dict[str, Problem],
        algorithms: dict[str, Algorithm],
    ):
        self._makers, self._kept, self.algorithms = makers, kept, algorithms

    def __getitem__(self, variant: str) -> tuple[Problem, Algorithm]:
        algorithm = self.algorithms[variant]
        return self._kept.get(variant) or self._makers[variant](), algorithm

    def __iter__(self) -> Iterator[str]:
        return iter(self.algorithms)

    def __len__(self) -> int:
        return len(self.algorithms)


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A problem and an algorithm, or several variants of them, ready to run; see `resolve`.

    Args:
        name: The experiment's name.
        cells: Problem and algorithm by variant; the key is "" where there are no variants.
        clocks: The simulated clock of each variant, if it has one.
        seeds: The seeds of every variant's runs.
        options: Arguments for `fs.solve`: `rounds`, `evaluate_every`, ...
        deploy: Options of a deployment.
        resolved: The configuration with all defaults filled in.
        instances: The problem's table of each variant if every seed is another instance of the
            problem (`run.instances`), else None.
        allowed: What the configuration may import.

    Example:
        >>> import fedsolve as fs
        >>> config = fs.experiments.read("neyman-pearson")
        >>> experiment = fs.experiments.resolve("neyman-pearson", config)
        >>> problem, algorithm = experiment.cell("", seed=0)
        >>> problem.n, type(algorithm).__name__
        (20, 'FedSGM')
    """

    name: str
    cells: Cells
    clocks: dict[str, Clock | None]
    seeds: list[int]
    options: Table
    deploy: Table
    resolved: Table
    instances: dict[str, Table] | None = None
    allowed: Allowed = dataclasses.field(default_factory=Allowed)

    def cell(self, variant: str, seed: int) -> tuple[Problem, Algorithm]:
        """Return the problem and the algorithm of one run.

        Args:
            variant: The variant's name.
            seed: The run's seed; with `run.instances` it is the problem's seed as well.

        Returns:
            What to pass to `fs.solve`.
        """
        if self.instances is None or seed == self.seeds[0]:
            return self.cells[variant]
        make = _problem(self.instances[variant] | {"seed": seed}, self.allowed)[0]
        return make(), self.cells.algorithms[variant]

    @property
    def runs(self) -> list[tuple[str, int]]:
        """Every variant with every seed, in the order in which they are run."""
        return [(variant, seed) for variant in self.cells for seed in self.seeds]


def names() -> list[str]:
    """List the experiments that come with the package.

    Returns:
        Their names, sorted.

    Example:
        >>> import fedsolve as fs
        >>> "neyman-pearson" in fs.experiments.names()
        True
    """
    folder = resources.files("fedsolve.experiments") / "configs"
    return sorted(
        f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")
    )


def read(name: str | Path) -> Table:
    """Read an experiment's configuration.

    Args:
        name: The name of an experiment that comes with the package (see `names`), or the path of
            a TOML file.

    Returns:
        The configuration, as `tomllib` reads it.

    Raises:
        InvalidInput: If there is no such experiment or file, or the file is not valid TOML.

    Example:
        >>> import fedsolve as fs
        >>> fs.experiments.read("neyman-pearson")["problem"]
        {'kind': 'neyman_pearson', 'clients': 20}
    """
    if isinstance(name, Path) or name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise InvalidInput(f"There is no file {name}.")
    else:
        check_known(name, names(), "experiment")
        path = resources.files("fedsolve.experiments") / "configs" / f"{name}.toml"
    try:
        return _with_schema(tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{name} is not valid TOML: {error}.") from error


def _with_schema(config: Table) -> Table:
    """Return the configuration with the keys of [schema] where the problem takes them."""
    if "schema" not in config:
        return config
    schema, problem = _table(config, "schema", ""), _table(config, "problem", "")
    for key in schema:
        check_known(key, SCHEMA_KEYS, "key", "schema.")
        if key in problem:
            raise InvalidInput(f"schema.{key} and problem.{key} say the same: leave out one.")
    if problem.get("kind") != "tabular":
        raise InvalidInput('The table [schema] is for problem.kind = "tabular".')
    rest = {key: value for key, value in config.items() if key != "schema"}
    return rest | {"problem": problem | schema}


def override(config: Table, assignment: str) -> Table:
    """Return the configuration with a setting `some.key=value`; the value is TOML or a word."""
    key, equals, text = assignment.partition("=")
    if not equals or not key.strip():
        raise InvalidInput(f"A setting is written as key=value, got {assignment!r}.")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a bare word is a string
    return with_key(config, key.strip(), value)


def resolve(name: str, config: Table, allowed: object = ()) -> Experiment:
    """Build what a configuration describes.

    A problem, algorithm or part of another installed package is named as `module:name`. Its module
    is imported only if that name is allowed.

    Args:
        name: The experiment's name, which becomes that of its folder.
        config: The configuration, such as `read` returns.
        allowed: The `module:name`s that may be imported, beside those that the user's settings
            allow (`allow` in `~/.config/fedsolve/config.toml`).

    Returns:
        The experiment, ready to run.

    Raises:
        InvalidInput: If a key is unknown or missing, a value cannot be used, or a name is not
            allowed.

    Example:
        >>> import fedsolve as fs
        >>> config = fs.experiments.read("neyman-pearson")
        >>> config["run"]["seeds"] = [0, 1]
        >>> fs.experiments.resolve("mine", config).runs
        [('', 0), ('', 1)]
    """
    permitted = allowed if isinstance(allowed, Allowed) else allowed_here(allowed)
    cells, resolved, run, seeds = _described(config, permitted)
    options = {key: value for key, value in run.items() if key not in SEED_KEYS}
    for key, registry in PARTS_OF_RUN.items():
        if key in run:
            options[key], _ = build(_part(run, key), registry, f"run.{key}", permitted)
    instances = bool(run.get("instances", False))
    problems = {v: cell.make() for v, cell in cells.items()} if not instances else {}
    return Experiment(
        name=name,
        cells=Cells(
            {variant: cell.make for variant, cell in cells.items()},
            problems,
            {variant: cell.make_algorithm() for variant, cell in cells.items()},
        ),
        clocks={variant: cell.make_clock() for variant, cell in cells.items()},
        seeds=seeds,
        options=options,
        deploy=resolved.get("deploy", {}),
        resolved=resolved,
        instances={v: cell.table for v, cell in cells.items()} if instances else None,
        allowed=permitted,
    )


def shown(experiment: str | Path, settings: Settings = None) -> Table:
    """Return a configuration with all defaults; nothing is built, and no other package imported."""
    return _described(_changed_by(read(experiment), settings), Allowed(builds=False))[1]


def _described(config: Table, allowed: Allowed) -> tuple[dict[str, _Cell], Table, Table, list[int]]:
    """Return what describes each variant, the configuration with all defaults, [run], the seeds."""
    for key in config:
        check_known(key, SECTIONS, "key", "")
    config = _with_schema(config)
    run, seeds = _run_table(config)
    variants = _table(config, "variants", "") if "variants" in config else {"": {}}
    builder = _Builder(run["rounds"], seeds[0] if run.get("instances", False) else None, allowed)
    cells: dict[str, _Cell] = {}
    shown = {key: config[key] for key in ("problem", "algorithm", "clock") if key in config}
    for variant, changes in variants.items():
        cells[variant] = builder.cell(_changed(config, variant, changes))
        if not changes:  # else defaults would stand beside what a variant changes
            shown = cells[variant].shown
    resolved: Table = {key: value for key, value in config.items() if key == "title"} | shown
    resolved["run"] = {key: run[key] for key in RUN_KEYS if key in run}
    if variants.keys() != {""}:
        resolved["variants"] = variants
    for key, registry in PARTS_OF_RUN.items():
        if key in run:
            rule = described(_part(run, key), registry, f"run.{key}", allowed)
            resolved["run"][key] = rule[1]
    if deploy := _deploy_table(config):
        resolved["deploy"] = deploy
    return cells, resolved, run, seeds


def load(
    experiment: str | Path | Experiment,
    settings: Settings = None,
    rounds: int | None = None,
    seed: int | None = None,
    allow: object = (),
) -> Experiment:
    """Return an experiment, by name or file, with some settings changed; see `runner.run`."""
    if isinstance(experiment, Experiment):
        name, table, allowed = experiment.name, experiment.resolved, experiment.allowed
        if not settings and rounds is None and seed is None:
            return experiment
    elif isinstance(experiment, str | Path):
        name, table, allowed = Path(experiment).stem, read(experiment), allowed_here(allow)
    else:
        raise InvalidInput(f"An experiment is a name, a file or an Experiment, got {experiment!r}.")
    return resolve(name, configured(table, settings, rounds, seed), allowed)


def configured(
    table: Table, settings: Settings = None, rounds: int | None = None, seed: int | None = None
) -> Table:
    """Return a configuration with some settings changed; see `runner.run`."""
    table = _changed_by(table, settings)
    if rounds is not None:
        table = with_key(table, "run.rounds", rounds)
    if seed is not None:
        table = with_key(table, "run.seed", seed)
        table["run"].pop("seeds", None)
    return table


def _changed_by(table: Table, settings: Settings) -> Table:
    """Return a configuration with settings changed."""
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            _check_setting(key, value)
            table = with_key(table, key, value)
    else:
        for assignment in settings or ():
            table = override(table, assignment)
    return table


def _check_setting(key: str, value: object) -> None:
    """Raise if a setting cannot be written to the configuration in the experiment's folder."""
    try:
        tomli_w.dumps({key: value})
    except (TypeError, AttributeError):
        raise InvalidInput(
            f"The setting {key!r} must be a number, a string, a list or a table, got {value!r}."
        ) from None


def _run_table(config: Table) -> tuple[Table, list[int]]:
    """Return the checked table [run], and its seeds."""
    run = _table(config, "run", "")
    for key in run:
        check_known(key, RUN_KEYS, "key", "run.")
    if "rounds" not in run:
        raise InvalidInput("run.rounds is missing: how many rounds to run.")
    seeds = run.get("seeds", [run.get("seed", 0)])
    if not isinstance(seeds, list) or not seeds or not all(type(s) is int for s in seeds):
        raise InvalidInput(f"run.seeds must be a list of whole numbers, got {seeds!r}.")
    check_count("run.rounds", run["rounds"])
    instances = run.get("instances", False)
    if not isinstance(instances, bool):
        raise InvalidInput(f"run.instances must be true or false, got {instances!r}.")
    return run, seeds


def _changed(config: Table, variant: str, changes: object) -> Table:
    """Return the configuration of a variant."""
    if not isinstance(changes, dict):
        raise InvalidInput(f"variants.{variant} must be a table of keys to change.")
    for key, value in changes.items():
        config = with_key(config, key, value)
    return config


@dataclasses.dataclass(frozen=True)
class _Cell:
    """What describes a variant."""

    make: Callable[[], Problem]
    make_algorithm: Callable[[], Algorithm]
    make_clock: Callable[[], Clock | None]
    table: Table  # the problem's, as it stands in the configuration
    shown: Table  # all tables, with defaults


class _Builder:
    """Describes the parts of variants; those with equal problem tables share the problem."""

    def __init__(self, rounds: int, seed: int | None, allowed: Allowed):
        self.seed = seed  # the problem's, if every seed is another instance of it
        self._rounds, self._allowed = rounds, allowed
        self._known: dict[str, tuple[Callable[[], Problem], Table]] = {}

    def cell(self, config: Table) -> _Cell:
        table = _table(config, "problem", "")
        if self.seed is not None:
            table = table | {"seed": self.seed}
        make, shown_problem = self._problem(table)
        make_algorithm, shown_algorithm = self._algorithm(_table(config, "algorithm", ""), make)
        shown = {"problem": shown_problem, "algorithm": shown_algorithm}
        make_clock = _no_clock
        if "clock" in config:
            clock = {"kind": "Clock"} | _table(config, "clock", "")
            parts = described(clock, {"Clock": Clock}, "clock", self._allowed)
            make_clock, shown["clock"] = parts
        return _Cell(make, make_algorithm, make_clock, table, shown)

    def _problem(self, table: Table) -> tuple[Callable[[], Problem], Table]:
        if (known := repr(table)) not in self._known:
            make, shown = _problem(table, self._allowed)
            # Instances may be large, and are not kept.
            self._known[known] = functools.cache(make) if self.seed is None else make, shown
        return self._known[known]

    def _algorithm(
        self, table: Table, make: Callable[[], Problem]
    ) -> tuple[Callable[[], Algorithm], Table]:
        if table.get("kind") != "FedSGM.from_theory":
            return described(table, ALGORITHMS, "algorithm", self._allowed)
        if self.seed is not None:
            raise InvalidInput("FedSGM.from_theory is for one problem; leave out run.instances.")

        def around(problem: Problem | None) -> tuple[Callable[[], Algorithm], Table]:
            known = {"problem": problem, "rounds": self._rounds}
            return described(table, ALGORITHMS, "algorithm", self._allowed, known)

        return lambda: around(make())[0](), around(None)[1]


def _no_clock() -> None:
    """Return no clock."""


def _deploy_table(config: Table) -> Table:
    deploy = _table(config, "deploy", "") if "deploy" in config else {}
    for key, value in deploy.items():
        check_known(key, DEPLOY_KEYS, "key", "deploy.")
        _check_deploy(key, value)
    return deploy


def _check_deploy(key: str, value: object) -> None:
    name = f"deploy.{key}"
    if key == "sites":
        check_count(name, value)
        return
    if key == "alarms":
        if value not in ALARMS:
            raise InvalidInput(f"{name} is one of {', '.join(ALARMS)}, got {value!r}.")
        return
    number = scalar(name)(value)
    check_positive(name, number, zero=key in ("quorum", "patience"))
    if key == "quorum" and number > 1:
        raise InvalidInput(f"{name} is a part of the clients asked, at most 1, got {value}.")


def _problem(table: Table, allowed: Allowed) -> tuple[Callable[[], Problem], Table]:
    """Return a function that builds a problem, and its table with all defaults filled in.

    `pooled = true` puts all samples on one client.
    """
    pooled = table.get("pooled", False)
    if not isinstance(pooled, bool):
        raise InvalidInput(f"problem.pooled must be true or false, got {pooled!r}.")
    rest = {key: value for key, value in table.items() if key != "pooled"}
    make, shown = described(rest, PROBLEMS, "problem", allowed)
    return (lambda: make().pooled(), shown | {"pooled": True}) if pooled else (make, shown)


def _table(config: Table, key: str, where: str) -> Table:
    if not isinstance(config.get(key), dict):
        raise InvalidInput(f"The table [{where}{key}] is missing.")
    return config[key]


def _part(run: Table, key: str) -> Table:
    """Return the table of a part of [run]; a name stands for a part without settings."""
    if key == "aggregation" and isinstance(run[key], str):
        return {"kind": run[key]}
    table = _table(run, key, "run.")
    return {"kind": "Private", **table} if key == "privacy" else table


def with_key(config: Table, key: str, value: object) -> Table:
    """Return the configuration with a dotted key set; the one that is given does not change."""
    changed = copy.deepcopy(config)
    *path, last = key.split(".")
    table = changed
    for name in path:
        if not isinstance(table.setdefault(name, {}), dict):
            table[name] = {"kind": table[name]} if isinstance(table[name], str) else {}
        table = table[name]
    table[last] = value
    return changed


def settings_of(config: Table, variant: str) -> Table:
    """Return a variant's settings by dotted key; a table's `kind` is the value of its own key."""
    shown = {key: config[key] for key in ("problem", "algorithm", "clock", "run") if key in config}
    for key, value in config.get("variants", {}).get(variant, {}).items():
        shown = with_key(shown, key, value)
    return _flat(shown)


def _flat(table: Table, prefix: str = "") -> Table:
    flat: Table = {}
    for key, value in table.items():
        name = prefix.removesuffix(".") if key == "kind" else prefix + key
        flat |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat
