"""Startup kits: each machine's certificate and its policy on what jobs may do there."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

from fedsolve.errors import InvalidInput
from fedsolve.storage.atomic import write_atomically
from fedsolve.types import Table

ADMIN = "admin@fedsolve.local"
ALLOWED = (  # classes that a job may name; kits and job files on other machines have these paths
    "nvflare.collab.runtime.controller.CollabController",
    "nvflare.collab.runtime.executor.CollabExecutor",
    "fedsolve.flare.jobs.Coordinator",
    "fedsolve.flare.jobs.Site",
    "fedsolve.flare.launcher.TolerantLauncher",
)
RIGHTS = {  # of the administrator, on every machine; nobody else has any
    **dict.fromkeys(["submit_job", "clone_job", "manage_job", "download_job"], "any"),
    **dict.fromkeys(["app_command", "view", "operate"], "any"),
    # Code that comes with a job is not checked against the list of classes above.
    **dict.fromkeys(["byoc", "shell_commands", "server-predeployed-flwr"], "none"),
}
AUTHORITY = Path("fedsolve", "state", "cert.json")  # in the folder of a federation's kits
SITES = "sites.json"  # in an administrator's kit: the names of all sites
ROOT_DAYS = 3650  # validity of the authority's own certificate; FLARE gives the others 360 days
RENEW_DAYS = 90  # certificates that expire within this time are renewed
DEFAULT_PORT = 8002
LOG_SIZES = {"maxBytes": 5_000_000, "backupCount": 3}  # of each of FLARE's own logs
README = {  # what each kit says of itself
    "server": """This is the kit of a federation's server. It has the server's private key.

    fedsolve deploy server KIT

starts the server, Ctrl-C stops it. Its port must be reachable by the sites. Runs are stored in
fedsolve/runs; back up the folder fedsolve. Nothing else in this folder is to be started by hand.
""",
    "site": """This is the kit of one site. Whoever has it can take part in your place.

    fedsolve deploy site KIT --data site.toml

starts the site, Ctrl-C stops it. site.toml is your own file: it names your data, and says what jobs
may use and ask. The clients' states are in fedsolve/runs; back up the folder fedsolve. If the kit
was stolen, tell the administrator, who can revoke it. Nothing else in this folder is to be started
by hand.
""",
    "administrator": """This is the kit of the administrator, who submits, cancels and stops runs.

    fedsolve deploy submit EXPERIMENT --kit KIT
    fedsolve deploy status --kit KIT
    fedsolve deploy cancel RUN --kit KIT
    fedsolve deploy revoke SITE --kit KIT
    fedsolve deploy stop --kit KIT
