"""The command line: `fedsolve run`, `list`, `show`, `reproduce`, `report`, `audit`, `deploy`."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import resource
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.markup import escape
from rich.table import Table

from fedsolve import experiments
from fedsolve.cli.console import (
    RunProgress,
    catalogue_table,
    closing_sentences,
    closing_table,
    err,
    fail,
    out,
    tell,
)
from fedsolve.errors import InvalidInput
from fedsolve.experiments import Experiment, Result, registry
from fedsolve.experiments.config import configured, load, resolve, shown
from fedsolve.fields import check_count
from fedsolve.runtimes.compilation import keep_compiled_programs
from fedsolve.solving.checkpoint import how_often
from fedsolve.solving.interrupt import Flag, interrupted_by

if TYPE_CHECKING:
    from fedsolve.flare.preprocessing import Tables

T = TypeVar("T")
ADDRESS_SPACE = 4 * 2**30  # bytes that JAX's and FLARE's threads reserve, with some room
ADMIN_KIT = "--kit, the administrator's kit"

app = typer.Typer(
    name="fedsolve",
    help="Federated optimization under constraints, compression and partial participation.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
Name = Annotated[str, typer.Argument(help="An experiment (see `fedsolve list`) or a TOML file.")]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODULE:NAME",
        help="Import this problem, algorithm or part of another package, whose code you trust.",
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key: algorithm.step_size=0.3"),
]


def main() -> None:
    """Run a command; for wrong input, print one sentence and exit with status 2."""
    try:
        _check_address_space()
        app()
    except InvalidInput as error:
        fail(str(error), 2)


def _check_address_space() -> None:
    """Raise if the shell allows less than compiled programs take, which would end in an abort."""
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY and most < ADDRESS_SPACE:
        raise InvalidInput(
            f"This shell allows a process {most / 2**30:.2g} GiB of addresses (`ulimit -v`), and"
            f" Fedsolve takes {ADDRESS_SPACE / 2**30:.2g} or more, most of which is never used:"
            " limit the memory of a container or of a user's slice instead."
        )


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    """Federated optimization under constraints, compression and partial participation."""
    if version:
        import fedsolve

        out.print(f"fedsolve {fedsolve.__version__}")
        raise typer.Exit


@app.command("list")
def list_all() -> None:
    """List experiments, algorithms, problems, compressors and other parts."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    titles = {name: experiments.read(name).get("title", "") for name in experiments.names()}
    others = {k: v for k, v in registry.PARTS.items() if k not in registry.COMPRESSORS}
    sections: dict[str, Mapping[str, str | Callable[..., object]]] = {
        "Experiments": titles,
        "Algorithms": registry.ALGORITHMS,
        "Problems": registry.PROBLEMS,
        "Compressors": registry.COMPRESSORS,
        "Other parts": others,
        "Rules that stop a run": registry.RULES,
    }
    for title, entries in sections.items():
        table.add_row(f"[bold]{title}[/bold]", "")
        for name, entry in entries.items():
            shown = entry if isinstance(entry, str) else registry.summary(entry)
            table.add_row(f"  {escape(name)}", escape(shown))
    out.print(table)


@app.command()
def show(name: Name, set: Set = None) -> None:
    """Show the whole configuration of an experiment, with all defaults.

    Nothing is built, and no other package is imported.
    """
    import tomli_w

    out.print(tomli_w.dumps(shown(name, set)), end="", markup=False, soft_wrap=True)


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
        str | None, typer.Option(metavar="DIR", help="Resume the run in this folder.")
    ] = None,
    checkpoint_every: Annotated[
        str | None,
        typer.Option(
            metavar="ROUNDS|TIME",
            help="Rounds or time between checkpoints: 100, 90s, 5min (default 30s).",
        ),
    ] = None,
    track: Annotated[
        list[str] | None,
        typer.Option(
            metavar="mlflow[=ADDRESS]",
            help="Send the history to a tracker; a resumed run continues there.",
        ),
    ] = None,
    allow: Allow = None,
) -> None:
    """Run an experiment and write its folder, or resume one that was stopped."""
    if resume is None:
        _needed(name, "an experiment, or --resume DIR")
    elif name is not None or set or seed is not None or out_dir is not None:
        raise InvalidInput("--resume DIR takes its settings from DIR; only --rounds may change.")
    with _signals() as stopped:
        with RunProgress() as progress:
            result = experiments.run(
                name,
                rounds=rounds,
                seed=seed,
                settings=set or None,
                out=out_dir,
                resume=resume,
                checkpoint_every=_interval(checkpoint_every),
                track=track or [],
                allow=allow or [],
                progress=progress,
                interrupted=stopped,
            )
        own = [name for text in track or [] if ":" in (name := text.partition("=")[0])]
        again = f"fedsolve run --resume {shlex.quote(str(result.folder))}"
        allowed: list[str] = [*(allow or []), *own]
        again += "".join(f" --allow {shlex.quote(name)}" for name in dict.fromkeys(allowed))
        _conclude(result, stopped, again)


