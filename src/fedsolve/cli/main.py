"""The command line: `fedsolve run`, `list`, `show`, `reproduce`, `report`, `deploy`."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import shlex
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from fedsolve.cli.console import Progress, catalogue_table, closing_table, err, fail, out, tell
from fedsolve.errors import InvalidInput
from fedsolve.solving.interrupt import Flag
from fedsolve.storage.atomic import check_writable, write_atomically

if TYPE_CHECKING:
    from fedsolve.experiments.config import Experiment

app = typer.Typer(
    name="fedsolve",
    help="Federated optimization under constraints, compression and partial participation.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
REPRODUCED = Path("reproduced")  # where `fedsolve reproduce` writes

Name = Annotated[str, typer.Argument(help="An experiment (see `fedsolve list`) or a TOML file.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key: algorithm.step_size=0.3"),
]


def main() -> None:
    """Runs a command; whatever the user did wrong is one sentence and exit status 2."""
    try:
        app()
    except InvalidInput as error:
        fail(str(error), 2)


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    if version:
        import fedsolve

        out.print(f"fedsolve {fedsolve.__version__}")
        raise typer.Exit


@app.command("list")
def list_all() -> None:
    """Lists experiments, algorithms, problems, compressors and other parts."""
    from fedsolve.experiments import config
    from fedsolve.experiments import registry as kinds

    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    experiments = {name: config.read(name).get("title", "") for name in config.experiment_names()}
    others = {k: v for k, v in kinds.PARTS.items() if k not in kinds.COMPRESSORS}
    sections: dict[str, dict[str, Any]] = {
        "Experiments": experiments,
        "Algorithms": kinds.ALGORITHMS,
        "Problems": kinds.PROBLEMS,
        "Compressors": kinds.COMPRESSORS,
        "Other parts": others,
        "Rules that stop a run": kinds.RULES,
    }
    for title, entries in sections.items():
        table.add_row(f"[bold]{title}[/bold]", "")
        for name, entry in entries.items():
            table.add_row(f"  {name}", entry if isinstance(entry, str) else kinds.summary(entry))
    out.print(table)


@app.command()
def show(name: Name, set: Set = None) -> None:
    """Shows the whole configuration of an experiment, defaults filled in."""
    import tomli_w

    out.print(tomli_w.dumps(_experiment(name, set).resolved), end="", markup=False, soft_wrap=True)


@app.command()
def run(
    name: Annotated[
        str | None, typer.Argument(help="An experiment (see `fedsolve list`) or a TOML file.")
    ] = None,
    set: Set = None,
    rounds: Annotated[int | None, typer.Option(help="How many rounds.")] = None,
    seed: Annotated[int | None, typer.Option(help="The seed (one run of each variant).")] = None,
    out_dir: Annotated[
        str | None, typer.Option("--out", metavar="DIR", help="A new folder for the results.")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="DIR", help="Go on with the run in this folder.")
    ] = None,
    checkpoint_every: Annotated[
        str | None,
        typer.Option(metavar="ROUNDS|TIME", help="Save so often: 100, 90s, 5min; by default 30s."),
    ] = None,
    track: Annotated[
        list[str] | None,
        typer.Option(metavar="mlflow[=ADDRESS]", help="Also tell a tracker; again when resumed."),
    ] = None,
) -> None:
    """Runs an experiment and writes its folder; or goes on with one that was stopped."""
    with Flag(signal.SIGINT, signal.SIGTERM) as stopped, warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = tell
        changes = list(set or [])
        changes += [f"run.rounds={rounds}"] if rounds is not None else []
        if resume is None:
            experiment = _experiment(_needed(name, "an experiment, or --resume DIR"), changes, seed)
        elif name is not None or set or seed is not None or out_dir is not None:
            raise InvalidInput("--resume DIR goes on with what DIR has; only --rounds may change.")
        elif not Path(resume, "config.toml").is_file():
            raise InvalidInput(f"{resume} is no folder of a run: it has no config.toml.")
        else:
            experiment = _experiment(str(Path(resume, "config.toml")), changes)
            experiment = dataclasses.replace(experiment, name=Path(resume).resolve().name)
        _run(experiment, out_dir, resume, checkpoint_every, stopped, track=track or [])


def _run(
    experiment: Experiment,
    out_dir: str | None,
    resume: str | None,
    checkpoint_every: int | str | None,
    stopped: Flag,
    again: str | None = None,
    track: Sequence[str] = (),
) -> None:
    """Runs it all; `again` is the command that goes on with it, where that is another one."""
    from fedsolve.experiments.run_folder import alone, new_folder
    from fedsolve.experiments.tracking import made
    from fedsolve.solving import checkpoint as checkpoints
    from fedsolve.solving.options import Options

    # Instances may be large: then only the first is made to look at it.
    for variant in list(experiment.cells)[: None if experiment.instances is None else 1]:
        clock = experiment.clocks[variant]
        Options(clock=clock, **experiment.options).check(*experiment.cells[variant])
    if isinstance(checkpoint_every, str) and re.fullmatch(r"-?\d+", checkpoint_every):
        checkpoint_every = int(checkpoint_every)
    checkpoints.how_often("--checkpoint-every", checkpoint_every)
    for text in track:
        made(text)
    if resume is None:
        folder = new_folder(out_dir, experiment.name)
    else:
        folder = Path(resume)
        check_writable(folder)
    with alone(folder):
        _run_in(folder, experiment, checkpoint_every, stopped, track, again)


def _run_in(
    folder: Path,
    experiment: Experiment,
    checkpoint_every: int | str | None,
    stopped: Flag,
    track: Sequence[str],
    again: str | None,
) -> None:
    import fedsolve as fs
    from fedsolve.experiments.run_folder import begin, checkpoint_of, save
    from fedsolve.experiments.tracking import Tracking
    from fedsolve.runtimes.compilation import keep_compiled_programs
    from fedsolve.solving import checkpoint as checkpoints
    from fedsolve.solving.options import Options

    # All that may be refused is looked at before the first file is written.
    saved: dict[int, checkpoints.Checkpoint] = {}
    own = {k: v for k, v in experiment.options.items() if k in ("evaluate_every", "precision")}
    for number, (variant, each) in enumerate(experiment.runs):
        if checkpoints.exists(place := checkpoint_of(folder, number)):
            saved[number] = checkpoints.load(place)
            done, wanted = saved[number].round, experiment.options["rounds"]
            if done > wanted:
                raise InvalidInput(f"{folder} has done {done} rounds, more than {wanted}.")
            clock = experiment.clocks[variant]
            options = Options(wanted, each, clock=clock, **own)
            saved[number].check(options.identity(*experiment.cell(variant, each)))
    try:
        begin(folder, experiment.resolved)
        tracking = Tracking(folder, track, experiment, tell)
    except OSError as error:
        raise InvalidInput(f"Cannot write to {folder}: {error.strerror}.") from None
    keep_compiled_programs()
    runs: dict[str, list[fs.Run]] = {variant: [] for variant in experiment.cells}
    status, message, lost, code, number = "finished", "", "", 0, 0
    try:
        for number, (variant, each) in enumerate(experiment.runs):
            label = f"{variant or experiment.name}, seed {each}"
            with Progress(label, experiment.options["rounds"]) as progress:
                done = fs.solve(
                    *experiment.cell(variant, each),
                    seed=each,
                    clock=experiment.clocks[variant],
                    progress=tracking.follow(number, progress),
                    interrupted=stopped,
                    checkpoint=checkpoint_of(folder, number),
                    checkpoint_every=checkpoint_every,
                    resume=saved.pop(number, None),
                    **experiment.options,
                )
                runs[variant].append(done)
                tracking.end(number, "finished", done.history)
    except (fs.Diverged, fs.Interrupted) as stop:
        runs[next(v for v, group in runs.items() if len(group) < len(experiment.seeds))].append(
            stop.run
        )
        status = "diverged" if isinstance(stop, fs.Diverged) else "interrupted"
        message, code = str(stop), 1 if stopped.caught is None else 128 + stopped.caught
        tracking.end(number, status, stop.run.history)
    tracking.close_table()
    out.print(closing_table(runs))
    try:
        save(folder, runs, experiment.resolved, status, message)
        out.print(f"Written to {folder}{os.sep}", markup=False, soft_wrap=True)
    except OSError as error:
        lost = f"Cannot write to {folder}: {error.strerror}."
        message, code = f"{message} {lost}".strip(), code or 1
    command = again or f"fedsolve run --resume {shlex.quote(str(folder))}"
    for missed in tracking.close(impatient=stopped if status == "finished" else lambda: False):
        tell(f"{missed} It is all in {folder}; to send it: {command}")
    if status == "interrupted" or lost:
        out.print(f"To go on: {command}", markup=False, soft_wrap=True)
    if code:
        fail(message, code)


@app.command()
def reproduce(
    name: Annotated[
        str | None, typer.Argument(help="Such as fedsgm/figure-2; without it, all are listed.")
    ] = None,
    list_all: Annotated[bool, typer.Option("--list", help="List what there is.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Small, in minutes on a CPU.")] = False,
    seeds: Annotated[int | None, typer.Option(help="How many seeds.")] = None,
    out_dir: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="DIR", help="Where to write.")
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the page of all that was reproduced below DIR."),
    ] = None,
) -> None:
    """Runs a figure or table of the papers, and shows it beside what the paper says.

    The same command goes on with what was stopped.
    """
    from fedsolve.papers.pages import whole_page

    if page is not None:
        if name is not None or quick or seeds is not None:
            raise InvalidInput("--page FILE takes what is there: name no figure beside it.")
        shown = whole_page(page, out_dir or REPRODUCED)
        out.print(f"Written to {page}: {len(shown)} figures and tables.", markup=False)
    elif name is None or list_all:
        out.print(catalogue_table())
        out.print("Times are about what 2 quiet cores take. To run one:", markup=False)
        out.print("  fedsolve reproduce fedsgm/figure-1 --quick", markup=False)
    else:
        with Flag(signal.SIGINT, signal.SIGTERM) as stopped, warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = tell
            _reproduce(name, quick, seeds, out_dir, stopped)


def _reproduce(
    name: str, quick: bool, seeds: int | None, out_dir: Path | None, stopped: Flag
) -> None:
    from fedsolve.experiments import run_folder as folder
    from fedsolve.papers import reproduce as of
    from fedsolve.papers.pages import page

    entry = of.find(name)
    wanted = {"name": name, "quick": quick, "seeds": seeds}
    place = out_dir or REPRODUCED / (f"{name}-quick" if quick else name)
    planned = of.plan(entry, quick, seeds)
    by = of.begin(place, wanted)
    words = ["fedsolve", "reproduce", name, *(["--quick"] if quick else [])]
    words += ["--seeds", str(seeds)] if seeds is not None else []
    again = shlex.join([*words, *(["-o", str(out_dir)] if out_dir else [])])
    runs = sum(len(experiment.runs) for experiment in planned.values())
    expected = of.duration(of.minutes(entry, quick, seeds))
    told = f"{name}: {runs} runs, about {expected} on 2 cores"
    if entry.gpu_minutes and not quick:
        told += f" (on a GPU about {of.duration(entry.gpu_minutes)}; --quick is small)"
    out.print(f"{told}.", markup=False, soft_wrap=True)
    results: dict[str, of.Groups] = {}
    seconds, tables = 0.0, []
    for label, experiment in planned.items():
        own = place / "runs" / label
        if not of.finished(own):
            there = own.exists()
            new, old = (None, str(own)) if there else (str(own), None)
            _run(experiment, new, old, None, stopped, again)
        contents = folder.read(own)
        seconds += sum(contents.facts["seconds"].values())
        results[label] = of.recorded(contents, experiment)
        contents.table.insert(0, "experiment", label)
        tables.append(contents.table)
    made = {"size": "quick" if quick else "full", "changes": of.changes(entry, quick)}
    made |= {"command": shlex.join(words), **by, "seconds": round(seconds, 1)}
    try:
        summary = of.finish(entry, results, place, made)
        of.write_data(place / "data.csv", tables)
        write_atomically(place / "page.md", page(entry, summary).encode())
    except OSError as error:
        fail(f"Cannot write to {place}: {error.strerror}.", 1)
    out.print(f"Written to {place}{os.sep}: page.md", markup=False, soft_wrap=True)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of runs.")],
    path: Annotated[Path, typer.Option("-o", "--out", help="The page to write.")] = Path(
        "report.html"
    ),
) -> None:
    """Makes one page of runs, with charts, that needs nothing else."""
    from fedsolve.experiments.report import report as write

    write(folders, path)
    out.print(f"Written to {path}", markup=False, soft_wrap=True)


@app.command()
def deploy(
    what: Annotated[
        str,
        typer.Argument(help="An experiment; or init, server, site, submit, status, stop."),
    ],
    target: Annotated[
        str | None, typer.Argument(help="A federation's TOML, a kit, or an experiment.")
    ] = None,
    set: Set = None,
    local: Annotated[int | None, typer.Option(help="This many sites on this machine.")] = None,
    data: Annotated[str | None, typer.Option(help="This machine's own file (site.toml).")] = None,
    kit: Annotated[str | None, typer.Option(help="The administrator's kit.")] = None,
    run_name: Annotated[
        str | None, typer.Option("--run", help="A run's name, to go on with it.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="How many rounds.")] = None,
    seed: Annotated[int | None, typer.Option(help="The seed.")] = None,
    out_dir: Annotated[
        str | None, typer.Option("--out", metavar="DIR", help="A new folder for the results.")
    ] = None,
    track: Annotated[
        list[str] | None,
        typer.Option(metavar="mlflow[=ADDRESS]", help="Also tell a tracker."),
    ] = None,
) -> None:
    """Runs an experiment as a real federation over NVIDIA FLARE."""
    try:
        import nvflare  # noqa: F401
    except ImportError:
        raise InvalidInput(
            "Deployment needs NVIDIA FLARE: pip install 'fedsolve[deploy]'."
        ) from None
    logging.disable(logging.ERROR)  # FLARE's own chatter
    from fedsolve.cli import deploy as commands

    changes = list(set or [])
    changes += [f"run.rounds={rounds}"] if rounds is not None else []
    for end in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(end, lambda *_: signal.raise_signal(signal.SIGINT))
    status: Any = 0
    try:
        if what == "init":
            commands.init(_needed(target, "a federation's TOML file"), out_dir)
        elif what == "server":
            status = commands.server(_needed(target, "the server's kit"), data, kit)
        elif what == "site":
            owners = _needed(data, "--data site.toml")
            status = commands.site(_needed(target, "the site's kit"), owners)
        elif what == "submit":
            experiment = _experiment(_needed(target, "an experiment"), changes, seed)
            admin_kit = _needed(kit, "--kit, the administrator's kit")
            status = commands.submit(experiment, admin_kit, run_name, out_dir, track or [])
        elif what in ("status", "stop"):
            commands.ask_admin(what, _needed(kit, "--kit, the administrator's kit"))
        else:
            words = "--local N, or one of init, server, site, submit, status, stop"
            sites = _needed(local, words)
            experiment = _experiment(what, changes, seed)
            status = commands.local(experiment, sites, out_dir, track or [])
    except InvalidInput as error:
        status = 2
        err.print("Error:", str(error), style="bold red", markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        status = 130
        err.print("Stopped by the user.", style="bold red")
    except SystemExit as end:
        status = end.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)  # FLARE's sessions leave threads that would keep a finished command waiting


def _needed(value: Any, what: str) -> Any:
    if value is None:
        raise InvalidInput(f"This needs {what}.")
    return value


def _experiment(name: str, changes: list[str] | None, seed: int | None = None) -> Any:
    from fedsolve.experiments import config

    table = config.read(name)
    for change in changes or []:
        table = config.override(table, change)
    if seed is not None:
        table.setdefault("run", {}).pop("seeds", None)
        table["run"]["seed"] = seed
    return config.resolve(Path(name).stem, table)
