"""The subcommands of `fedsolve deploy`."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import Popen

import numpy as np

from fedsolve.cli import console as terminal
from fedsolve.errors import InvalidInput
from fedsolve.experiments.config import Experiment, resolve
from fedsolve.experiments.run_folder import new_folder, save
from fedsolve.experiments.tracking import Tracking, made
from fedsolve.flare import provisioning
from fedsolve.flare.admin import Admin
from fedsolve.flare.job_files import check_run_name
from fedsolve.flare.jobs import CANCELLED
from fedsolve.flare.kit_checks import check_certificate, check_connection
from fedsolve.flare.local_federation import deploy_local
from fedsolve.flare.processes import keep_running, start_server, start_site, temporary_folder
from fedsolve.flare.site_config import load_clients, read_owners_file
from fedsolve.flare.supervisor import (
    Runs,
    Tell,
    new_run_name,
    saved_runs,
    supervise,
    wait_for_server,
)
from fedsolve.runtimes.history import History
from fedsolve.types import Table

# What the server reports of an evaluated round beside the entries of its history.
LABELS = {"cell", "variant", "seed"}
NOT_IN_HISTORY = LABELS | {"answered", "milliseconds", "wire_sent", "wire_received"}
CONNECT_TIMEOUT = 10  # seconds until a command gives up on the server
NAMES_WIDTH = 50  # characters in the progress line for the names of sites


def local(experiment: Experiment, sites: int, out_dir: str | None, track: Sequence[str]) -> int:
    """Run an experiment on a federation of this machine; return the exit status.

    The folder of results is the same as from `fedsolve run`.
    """
    folder, tracking = _new_folder(experiment, out_dir, track)
    with _Progress(experiment, sites, tracking) as tell:
        runs, status = deploy_local(experiment, sites, tell)
    return _write(folder, runs, experiment, status, tracking)


def _new_folder(
    experiment: Experiment, out_dir: str | None, track: Sequence[str], run: str = ""
) -> tuple[Path, Tracking]:
    """Make a new folder and everything that follows its runs."""
    for text in track:
        made(text)
    folder = new_folder(out_dir, f"{experiment.name}-deployed")
    return folder, Tracking(folder, track, experiment, terminal.tell, run)


def init(file: str, out_dir: str | None) -> None:
    """Make the kits of a federation and print their folders."""
    for name, kit in provisioning.init(Path(file), Path(out_dir or "kits")).items():
        terminal.out.print(f"{name}: {kit}", markup=False, soft_wrap=True)


def server(kit: str, owners: str | None, admin_kit: str | None) -> int:
    """Run the server in the foreground; return the exit status.

    With the administrator's kit, runs that were not finished are continued.
    """
    place = _kit(kit, "fed_server.json")
    check_certificate(place)
    if owners is not None:
        read_owners_file(Path(owners))
    if admin_kit is not None:
        admin = _kit(admin_kit, "fed_admin.json")
        threading.Thread(target=_continue_runs, args=(place, admin), daemon=True).start()
    own = None if owners is None else Path(owners)
    start = functools.partial(start_server, place, own)
    return _foreground(start, place, "the server is running; stop it with Ctrl-C")


def _continue_runs(kit: Path, admin_kit: Path) -> None:
    """Supervise the runs that were not finished when the server went down."""
    for kept in sorted((kit / "fedsolve" / "runs").glob("*/experiment.json")):
        run = kept.parent.name
        if not any((kept.parent / mark).exists() for mark in ("done", CANCELLED)):
            terminal.out.print(f"continuing {run}", markup=False)
            experiment = resolve(run, json.loads(kept.read_text()))
            try:
                supervise(Admin(admin_kit), experiment, run, _print_note, _sites(experiment))
                terminal.out.print(f"{run} is finished", markup=False)
            except InvalidInput as error:
                terminal.out.print(f"{run}: {error}", markup=False)


def site(kit: str, owners: str) -> int:
    """Run a site in the foreground; return the exit status.

    Its data must be readable and the server must accept it.
    """
    load_clients(Path(owners))
    place = _kit(kit, "fed_client.json")
    check_certificate(place)
    check_connection(place)
    start = functools.partial(start_site, place, Path(owners))
    name = provisioning.kit_name(place)
    return _foreground(start, place, f"{name} is running; stop it with Ctrl-C")


def _foreground(start: Callable[[], Popen], kit: Path, text: str) -> int:
    terminal.out.print(text, markup=False)
    log = kit / "output.log"
    status = keep_running(start, log, lambda line: terminal.out.print(line, markup=False))
    if status:
        terminal.fail(f"The process ended with status {status}; its log is {log}.", 1)
    return status


def submit(
    experiment: Experiment, kit: str, run: str | None, out_dir: str | None, track: Sequence[str]
) -> int:
    """Submit a run, or find it by its name; follow it and fetch its results."""
    run = new_run_name() if run is None else run
    check_run_name(run)
    admin = Admin(_kit(kit, "fed_admin.json"), timeout=CONNECT_TIMEOUT)
    folder, tracking = _new_folder(experiment, out_dir, track, run)
    sites = _sites(experiment)
    terminal.out.print(
        f"{run}: the server stores it in its kit, in fedsolve/runs/{run}", markup=False
    )
    try:
        with _Progress(experiment, sites, tracking) as tell:
            job = supervise(admin, experiment, run, tell, sites)
            runs = _fetched(admin, job, experiment)
    except KeyboardInterrupt:
        admin.close()
        tracking.close_table()
        tracking.close(impatient=lambda: False)
        for file in ("run.json", "history.csv", "tracking.json"):
            (folder / file).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()
        terminal.fail(f"Stopped following; the job continues. To follow it: --run {run}", 130)
    admin.close()
    return _write(folder, runs, experiment, "finished", tracking, data_here=False)


def _fetched(admin: Admin, job: str, experiment: Experiment) -> Runs:
    """Return a job's results, once FLARE has stored them."""
    wait_for_server(lambda: admin.wait_for_end(job), _print_note)
    with temporary_folder() as folder:
        found = next(admin.download(job, folder).rglob("0.safetensors"), None)
        if found is None:
            raise InvalidInput("The job ended without results; see the server's log.")
        return saved_runs(experiment, found.parent, ".safetensors")