""",
}
LOOPBACK = {  # a site's and a server's own processes talk with certificates, too
    "allow_adhoc_conns": False,
    "internal": {
        "scheme": "tcp",
        "resources": {"host": "localhost", "connection_security": "mtls"},
    },
}
KIT_NAMES = {  # startup file of a kit: keys that lead to the name of the machine
    "fed_server.json": ("servers", 0, "admin_server"),
    "fed_client.json": ("client", "fqsn"),
}


def init(file: Path, out: Path) -> dict[str, Path]:
    """Make the kits for the federation that a TOML file describes: `server`, `port`, `sites`.

    Return the folders of the new kits by name. If `out` has kits already, only those that are
    missing or expire soon are made.
    """
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise InvalidInput(f"Cannot read {file}: {error}.") from error
    missing = [key for key in ("server", "sites") if key not in table]
    if missing:
        raise InvalidInput(f"{file} needs `server` (a host name) and `sites` (a list of names).")
    names = table["sites"]
    if not isinstance(names, list) or not names or not all(isinstance(n, str) and n for n in names):
        raise InvalidInput(f"{file}: sites must be a list of names, got {names!r}.")
    if out.exists() and not (out / AUTHORITY).exists():
        raise InvalidInput(f"{out} exists and is not a folder of kits.")
    return make_kits(out, str(table["server"]), table.get("port", DEFAULT_PORT), names)


def make_kits(folder: Path, host: str, port: int, sites: list[str]) -> dict[str, Path]:
    """Make kits for the server, each site and the administrator; return those that are new.

    In a folder that has kits already, the authority and certificates that remain valid for a while
    are kept.
    """
    before = _kept_certificates(folder)
    names = [host, *sites, ADMIN]
    if before >= {*names}:
        raise InvalidInput(
            f"{folder} has kits for all of these names, and their certificates are still valid."
        )
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    plan = folder / "project.yml"
    plan.write_text(json.dumps(_project(host, port, sites)), encoding="utf-8")  # JSON is YAML
    command = ["provision", "-p", str(plan), "-w", str(folder), "--force"]
    done = subprocess.run(
        [sys.executable, "-m", "nvflare.cli", *command],
        capture_output=True,
        text=True,
        env=os.environ | {"HOME": str(folder)},
    )
    made = max((folder / "fedsolve").glob("prod_*"), default=folder)
    if not (made / host).is_dir() or done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise InvalidInput(f"FLARE could not make the kits: {' '.join(last)}")
    for path in (*made.rglob("*.key"), folder / AUTHORITY):
        path.chmod(0o600)  # the authority's file has the key that signs all certificates
    new = {name: made / name for name in names if name not in before}
    for name, kit in new.items():
        _finish(kit, "administrator" if name == ADMIN else "server" if name == host else "site")
    all_sites = sorted(_certified(json.loads((folder / AUTHORITY).read_text())) - {host, ADMIN})
    write_atomically(made / ADMIN / SITES, json.dumps(all_sites).encode())
    return new


def _finish(kit: Path, role: str) -> None:
    """Give a new kit its policy and our readme, and take away what starts FLARE without them."""
    if role != "administrator":
        prepare(kit)
    for path in [*kit.rglob("*.sh"), *kit.rglob("*.ipynb"), *kit.rglob("readme.txt")]:
        path.unlink()
    (kit / "README.txt").write_text(README[role], encoding="utf-8")


def _project(host: str, port: int, sites: list[str]) -> Table:
    """Return the project that `nvflare provision` takes."""
    builders = {
        "workspace.WorkspaceBuilder": {"template_file": ["master_template.yml"]},
        "static_file.StaticFileBuilder": {"scheme": "grpc"},
        "cert.CertBuilder": {"root_valid_days": ROOT_DAYS},
        "signature.SignatureBuilder": {},
    }
    return {
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
            for builder, arguments in builders.items()
        ],
    }


def _kept_certificates(folder: Path) -> set[str]:
    """Return whose certificates the folder's authority keeps, and remove those to be renewed."""
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
    return _certified(kept)


def _certified(authority: Table) -> set[str]:
    """Return the names that have a certificate of an authority."""
    return {name for name, entry in authority.items() if isinstance(entry, dict)}


def kit_name(kit: Path) -> str:
    """Return the name of a kit's machine, which need not be the name of the folder."""
    for file, path in KIT_NAMES.items():
        if (kit / "startup" / file).exists():
            found = json.loads((kit / "startup" / file).read_text())
            for key in path:
                found = found[key]
            return str(found)
    raise InvalidInput(f"{kit} is not the kit of a server or a site.")


def prepare(kit: Path) -> None:
    """Write a kit's local policy.

    It says which classes jobs may name, forbids code in jobs and remote reading of files, closes
    the channel to job processes to others, and sets where jobs are stored and what is logged. It is
    written at every start, as it contains the path of the kit, which is carried to other machines.
    """
    local = kit / "local"
    resources = json.loads((local / "resources.json.default").read_text())
    resources["class_allow_list"] = list(ALLOWED)
    resources["allow_log_streaming"] = False  # a site's log stays there
    resources["components"] = [c for c in resources["components"] if "log" not in c["id"]]
    for component in resources["components"]:
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
    (local / "comm_config.json").write_text(json.dumps(LOOPBACK, indent=1))
    policy = {"format_version": "1.0", "permissions": {"project_admin": RIGHTS}}
    (local / "authorization.json").write_text(json.dumps(policy, indent=1))
    logging = json.loads((local / "log_config.json.default").read_text())
    for handler in logging.get("handlers", {}).values():
        if "maxBytes" in handler:
            handler |= LOG_SIZES
    # Of FLARE's messages the owner can use hardly any; all are in the kit's own log files.
    logging["handlers"]["consoleHandler"]["level"] = "CRITICAL"
    for logger in logging.get("loggers", {}).values():
        logger["level"] = "WARNING"
    # The administrator may ask a job for news before the job can answer; that is not an error.
    quiet = "nvflare.private.fed.server.server_commands.AppCommandProcessor"
    logging.setdefault("loggers", {})[quiet] = {"level": "CRITICAL"}
    (local / "log_config.json").write_text(json.dumps(logging, indent=1))
