"""FLARE itself: kits with certificates, processes, jobs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from fedsolve.errors import InvalidInput
from fedsolve.flare.jobs import HOME, SITE

ADMIN = "admin@fedsolve.local"
ALLOWED = (
    "nvflare.collab.runtime.controller.CollabController",
    "nvflare.collab.runtime.executor.CollabExecutor",
    "fedsolve.flare.jobs.Coordinator",
    "fedsolve.flare.jobs.Site",
    "fedsolve.flare.launcher.TolerantLauncher",
)
ENVIRONMENT = {  # without the first two every reply leaves a thread behind for a minute
    "NVFLARE_STREAMING_RETRY_TIMEOUT": "3",
    "NVFLARE_STREAMING_RETRY_WAIT": "1",
    "NVFLARE_NP_DOWNLOAD_CHUNK_SIZE": "0",
}


def make_kits(folder: Path, host: str, port: int, sites: list[str]) -> dict[str, Path]:
    """A federation with fresh certificates: kits for the server, each site, the administrator."""
    builders = ["workspace.WorkspaceBuilder", "static_file.StaticFileBuilder", "cert.CertBuilder"]
    project: dict[str, Any] = {
        "api_version": 3,
        "name": "fedsolve",
        "description": "made by fedsolve",
        "participants": [
            {"name": host, "type": "server", "org": "fedsolve", "fed_learn_port": port},
            *[{"name": site, "type": "client", "org": "fedsolve"} for site in sites],
            {"name": ADMIN, "type": "admin", "org": "fedsolve", "role": "project_admin"},
        ],
        "builders": [
            {"path": f"nvflare.lighter.impl.{builder}", "args": arguments}
            for builder, arguments in zip(
                [*builders, "signature.SignatureBuilder"],
                [{"template_file": ["master_template.yml"]}, {"scheme": "grpc"}, {}, {}],
                strict=True,
            )
        ],
    }
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    plan = folder / "project.yml"
    plan.write_text(json.dumps(project), encoding="utf-8")  # JSON is YAML
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "nvflare.cli",
            "provision",
            "-p",
            str(plan),
            "-w",
            str(folder),
            "--force",
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"HOME": str(folder)},
    )
    made = folder / "fedsolve" / "prod_00"
    if not made.is_dir():
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise InvalidInput(f"FLARE could not make the kits: {' '.join(last)}")
    for path in made.rglob("*.key"):
        path.chmod(0o600)
    return {name: made / name for name in (host, *sites, ADMIN)}


def _prepare(kit: Path) -> None:
    """A kit's local policy: what classes jobs may name, where they are kept, what is logged.

    Made at every start, since a kit is carried from where it was made to where it is used.
    """
    local = kit / "local"
    resources = json.loads((local / "resources.json.default").read_text())
    resources["class_allow_list"] = list(ALLOWED)
    resources["allow_log_streaming"] = False  # a site's log stays there
    resources["components"] = [c for c in resources["components"] if "log" not in c["id"]]
    for component in resources.get("components", []):
        if component.get("id") == "process_launcher":
            component["path"] = component["path"].replace(
                "nvflare.app_common.job_launcher.client_process_launcher.ClientProcessJobLauncher",
                "fedsolve.flare.launcher.TolerantLauncher",
            )
        if "uri_root" in component.get("args", {}):
            component["args"]["uri_root"] = str(kit / "jobs")
    if "snapshot_persistor" in resources:
        storage = resources["snapshot_persistor"]["args"]["storage"]["args"]
        storage["root_dir"] = str(kit / "snapshots")
    (local / "resources.json").write_text(json.dumps(resources, indent=1))
    logging = json.loads((local / "log_config.json.default").read_text())
    for logger in logging.get("loggers", {}).values():
        logger["level"] = "WARNING"
    (local / "log_config.json").write_text(json.dumps(logging, indent=1))


def start_server(kit: Path) -> subprocess.Popen:
    """The server's process."""
    return _start(kit, "server", {HOME: str(kit.resolve() / "fedsolve")})


def start_site(kit: Path, site_file: Path) -> subprocess.Popen:
    """A site's process, with its owner's file."""
    home, owned = kit.resolve() / "fedsolve", site_file.resolve()
    return _start(kit, "client", {HOME: str(home), SITE: str(owned)})


