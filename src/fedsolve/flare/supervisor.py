"""Supervise a run as a series of FLARE jobs, and read its results.

A job is disposable: what must survive is on the disks of the server and the sites. When a job ends
early, the next one continues from there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from fedsolve.errors import InvalidInput
from fedsolve.experiments.config import Experiment
from fedsolve.flare.admin import SILENT, Admin, NoServer
from fedsolve.flare.job_files import write_job
from fedsolve.flare.participation import summary
from fedsolve.flare.processes import temporary_folder
from fedsolve.flare.server import FOLDER, saved_participation, saved_run
from fedsolve.solving.result import Run
from fedsolve.types import Table

POLL = 0.3  # seconds between two requests for a job's news
STATUS_POLL = 2.0  # seconds between two requests for a job's status
RECONNECT = 1.0  # seconds between two attempts to reach the server
REJOIN = 60.0  # seconds that a job runs before it makes room for one with a returned site
START_TIMEOUT = 180.0  # seconds until a new job must answer for the first time
SILENCE_TIMEOUT = 30.0  # seconds without an answer after which a job counts as ended
TOGETHER = 6.0  # seconds to wait for further sites when some return
MOST_EMPTY_JOBS = 3  # jobs in a row without a single round, after which a run is given up


class NotReady(InvalidInput):
    """A run was given up because its jobs ended without a round."""


Tell = Callable[[Table], None]  # takes one entry of a run's news: a note, a round, an error
Runs = dict[str, list[Run]]  # by variant
Records = dict[tuple[str, int], Table]  # by variant and seed: which sites took part
T = TypeVar("T")


def supervise(admin: Admin, experiment: Experiment, run: str, tell: Tell, sites: int = 1) -> str:
    """Run an experiment through as many jobs as it takes; return the last job.

    A run that has a job already is followed. The next job starts once enough sites are connected:
    `sites` at first, later as many as the quorum needs. When a lost site is back, the job makes
    room for one that includes it. The server may go away and come back.
    """
    needed, empty_jobs = sites, 0
    last = JobOutcome()
    job = wait_for_server(lambda: admin.running(run), tell)
    while True:
        if job is None:
            connected, waited = _wait_for_sites(admin, needed, last.missed, tell)
            # A job is no failure if its sites were away for a while.
            useful = last.rounds or last.waiting or waited > 2 * SILENT
            empty_jobs = 0 if useful else empty_jobs + 1
            if empty_jobs > MOST_EMPTY_JOBS:
                raise NotReady(
                    f"{MOST_EMPTY_JOBS} jobs in a row ended without a round: {last.reason}."
                )
            job = _submit(admin, experiment, run, connected, tell)
        last = _follow(admin, job, tell)
        if last.ended:
            return job
        needed = max(1, math.ceil(float(experiment.deploy.get("quorum", 0.0)) * sites))
        tell({"note": "continuing with a new job"})
        job = None


def _submit(admin: Admin, experiment: Experiment, run: str, sites: list[str], tell: Tell) -> str:
    with temporary_folder() as folder:
        path = write_job(folder, experiment.resolved, run, sites)
        job = wait_for_server(lambda: admin.submit(path), tell)
    tell({"note": f"starting a job with {len(sites)} sites"})
    return job


@dataclasses.dataclass
class JobOutcome:
    """What is known of a job when it has ended."""

    rounds: int = 0  # in which some site answered
    ended: bool = False  # whether the whole run is finished
    lost: dict[str, float] = dataclasses.field(default_factory=dict)  # sites: last heartbeats
    missed: dict[str, float] = dataclasses.field(default_factory=dict)  # those that a round needs
    waiting: bool = False  # whether only the last evaluation over everyone is missing
    reason: str = "see the logs"  # its last note


def _follow(admin: Admin, job: str, tell: Tell) -> JobOutcome:
    """Pass on a job's news until it ends."""
    told, outcome = 0, JobOutcome()
    began = heard = time.monotonic()
    next_status, over, timeout = 0.0, False, START_TIMEOUT
    while True:
        try:
            if time.monotonic() > next_status:
                over, next_status = admin.is_over(job), time.monotonic() + STATUS_POLL
            rejoin = bool(outcome.lost) and (outcome.waiting or time.monotonic() > began + REJOIN)
            returned = _returned(outcome.lost, admin.sites()) if rejoin else []
            answer = admin.news(job, told, make_room=bool(returned))
        except NoServer as error:
            tell({"note": f"{error} Waiting for it."})
            wait_for_server(admin.sites, tell)
            answer = None
        entries: list[Table] = answer["news"] if answer is not None else []
        if answer is not None:
            heard, timeout, outcome.rounds = time.monotonic(), SILENCE_TIMEOUT, answer["rounds"]
        elif time.monotonic() > heard + timeout:
            over = True  # a restarted server reports its old jobs as running for ever
        for entry in entries:
            _take(admin, entry, outcome, tell)
        told += len(entries)
        if outcome.ended:
            with contextlib.suppress(NoServer):  # so that the job does not wait for us
                admin.news(job, told)
            return outcome
        if over and not entries:
            return outcome
        time.sleep(0 if entries else POLL)