@contextlib.contextmanager
def _signals() -> Iterator[Flag]:
    """Catch Ctrl-C and SIGTERM in a flag, print warnings, and keep compiled programs."""
    with Flag(signal.SIGINT, signal.SIGTERM) as stopped, warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = tell
        keep_compiled_programs()
        yield stopped


def _interval(text: str | None) -> int | str | None:
    """Parse `--checkpoint-every`."""
    every = int(text) if text is not None and re.fullmatch(r"-?\d+", text) else text
    how_often("--checkpoint-every", every)
    return every


def _conclude(result: Result, stopped: Flag, command: str) -> None:
    """Print what an experiment left, and exit unless it finished; the command resumes it."""
    out.print(closing_table(result.runs))
    for sentence in (*closing_sentences(result.runs), *result.privacy):
        out.print(sentence, markup=False, soft_wrap=True)
    if not result.unsaved:
        out.print(f"Written to {result.folder}{os.sep}", markup=False, soft_wrap=True)
    for missed in result.untracked:
        tell(f"{missed} It is all in {result.folder}; to send it: {command}")
    if result.status == "interrupted" or result.unsaved:
        out.print(f"To go on: {command}", markup=False, soft_wrap=True)
    ended = result.status != "finished"
    if ended or result.unsaved:
        code = 128 + stopped.caught if ended and stopped.caught is not None else 1
        fail(f"{result.message} {result.unsaved}".strip(), code)


@app.command()
def reproduce(
    name: Annotated[
        str | None, typer.Argument(help="Such as fedsgm/figure-2; without it, all are listed.")
    ] = None,
    list_all: Annotated[bool, typer.Option("--list", help="List what there is.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="A small version, in minutes on a CPU.")
    ] = False,
    seeds: Annotated[int | None, typer.Option(help="How many seeds.")] = None,
    out_dir: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="DIR", help="Where to write.")
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the page of all that was reproduced below DIR."),
    ] = None,
    only: Annotated[
        str,
        typer.Option(metavar="TEXT", help="Rows of ppbc/decisive whose name has these."),
    ] = "",
) -> None:
    """Run a figure or table of the papers, and show it beside what the paper says.

    The same command resumes what was stopped.
    """
    from fedsolve.papers import reproduce as of
    from fedsolve.papers.pages import whole_page

    if page is not None:
        if name is not None or quick or seeds is not None or only:
            raise InvalidInput(
                "--page FILE is for all figures below DIR: name no figure beside it."
            )
        shown = whole_page(page, out_dir or of.FOLDER)
        out.print(f"Written to {page}: {len(shown)} figures and tables.", markup=False)
    elif name is None or list_all:
        out.print(catalogue_table())
        out.print("Times are about what 2 quiet cores take. To run one:", markup=False)
        out.print("  fedsolve reproduce fedsgm/figure-1 --quick", markup=False)
    else:
        with _signals() as stopped:
            _reproduce(name, quick, seeds, out_dir, only, stopped)


def _reproduce(
    name: str, quick: bool, seeds: int | None, out_dir: Path | None, only: str, stopped: Flag
) -> None:
    from fedsolve.papers import reproduce as of

    if seeds is not None:
        check_count("--seeds", seeds)
    reproduction = of.start(name, quick, seeds, out_dir, only)
    out.print(reproduction.announcement, markup=False, soft_wrap=True)
    again = reproduction.command + (f" -o {shlex.quote(str(out_dir))}" if out_dir else "")
    with RunProgress() as progress:
        for result in reproduction.run(progress=progress, interrupted=stopped):
            progress.stop()
            _conclude(result, stopped, again)
    try:
        reproduction.finish()
    except OSError as error:
        fail(f"Cannot write to {reproduction.folder}: {error.strerror}.", 1)
    out.print(f"Written to {reproduction.folder}{os.sep}: page.md", markup=False, soft_wrap=True)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of runs.")],
    path: Annotated[Path, typer.Option("-o", "--out", help="The page to write.")] = Path(
        "report.html"
    ),
) -> None:
    """Write an HTML page with the charts of runs, in one file."""
    from fedsolve.experiments.report import report as write

    write(folders, path)
    out.print(f"Written to {path}", markup=False, soft_wrap=True)


