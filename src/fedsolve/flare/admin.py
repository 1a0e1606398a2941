"""The administrator's session with a FLARE server."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from nvflare.fuel.flare_api.api_spec import TargetType
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

from fedsolve.errors import InvalidInput
from fedsolve.flare.jobs import STOPPED, TOPIC, WITHOUT
from fedsolve.flare.processes import ENVIRONMENT, HEARTBEAT, temporary_folder
from fedsolve.flare.provisioning import ADMIN, SITES
from fedsolve.types import Table

SILENT = 5 * HEARTBEAT  # seconds without a heartbeat after which a site counts as gone
CONNECT_TIMEOUT = 5.0  # seconds for one attempt to connect
CANCEL_TIMEOUT = 120.0  # seconds in which a run must end that is cancelled
END_TIMEOUT = 20.0  # seconds in which running jobs must end when everything is shut down

T = TypeVar("T")


class NoServer(InvalidInput):
    """The server does not answer at the moment."""


class Admin:
    """The administrator's session with a server, which may go away and come back.

    A command that fails closes the session and raises `NoServer`; the next command connects again.
    """

    def __init__(self, kit: Path, timeout: float = 60.0):
        os.environ.update(ENVIRONMENT)
        self._kit = kit
        self._session: Session | None = None
        self._clock = _ServerClock()
        end = time.monotonic() + timeout
        while True:
            try:
                self._connect()
                return
            except NoServer as error:
                if time.monotonic() > end:
                    raise InvalidInput(str(error)) from error
                time.sleep(0.3)

    def _connect(self) -> Session:
        """Return the session; connect if there is none."""
        if self._session is None:
            try:
                with contextlib.redirect_stdout(io.StringIO()):  # it prints that it connects
                    self._session = new_secure_session(
                        ADMIN, str(self._kit), timeout=CONNECT_TIMEOUT
                    )
            except Exception as error:
                raise NoServer(f"Cannot connect to the server: {error}.") from error
        return self._session

    def _do(self, command: Callable[[Session], T]) -> T:
        """Return a command's result; after any error, close the session and raise `NoServer`."""
        session = self._connect()
        try:
            return command(session)
        except Exception as error:
            self.close()
            raise NoServer(f"The server does not answer: {error}.") from error

    def sites(self) -> dict[str, float]:
        """Return the connected sites, with the time of each one's last heartbeat."""
        found = self._do(lambda session: session.get_system_info()).client_info
        now = self._clock.now([info.last_connect_time for info in found])
        return {
            info.name: info.last_connect_time
            for info in found
            if info.last_connect_time > now - SILENT
        }

    def submit(self, job: Path) -> str:
        """Submit the job in a folder and return its identifier."""
        return self._do(lambda session: session.submit_job(str(job)))

    def is_over(self, job: str) -> bool:
        """Return whether a job has ended, for whatever reason."""
        meta = self._do(lambda session: session.get_job_meta(job))
        return "FINISHED" in str(meta.get("status"))

    def wait_for_end(self, job: str) -> None:
        """Wait until FLARE has stored the results of a job that has done its work."""
        while not self.is_over(job):
            time.sleep(0.3)

    def end(self, job: str) -> None:
        """Abort a job."""
        self._do(lambda session: session.abort_job(job))

    def running(self, run: str) -> str | None:
        """Return the job that a run has now, if any."""
        alive = self._jobs_with_process()
        for job in self._do(lambda session: session.list_jobs()):
            going = job["status"] in ("DISPATCHED", "RUNNING") and job["job_id"] in alive
            if job["job_name"] == run and (going or job["status"] in ("SUBMITTED", "APPROVED")):
                return job["job_id"]
        return None

    def _jobs_with_process(self) -> set[str]:
        """Return the jobs that really run.

        The jobs that a server had when it was killed keep the status RUNNING for ever; its list of
        processes is right.
        """
        return {job.job_id for job in self._do(lambda s: s.get_system_info()).job_info}

    def cancel(self, run: str) -> None:
        """End a run for good, before its next round.

        Raises:
            InvalidInput: If it has no job now, or one that does not end.
        """
        job, end = self.running(run), time.monotonic() + CANCEL_TIMEOUT
        if job is None:
            raise InvalidInput(
                f"{run} has no job now. If a `deploy submit` or `deploy server` waits for its"
                " sites, end that command."
            )
        while not self.is_over(job):
            self.news(job, 0, cancel=True)
            if time.monotonic() > end:
                raise InvalidInput(f"{run} does not end: its sites are still at work. Try again.")
            time.sleep(0.3)

    def revoke(self, site: str) -> None:
        """Let nobody take part as a site any more: not in runs that go on, and in no other.

        Raises:
            InvalidInput: If no site has that name.
        """
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", site) or site == ADMIN:
            raise InvalidInput(f"{site!r} is not the name of a site.")
        self._check_known(site)
        self._do(lambda session: session.disable_client(site))
        for job in self._jobs_with_process():
            self.news(job, 0, revoke=site)

    def _check_known(self, site: str) -> None:
        """Raise if neither this kit nor the server knows a site; old kits have no list of sites."""
        listed = self._kit / SITES
        if not listed.exists():
            return
        connected = self._do(lambda session: session.get_system_info()).client_info
        known = {*json.loads(listed.read_text()), *(info.name for info in connected)}
        if site not in known:
            raise InvalidInput(
                f"There is no site {site!r}; the sites are {', '.join(sorted(known))}. For a site"
                f" that was added later, copy {SITES} from the administrator's newest kit."
            )

    def news(
        self, job: str, since: int, make_room: bool = False, cancel: bool = False, revoke: str = ""
    ) -> Table | None:
        """Ask a job for its news after the first `since` entries; None if it does not run.

        The answer has `news`, a list of entries, and `rounds`, the number of rounds in which some
        site answered. With `make_room`, the job is to end before its next round; with `cancel`,
        the run is. The site in `revoke` is not asked any more.
        """
        wish = {"since": since, "yield": make_room, "cancel": cancel, "revoke": revoke}
        try:
            return self._connect().do_app_command(job, TOPIC, wish)
        except NoServer:
            raise
        except Exception:
            return None  # it has not started, or is over, or its server went away

    def download(self, job: str, folder: Path) -> Path:
        """Download the results of a job that has ended; return their folder."""
        return Path(self._do(lambda session: session.download_job_result(job, str(folder))))

    def overview(self) -> list[str]:
        """Return a line for each site and each run, in the order of their newest jobs.

        A run is as its newest job is, except for jobs that only had its name, and were refused.
        """
        lines = [f"site {name}" for name in sorted(self.sites())]
        jobs: dict[str, list[Table]] = {}  # by run, the oldest first
        listed = self._do(lambda session: session.list_jobs())
        for job in sorted(listed, key=lambda job: str(job.get("submit_time", ""))):
            jobs[job["job_name"]] = [*jobs.pop(job["job_name"], []), job]
        alive = self._jobs_with_process()
        for run, own in jobs.items():
            told = (self._told(job, alive) for job in reversed(own))
            lines.append(f"run {run}: {next(filter(None, told), 'refused')}")
        return lines

    def _told(self, job: Table, alive: set[str]) -> str | None:
        """Return a job's state; None if the job was refused and never belonged to the run."""
        status, name = str(job["status"]), job["job_id"]
        if status in ("SUBMITTED", "APPROVED", "DISPATCHED"):
            return "handed over"
        if status == "RUNNING":
            return self._going(name) if name in alive else "ended early, as the server went away"
        if status != "FINISHED:COMPLETED":
            return "ended early" + ("" if "ABORT" not in status else ", as it was stopped")
        found = self._results(name)
        if STOPPED in found:
            return _why_stopped(found[STOPPED])
        if WITHOUT not in found:
            return "waiting to be continued"
        absent = ", ".join(found[WITHOUT])
        return f"finished without {absent}" if absent else "finished"

    def _going(self, job: str) -> str | None:
        """Return how a running job stands; None if it was refused."""
        since, last, waiting = 0, None, []
        while (answer := self.news(job, since)) and (entries := answer["news"]):
            since += len(entries)
            for entry in entries:
                if "error" in entry:
                    return _why_stopped(entry)
                last = entry if "round" in entry else last
                waiting = entry.get("waiting", waiting)
        if last is None:
            return "running, before its first evaluation"
        told = f"round {last['round']}, f {last['objective']:.4g}"
        told += f", answered by {', '.join(last['answered'])}"
        told += "".join(f"; without {site} ({why})" for site, why in last["missing"].items())
        return f"waiting for {', '.join(waiting)}; {told}" if waiting else f"running, {told}"

    def _results(self, job: str) -> dict[str, Table]:
        """Return what a job that has ended says of its end, by the name of the file."""
        with temporary_folder() as folder:
            found = [*self.download(job, folder).rglob("*.json")]
            ends = [path for path in found if path.name in (WITHOUT, STOPPED)]
            return {path.name: json.loads(path.read_text()) for path in ends}

    def shut_down(self) -> None:
        """Abort running jobs and shut down all sites and the server."""
        end = time.monotonic() + END_TIMEOUT
        while True:
            try:
                for job in self._jobs_with_process():
                    self.end(job)
                self._do(lambda session: session.shutdown(TargetType.ALL))
                return
            except NoServer as error:
                if time.monotonic() > end:
                    raise InvalidInput(f"Cannot end the running jobs: {error}") from error
                time.sleep(0.5)

    def close(self) -> None:
        """Close the session."""
        if self._session is not None:
            with contextlib.suppress(Exception):
                self._session.close()
            self._session = None


def _why_stopped(entry: Table) -> str | None:
    """Return why a job ended; None if it only shares the run's name."""
    return None if entry.get("refused") else f"stopped: {entry['error']}"


class _ServerClock:
    """An estimate of the server's clock from the times of heartbeats that it reports."""

    def __init__(self):
        self._newest, self._seen = 0.0, 0.0  # the newest heartbeat; when this process saw it

    def now(self, heartbeats: list[float]) -> float:
        """Return a lower bound of the server's time, given the heartbeats that it reports now."""
        if (newest := max(heartbeats, default=0.0)) > self._newest:
            self._newest, self._seen = newest, time.monotonic()
        return self._newest + time.monotonic() - self._seen