def _take(admin: Admin, entry: Table, outcome: JobOutcome, tell: Tell) -> None:
    """Pass on an entry of a job's news and add it to the outcome; raise if it is an error."""
    tell(entry)
    outcome.reason = entry.get("note", outcome.reason)
    if "lost" in entry:
        now = wait_for_server(admin.sites, tell)
        outcome.lost[entry["lost"]] = max(now.values(), default=0.0)
    outcome.missed |= {site: outcome.lost.get(site, 0.0) for site in entry.get("missed", [])}
    if "error" in entry:
        raise InvalidInput(entry["error"])
    outcome.ended = outcome.ended or "done" in entry
    outcome.waiting = outcome.waiting or "waiting" in entry


def _returned(lost: dict[str, float], sites: dict[str, float]) -> list[str]:
    """Return the lost sites that have sent heartbeats long after they were lost."""
    return [site for site in lost if sites.get(site, 0.0) > lost[site] + SILENT]


def _wait_for_sites(
    admin: Admin, needed: int, missed: dict[str, float], tell: Tell
) -> tuple[list[str], float]:
    """Wait, however long it takes, until enough sites and one of the missed ones are connected.

    Sites that were away together return one after the other, so a while passes before they are
    taken. Return the connected sites and how long that took.
    """
    said, began, newest = "", time.monotonic(), 0.0
    known: set[str] = set()
    while True:
        sites = wait_for_server(admin.sites, tell)
        if sites.keys() - known:
            known, newest = known | sites.keys(), time.monotonic()
        if len(sites) < needed:
            known &= sites.keys()
            text = f"waiting for sites: {len(sites)} of {needed} are connected"
        elif missed and not _returned(missed, sites):
            text = f"waiting for one of {', '.join(sorted(missed))}"
        elif missed and time.monotonic() <= newest + TOGETHER:
            text = said
        else:
            return sorted(sites), time.monotonic() - began
        if text != said:
            said = text
            tell({"note": text})
        time.sleep(POLL)


def wait_for_server(command: Callable[[], T], tell: Tell) -> T:
    """Return the result of a command to the server; repeat it while the server does not answer."""
    while True:
        try:
            return command()
        except NoServer as error:
            tell({"note": str(error)})
            time.sleep(RECONNECT)


def saved_runs(experiment: Experiment, home: Path, suffix: str = f"/{FOLDER}") -> Runs:
    """Return the runs as far as the server has stored them, by variant.

    Results are at `home/NUMBER` + `suffix`: in the server's journals, or downloaded.
    """
    found: Runs = {variant: [] for variant in experiment.cells}
    for cell, (variant, seed) in enumerate(experiment.runs):
        path = Path(f"{home}/{cell}{suffix}")
        if path.exists():
            problem, algorithm = experiment.cells[variant]
            precision = experiment.options.get("precision")
            run = saved_run(path, problem, algorithm, seed, precision)
            found[variant] += [] if run is None else [run]
    return found


def participations(experiment: Experiment, home: Path, suffix: str = f"/{FOLDER}") -> Records:
    """Return the records of expected sites of runs, by variant and seed; see `saved_runs`."""
    places = {run: Path(f"{home}/{cell}{suffix}") for cell, run in enumerate(experiment.runs)}
    return {
        run: summary(saved_participation(path)) for run, path in places.items() if path.exists()
    }


def new_run_name() -> str:
    """Return a name that no other run has."""
    return f"run-{uuid.uuid4().hex[:8]}"
