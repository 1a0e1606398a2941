"""`solve`: one run of an algorithm on a problem."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from fedsolve.algorithms.base import Algorithm
from fedsolve.errors import Diverged, Interrupted, InvalidInput, ProcessLost
from fedsolve.federation.clock import Clock, check_clock
from fedsolve.federation.options import Arrivals, Follow, Setting
from fedsolve.federation.state import State
from fedsolve.fields import check_count, check_kind
from fedsolve.problem.layout import as_device_array
from fedsolve.problem.problem import Problem
from fedsolve.runtimes import debug
from fedsolve.runtimes.sharding import (
    agreed,
    anyone,
    copied,
    mesh_of,
    problem_specs,
    several_processes,
    spread,
    state_specs,
    whole,
)
from fedsolve.runtimes.simulation import compiled_advance, compiled_start
from fedsolve.runtimes.streaming import Stream
from fedsolve.solving.checkpoint import (
    Checkpoint,
    Checkpoints,
    exists,
    fingerprint,
    how_often,
    load,
)
from fedsolve.solving.chunks import (
    Spans,
    joined,
    on_host,
    padded,
    spans_of,
    split,
    until,
    until_stopped,
)
from fedsolve.solving.faults import Fault, first_fault, method_of, whose
from fedsolve.solving.interrupt import Flag
from fedsolve.solving.result import History, Run
from fedsolve.solving.stopping import Stop, check_stop, for_problem

SECONDS_A_CHUNK = 0.5  # how long a run may be deaf to Ctrl-C and silent about its progress


def solve(
    problem: Problem,
    algorithm: Algorithm,
    rounds: int,
    seed: int = 0,
    *,
    evaluate_every: int = 1,
    runtime: str = "compiled",
    precision: str | None = None,
    clients_at_once: int | None = None,
    arrivals: Arrivals | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int | str | None = None,
    resume: State | Checkpoint | str | Path | None = None,
    stop: Stop | None = None,
    progress: Callable[[int, int, History], None] | None = None,
    interrupted: Callable[[], bool] | None = None,
    follow: Mapping[str, Any] | None = None,
    clock: Clock | None = None,
    devices: Any = None,
    store: Any = None,
) -> Run:
    """Runs the algorithm for that many rounds, or until a rule says that it is enough.

    - `evaluate_every`: the objective, the constraint and the metrics are computed over all clients
      after every so many rounds, and after the last.
    - `runtime`: `"compiled"`, `"debug"` (clients one by one, nothing compiled), or `"streamed"`:
      clients' data (memory-mapped arrays, say) and states stay outside, and only a cohort is on the
      device at a time. `store` is the folder for the states, or any mutable mapping from numbers
      to bytes; a temporary folder if None.
    - `precision`: `"float32"` or `"float64"`; by default as JAX is set (float32).
    - `clients_at_once`: how many clients are computed together; by default all, or as many as the
      processor's cache holds where their data are large.
    - `arrivals(round, exchange, clients)`: which answers arrive, to try what losses do.
    - `checkpoint`: a file that keeps the run, whole, every half minute (or every
      `checkpoint_every`: so many rounds, or a time such as `"5 min"`) and at its end; the one
      before is kept as well (`….before`).
    - `resume`: what to go on from: a checkpoint's file, with which the run is as if it had never
      stopped, or the `state` of an earlier run. `rounds` counts from the beginning.
    - `stop`: a rule such as `Stationary(below=1e-6)`, or a function of a history entry (a dict by
      name); it is looked at after every evaluation, and `run.rounds` says how many were done.
    - `progress(rounds done, rounds, newest entries of the history)`: called about twice a second;
      where a run is resumed from a file, first with the entries that it has.
    - `interrupted()`: asked about twice a second; True ends the run as Ctrl-C does.
    - `follow`: by name, functions of (problem, params) that see the whole problem, such as
      `fs.theory.skewness`; computed with the objective, inside the compiled program.
    - `clock`: how long clients take; the history then has the `seconds` of a round as they would
      pass in a real federation, and `seconds_total` since the start.
    - `devices`: clients are shared out over that many devices, `"all"` of them, or a list of JAX's;
      after `jax.distributed.initialize()` over those of all processes, which must call alike.

    Raises `Diverged` at the first value that is not finite, and `Interrupted` on Ctrl-C; both carry
    the `run` up to there. `ProcessLost` where another process of the run ended.
    """
    check_run(problem, algorithm, rounds, evaluate_every, precision, clients_at_once, stop, clock)
    if runtime not in ("compiled", "debug", "streamed"):
        raise InvalidInput(f'runtime must be "compiled", "debug" or "streamed", got {runtime!r}.')
    saved = load(resume) if isinstance(resume, str | Path) else resume
    mesh = mesh_of(devices)
    if mesh is not None and runtime != "compiled":
        raise InvalidInput(f"Several devices are for the compiled runtime, not for {runtime!r}.")
    if runtime == "streamed":
        _check_streamed(checkpoint, store, saved)
    followed = as_follow(follow)
    stop = for_problem(stop, problem)
    how_often("checkpoint_every", checkpoint_every)
    identity: dict[str, Any] = {}
    if checkpoint is not None or isinstance(saved, Checkpoint):
        identity = identity_of(problem, algorithm, seed, evaluate_every, precision, followed, clock)
    if isinstance(saved, Checkpoint):
        saved.check(identity)
        if saved.round > rounds:
            raise InvalidInput(f"{saved.path} has done {saved.round} of {rounds} rounds.")
    keeper = None
    if checkpoint is not None:
        place = Path(checkpoint)
        if exists(place) and not (isinstance(saved, Checkpoint) and saved.of(place)):
            raise InvalidInput(f"{place} exists; go on from it with resume, or choose another.")
        if jax.process_index() == 0:
            keeper = Checkpoints(place, checkpoint_every, identity)
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_together(checkpoint))
        dtype = stack.enter_context(precision_of(precision))
        if interrupted is None:
            interrupted = stack.enter_context(_ctrl_c())
        setting = Setting(arrivals, clients_at_once, stop, followed, clock, mesh)
        setting, tuned = as_device_array(setting, dtype), numbers_on_device(algorithm, dtype)
        words = jax.random.key_data(jax.random.key(seed))
        stream = None
        if runtime == "streamed":
            place = stack.enter_context(TemporaryDirectory()) if store is None else store
            placed, stream = problem, Stream(problem, tuned, setting, place, dtype)
        elif mesh is None:
            placed = problem.on_device(dtype)
        else:
            placed = spread(problem.on_host(dtype), problem_specs(problem, mesh))
            setting, tuned, words = copied((setting, tuned, words), mesh)
        if stream is not None:
            start = stream.start(words)
            stack.enter_context(stream.stored(saved if isinstance(saved, Checkpoint) else None))
        else:
            start = jax.block_until_ready(compiled_start(placed, tuned, words, setting))
        chunks: list[History] = []
        if isinstance(saved, Checkpoint):
            state = saved.state(start)
            began -= saved.seconds
            if history := saved.history:
                # A last evaluation between the others would not be there with more rounds.
                kept = (history["round"] % evaluate_every == 0) | (history["round"] == rounds)
                chunks.append({name: values[kept] for name, values in history.items()})
                if progress is not None:
                    progress(saved.round, rounds, chunks[0])
        else:
            state = start if saved is None else _resumed(saved, start, rounds)
        if mesh is not None and saved is not None:
            state = spread(state, state_specs(state, problem.n, mesh))
        ended = fingerprint(stop)  # how a checkpoint says that this rule ended the run

        def advance(state: State, spans: Spans) -> tuple[State, History, bool]:
            if runtime == "debug":
                after, entries = debug.advance(placed, tuned, state, spans, setting)
            elif stream is not None:
                after, entries = stream.advance(state, spans)
            else:
                after, entries = compiled_advance(placed, tuned, state, padded(spans), setting)
            spans, stopped = until_stopped(entries, spans)
            return after, on_host(entries, spans), stopped

        def run(state: State, chunks: list[History]) -> Run:
            seconds = time.perf_counter() - began
            return Run.of(problem, algorithm, whole(state), joined(chunks), seed, seconds)

        def keep(state: State, stopped: bool = False) -> None:
            if checkpoint is None:
                return
            state, seconds = whole(state), time.perf_counter() - began
            if keeper is not None:
                rows = None if stream is None else stream.store
                keeper.write(state, joined(chunks), seconds, ended if stopped else "", rows)

        def name(fault: Fault, spans: Spans) -> str:
            if stream is not None:  # clients' data are not here to look again
                reply = f"client {fault.client}'s reply" if fault.client >= 0 else "w"
                what = f"the {fault.quantity}" if fault.quantity else reply
            elif fault.quantity:
                bad, _, _ = advance(state, until(spans, fault.round))
                what = whose(placed, bad, fault.quantity)
            elif fault.exchange >= 0:
                method = method_of(placed, tuned, state, fault)
                what = f"client {fault.client}'s reply to '{method}'"
            else:
                what = "w"
            return f"Round {fault.round}: {what} is not finite; a smaller step may help."

        spans = spans_of(int(state.round), rounds, evaluate_every)
        if isinstance(saved, Checkpoint) and (saved.round == rounds or saved.stopped == ended):
            return run(state, chunks)
        budget = 1  # rounds that fit into a chunk
        stopped = False
        while len(spans):
            if keeper is not None:
                budget = keeper.at_most(budget, int(state.round))
            (budget,) = agreed(budget)
            if anyone(interrupted()):
                keep(state)
                message = f"Stopped by the user after round {int(state.round)} of {rounds}."
                raise Interrupted(message, run(state, chunks))
            now, rest = split(spans, budget)
            chunk_began = time.perf_counter()
            after, entries, stopped = advance(state, now)
            if fault := first_fault(state, after, entries):
                if len(good := until(now, fault.good)):
                    last, entries, _ = advance(state, good)
                    raise Diverged(name(fault, now), run(last, [*chunks, entries]))
                raise Diverged(name(fault, now), run(state, chunks))
            chunks.append(entries)
            state, spans = after, rest[:0] if stopped else rest
            pace = (now[-1, 1] - now[0, 0]) / max(time.perf_counter() - chunk_began, 1e-9)
            budget = max(int(SECONDS_A_CHUNK * pace), 1)
            if len(spans) and checkpoint is not None:
                (due,) = agreed(keeper is not None and keeper.due(int(state.round)))
                if due:
                    keep(state)
            if progress is not None:
                progress(int(state.round), rounds, entries)
        keep(state, stopped)
        return run(state, chunks)


@contextlib.contextmanager
def _together(checkpoint: str | Path | None) -> Iterator[None]:
    """Says in a sentence that another process was lost in the block."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not several_processes():
            raise
        reason = str(error).strip().splitlines()[0]
        rest = "give `checkpoint` to be able to go on next time"
        if checkpoint is not None:
            rest = f"start all of them again with resume={str(checkpoint)!r} to go on"
        raise ProcessLost(f"Another process of this run was lost; {rest}. ({reason})") from error


