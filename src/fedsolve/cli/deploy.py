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
from typing import NoReturn

import numpy as np

from fedsolve.cli import console as terminal
from fedsolve.errors import InvalidInput
from fedsolve.experiments.config import Experiment, resolve
from fedsolve.experiments.run_folder import new_folder, save
from fedsolve.experiments.tracking import Tracking, made
from fedsolve.experiments.watch import NEWS
from fedsolve.flare import provisioning
from fedsolve.flare.admin import Admin
from fedsolve.flare.job_files import check_run_name
from fedsolve.flare.jobs import CANCELLED
from fedsolve.flare.kit_checks import check_certificate, check_connection
from fedsolve.flare.limits import Limits
from fedsolve.flare.local_federation import check_site_count, deploy_local, local_federation
from fedsolve.flare.participation import gaps
from fedsolve.flare.preprocessing import SUFFIX, Tables, fitted_by
from fedsolve.flare.processes import keep_running, start_server, start_site, temporary_folder
from fedsolve.flare.site_checks import checks
from fedsolve.flare.site_config import allowed_names, load_clients, read_owners_file
from fedsolve.flare.supervisor import (
    NotReady,
    Records,
    Runs,
    Tell,
    new_run_name,
    participations,
    saved_runs,
    supervise,
    wait_for_server,
)
from fedsolve.runtimes.history import History
from fedsolve.types import Table

# What the server reports of an evaluated round beside the entries of its history.
LABELS = {"cell", "variant", "seed"}
FACTS = {"answered", "missing", "clients", "ended", "milliseconds", "wire_sent", "wire_received"}
NOT_IN_HISTORY = LABELS | FACTS
INCOMPLETE = "incomplete"  # the status of runs that ended without some of their sites
WITHOUT_SITES = 3  # the exit status of a command whose runs ended, or did not begin, for that
CONNECT_TIMEOUT = 10  # seconds until a command gives up on the server
NAMES_WIDTH = 50  # characters in the progress line for the names of sites


def local(
    experiment: Experiment,
    sites: int,
    out_dir: str | None,
    track: Sequence[str],
    tables: Tables | None = None,
) -> int:
    """Run an experiment on a federation of this machine; return the exit status.

    The folder of results is the same as from `fedsolve run`. With `tables`, every site reads its
    own files.
    """
    with contextlib.ExitStack() as stack:
        running = None
        if tables is None:
            check_site_count(experiment, sites)
        else:
            own = tables.local_sites(sites)
            running = stack.enter_context(local_federation(sites, sites, _print_note, (), own))
            experiment = _fitted(
                tables,
                experiment,
                "local",
                lambda sums, name: deploy_local(sums, sites, _print_note, running, name)[:2],
            )
        folder, tracking = _new_folder(experiment, out_dir, track)
        try:
            with _Progress(experiment, sites, tracking, folder) as tell:
                runs, records, status = deploy_local(experiment, sites, tell, running)
        except NotReady as error:
            _give_up(folder, experiment, tracking, error)
        here = tables is None
        return _write(folder, runs, records, experiment, status, tracking, data_here=here)


def _fitted(
    tables: Tables,
    blank: Experiment,
    run: str,
    deployed: Callable[[Experiment, str], tuple[Runs, Records]],
) -> Experiment:
    """Return the experiment with the means and deviations of all sites' tables."""
    if (config := tables.sums()) is None:
        return blank
    name = run + SUFFIX
    check_run_name(name)
    terminal.out.print(f"{name}: adding up the sites' numbers", markup=False)
    runs, records = deployed(resolve(name, config), name)
    if not any(runs.values()):
        raise InvalidInput("The sites' numbers were not added up.")
    (run_of_sums,), (record,) = runs[""], records.values()
    return resolve(blank.name, tables.fitted(fitted_by(run_of_sums, record)), blank.allowed)


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
    own = None if owners is None else Path(owners)
    if own is not None:
        allowed_names(read_owners_file(own))
    if admin_kit is not None:
        admin = _kit(admin_kit, "fed_admin.json")
        threading.Thread(target=_continue_runs, args=(place, admin, own), daemon=True).start()
    start = functools.partial(start_server, place, own)
    status = _foreground(start, place, "the server is running; stop it with Ctrl-C")
    if left := ", ".join(path.name for path in _unfinished(place)):
        terminal.out.print(
            f"Not finished: {left}. To go on, start the server with --kit ADMIN_KIT, or submit a"
            " run again with its --run.",
            markup=False,
            soft_wrap=True,
        )
    return status


def _unfinished(kit: Path) -> list[Path]:
    """Return the folders of runs on a server that have not ended."""
    runs = [path.parent for path in (kit / "fedsolve" / "runs").glob("*/experiment.json")]
    return sorted(
        run for run in runs if not any((run / mark).exists() for mark in ("done", CANCELLED))
    )