def _start(kit: Path, role: str, extra: dict[str, str]) -> subprocess.Popen:
    kit = kit.resolve()
    _prepare(kit)
    module = f"nvflare.private.fed.app.{role}.{role}_train"
    words = ["-m", str(kit), "-s", f"fed_{role}.json", "--set", "secure_train=true"]
    words += [f"uid={kit.name}"] if role == "client" else []
    words += ["org=fedsolve", "config_folder="]
    with open(kit / "output.log", "ab") as output:
        return subprocess.Popen(
            [sys.executable, "-u", "-m", module, *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=os.environ | ENVIRONMENT | extra,
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


def write_job(folder: Path, experiment: dict[str, Any], run: str, deadline: float) -> Path:
    """A job that carries a configuration, and no code."""
    text = json.dumps(experiment)
    threads = {"max_inbound_call_threads": 100, "max_outbound_call_threads": 100}
    common = {"collab_obj_ids": [], "props": {}, **threads}
    server = {
        "format_version": 2,
        "workflows": [
            {"id": "controller", "path": ALLOWED[0], "args": {"server_obj_id": "_server", **common}}
        ],
        "components": [
            {
                "id": "_server",
                "path": ALLOWED[2],
                "args": {"experiment": text, "run": run, "deadline": deadline},
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
                "executor": {"path": ALLOWED[1], "args": {"client_obj_id": "_client", **common}},
            }
        ],
        "components": [
            {"id": "_client", "path": ALLOWED[3], "args": {"experiment": text, "run": run}}
        ],
        "task_data_filters": [],
        "task_result_filters": [],
    }
    meta = {"name": run, "resource_spec": {}, "min_clients": 1, "deploy_map": {"app": ["@ALL"]}}
    config = folder / run / "app" / "config"
    config.mkdir(parents=True, exist_ok=True)
    (folder / run / "meta.json").write_text(json.dumps(meta))
    (config / "config_fed_server.json").write_text(json.dumps(server))
    (config / "config_fed_client.json").write_text(json.dumps(client))
    return folder / run


class Admin:
    """The administrator's session with a running server."""

    def __init__(self, kit: Path, timeout: float = 60.0):
        os.environ.update(ENVIRONMENT)
        from nvflare.fuel.flare_api.flare_api import new_secure_session

        end = time.monotonic() + timeout
        while True:
            try:
                self._session = new_secure_session(ADMIN, str(kit), timeout=5.0)
                return
            except Exception as error:
                if time.monotonic() > end:
                    raise InvalidInput(f"No server answers: {error}.") from error
                time.sleep(0.3)

    def wait_for_sites(self, count: int, timeout: float = 60.0) -> None:
        """Until so many sites are registered."""
        end = time.monotonic() + timeout
        while len(self._session.get_system_info().client_info) < count:
            if time.monotonic() > end:
                raise InvalidInput(f"After {timeout:.0f} s not all of {count} sites are there.")
            time.sleep(0.3)

    def submit(self, job: Path) -> str:
        return self._session.submit_job(str(job))

    def status(self, job: str) -> str:
        """RUNNING, or how it ended."""
        return str(self._session.get_job_meta(job).get("status"))

    def overview(self) -> list[str]:
        """Sites and jobs, a line each."""
        sites = [f"site {info.name}" for info in self._session.get_system_info().client_info]
        jobs = [f"job {job['name']}: {job['status']}" for job in self._session.list_jobs()]
        return [*sites, *jobs]

    def shut_down(self) -> None:
        """Ends running jobs, all sites and the server."""
        from nvflare.fuel.flare_api.api_spec import JobNotDone, TargetType

        for job in self._session.list_jobs():
            if job["status"] == "RUNNING":
                self._session.abort_job(job["job_id"])
        end = time.monotonic() + 20
        while True:
            try:
                self._session.shutdown(TargetType.ALL)
                return
            except JobNotDone as error:
                if time.monotonic() > end:
                    raise InvalidInput(f"A job does not end: {error}.") from error
                time.sleep(0.5)

    def close(self) -> None:
        self._session.close()


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