@app.command()
def audit(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    data: Annotated[
        Path | None,
        typer.Option(help="Held-out data: an .npz of arrays with a client axis, or a site.toml."),
    ] = None,
    run_name: Annotated[
        str | None, typer.Option("--run", help="Which run: soft/seed-0. Needed if there are many.")
    ] = None,
    model: Annotated[str, typer.Option(help="last, average or best.")] = "last",
    confidence: Annotated[float, typer.Option(help="That all verdicts are right together.")] = 0.95,
    within: Annotated[
        str | None,
        typer.Option("--range", metavar="LOW,HIGH", help="The range of all values of means."),
    ] = None,
    site: Annotated[
        str | None, typer.Option("--site", help="This site's name, before its clients' names.")
    ] = None,
    counts: Annotated[
        Path | None,
        typer.Option(
            "--counts", metavar="FILE", help="Write this site's counts, and judge nothing."
        ),
    ] = None,
    merge: Annotated[
        list[Path] | None, typer.Option("--merge", metavar="FILE", help="Counts of a site.")
    ] = None,
    sites: Annotated[bool, typer.Option(help="Judge every client, too.")] = True,
    allow: Allow = None,
) -> None:
    """Judge a run's constraints on held-out data: met, not met, or too few samples.

    In a deployment each site writes its --counts, and these files are judged with --merge.
    """
    import json

    from fedsolve.experiments.audit import Audited, read_counts
    from fedsolve.flare.site_config import held_out
    from fedsolve.storage.atomic import write_atomically

    if bool(merge) == (data is not None):
        raise InvalidInput("An audit needs held-out data: give --data, or --merge with counts.")
    ranges = None if within is None else _range(within)
    audited = Audited(folder, run_name, model, allow or ())
    if merge:
        tally = read_counts(merge)
    else:
        assert data is not None
        clients, number = held_out(data, audited.problem)
        names = None
        if site is not None:
            names = [site] if number == 1 else [f"{site}, client {i}" for i in range(number)]
        tally = audited.count(clients, names, ranges)
    if counts is not None:
        try:
            write_atomically(counts, json.dumps(tally.to_json()).encode())
        except OSError as error:
            fail(f"Cannot write to {counts}: {error.strerror}.", 1)
        out.print(f"Written to {counts}: counts and sums only", markup=False, soft_wrap=True)
        return
    found = audited.judge(tally, confidence, ranges, sites)
    out.print(str(found), markup=False, soft_wrap=True)
    out.print(f"Written to {folder}{os.sep}: audit.json", markup=False, soft_wrap=True)


def _range(text: str) -> tuple[float, float]:
    """Return the range that two numbers with a comma name."""
    try:
        low, high = (float(word) for word in text.split(","))
    except ValueError:
        raise InvalidInput(f"--range takes two numbers, LOW,HIGH, got {text!r}.") from None
    return low, high


@app.command()
def predict(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run on tables.")],
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="A CSV or Parquet file.")],
    data: Annotated[
        Path | None,
        typer.Option(help="A site.toml, for the file's own columns, units and words."),
    ] = None,
    run_name: Annotated[
        str | None, typer.Option("--run", help="Which run: soft/seed-0. Needed if there are many.")
    ] = None,
    model: Annotated[str, typer.Option(help="best, last or average.")] = "best",
    path: Annotated[Path, typer.Option("-o", "--out", help="The file to write.")] = Path(
        "predictions.csv"
    ),
) -> None:
    """Predict the rows of a new table by a finished run."""
    from fedsolve.data.table_files import Source, data_of
    from fedsolve.experiments.prediction import predict as predicted
    from fedsolve.experiments.prediction import write_csv

    source = None if data is None else Source.of(data_of(data))
    found = predicted(folder, table, run_name, model, source)
    write_csv(found, path)
    rows = len(found["row"])
    out.print(f"Written to {path}: {rows} rows", markup=False, soft_wrap=True)