def _continue_runs(kit: Path, admin_kit: Path, owners: Path | None) -> None:
    """Supervise the runs that were not finished when the server went down."""
    names = [] if owners is None else allowed_names(read_owners_file(owners))
    for home in _unfinished(kit):
        run, kept = home.name, home / "experiment.json"
        terminal.out.print(f"continuing {run}", markup=False)
        try:
            experiment = resolve(run, json.loads(kept.read_text()), names)
            ending = _continued(Admin(admin_kit), experiment, run)
            terminal.out.print(f"{run} is {ending}", markup=False)
        except InvalidInput as error:
            terminal.out.print(f"{run}: {error}", markup=False)


def _continued(admin: Admin, experiment: Experiment, run: str) -> str:
    """Supervise a run to its end, and return how it ended."""
    without: dict[str, str] = {}

    def tell(news: Table) -> None:
        _print_note(news)
        without.update(news.get("without", {}))

    supervise(admin, experiment, run, tell, _sites(experiment))
    return f"finished without {', '.join(without)}" if without else "finished"


def site(kit: str, owners: str) -> int:
    """Run a site in the foreground; return the exit status.

    Its data must be readable and the server must accept it.
    """
    load_clients(Path(owners))
    Limits.of(read_owners_file(Path(owners)))
    place = _kit(kit, "fed_client.json")
    check_certificate(place)
    check_connection(place)
    start = functools.partial(start_site, place, Path(owners))
    name = provisioning.kit_name(place)
    return _foreground(start, place, f"{name} is running; stop it with Ctrl-C")


def check(kit: str, owners: str, config: Table | None) -> int:
    """Check a site before a run, one line for each thing; return the exit status."""
    found = list(checks(_kit(kit, "fed_client.json"), Path(owners), config))
    width = max(len(line.name) for line in found)
    for line in found:
        mark = "ok  " if line.fits else "STOP"
        text = f"{mark}  {line.name.ljust(width)}  {line.text}"
        terminal.out.print(text, markup=False, soft_wrap=True)
    if wrong := [line.name for line in found if not line.fits]:
        terminal.fail(f"This site is not ready: {', '.join(wrong)}.", 2)
    terminal.out.print("This site is ready.")
    return 0


def _foreground(start: Callable[[], Popen], kit: Path, text: str) -> int:
    terminal.out.print(text, markup=False)
    log = kit / "output.log"
    status = keep_running(start, log, lambda line: terminal.out.print(line, markup=False))
    if status:
        terminal.fail(f"The process ended with status {status}; its log is {log}.", 1)
    return status


def submit(
    experiment: Experiment,
    kit: str,
    run: str | None,
    out_dir: str | None,
    track: Sequence[str],
    tables: Tables | None = None,
) -> int:
    """Submit a run, or find it by its name; follow it and fetch its results."""
    run = new_run_name() if run is None else run
    check_run_name(run)
    admin = _connected(kit)
    sites = _sites(experiment)
    if tables is not None:

        def deployed(sums: Experiment, name: str) -> tuple[Runs, Records]:
            return _fetched(admin, supervise(admin, sums, name, _print_note, sites), sums)

        try:
            experiment = _fitted(tables, experiment, run, deployed)
        except NotReady as error:
            terminal.fail(str(error), WITHOUT_SITES)
    folder, tracking = _new_folder(experiment, out_dir, track, run)
    terminal.out.print(
        f"{run}: the server stores it in its kit, in fedsolve/runs/{run}", markup=False
    )
    try:
        with _Progress(experiment, sites, tracking, folder) as tell:
            job = supervise(admin, experiment, run, tell, sites)
            runs, records = _fetched(admin, job, experiment)
    except NotReady as error:
        _give_up(folder, experiment, tracking, error)
    except KeyboardInterrupt:
        admin.close()
        tracking.close_table()
        tracking.close(impatient=lambda: False)
        for file in ("run.json", "history.csv", "tracking.json", NEWS):
            (folder / file).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()
        terminal.fail(f"Stopped following; the job continues. To follow it: --run {run}", 130)
    admin.close()
    return _write(folder, runs, records, experiment, "finished", tracking, data_here=False)


def _fetched(admin: Admin, job: str, experiment: Experiment) -> tuple[Runs, Records]:
    """Return a job's results and which sites took part, once FLARE has stored them."""
    wait_for_server(lambda: admin.wait_for_end(job), _print_note)
    with temporary_folder() as folder:
        found = next(admin.download(job, folder).rglob("0.safetensors"), None)
        if found is None:
            raise InvalidInput("The job ended without results; see the server's log.")
        place = experiment, found.parent, ".safetensors"
        return saved_runs(*place), participations(*place)


def _connected(kit: str) -> Admin:
    """Connect as the administrator; raise with the reason if the server does not accept the kit."""
    place = _kit(kit, "fed_admin.json")
    try:
        return Admin(place, timeout=CONNECT_TIMEOUT)
    except InvalidInput:
        check_connection(place)
        raise


def revoke(site: str, kit: str, yes: bool) -> None:
    """Let nobody take part with a site's kit any more."""
    text = (
        f"Nobody can take part as {site} any more, in no run and with no kit. To take the owner in"
        " again, make a kit with another name (`deploy init`)."
    )
    _ask(text, f"Revoke {site}?", "revoke it", yes)
    admin = _connected(kit)
    admin.revoke(site)
    terminal.out.print(f"{site} was revoked.", markup=False)
    admin.close()


