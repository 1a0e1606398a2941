"""`solve`: one run of an algorithm on a problem."""

from __future__ import annotations

import contextlib
import dataclasses
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
from jaxtyping import Bool

from fedsolve.algorithms.base import Algorithm
from fedsolve.errors import InvalidInput, ProcessLost
from fedsolve.federation.clock import Clock
from fedsolve.federation.milestones import COLUMNS
from fedsolve.federation.options import Arrivals, RoundOptions, Stop
from fedsolve.federation.rules import Rule
from fedsolve.federation.state import State
from fedsolve.privacy.accounting import Ledger
from fedsolve.privacy.plan import Plan
from fedsolve.privacy.private import Private
from fedsolve.problem.problem import Problem
from fedsolve.runtimes.base import Runtime
from fedsolve.runtimes.debug import Debug
from fedsolve.runtimes.history import History, joined
from fedsolve.runtimes.placement import numbers_on_device, precision_of
from fedsolve.runtimes.sharding import (
    Devices,
    copied,
    problem_specs,
    several_processes,
    spread,
)
from fedsolve.runtimes.simulation import Compiled
from fedsolve.runtimes.streaming import Streamed
from fedsolve.solving.checkpoint import Checkpoint, Checkpoints, exists, fingerprint
from fedsolve.solving.interrupt import Flag
from fedsolve.solving.loop import Loop
from fedsolve.solving.options import Options, Progress
from fedsolve.solving.progress_bar import default_bar
from fedsolve.solving.result import Run, concluded
from fedsolve.types import PyTree


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
    progress: Progress | bool | None = None,
    interrupted: Callable[[], bool] | None = None,
    follow: Mapping[str, object] | None = None,
    clock: Clock | None = None,
    devices: Devices = None,
    store: object = None,
    privacy: Private | None = None,
    aggregation: Rule | None = None,
    evaluate_at: str = "rounds",
) -> Run:
    """Run an algorithm on a problem for a number of rounds, or until a rule ends the run.

    Args:
        problem: The problem.
        algorithm: The algorithm.
        rounds: The number of rounds, counted from the beginning where a run is resumed.
        seed: The seed of all random numbers of the run.
        evaluate_every: Compute the objective, the constraint and the metrics over all clients after
            this many rounds (or what `evaluate_at` says), and after the last.
        runtime: `"compiled"`; `"debug"`, clients one by one and nothing compiled; or `"streamed"`,
            clients' data (memory-mapped arrays, say) and states stay outside, and only a cohort is
            on the device at a time.
        precision: `"float32"` or `"float64"`; by default as JAX is set (float32).
        clients_at_once: How many clients are computed together; by default all, or as many as the
            processor's cache holds where their data are large.
        arrivals: A function of (round, exchange, clients) that says which answers arrive, to
            simulate losses.
        checkpoint: A file that keeps the whole run, written every half minute (or every
            `checkpoint_every`) and at the end; the one before is kept as well (`….before`).
        checkpoint_every: Rounds between checkpoints, or a time such as `"5 min"`.
        resume: What to go on from: a checkpoint's file, with which the run is as if it had never
            stopped, or the `state` of an earlier run.
        stop: A rule such as `Stationary(below=1e-6)`, or a function of a history entry (a dict by
            name). It is looked at after every evaluation; `run.rounds` says how many rounds were
            played.
        progress: Called about twice a second with (rounds done, rounds, newest entries of the
            history); where a run is resumed from a file, first with the entries that it has. By
            default a line with the newest values in terminals and notebooks, for runs of more
            than a second; False shows none.
        interrupted: Called about twice a second; True ends the run as Ctrl-C does.
        follow: By name, functions of (problem, params) that see the whole problem, such as
            `fs.theory.skewness`; computed with the objective, inside the compiled program.
        clock: How long clients take; the history then has the `seconds` of a round as they would
            pass in a real federation, and `seconds_total` since the start.
        devices: Share out clients over this many devices, `"all"` of them, or a list of JAX
            devices; after `jax.distributed.initialize()` over those of all processes, which must
            call alike.
        store: Where a streamed run keeps clients' states: a folder, or any mutable mapping from
            numbers to bytes; by default a temporary folder.
        privacy: Differential privacy of clients, such as `fs.Private(clip=1.0, noise=2.0)`; the
            history then has ε so far as `epsilon`, and the run ends when its budget is spent.
        aggregation: How the server adds up answers; None for plain sums.
        evaluate_at: What `evaluate_every` counts: `"rounds"`, or `"messages"`, `"bytes_up"` or
            `"bytes_down"` as `fs.Spent` counts them. Then evaluations are after the rounds in which
            a multiple of it is reached, and after the last round.

    Returns:
        Parameters, history and state.

    Raises:
        InvalidInput: If the problem, the algorithm or an option cannot be used.
        Diverged: At the first value that is not finite; carries the `run` up to there.
        Interrupted: On Ctrl-C; carries the `run` up to there.
        ProcessLost: If another process of the run ended.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.neyman_pearson(clients=4)
        >>> run = fs.solve(problem, fs.FedSGM(step_size=0.3, tolerance=0.05), rounds=5)
        >>> run.history["objective"].shape
        (5,)
    """
    bar = default_bar() if progress is None or progress is True else None
    progress = progress if callable(progress) else bar
    options = Options(
        rounds,
        seed,
        evaluate_every,
        runtime,
        precision,
        clients_at_once,
        arrivals,
        checkpoint,
        checkpoint_every,
        resume,
        stop,
        progress,
        interrupted,
        follow,
        clock,
        devices,
        store,
        privacy,
        aggregation,
        evaluate_at,
    )
    options.check(problem, algorithm)
    saved, plan = options.load(), options.plan(problem, algorithm)
    round_options = options.of_rounds(problem, plan)
    saver = _saver(problem, algorithm, options, saved, fingerprint(round_options.stop))
    began = time.perf_counter() - (saved.seconds if isinstance(saved, Checkpoint) else 0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_lost_process(checkpoint))
        if bar is not None:
            stack.callback(bar.close)
        dtype = stack.enter_context(precision_of(precision))
        played = problem if plan is None else plan.problem_of(problem)
        made = _made(played, algorithm, options, round_options, dtype, stack)
        ledger = None if plan is None else plan.ledger
        rounds = _affordable(rounds, plan, saved)
        state, chunks = _beginning(made, saved, options, ledger)
        if saver is not None:
            saver.store = made.store

        def result(state: State, chunks: list[History], seconds: float) -> Run:
            history = joined(chunks)
            state = concluded(state, history, algorithm)
            return Run.of(problem, algorithm, state, history, seed, seconds)

        loop = Loop(
            runtime=made,
            rounds=rounds,
            evaluate_every=evaluate_every if options.milestones is None else 1,
            began=began,
            result=result,
            interrupted=interrupted or stack.enter_context(_ctrl_c()),
            saver=saver,
            progress=progress,
            ledger=ledger,
        )
        if isinstance(saved, Checkpoint) and _is_over(saved, rounds, round_options):
            return loop.result_of(state, chunks)
        return loop.run(state, chunks)


