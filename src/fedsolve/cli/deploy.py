"""What `fedsolve deploy` does, word by word."""

from __future__ import annotations

import contextlib
import functools
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import Popen
from typing import Any

import numpy as np

from fedsolve.cli import console as terminal
from fedsolve.errors import InvalidInput
from fedsolve.experiments.config import Experiment, resolve
from fedsolve.experiments.run_folder import new_folder, save
from fedsolve.experiments.tracking import Tracking, made
from fedsolve.flare import admin as engine
from fedsolve.flare import supervisor as deploy
from fedsolve.flare.jobs import check_run_name
from fedsolve.flare.provisioning import kit_name
from fedsolve.flare.site_config import own_clients, owners_file

# What the server tells of an evaluation beside its entry in the history.
OF_THE_LINK = {"cell", "variant", "seed", "answered", "milliseconds", "wire_sent", "wire_received"}


def local(experiment: Experiment, sites: int, out_dir: str | None, track: Sequence[str]) -> int:
    """A federation on this machine, and the same folder as `fedsolve run`: the exit status."""
    folder, tracking = _place(experiment, out_dir, track)
    with _Progress(experiment, sites, tracking) as tell:
        runs, status = deploy.deploy_local(experiment, sites, tell)
    return _write(folder, runs, experiment, status, tracking)


def _place(
    experiment: Experiment, out_dir: str | None, track: Sequence[str], run: str = ""
) -> tuple[Path, Tracking]:
    """A new folder, and all that follows its runs."""
    for text in track:
        made(text)
    folder = new_folder(out_dir, f"{experiment.name}-deployed")
    return folder, Tracking(folder, track, experiment, terminal.tell, run)


def init(file: str, out_dir: str | None) -> None:
    """Kits, to be carried to their machines by a way that is trusted."""
    for name, kit in deploy.init(Path(file), Path(out_dir or "kits")).items():
        terminal.out.print(f"{name}: {kit}", markup=False, soft_wrap=True)


def server(kit: str, owners: str | None, admin_kit: str | None) -> int:
    """The server, in the foreground. With the administrator's kit it goes on with its runs that
    have not ended."""
    place = _kit(kit, "fed_server.json")
    deploy.check_certificate(place)
    if owners is not None:
        owners_file(Path(owners))
    if admin_kit is not None:
        admin = _kit(admin_kit, "fed_admin.json")
        threading.Thread(target=_go_on, args=(place, admin), daemon=True).start()
    own = None if owners is None else Path(owners)
    start = functools.partial(engine.start_server, place, own)
    return _foreground(start, place, "the server runs; Ctrl-C ends it")


def _go_on(kit: Path, admin_kit: Path) -> None:
    """Supervises runs that were not finished when the server went down."""
    for kept in sorted((kit / "fedsolve" / "runs").glob("*/experiment.json")):
        run = kept.parent.name
        if not (kept.parent / "done").exists():
            terminal.out.print(f"going on with {run}", markup=False)
            experiment = resolve(run, json.loads(kept.read_text()))
            try:
                deploy.supervise(engine.Admin(admin_kit), experiment, run, _say, _sites(experiment))
                terminal.out.print(f"{run} is done", markup=False)
            except InvalidInput as error:
                terminal.out.print(f"{run}: {error}", markup=False)


def site(kit: str, owners: str) -> int:
    """A site, in the foreground, once its data can be read and the server would take it."""
    own_clients(Path(owners))
    place = _kit(kit, "fed_client.json")
    deploy.check_certificate(place)
    deploy.check_welcome(place)
    start = functools.partial(engine.start_site, place, Path(owners))
    return _foreground(start, place, f"{kit_name(place)} runs; Ctrl-C ends it")


def _foreground(start: Callable[[], Popen], kit: Path, text: str) -> int:
    terminal.out.print(text, markup=False)
    status = deploy.keep_running(
        start, kit / "output.log", lambda line: terminal.out.print(line, markup=False)
    )
    if status:
        terminal.fail(
            f"The process ended with status {status}; its log is {kit / 'output.log'}.", 1
        )
    return status


