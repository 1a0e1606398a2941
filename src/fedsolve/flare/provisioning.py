"""Kits: what each machine of a federation gets, with its certificate and what it may be asked."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from fedsolve.errors import InvalidInput
from fedsolve.storage.atomic import write_atomically

ADMIN = "admin@fedsolve.local"
ALLOWED = (
    "nvflare.collab.runtime.controller.CollabController",
    "nvflare.collab.runtime.executor.CollabExecutor",
    "fedsolve.flare.jobs.Coordinator",
    "fedsolve.flare.jobs.Site",
    "fedsolve.flare.launcher.TolerantLauncher",
)
RIGHTS = {  # of the administrator, on every machine; nobody else has any
    **dict.fromkeys(["submit_job", "clone_job", "manage_job", "download_job"], "any"),
    **dict.fromkeys(["app_command", "view", "operate"], "any"),
    # A job with code of its own would be free of the list of classes above.
    **dict.fromkeys(["byoc", "shell_commands", "server-predeployed-flwr"], "none"),
}
AUTHORITY = Path("fedsolve", "state", "cert.json")  # in the folder of a federation's kits
ROOT_DAYS = 3650  # the authority outlives the certificates that it makes, of 360 days,
RENEW_DAYS = 90  # and renews those that end so soon
KIT_NAMES = {  # where the parts of a kit tell whose it is
    "fed_server.json": ("servers", 0, "admin_server"),
    "fed_client.json": ("client", "fqsn"),
}


def make_kits(folder: Path, host: str, port: int, sites: list[str]) -> dict[str, Path]:
    """A federation's kits, for the server, each site, the administrator. In a folder that has some
    already the authority is the same, and so are certificates that are good for a while longer:
    what is given are the kits with new ones."""
    before, root = _kept_certificates(folder), {"root_valid_days": ROOT_DAYS}
    names = [host, *sites, ADMIN]
    if before >= {*names}:
        raise InvalidInput(f"{folder} has kits for all of these; good certificates are kept.")
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
                [{"template_file": ["master_template.yml"]}, {"scheme": "grpc"}, root, {}],
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
    made = max((folder / "fedsolve").glob("prod_*"), default=folder)
    if not (made / host).is_dir() or done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise InvalidInput(f"FLARE could not make the kits: {' '.join(last)}")
    for path in (*made.rglob("*.key"), folder / AUTHORITY):
        path.chmod(0o600)  # the last one has the key that makes all others
    return {name: made / name for name in names if name not in before}


def _kept_certificates(folder: Path) -> set[str]:
    """Whose certificates the authority of that folder keeps; of others it makes new ones."""
    from cryptography import x509

    if not (folder / AUTHORITY).exists():
        return set()
    kept = json.loads((folder / AUTHORITY).read_text())
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=RENEW_DAYS)
    for name, entry in list(kept.items()):
        if isinstance(entry, dict):
            certificate = x509.load_pem_x509_certificate(entry["cert"].encode())
            if certificate.not_valid_after_utc < soon:
                del kept[name]
    write_atomically(folder / AUTHORITY, json.dumps(kept).encode())
    (folder / AUTHORITY).chmod(0o600)
    return {name for name, entry in kept.items() if isinstance(entry, dict)}


def kit_name(kit: Path) -> str:
    """Whose kit this is, whatever its folder is called."""
    for file, path in KIT_NAMES.items():
        if (kit / "startup" / file).exists():
            found: Any = json.loads((kit / "startup" / file).read_text())
            for key in path:
                found = found[key]
            return str(found)
    raise InvalidInput(f"{kit} is no kit of a server or a site.")


def prepare(kit: Path) -> None:
    """A kit's local policy: what classes jobs may name, that they bring no code and nobody looks
    into files, where jobs are kept, what is logged.

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
    policy = {"format_version": "1.0", "permissions": {"project_admin": RIGHTS}}
    (local / "authorization.json").write_text(json.dumps(policy, indent=1))
    logging = json.loads((local / "log_config.json.default").read_text())
    for logger in logging.get("loggers", {}).values():
        logger["level"] = "WARNING"
    # The administrator may ask a job for news before it can answer: no error.
    quiet = "nvflare.private.fed.server.server_commands.AppCommandProcessor"
    logging.setdefault("loggers", {})[quiet] = {"level": "CRITICAL"}
    (local / "log_config.json").write_text(json.dumps(logging, indent=1))