def cancel(run: str, kit: str) -> None:
    """End a run for good."""
    admin = Admin(_kit(kit, "fed_admin.json"), timeout=CONNECT_TIMEOUT)
    admin.cancel(run)
    terminal.out.print(f"{run} was cancelled.", markup=False)
    admin.close()


def ask_admin(what: str, kit: str, yes: bool = False) -> None:
    """Print the federation's sites and jobs, or stop all of it if `what` is `stop`.

    Before it stops anything it asks, unless told `yes`.
    """
    admin = Admin(_kit(kit, "fed_admin.json"), timeout=CONNECT_TIMEOUT)
    if what == "stop":
        if not (yes or _agreed(", ".join(sorted(admin.sites())))):
            raise InvalidInput("Nothing was stopped.")
        admin.shut_down()
        terminal.out.print("The server and all sites were told to stop.")
    else:
        for line in admin.overview():
            terminal.out.print(line, markup=False)
    admin.close()


def _agreed(sites: str) -> bool:
    """Ask whether to stop the server and all sites; raise if nobody can answer."""
    terminal.out.print(
        f"This stops the server and its sites ({sites or 'none is connected'}), and the runs that"
        " are going on. Each site's owner has to start it again. To end one run, use `deploy"
        " cancel RUN`.",
        markup=False,
        soft_wrap=True,
    )
    if not sys.stdin.isatty():
        raise InvalidInput("Nobody can answer here: to stop all of it, add --yes.")
    return terminal.out.input("Stop all of it? [y/N] ", markup=False).strip().lower() in (
        "y",
        "yes",
    )


def _write(
    folder: Path,
    runs: Runs,
    experiment: Experiment,
    status: str,
    tracking: Tracking,
    data_here: bool = True,
) -> int:
    """Write the results, print the closing table and return the exit status."""
    for number, (variant, seed) in enumerate(experiment.runs):
        for run in runs[variant]:
            if run.seed == seed:
                tracking.end(number, status, run.history)
    tracking.close_table()
    save(folder, runs, experiment.resolved, status, data_here=data_here)
    if any(runs.values()):
        terminal.out.print(terminal.closing_table(runs))
    terminal.out.print(f"Written to {folder}/", markup=False, soft_wrap=True)
    for missed in tracking.close(impatient=lambda: False):
        terminal.tell(f"{missed} Everything is in {folder}.")
    if status == "interrupted":
        terminal.fail("Stopped by the user.", 130)
    return 0


class _Progress:
    """Show the news of runs in a progress line, and pass evaluated rounds on to trackers.

    Trackers get rounds in order. After a round that did not arrive here they get the others at the
    end, from the run's history.
    """

    def __init__(self, experiment: Experiment, sites: int, tracking: Tracking):
        cells = range(len(experiment.runs))
        rounds = experiment.options["rounds"] * len(cells)
        self._bar = terminal.Progress(f"{experiment.name}, {sites} sites", rounds)
        self._each, self._every = rounds // len(cells), experiment.options.get("evaluate_every", 1)
        self._follow = [tracking.follow(cell, lambda *_: None) for cell in cells]
        self._last = [0 for _ in cells]

    def __enter__(self) -> Tell:
        self._bar.__enter__()
        return self._show

    def __exit__(self, *_: object) -> None:
        self._bar.__exit__()

    def _show(self, news: Table) -> None:
        if "note" in news:
            self._bar.say(None, str(news["note"]))
        elif "round" in news:
            facts = [f"f {news['objective']:.4g}"]
            facts += [f"g {news['constraint']:.4g}"] if "constraint" in news else []
            facts += [_answered(news["answered"])]
            facts += [terminal.size_text(news["bytes_up_total"] + news["bytes_down_total"])]
            facts += [f"{news['milliseconds']:.0f} ms an exchange"]
            self._bar.say(self._each * news["cell"] + news["round"], "  ".join(facts))
            self._track(news["cell"], news["round"], news)

    def _track(self, cell: int, round: int, news: Table) -> None:
        if self._last[cell] < round <= self._last[cell] + self._every:
            entry = {k: np.asarray([v]) for k, v in news.items() if k not in NOT_IN_HISTORY}
            self._follow[cell](round, self._each, History(entry))
            self._last[cell] = round


def _answered(sites: list[str]) -> str:
    """Return which sites answered, or how many if their names are too long for the line."""
    names = ", ".join(sites) or "no site"
    return f"{names} answered" if len(names) < NAMES_WIDTH else f"{len(sites)} sites answered"


def _print_note(news: Table) -> None:
    if "note" in news:
        terminal.out.print(news["note"], markup=False)


def _sites(experiment: Experiment) -> int:
    return int(experiment.deploy.get("sites", 1))


def _kit(kit: str, needs: str) -> Path:
    """Return a kit's folder; raise unless it has the startup file of the right kind of machine."""
    if not Path(kit, "startup", needs).is_file():
        raise InvalidInput(f"{kit} is not the right kind of kit: it has no startup/{needs}.")
    return Path(kit).resolve()
