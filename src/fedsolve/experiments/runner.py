"""Run an experiment in a folder: `fs.experiments.run`, and the command `fedsolve run`."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from fedsolve.errors import Diverged, Interrupted, InvalidInput
from fedsolve.experiments.config import Experiment, Settings, load
from fedsolve.experiments.run_folder import alone, begin, checkpoint_of, new_folder, save
from fedsolve.experiments.tracking import Tracked, Tracking, made
from fedsolve.runtimes.history import History, no_history
from fedsolve.solving import checkpoint as checkpoints
from fedsolve.solving.options import Options
from fedsolve.solving.result import Run
from fedsolve.solving.solve import solve
from fedsolve.storage.atomic import check_writable

Progress = Callable[[Tracked, int, int, History], None]


@dataclasses.dataclass(frozen=True)
class Result:
    """What `run` returns.

    Args:
        runs: The runs of each variant, one for each seed; the key is "" where there are no
            variants. A run that was interrupted or diverged is the last one.
        folder: The folder that has configuration, history, parameters and pictures.
        status: `"finished"`, `"interrupted"` or `"diverged"`.
        message: Why the runs ended early; empty if they finished.
        unsaved: Why the results could not be written to the folder; empty if they were.
        untracked: What trackers did not get, a sentence for each.
        privacy: What a private run guarantees, with its clips and noise, a sentence for each.

    Example:
        >>> import tempfile
        >>> import fedsolve as fs
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result = fs.experiments.run(
        ...         "neyman-pearson", rounds=2, settings={"run.seeds": [0, 1]}, out=folder
        ...     )
        >>> result.status, [run.seed for run in result.runs[""]]
        ('finished', [0, 1])
    """

    runs: dict[str, list[Run]]
    folder: Path
    status: str = "finished"
    message: str = ""
    unsaved: str = ""
    untracked: tuple[str, ...] = ()
    privacy: tuple[str, ...] = ()


def run(
    experiment: str | Path | Experiment | None = None,
    *,
    rounds: int | None = None,
    seed: int | None = None,
    settings: Settings = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    checkpoint_every: int | str | None = None,
    track: Sequence[str] = (),
    allow: Sequence[str] = (),
    progress: Progress | None = None,
    interrupted: Callable[[], bool] | None = None,
) -> Result:
    """Run all variants and seeds of an experiment, and write its folder, as `fedsolve run` does.

    If a run diverges, or is interrupted (by Ctrl-C or by `interrupted`), the runs end there: the
    folder is written with what there is, and `status` and `message` of the result tell why.

    Args:
        experiment: The name of an experiment that comes with the package (`fs.experiments.names`),
            the path of a TOML file, or an `Experiment`. Leave it out with `resume`.
        rounds: How many rounds to run; by default as the experiment has it.
        seed: The only seed to run; by default all seeds of the experiment.
        settings: Keys of the configuration to change: `{"algorithm.step_size": 0.3}`, or texts such
            as `["algorithm.step_size=0.3"]`.
        out: The folder, which must be new or empty; by default a new one below `runs/`.
        resume: The folder of an earlier run to continue from its checkpoints; only `rounds` may
            change.
        checkpoint_every: Rounds between checkpoints, or a time such as `"5 min"`; by default half a
            minute.
        track: Trackers that get the history, such as `"mlflow"`, `"mlflow=http://host:5000"` or
            `"module:Class=address"`. A resumed run continues with the same ones.
        allow: Names such as `"module:name"` that the configuration may import, beside those that
            the user's settings allow; a folder to resume may name trackers, which count as well.
        progress: Called as `progress(run, rounds done, rounds, newest)` when a run begins and about
            twice a second; `run` is an `fs.Tracked`, `newest` the newest entries of the history.
        interrupted: Asked about twice a second; True interrupts the run. By default Ctrl-C does.

    Returns:
        The runs, the folder, and how the runs ended.

    Raises:
        InvalidInput: If the experiment cannot be run as asked, or the folder cannot be used.

    Example:
        >>> import tempfile
        >>> import fedsolve as fs
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result = fs.experiments.run(
        ...         "neyman-pearson", rounds=3, settings={"problem.clients": 10}, out=folder
        ...     )
        ...     print(result.status, result.runs[""][0].rounds)
        ...     print((result.folder / "history.csv").exists())
        finished 3
        True
    """
    if resume is None:
        if experiment is None:
            raise InvalidInput("Name an experiment to run, or a folder to resume.")
        ready = load(experiment, settings, rounds, seed, allow)
    elif any(given is not None for given in (experiment, seed, settings, out)):
        raise InvalidInput("With resume only the number of rounds may change.")
    elif not Path(resume, "config.toml").is_file():
        raise InvalidInput(f"{resume} is not the folder of a run: it has no config.toml.")
    else:
        ready = load(Path(resume, "config.toml"), rounds=rounds, allow=allow)
        ready = dataclasses.replace(ready, name=Path(resume).resolve().name)
    return execute(
        ready,
        out=out,
        resume=resume,
        checkpoint_every=checkpoint_every,
        track=track,
        progress=progress,
        interrupted=interrupted,
    )


def execute(
    experiment: Experiment,
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    checkpoint_every: int | str | None = None,
    track: Sequence[str] = (),
    progress: Progress | None = None,
    interrupted: Callable[[], bool] | None = None,
) -> Result:
    """Run an experiment in a new folder, or continue it in the folder of an earlier run."""
    # Instances may be large: then only the first variant's is built to check it.
    told: dict[str, None] = {}  # sentences on privacy, each once, in their order
    warned: dict[str, None] = {}
    for variant in list(experiment.cells)[: None if experiment.instances is None else 1]:
        options = Options(clock=experiment.clocks[variant], **experiment.options)
        problem, algorithm = experiment.cells[variant]
        options.check(problem, algorithm)
        if (plan := options.plan(problem, algorithm)) is not None:
            told |= dict.fromkeys(plan.sentences())
            warned |= dict.fromkeys([plan.warning()])
    for sentence in filter(None, warned):
        warnings.warn(sentence, stacklevel=2)
    checkpoints.how_often("checkpoint_every", checkpoint_every)
    for text in track:
        made(text)
    if resume is None:
        folder = new_folder(out, experiment.name)
    else:
        folder = Path(resume)
        check_writable(folder)
    with alone(folder):
        saved = _saved(folder, experiment)
        try:
            begin(folder, experiment.resolved)
            tracking = Tracking(folder, track, experiment, warnings.warn)
        except OSError as error:
            raise InvalidInput(f"Cannot write to {folder}: {error.strerror}.") from None
        try:
            result = _solve_all(
                folder, experiment, saved, tracking, checkpoint_every, progress, interrupted
            )
            tracking.close_table()
            try:
                save(folder, result.runs, experiment.resolved, result.status, result.message)
                unsaved = ""
            except OSError as error:
                unsaved = f"Cannot write to {folder}: {error.strerror}."
        except BaseException:
            tracking.close(impatient=lambda: True)
            raise
        impatient = interrupted if result.status == "finished" else None
        untracked = tracking.close(impatient=impatient or (lambda: False))
        return dataclasses.replace(
            result, unsaved=unsaved, untracked=tuple(untracked), privacy=tuple(told)
        )


def _solve_all(
    folder: Path,
    experiment: Experiment,
    saved: dict[int, checkpoints.Checkpoint],
    tracking: Tracking,
    checkpoint_every: int | str | None,
    progress: Progress | None,
    interrupted: Callable[[], bool] | None,
) -> Result:
    """Run every variant with every seed, until one diverges or is interrupted."""
    runs: dict[str, list[Run]] = {variant: [] for variant in experiment.cells}
    for number, (variant, seed) in enumerate(experiment.runs):
        shown = functools.partial(progress or _silent, tracking.runs[number])
        shown(0, experiment.options["rounds"], no_history())
        status, message = "finished", ""
        try:
            done = solve(
                *experiment.cell(variant, seed),
                seed=seed,
                clock=experiment.clocks[variant],
                progress=tracking.follow(number, shown),
                interrupted=interrupted,
                checkpoint=checkpoint_of(folder, number),
                checkpoint_every=checkpoint_every,
                resume=saved.pop(number, None),
                **experiment.options,
            )
        except (Diverged, Interrupted) as stop:
            done, message = stop.run, str(stop)
            status = "diverged" if isinstance(stop, Diverged) else "interrupted"
        runs[variant].append(done)
        tracking.end(number, status, done.history)
        if status != "finished":
            return Result(runs, folder, status, message)
    return Result(runs, folder)


def _silent(run: Tracked, done: int, rounds: int, newest: History) -> None:
    """Show no progress."""


def _saved(folder: Path, experiment: Experiment) -> dict[int, checkpoints.Checkpoint]:
    """Load the checkpoints of a folder by the number of their run; raise if one does not fit."""
    saved: dict[int, checkpoints.Checkpoint] = {}
    same = ("evaluate_every", "evaluate_at", "precision", "aggregation", "privacy")
    own = {k: v for k, v in experiment.options.items() if k in same}
    for number, (variant, seed) in enumerate(experiment.runs):
        if not checkpoints.exists(place := checkpoint_of(folder, number)):
            continue
        saved[number] = checkpoints.load(place)
        done, wanted = saved[number].round, experiment.options["rounds"]
        if done > wanted:
            raise InvalidInput(f"{folder} has done {done} rounds, more than {wanted}.")
        options = Options(wanted, seed, clock=experiment.clocks[variant], **own)
        saved[number].check(options.identity(*experiment.cell(variant, seed)))
    return saved
