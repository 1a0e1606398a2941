"""`sweep`: a grid of runs as one compiled program."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from fedsolve.algorithms.base import Algorithm
from fedsolve.errors import InvalidInput
from fedsolve.federation.clock import Clock
from fedsolve.federation.options import Setting
from fedsolve.federation.state import State
from fedsolve.problem.layout import as_device_array
from fedsolve.problem.problem import Problem
from fedsolve.runtimes.simulation import SLOTS, advance
from fedsolve.solving.chunks import joined, on_host, padded, spans_of
from fedsolve.solving.result import Run, Sweep
from fedsolve.solving.solve import Spans, as_follow, check_run, numbers_on_device, precision_of
from fedsolve.solving.stopping import Stop, for_problem


def sweep(
    problem: Problem | Sequence[Problem],
    algorithm: Algorithm,
    rounds: int,
    seeds: Iterable[int] = (0,),
    *,
    evaluate_every: int = 1,
    precision: str | None = None,
    clients_at_once: int | None = None,
    stop: Stop | None = None,
    follow: Mapping[str, Any] | None = None,
    clock: Clock | None = None,
    **grid: Sequence[Any],
) -> Sweep:
    """Every seed with every combination of the fields' values, such as `step_size=[1, 0.3]` or
    `**{"switching.beta": [20, 40]}`.

    All seeds, and all combinations that differ in numbers only (step sizes, tolerances, β), are one
    compiled program, mapped over algorithm and seed. Values that change the program itself (local
    steps, compressors, hard or soft) make one program each. A combination that diverges does not
    stop the others; the table says in which round it did. A rule `stop` ends each run by itself.
    `follow` and `clock` are as in `solve`.

    Several problems (instances of one kind) are run one by one, by the same program where their
    shapes are the same; the settings say which (`instance`).
    """
    alone = isinstance(problem, Problem)
    problems, seeds = [problem] if alone else list(problem), list(seeds)
    cells = [
        (settings if alone else {"instance": number} | settings, changed, seed, number)
        for number in range(len(problems))
        for settings, changed in _combinations(algorithm, grid)
        for seed in seeds
    ]
    if not cells:
        raise InvalidInput("A sweep needs a problem, a seed, and one value of each field at least.")
    how = rounds, evaluate_every, precision, clients_at_once, stop, clock
    for _, changed, _, number in cells:
        check_run(problems[number], changed, *how)
    followed = as_follow(follow)
    runs: dict[int, Run] = {}
    with precision_of(precision) as dtype:
        settings_of = [
            as_device_array(
                Setting(None, clients_at_once, for_problem(stop, each), followed, clock), dtype
            )
            for each in problems
        ]
        tuned = [numbers_on_device(changed, dtype) for _, changed, _, _ in cells]
        programs: dict[Any, list[int]] = {}
        for index, each in enumerate(tuned):
            programs.setdefault((cells[index][3], jax.tree.structure(each)), []).append(index)

    def run_group(members: list[int], spans: Spans) -> None:
        with precision_of(precision) as dtype:  # JAX keeps it for each thread
            began = time.perf_counter()
            number = cells[members[0]][3]
            placed, setting = problems[number].on_device(dtype), settings_of[number]
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(tuned[i] for i in members))
            keys = jnp.stack([jax.random.key(cells[i][2]) for i in members])
            state, chunks = _start_all(placed, stacked, keys, clock is not None), []
            stopped = np.zeros(len(members), bool)
            for now in np.split(spans, range(SLOTS, len(spans), SLOTS)):
                state, entries = _advance_all(placed, stacked, state, padded(now), setting, stopped)
                chunks.append(on_host(entries, now))
                if stop is not None:
                    stopped = stopped | chunks[-1]["stopped"].any(axis=0)
                if stopped.all():
                    break
            history, state = joined(chunks), jax.tree.map(np.asarray, state)
            ends = np.asarray(history.pop("stopped", np.zeros((0, len(members)), bool)))
            seconds = time.perf_counter() - began
            for row, index in enumerate(members):
                settings, changed, seed, number = cells[index]
                done = np.append(np.flatnonzero(ends[:, row]) + 1, len(history["round"]))[0]
                own = {k: (v if k == "round" else v[:, row])[:done] for k, v in history.items()}
                last = jax.tree.map(lambda leaf, row=row: leaf[row], state)
                runs[index] = Run.of(problems[number], changed, last, own, seed, seconds, settings)

    spans = spans_of(0, rounds, evaluate_every)
    groups = [group for members in programs.values() for group in _groups(members, len(problems))]
    with ThreadPoolExecutor(_cores()) as pool:
        # One of each size and structure compiles, so that the threads need not.
        first = {(len(g), jax.tree.structure(tuned[g[0]])): g for g in reversed(groups)}
        for group in first.values():
            run_group(group, spans[:0])
        list(pool.map(lambda group: run_group(group, spans), groups))
    return Sweep([runs[index] for index in range(len(cells))])


def _cores() -> int:
    return 1 if jax.default_backend() != "cpu" else len(os.sched_getaffinity(0))


def _groups(members: list[int], problems: int) -> list[list[int]]:
    """Equal groups, one for each core (one program on a CPU hardly uses more than one), or one
    group where there are problems enough for all cores. The last member fills up the last group."""
    cores = _cores() if problems < _cores() else 1
    size = -(-len(members) // min(cores, len(members)))
    filled = members + [members[-1]] * (-len(members) % size)
    return [filled[i : i + size] for i in range(0, len(filled), size)]


@eqx.filter_jit
def _start_all(problem: Problem, algorithms: Algorithm, keys: Any, timed: bool) -> State:
    def one(algorithm: Algorithm, key: Any) -> State:
        return State.start(problem, algorithm, key, timed=timed)

    return eqx.filter_vmap(one, in_axes=(eqx.if_array(0), 0))(algorithms, keys)


@eqx.filter_jit
def _advance_all(
    problem: Problem,
    algorithms: Algorithm,
    state: State,
    spans: Any,
    setting: Setting,
    stopped: Any,
) -> tuple[State, dict[str, Any]]:
    def one(algorithm: Algorithm, state: State, stopped: Any) -> tuple[State, dict[str, Any]]:
        # Without a rule all runs go through the same rounds.
        stopped = False if setting.stop is None else stopped
        return advance(problem, algorithm, state, spans, setting, stopped)

    # Entries have their slots first, as those of a single run do.
    return eqx.filter_vmap(one, in_axes=(eqx.if_array(0), 0, 0), out_axes=(0, 1))(
        algorithms, state, stopped
    )


def _combinations(
    algorithm: Algorithm, grid: dict[str, Sequence[Any]]
) -> list[tuple[dict[str, Any], Algorithm]]:
    found = []
    for values in itertools.product(*grid.values()):
        settings, changed = dict(zip(grid, values, strict=True)), algorithm
        for name, value in settings.items():
            changed = with_field(changed, name.split("."), value)
        found.append((settings, changed))
    return found


def with_field(module: Any, path: Sequence[str], value: Any) -> Any:
    """The module with one field, perhaps of a part of it, replaced; its checks run again."""
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