def cancel(run: str, kit: str) -> None:
    """End a run for good."""
    admin = _connected(kit)
    admin.cancel(run)
    terminal.out.print(f"{run} was cancelled.", markup=False)
    admin.close()


def ask_admin(what: str, kit: str, yes: bool = False) -> None:
    """Print the federation's sites and jobs, or stop all of it if `what` is `stop`.

    Before it stops anything it asks, unless told `yes`.
    """
    admin = _connected(kit)
    if what == "stop":
        sites = ", ".join(sorted(admin.sites())) or "none is connected"
        text = (
            f"This stops the server and its sites ({sites}), and the runs that are going on. Each"
            " site's owner has to start it again. To end one run, use `deploy cancel RUN`."
        )
        _ask(text, "Stop all of it?", "stop all of it", yes)
        admin.shut_down()
        terminal.out.print("The server and all sites were told to stop.")
    else:
        for line in admin.overview():
            terminal.out.print(line, markup=False)
    admin.close()


def _ask(text: str, question: str, what: str, yes: bool) -> None:
    """Ask before something is done, unless told `yes`; raise if it is not to be done."""
    if yes:
        return
    terminal.out.print(text, markup=False, soft_wrap=True)
    if not sys.stdin.isatty():
        raise InvalidInput(f"Nobody can answer here: to {what}, add --yes.")
    answer = terminal.out.input(f"{question} [y/N] ", markup=False).strip().lower()
    if answer not in ("y", "yes"):
        raise InvalidInput("Nothing was done.")


def _write(
    folder: Path,
    runs: Runs,
    records: Records,
    experiment: Experiment,
    status: str,
    tracking: Tracking,
    data_here: bool = True,
) -> int:
    """Write the results, print the closing table and return the exit status."""
    lines = list(dict.fromkeys(line for each in records.values() for line in gaps(each["sites"])))
    absent = sorted({site for each in records.values() for site in each["missing"]})
    message = "\n".join(lines)
    for number, (variant, seed) in enumerate(experiment.runs):
        for run in runs[variant]:
            if run.seed == seed:
                tracking.end(number, status, run.history)
    tracking.close_table()
    kept = INCOMPLETE if absent and status == "finished" else status
    config = experiment.resolved
    save(folder, runs, config, kept, message, data_here=data_here, participation=records)
    if any(runs.values()):
        terminal.out.print(terminal.closing_table(runs, records))
        for sentence in terminal.closing_sentences(runs):
            terminal.out.print(sentence, markup=False, soft_wrap=True)
    for line in lines:
        terminal.out.print(line, markup=False, soft_wrap=True)
    terminal.out.print(f"Written to {folder}/", markup=False, soft_wrap=True)
    for missed in tracking.close(impatient=lambda: False):
        terminal.tell(f"{missed} Everything is in {folder}.")
    if status == "interrupted":
        terminal.fail("Stopped by the user.", 130)
    if absent:
        terminal.fail(f"Finished without {', '.join(absent)}.", WITHOUT_SITES)
    return 0


def _give_up(folder: Path, experiment: Experiment, tracking: Tracking, error: NotReady) -> NoReturn:
    """Write why a run ended without a result, and exit."""
    tracking.close_table()
    tracking.close(impatient=lambda: False)
    save(folder, {}, experiment.resolved, INCOMPLETE, str(error))
    terminal.fail(str(error), WITHOUT_SITES)


class _Progress:
    """Show the news of runs in a progress line, and pass evaluated rounds on to trackers.

    Trackers get rounds in order. After a round that did not arrive here they get the others at the
    end, from the run's history.
    """

    def __init__(self, experiment: Experiment, sites: int, tracking: Tracking, folder: Path):
        self._news = folder / NEWS
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
        with contextlib.suppress(OSError), open(self._news, "a", encoding="utf-8") as file:
            file.write(json.dumps(news) + "\n")
        if "note" in news:
            if news.get("warning"):
                terminal.tell(str(news["note"]))
            else:
                self._bar.say(None, str(news["note"]))
                self._bar.redirected(str(news["note"]))
        elif "round" in news:
            facts = [f"f {news['objective']:.4g}"]
            facts += [f"g {news['constraint']:.4g}"] if "constraint" in news else []
            if news["clients_evaluated"] != news["clients"]:
                facts += [f"over {news['clients_evaluated']} of {news['clients'] or '?'} clients"]
            facts += [_answered(news["answered"])]
            facts += [f"without {', '.join(news['missing'])}"] if news["missing"] else []
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
    for site, why in news.get("without", {}).items():
        terminal.tell(f"Without {site}: {why}")


def _sites(experiment: Experiment) -> int:
    return int(experiment.deploy.get("sites", 1))


def _kit(kit: str, needs: str) -> Path:
    """Return a kit's folder; raise unless it has the startup file of the right kind of machine."""
    if not Path(kit, "startup", needs).is_file():
        raise InvalidInput(f"{kit} is not the right kind of kit: it has no startup/{needs}.")
    return Path(kit).resolve()