def submit(
    experiment: Experiment, kit: str, run: str | None, out_dir: str | None, track: Sequence[str]
) -> int:
    """Gives the server a run to do (or goes on with one), follows it, and fetches its results."""
    run = deploy.new_run() if run is None else run
    check_run_name(run)
    admin = engine.Admin(_kit(kit, "fed_admin.json"), timeout=10)
    folder, tracking = _place(experiment, out_dir, track, run)
    sites = _sites(experiment)
    terminal.out.print(
        f"{run}: the server keeps it in its kit, in fedsolve/runs/{run}", markup=False
    )
    try:
        with _Progress(experiment, sites, tracking) as tell:
            job = deploy.supervise(admin, experiment, run, tell, sites)
            runs = _fetched(admin, job, experiment)
    except KeyboardInterrupt:
        admin.close()
        tracking.close_table()
        tracking.close(impatient=lambda: False)
        for file in ("run.json", "history.csv", "tracking.json"):
            (folder / file).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()
        terminal.fail(f"Not followed any more; the job goes on. To follow it: --run {run}", 130)
    admin.close()
    return _write(folder, runs, experiment, "finished", tracking, data_here=False)


def _fetched(admin: engine.Admin, job: str, experiment: Experiment) -> deploy.Runs:
    """A job's results, once FLARE has stored them."""
    deploy.patiently(lambda: admin.wait_for_end(job), _say)
    with engine.temporary_folder() as folder:
        found = next(admin.download(job, folder).rglob("0.safetensors"), None)
        if found is None:
            raise InvalidInput("The job ended without results; its server's log says more.")
        return deploy.saved_runs(experiment, found.parent, ".safetensors")


def ask_admin(what: str, kit: str) -> None:
    """Who is there and what runs; or the end of it all."""
    admin = engine.Admin(_kit(kit, "fed_admin.json"), timeout=10)
    if what == "stop":
        admin.shut_down()
        terminal.out.print("The server and all sites were told to stop.")
    else:
        for line in admin.overview():
            terminal.out.print(line, markup=False)
    admin.close()


def _write(
    folder: Path,
    runs: deploy.Runs,
    experiment: Experiment,
    status: str,
    tracking: Tracking,
    data_here: bool = True,
) -> int:
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
        terminal.tell(f"{missed} It is all in {folder}.")
    if status == "interrupted":
        terminal.fail("Stopped by the user.", 130)
    return 0


class _Progress:
    """A line that follows the runs, a line for everything worth saying, and trackers told of every
    evaluation in its turn: after one that was not heard, they get the rest at the end."""

    def __init__(self, experiment: Experiment, sites: int, tracking: Tracking):
        cells = range(len(experiment.runs))
        rounds = experiment.options["rounds"] * len(cells)
        self._bar = terminal.Progress(f"{experiment.name}, {sites} sites", rounds)
        self._each, self._every = rounds // len(cells), experiment.options.get("evaluate_every", 1)
        self._follow = [tracking.follow(cell, lambda *_: None) for cell in cells]
        self._last = [0 for _ in cells]

    def __enter__(self) -> deploy.Tell:
        self._bar.__enter__()
        return self._show

    def __exit__(self, *_: object) -> None:
        self._bar.__exit__()

    def _show(self, news: dict[str, Any]) -> None:
        if "note" in news:
            self._bar.say(None, str(news["note"]))
        elif "round" in news:
            facts = [f"f {news['objective']:.4g}"]
            facts += [f"g {news['constraint']:.4g}"] if "constraint" in news else []
            facts += [_who(news["answered"])]
            facts += [terminal.size_text(news["bytes_up_total"] + news["bytes_down_total"])]
            facts += [f"{news['milliseconds']:.0f} ms an exchange"]
            self._bar.say(self._each * news["cell"] + news["round"], "  ".join(facts))
            self._track(news["cell"], news["round"], news)

    def _track(self, cell: int, round: int, news: dict[str, Any]) -> None:
        if self._last[cell] < round <= self._last[cell] + self._every:
            entry = {k: np.asarray([v]) for k, v in news.items() if k not in OF_THE_LINK}
            self._follow[cell](round, self._each, entry)
            self._last[cell] = round


def _who(answered: list[str]) -> str:
    """Who answered, as far as a line has room for names."""
    names = ", ".join(answered)
    return f"{names or 'nobody'} answered" if len(names) < 50 else f"{len(answered)} sites answered"


def _say(news: dict[str, Any]) -> None:
    if "note" in news:
        terminal.out.print(news["note"], markup=False)


def _sites(experiment: Experiment) -> int:
    return int(experiment.deploy.get("sites", 1))


def _kit(kit: str, needs: str) -> Path:
    if not Path(kit, "startup", needs).is_file():
        raise InvalidInput(f"{kit} is not the kit that this needs: it has no startup/{needs}.")
    return Path(kit).resolve()
