"""`sweep`: a grid of runs as one compiled program."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Key

from fedsolve.algorithms.base import Algorithm
from fedsolve.errors import InvalidInput
from fedsolve.federation.clock import Clock
from fedsolve.federation.options import RoundOptions, Stop
from fedsolve.federation.state import State
from fedsolve.fields import check_seed
from fedsolve.problem.problem import Problem
from fedsolve.runtimes.chunks import SLOTS, Spans, padded, spans_of
from fedsolve.runtimes.history import History, host_history, joined
from fedsolve.runtimes.placement import numbers_on_device, precision_of
from fedsolve.runtimes.simulation import advance
from fedsolve.solving.options import Options
from fedsolve.solving.result import Run, Sweep, concluded
from fedsolve.types import Flag, Info, PRNGKey

Module = TypeVar("Module", bound=eqx.Module)
Keys = Key[Array, " members"]
Cell = tuple[dict[str, object], Algorithm, int, int]  # settings, algorithm, seed, problem's number


def sweep(
    problem: Problem | Sequence[Problem],
    algorithm: Algorithm | Sequence[object] | Mapping[str, Algorithm],
    rounds: int,
    seeds: Iterable[int] = (0,),
    *,
    evaluate_every: int = 1,
    precision: str | None = None,
    clients_at_once: int | None = None,
    stop: Stop | None = None,
    follow: Mapping[str, object] | None = None,
    clock: Clock | None = None,
    **grid: Sequence[object],
) -> Sweep:
    """Run every seed with every combination of some fields' values.

    All seeds, and all combinations that differ in numbers only (step sizes, tolerances, β), are one
    compiled program, mapped over algorithm and seed. Values that change the program itself (local
    steps, compressors, hard or soft) make one program each. A combination that diverges does not
    stop the others; the table says in which round it did.

    Args:
        problem: The problem; or several (instances of one kind), which are run one by one, by the
            same program where their shapes are the same. The settings then say which (`instance`).
        algorithm: The algorithm whose fields are varied; or several, in a list or by name. The
            settings then say which (`algorithm`).
        rounds: The number of rounds.
        seeds: The seeds.
        evaluate_every: As in `solve`.
        precision: As in `solve`.
        clients_at_once: As in `solve`.
        stop: A rule that ends each run by itself.
        follow: As in `solve`.
        clock: As in `solve`.
        **grid: By field, the values to try: `step_size=[1, 0.3]` or `**{"switching.beta": [20]}`.

    Returns:
        The runs, and a table with one row for each.

    Raises:
        InvalidInput: If there is nothing to run, or one of the runs is not possible.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.neyman_pearson(clients=4)
        >>> algorithm = fs.FedSGM(step_size=0.3, tolerance=0.05)
        >>> len(fs.sweep(problem, algorithm, rounds=2, seeds=[0, 1], step_size=[0.1, 0.3]))
        4
    """
    alone = isinstance(problem, Problem)
    problems, seeds = [problem] if alone else list(problem), list(seeds)
    cells = [
        (settings if alone else {"instance": number} | settings, changed, seed, number)
        for number in range(len(problems))
        for label, one in _by_name(algorithm)
        for settings, changed in _combinations(one, grid, label)
        for seed in seeds
    ]
    if not cells:
        raise InvalidInput("A sweep needs a problem, a seed, and one value of each field at least.")
    options = Options(
        rounds,
        evaluate_every=evaluate_every,
        precision=precision,
        clients_at_once=clients_at_once,
        stop=stop,
        follow=follow,
        clock=clock,
    )
    for _, changed, seed, number in cells:
        check_seed(seed)
        options.check(problems[number], changed)
    grid_of_runs = _Grid(problems, cells, options)
    return Sweep(grid_of_runs.run())


class _Grid:
    """The runs of a sweep, in groups that are one program each."""

    def __init__(self, problems: list[Problem], cells: list[Cell], options: Options):
        self._problems, self._cells, self._options = problems, cells, options
        self._runs: dict[int, Run] = {}
        with precision_of(options.precision) as dtype:
            self._round_options = [
                numbers_on_device(options.of_rounds(each), dtype) for each in problems
            ]
            self._tuned = [numbers_on_device(changed, dtype) for _, changed, _, _ in cells]

    def run(self) -> list[Run]:
        """Run all cells, with one thread for each core."""
        programs: dict[Hashable, list[int]] = {}
        for index, each in enumerate(self._tuned):
            key = self._cells[index][3], jax.tree.structure(each)
            programs.setdefault(key, []).append(index)
        count = len(self._problems)
        groups = [group for members in programs.values() for group in _groups(members, count)]
        spans = spans_of(0, self._options.rounds, self._options.evaluate_every)
        with ThreadPoolExecutor(_cores()) as pool:
            # One of each size and structure compiles, so that the threads need not.
            first = {(len(g), jax.tree.structure(self._tuned[g[0]])): g for g in reversed(groups)}
            for group in first.values():
                self._run_group(group, spans[:0])
            list(pool.map(lambda group: self._run_group(group, spans), groups))
        return [self._runs[index] for index in range(len(self._cells))]

    def _run_group(self, members: list[int], spans: Spans) -> None:
        """Run some cells as one program."""
        number, stops = self._cells[members[0]][3], self._options.stop is not None
        with precision_of(self._options.precision) as dtype:  # JAX keeps it for each thread
            began = time.perf_counter()
            placed, options = self._problems[number].on_device(dtype), self._round_options[number]
            tuned = [self._tuned[i] for i in members]
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *tuned)
            keys = jnp.stack([jax.random.key(self._cells[i][2]) for i in members])
            state = _start_all(placed, stacked, keys, options.clock is not None)
            chunks: list[History] = []
            stopped = np.zeros(len(members), bool)
            for now in np.split(spans, range(SLOTS, len(spans), SLOTS)):
                state, entries = _advance_all(placed, stacked, state, padded(now), options, stopped)
                chunks.append(host_history(entries, now))
                if stops:
                    stopped = stopped | chunks[-1]["stopped"].any(axis=0)
                if stopped.all():
                    break
            history, state = joined(chunks), jax.tree.map(np.asarray, state)
            self._keep(members, state, history, time.perf_counter() - began)

    def _keep(self, members: list[int], state: State, history: History, seconds: float) -> None:
        """Take a group's results apart, each run up to where its rule stopped it."""
        ends = np.asarray(history.pop("stopped", np.zeros((0, len(members)), bool)))
        for row, index in enumerate(members):
            settings, changed, seed, number = self._cells[index]
            done = np.append(np.flatnonzero(ends[:, row]) + 1, len(history["round"]))[0]
            columns = {k: v if k == "round" else v[:, row] for k, v in history.items()}
            own = History({name: values[:done] for name, values in columns.items()})
            last = jax.tree.map(lambda leaf, row=row: leaf[row], state)
            problem, last = self._problems[number], concluded(last, own, changed)
            self._runs[index] = Run.of(problem, changed, last, own, seed, seconds, settings)