def _saver(
    problem: Problem,
    algorithm: Algorithm,
    options: Options,
    saved: State | Checkpoint | None,
    rule: str,
) -> Checkpoints | None:
    """Return what writes checkpoints, after a look at those that are there."""
    place = None if options.checkpoint is None else Path(options.checkpoint)
    resumed = saved if isinstance(saved, Checkpoint) else None
    if place is None and resumed is None:
        return None
    identity = options.identity(problem, algorithm)
    if resumed is not None:
        resumed.check(identity)
        if resumed.round > options.rounds:
            raise InvalidInput(
                f"{resumed.path} has done {resumed.round} of {options.rounds} rounds."
            )
    if place is None:
        return None
    if exists(place) and not (resumed is not None and resumed.of(place)):
        raise InvalidInput(f"{place} exists; go on from it with resume, or choose another.")
    return Checkpoints(place, options.checkpoint_every, identity, rule)


def _is_over(saved: Checkpoint, rounds: int, options: RoundOptions) -> bool:
    """Return whether all rounds are done, or the same rule has ended the run."""
    return saved.round == rounds or saved.stopped == fingerprint(options.stop)


def _made(
    problem: Problem,
    algorithm: Algorithm,
    options: Options,
    round_options: RoundOptions,
    dtype: np.dtype | None,
    stack: contextlib.ExitStack,
) -> Runtime:
    """Make the runtime, with its arrays where they belong; the stack closes it."""
    mesh, tuned = options.mesh, numbers_on_device(algorithm, dtype)
    round_options = numbers_on_device(round_options, dtype)
    if options.runtime == "streamed":
        place = options.store
        if place is None:
            place = stack.enter_context(TemporaryDirectory())
        made: Runtime = Streamed(problem, tuned, round_options, place, dtype)
    elif mesh is not None:
        placed = spread(problem.on_host(dtype), problem_specs(problem, mesh))
        made = Compiled(placed, *copied((tuned, round_options), mesh))
    else:
        kind = Debug if options.runtime == "debug" else Compiled
        made = kind(problem.on_device(dtype), tuned, round_options)
    stack.callback(made.close)
    return made