def _check_streamed(checkpoint: Any, store: Any, saved: Any) -> None:
    if checkpoint is not None and store is None:
        raise InvalidInput("A checkpoint of a streamed run needs a store that stays: give store.")
    if isinstance(saved, State):
        raise InvalidInput("A streamed run goes on from its checkpoint; a state has no clients.")
    if isinstance(saved, Checkpoint):
        if "store" not in saved.head:
            raise InvalidInput(f"{saved.path} is not of a streamed run.")
        if store is None:
            raise InvalidInput(f"{saved.path} goes on with the store that it was made with.")
        if checkpoint is not None and not saved.of(Path(checkpoint)):
            raise InvalidInput(
                f"A streamed run goes on in its own checkpoint, {saved.path}: a store has the rows"
                " of one run."
            )


def _ctrl_c() -> Flag:
    """Catches Ctrl-C, unless the program around has its own way with it."""
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return Flag(signal.SIGINT) if usual else Flag()


def check_run(
    problem: Problem,
    algorithm: Algorithm,
    rounds: int,
    evaluate_every: int = 1,
    precision: str | None = None,
    clients_at_once: int | None = None,
    stop: Stop | None = None,
    clock: Clock | None = None,
    devices: Any = None,
) -> None:
    """Refuses what cannot be run."""
    check_kind("problem", problem, Problem)
    check_kind("algorithm", algorithm, Algorithm)
    check_count("rounds", rounds)
    check_count("evaluate_every", evaluate_every)
    if clients_at_once is not None:
        check_count("clients_at_once", clients_at_once)
    if precision not in (None, "float32", "float64"):
        raise InvalidInput(f'precision must be "float32" or "float64", got {precision!r}.')
    check_stop(stop)
    check_clock(clock, problem.n)
    mesh_of(devices)
    algorithm.check(problem)