def _cores() -> int:
    return 1 if jax.default_backend() != "cpu" else len(os.sched_getaffinity(0))


def _groups(members: list[int], problems: int) -> list[list[int]]:
    """Return equal groups, one for each core, or one where there are problems enough for all cores.

    One program on a CPU hardly uses more than one core. The last member fills up the last group.
    """
    cores = _cores() if problems < _cores() else 1
    size = -(-len(members) // min(cores, len(members)))
    filled = members + [members[-1]] * (-len(members) % size)
    return [filled[i : i + size] for i in range(0, len(filled), size)]


@eqx.filter_jit
def _start_all(problem: Problem, algorithms: Algorithm, keys: Keys, timed: bool) -> State:
    def one(algorithm: Algorithm, key: PRNGKey) -> State:
        return State.start(problem, algorithm, key, timed=timed)

    return eqx.filter_vmap(one, in_axes=(eqx.if_array(0), 0))(algorithms, keys)


@eqx.filter_jit
def _advance_all(
    problem: Problem,
    algorithms: Algorithm,
    state: State,
    spans: Int[Array | np.ndarray, "_ 3"],
    options: RoundOptions,
    stopped: Bool[Array | np.ndarray, " members"],
) -> tuple[State, Info]:
    def one(algorithm: Algorithm, state: State, stopped: Flag) -> tuple[State, Info]:
        # Without a rule all runs go through the same rounds.
        stopped = False if options.stop is None else stopped
        return advance(problem, algorithm, state, spans, options, stopped)

    # Entries have their slots first, as those of a single run do.
    return eqx.filter_vmap(one, in_axes=(eqx.if_array(0), 0, 0), out_axes=(0, 1))(
        algorithms, state, stopped
    )


def _by_name(
    given: Algorithm | Sequence[object] | Mapping[str, Algorithm],
) -> list[tuple[dict[str, object], Algorithm]]:
    """Return each algorithm with its name among several, as a setting; of one, no setting."""
    if isinstance(given, Algorithm):
        return [({}, given)]
    if isinstance(given, Mapping):
        return [({"algorithm": name}, each) for name, each in given.items()]
    several = given if isinstance(given, Sequence) else [given]
    algorithms = [each for each in several if isinstance(each, Algorithm)]
    if len(algorithms) < len(several):
        raise InvalidInput(f"algorithm is an algorithm, or several in a list, got {given!r}.")
    names = [type(each).__name__ for each in given]
    numbered = [
        name if names.count(name) == 1 else f"{name} {names[: at + 1].count(name)}"
        for at, name in enumerate(names)
    ]
    return [({"algorithm": n}, each) for n, each in zip(numbered, algorithms, strict=True)]


def _combinations(
    algorithm: Algorithm, grid: Mapping[str, Sequence[object]], label: dict[str, object]
) -> list[tuple[dict[str, object], Algorithm]]:
    found = []
    for values in itertools.product(*grid.values()):
        settings, changed = dict(zip(grid, values, strict=True)), algorithm
        for name, value in settings.items():
            changed = with_field(changed, name.split("."), value)
        found.append((label | settings, changed))
    return found


def with_field(module: Module, path: Sequence[str], value: object) -> Module:
    """Return the module with one field, perhaps of a part of it, replaced; its checks run again."""
    name, *rest = path
    fields = sorted(dataclasses.fields(module), key=lambda field: field.kw_only is True)
    names = [field.name for field in fields if field.init]
    if name not in names:
        raise InvalidInput(
            f"{type(module).__name__} has no field {name!r}; it has {', '.join(names)}."
        )
    if rest:
        value = with_field(getattr(module, name), rest, value)
    return dataclasses.replace(module, **{name: value})