def _beginning(
    runtime: Runtime,
    saved: State | Checkpoint | None,
    options: Options,
    ledger: Ledger | None = None,
) -> tuple[State, list[History]]:
    """Return the state to begin with, and the history that there is."""
    start = runtime.start(jax.random.key_data(jax.random.key(options.seed)))
    if ledger is not None:
        start = ledger.start(start)
    if isinstance(saved, State):
        _check_spending(saved, ledger)
    if not isinstance(saved, Checkpoint):
        runtime.open(0, ())
        return (
            start if saved is None else runtime.place(_resumed(saved, start, options.rounds))
        ), []
    runtime.open(saved.round, saved.stores if "store" in saved.head else ())
    state, history = saved.state(start), saved.history
    if not history:
        return runtime.place(state), []
    # A last evaluation between the others would not be there with more rounds.
    kept = _in_longer_runs(history, options) | (history["round"] == options.rounds)
    history = History({name: values[kept] for name, values in history.items()})
    if options.progress is not None:
        options.progress(saved.round, options.rounds, history)
    return runtime.place(state), [history]


def _in_longer_runs(history: History, options: Options) -> Bool[np.ndarray, " entries"]:
    """Return which entries a run of more rounds has, too."""
    if options.milestones is None:
        return history["round"] % options.evaluate_every == 0
    passed = history[f"{COLUMNS[options.evaluate_at]}_total"] // options.evaluate_every
    return passed > np.append(0, passed[:-1])


def _resumed(saved: State, start: State, rounds: int) -> State:
    """Return the saved state, if it fits what this run would have started from."""
    if _shapes(saved) != _shapes(start):
        raise InvalidInput(
            "The state to resume from belongs to another problem, algorithm or clock."
        )
    if int(saved.round) >= rounds:
        raise InvalidInput(
            f"The state to resume from has done {int(saved.round)} of {rounds} rounds."
        )
    saved = jax.tree.map(jnp.asarray, saved)
    return dataclasses.replace(saved, best=start.best)  # of the rounds that this run plays


def _affordable(rounds: int, plan: Plan | None, saved: State | Checkpoint | None) -> int:
    """Return the number of rounds to which a run may go, by its budget."""
    if plan is None or plan.rounds == rounds:
        return rounds
    done = 0 if saved is None else int(saved.round)
    if isinstance(saved, State) and done >= plan.rounds:
        raise InvalidInput(
            f"The budget is spent after round {plan.rounds}, and the state has done {done}."
        )
    return max(plan.rounds, done)


def _check_spending(saved: State, ledger: Ledger | None) -> None:
    """Raise if a state cannot go on with this privacy, or without any."""
    if ledger is not None:
        ledger.check(saved)
    elif saved.spent is not None:
        raise InvalidInput(
            "The state to resume from is of a private run: go on with the same privacy."
        )


def _shapes(tree: PyTree) -> tuple[object, list[tuple[Any, ...]]]:
    leaves, structure = jax.tree.flatten(eqx.filter(tree, eqx.is_array_like))
    return structure, [(np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]


def _ctrl_c() -> Flag:
    """Catch Ctrl-C, unless the program around has its own handler."""
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return Flag(signal.SIGINT) if usual else Flag()


@contextlib.contextmanager
def _lost_process(checkpoint: str | Path | None) -> Iterator[None]:
    """Say in a sentence that another process was lost in the block."""
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