def identity_of(
    problem: Problem,
    algorithm: Algorithm,
    seed: int,
    evaluate_every: int = 1,
    precision: str | None = None,
    followed: Follow = (),
    clock: Clock | None = None,
) -> dict[str, Any]:
    """What makes a run this one and no other, as its checkpoints have it."""
    return {
        "problem": fingerprint(problem),
        "algorithm": fingerprint(algorithm),
        "seed": seed,
        "evaluate_every": evaluate_every,
        "precision": precision,
        "follow": fingerprint(followed),
        "clock": None if clock is None else fingerprint(clock),
    }


def as_follow(follow: Mapping[str, Any] | None) -> Follow:
    """What is to be followed, in a form that a compiled program can be kept for."""
    for name, function in (follow or {}).items():
        if not callable(function):
            raise InvalidInput(
                f"follow[{name!r}] must be a function of (problem, params), got {function!r}."
            )
    return tuple((follow or {}).items())


@contextlib.contextmanager
def precision_of(name: str | None) -> Iterator[Any]:
    """Runs the block in that precision; gives the type for floating-point numbers, if asked for."""
    if name is None:
        yield None
    else:
        with jax.enable_x64(name == "float64"):
            yield jnp.dtype(name)


def numbers_on_device(algorithm: Algorithm, dtype: Any) -> Algorithm:
    """The algorithm with its numbers as arrays: a new value is then no new compilation."""
    return as_device_array(algorithm, dtype)


def _resumed(saved: State, start: State, rounds: int) -> State:
    """The saved state, if it fits what this run would have started from."""
    if _shapes(saved) != _shapes(start):
        raise InvalidInput(
            "The state to resume from belongs to another problem, algorithm or clock."
        )
    if int(saved.round) >= rounds:
        raise InvalidInput(
            f"The state to resume from has done {int(saved.round)} of {rounds} rounds."
        )
    return jax.tree.map(jnp.asarray, saved)


def _shapes(tree: PyTree) -> Any:
    leaves, structure = jax.tree.flatten(eqx.filter(tree, eqx.is_array_like))
    return structure, [(np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]
