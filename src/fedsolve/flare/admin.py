"""FLARE itself: its processes, its jobs, its administrator."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from fedsolve.errors import InvalidInput
from fedsolve.flare import provisioning as kits
from fedsolve.flare.jobs import HOME, OWNER, TOPIC, check_run_name

HEARTBEAT = 2.0  # seconds between two signs of life of a site
SILENT = 5 * HEARTBEAT  # after so long without one it counts as gone
ENVIRONMENT = {  # without the first two every reply leaves a thread behind for a minute
    "NVFLARE_STREAMING_RETRY_TIMEOUT": "3",
    "NVFLARE_STREAMING_RETRY_WAIT": "1",
    "NVFLARE_NP_DOWNLOAD_CHUNK_SIZE": "0",
}
# Messages are new memory every time: in large pages it is there four times as fast.
MEMORY = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def start_server(kit: Path, owners_file: Path | None = None) -> subprocess.Popen:
    """The server's process, with its owner's allow-list if there is one."""
    return _start(kit, "server", owners_file)


def start_site(kit: Path, owners_file: Path) -> subprocess.Popen:
    """A site's process, with its owner's file."""
    return _start(kit, "client", owners_file)


def _start(kit: Path, role: str, owners_file: Path | None) -> subprocess.Popen:
    kit = kit.resolve()
    kits.prepare(kit)
    extra = {HOME: str(kit / "fedsolve")}
    extra |= {OWNER: str(owners_file.resolve())} if owners_file is not None else {}
    module = f"nvflare.private.fed.app.{role}.{role}_train"
    words = ["-m", str(kit), "-s", f"fed_{role}.json", "--set", "secure_train=true"]
    words += (
        [f"uid={kits.kit_name(kit)}", f"heart_beat_interval={HEARTBEAT}"]
        if role == "client"
        else []
    )
    words += ["org=fedsolve", "config_folder="]
    with open(kit / "output.log", "ab") as output:
        return subprocess.Popen(
            [sys.executable, "-u", "-m", module, *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=MEMORY | os.environ | ENVIRONMENT | extra,
            start_new_session=True,
        )


def stop(processes: list[subprocess.Popen]) -> None:
    """Ends processes and everything they started."""
    family: list[psutil.Process] = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(process.pid)
            family += [*parent.children(recursive=True), parent]
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family, timeout=10)
    for process in processes:
        process.wait(timeout=10)


def write_job(folder: Path, experiment: dict[str, Any], run: str, sites: list[str]) -> Path:
    """A job for those sites that carries a configuration, and no code."""
    check_run_name(run)
    text = json.dumps(experiment)
    threads = {"max_inbound_call_threads": 100, "max_outbound_call_threads": 100}
    common = {"collab_obj_ids": [], "props": {}, **threads}
    server = {
        "format_version": 2,
        "workflows": [
            {
                "id": "controller",
                "path": kits.ALLOWED[0],
                "args": {"server_obj_id": "_server", **common},
            }
        ],
        "components": [
            {
                "id": "_server",
                "path": kits.ALLOWED[2],
                "args": {"experiment": text, "run": run},
            }
        ],
        "task_data_filters": [],
        "task_result_filters": [],
    }
    client = {
        "format_version": 2,
        "executors": [
            {
                "tasks": ["*"],
                "executor": {
                    "path": kits.ALLOWED[1],
                    "args": {"client_obj_id": "_client", **common},
                },
            }
        ],
        "components": [
            {"id": "_client", "path": kits.ALLOWED[3], "args": {"experiment": text, "run": run}}
        ],
        "task_data_filters": [],
        "task_result_filters": [],
    }
    places = {"app": ["server", *sites]}
    meta = {"name": run, "resource_spec": {}, "min_clients": 1, "deploy_map": places}
    config = folder / run / "app" / "config"
    config.mkdir(parents=True, exist_ok=True)
    (folder / run / "meta.json").write_text(json.dumps(meta))
    (config / "config_fed_server.json").write_text(json.dumps(server))
    (config / "config_fed_client.json").write_text(json.dumps(client))
    return folder / run


class NoServer(InvalidInput):
    """The server does not answer, for now."""


class Admin:
    """The administrator's session with a server, which may go away and come back."""

    def __init__(self, kit: Path, timeout: float = 60.0):
        os.environ.update(ENVIRONMENT)
        self._kit, self._session = kit, None
        end = time.monotonic() + timeout
        while True:
            try:
                self._connect()
                return
            except NoServer as error:
                if time.monotonic() > end:
                    raise InvalidInput(str(error)) from error
                time.sleep(0.3)

    def _connect(self) -> Any:
        from nvflare.fuel.flare_api.flare_api import new_secure_session

        if self._session is None:
            try:
                with contextlib.redirect_stdout(io.StringIO()):  # it prints that it connects
                    self._session = new_secure_session(kits.ADMIN, str(self._kit), timeout=5.0)
            except Exception as error:
                raise NoServer(f"No server answers: {error}.") from error
        return self._session

    def _do(self, command: Callable[[Any], Any]) -> Any:
        """Any trouble is taken for a server that went away: the next command connects anew."""
        session = self._connect()
        try:
            return command(session)
        except Exception as error:
            self.close()
            raise NoServer(f"The server does not answer: {error}.") from error

    def sites(self) -> dict[str, float]:
        """Sites that show signs of life, and when each did last."""
        found = self._do(lambda session: session.get_system_info()).client_info
        newest = max((info.last_connect_time for info in found), default=0.0)
        newest = max(newest, self._clock(newest))
        return {
            info.name: info.last_connect_time
            for info in found
            if info.last_connect_time > newest - SILENT
        }

    def _clock(self, newest: float) -> float:
        """The server's clock, which only its own entries tell: it goes on between two looks."""
        seen, at = getattr(self, "_seen", (0.0, 0.0))
        if newest > seen:
            self._seen = seen, at = newest, time.monotonic()
        return seen + time.monotonic() - at

    def submit(self, job: Path) -> str:
        return self._do(lambda session: session.submit_job(str(job)))

    def is_over(self, job: str) -> bool:
        """Whether a job has ended, in whatever way."""
        return "FINISHED" in str(self._do(lambda s: s.get_job_meta(job)).get("status"))

    def wait_for_end(self, job: str) -> None:
        """Until a job that has done its work is put away."""
        while not self.is_over(job):
            time.sleep(0.3)

    def end(self, job: str) -> None:
        self._do(lambda session: session.abort_job(job))

    def running(self, run: str) -> str | None:
        """The job that a run has now, if any."""
        alive = self._alive()
        for job in self._do(lambda session: session.list_jobs()):
            going = job["status"] in ("DISPATCHED", "RUNNING") and job["job_id"] in alive
            if job["job_name"] == run and (going or job["status"] in ("SUBMITTED", "APPROVED")):
                return job["job_id"]
        return None

    def _alive(self) -> set[str]:
        """Jobs that really run. A server that was away says for ever that its old ones do; its list
        of processes tells."""
        return {job.job_id for job in self._do(lambda s: s.get_system_info()).job_info}

    def news(self, job: str, since: int, make_room: bool = False) -> dict[str, Any] | None:
        """What a job has told after so many entries, and in how many rounds somebody was heard;
        None where it does not run."""
        try:
            wish = {"since": since, "yield": make_room}
            return self._connect().do_app_command(job, TOPIC, wish)
        except NoServer:
            raise
        except Exception:
            return None  # it has not started, or is over, or its server was away

    def last_round(self, job: str) -> dict[str, Any] | None:
        """The newest round that a running job has told."""
        since, last = 0, None
        while (told := self.news(job, since)) and (news := told["news"]):
            since += len(news)
            last = next((entry for entry in reversed(news) if "round" in entry), last)
        return last

    def download(self, job: str, folder: Path) -> Path:
        """The results of a job that ended."""
        return Path(self._do(lambda s: s.download_job_result(job, str(folder))))

    def overview(self) -> list[str]:
        """Sites and jobs, a line each, with the last news of those that run."""
        alive = self.sites()
        lines = [f"site {name}" for name in sorted(alive)]
        for job in self._do(lambda session: session.list_jobs()):
            lines.append(f"job {job['job_name']}: {job['status']}")
            if job["status"] == "RUNNING" and (last := self.last_round(job["job_id"])) is not None:
                answered = ", ".join(last["answered"])
                lines[-1] += f", round {last['round']}, f {last['objective']:.4g}, heard {answered}"
        return lines

    def shut_down(self) -> None:
        """Ends running jobs, all sites and the server."""
        from nvflare.fuel.flare_api.api_spec import TargetType

        end = time.monotonic() + 20
        while True:
            try:
                for job in self._alive():
                    self.end(job)
                self._do(lambda session: session.shutdown(TargetType.ALL))
                return
            except NoServer as error:
                if time.monotonic() > end:
                    raise InvalidInput(f"A job does not end: {error}") from error
                time.sleep(0.5)

    def close(self) -> None:
        if self._session is not None:
            with contextlib.suppress(Exception):
                self._session.close()
            self._session = None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def temporary_folder():
    """A folder that is gone afterwards, whatever happened."""
    folder = Path(tempfile.mkdtemp(prefix="fedsolve-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