@app.command()
def watch(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN|FOLDER", help="A run's folder, or one with several.")
    ] = Path("runs"),
    port: Annotated[int, typer.Option(help="The port; 0 for any that is free.")] = 8765,
    browse: Annotated[
        bool, typer.Option("--browse/--no-browse", help="Open the page in a browser.")
    ] = True,
) -> None:
    """Show runs on a live page while they go on; stop it with Ctrl-C."""
    import webbrowser

    from fedsolve.experiments.watch import watch as serving

    with serving(folder, port) as server:
        address = f"http://127.0.0.1:{server.server_address[1]}/"
        out.print(f"Watching {folder} at {address}", markup=False, soft_wrap=True)
        out.print("Stop it with Ctrl-C.")
        if browse and sys.stdout.isatty():
            webbrowser.open(address)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


@app.command()
def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write the files.")] = Path(
        "."
    ),
) -> None:
    """Ask for a table, its label and a constraint, and write the files of an experiment."""
    from fedsolve.cli.new import start

    start(folder)


@app.command()
@interrupted_by(signal.SIGTERM, signal.SIGHUP)
def deploy(
    what: Annotated[
        str,
        typer.Argument(
            help="An experiment; or init, check, server, site, submit, status, cancel, "
            "revoke, stop."
        ),
    ],
    target: Annotated[
        str | None,
        typer.Argument(help="A federation's TOML, a kit, an experiment, a run or a site."),
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
        typer.Option(metavar="mlflow[=ADDRESS]", help="Send the history to a tracker."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Stop or revoke without asking.")] = False,
    experiment: Annotated[
        str | None, typer.Option(help="For check: the experiment that the data must fit.")
    ] = None,
    allow: Allow = None,
) -> None:
    """Run an experiment as a real federation over NVIDIA FLARE."""
    try:
        import nvflare  # noqa: F401

        from fedsolve.flare.preprocessing import tables_in
    except ImportError:
        raise InvalidInput(
            "Deployment needs NVIDIA FLARE: pip install 'fedsolve[deploy]'."
        ) from None
    logging.disable(logging.ERROR)  # FLARE's own messages
    status = 0
    try:
        if what in ("init", "server", "site", "status", "cancel", "revoke", "stop"):
            status = _deployment(what, target, data, kit, out_dir, yes)
        elif what == "check":
            from fedsolve.cli.deploy import check

            kit_of_site = _needed(target, "the site's kit")
            table = None if experiment is None else configured(experiments.read(experiment), set)
            status = check(kit_of_site, _needed(data, "--data site.toml"), table)
        else:
            submitted = what == "submit"
            name = _needed(target, "an experiment") if submitted else what
            words = "--local N, or one of init, check, server, site, submit, status, cancel, "
            words += "revoke, stop"
            sites = None if submitted else _needed(local, words)
            config = configured(experiments.read(name), set, rounds, seed)
            tables = tables_in(config)
            ready = (
                load(name, set, rounds, seed, allow or [])
                if tables is None
                else resolve(Path(name).stem, tables.blank(), allow or [])
            )
            options = out_dir, track or [], tables
            status = _deployed(ready, sites, kit, run_name, options)
    except InvalidInput as error:
        status = 2
        err.print("Error:", str(error), style="bold red", markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        status = 130
        err.print("Stopped by the user.", style="bold red")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)  # FLARE's threads would keep a finished command waiting


def _deployment(
    what: str,
    target: str | None,
    data: str | None,
    kit: str | None,
    out_dir: str | None,
    yes: bool,
) -> int:
    """Make kits, start a server or a site, or ask the administrator's questions."""
    from fedsolve.cli import deploy as commands

    if what == "init":
        commands.init(_needed(target, "a federation's TOML file"), out_dir)
    elif what == "server":
        return commands.server(_needed(target, "the server's kit"), data, kit)
    elif what == "site":
        owners = _needed(data, "--data site.toml")
        return commands.site(_needed(target, "the site's kit"), owners)
    elif what == "cancel":
        commands.cancel(_needed(target, "a run's name"), _needed(kit, ADMIN_KIT))
    elif what == "revoke":
        commands.revoke(_needed(target, "a site's name"), _needed(kit, ADMIN_KIT), yes)
    else:
        commands.ask_admin(what, _needed(kit, ADMIN_KIT), yes)
    return 0


def _deployed(
    experiment: Experiment,
    sites: int | None,
    kit: str | None,
    run_name: str | None,
    options: tuple[str | None, list[str], Tables | None],
) -> int:
    """Run an experiment on that many local sites, or submit it to a server (None)."""
    from fedsolve.cli import deploy as commands

    if sites is not None:
        return commands.local(experiment, sites, *options)
    return commands.submit(experiment, _needed(kit, ADMIN_KIT), run_name, *options)


def _needed(value: T | None, what: str) -> T:
    if value is None:
        raise InvalidInput(f"This needs {what}.")
    return value
