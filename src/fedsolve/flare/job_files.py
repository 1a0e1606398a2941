"""The files of a FLARE job: a configuration for the server and one for the sites, and no code."""

from __future__ import annotations

import json
import re
from pathlib import Path

from fedsolve.errors import InvalidInput
from fedsolve.flare import provisioning
from fedsolve.types import Table

THREADS = {"max_inbound_call_threads": 100, "max_outbound_call_threads": 100}


def check_run_name(run: object) -> None:
    """Raise unless a run's name can safely be the name of a folder on every machine."""
    if not isinstance(run, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", run):
        shown = str(run)[:80]
        raise InvalidInput(
            "A run's name has letters, digits, `.`, `_` and `-`, at most 64 of them, and does not"
            f" begin with `.` or `-`; got {shown!r}."
        )


def write_job(folder: Path, experiment: Table, run: str, sites: list[str]) -> Path:
    """Write a job that runs an experiment's configuration on these sites; return its folder."""
    check_run_name(run)
    controller, executor, coordinator, site_job, *_ = provisioning.ALLOWED
    carried = {"experiment": json.dumps(experiment), "run": run}
    common = {"collab_obj_ids": [], "props": {}, **THREADS}
    no_filters = {"task_data_filters": [], "task_result_filters": []}
    server = {
        "format_version": 2,
        "workflows": [
            {
                "id": "controller",
                "path": controller,
                "args": {"server_obj_id": "_server", **common},
            }
        ],
        "components": [{"id": "_server", "path": coordinator, "args": carried | {"sites": sites}}],
        **no_filters,
    }
    work = {"path": executor, "args": {"client_obj_id": "_client", **common}}
    client = {
        "format_version": 2,
        "executors": [{"tasks": ["*"], "executor": work}],
        "components": [{"id": "_client", "path": site_job, "args": carried}],
        **no_filters,
    }
    places = {"app": ["server", *sites]}
    meta = {"name": run, "resource_spec": {}, "min_clients": 1, "deploy_map": places}
    config = folder / run / "app" / "config"
    config.mkdir(parents=True, exist_ok=True)
    (folder / run / "meta.json").write_text(json.dumps(meta))
    (config / "config_fed_server.json").write_text(json.dumps(server))
    (config / "config_fed_client.json").write_text(json.dumps(client))
    return folder / run
