"""A federation of processes on this machine, for `fedsolve deploy --local` and tests."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import tomli_w

from fedsolve.errors import InvalidInput
from fedsolve.experiments.config import Experiment
from fedsolve.flare.admin import Admin
from fedsolve.flare.limits import EXACT
from fedsolve.flare.processes import (
    free_port,
    start_server,
    start_site,
    stop,
    temporary_folder,
)
from fedsolve.flare.provisioning import ADMIN, make_kits
from fedsolve.flare.supervisor import (
    Records,
    Runs,
    Tell,
    participations,
    saved_runs,
    supervise,
)
from fedsolve.types import Table

SERVER = "localhost"
# All data are on this machine, and results are to be those of the simulation.
NO_LIMITS = {"samples": 1, "evaluations": 10**9, "digits": EXACT, "seconds": 1e6}
RUN = "local"  # the name of the only run of `deploy_local`


@dataclasses.dataclass(frozen=True)
class LocalFederation:
    """A server, sites and an administrator on this machine."""

    folder: Path
    kits: dict[str, Path]
    processes: dict[str, subprocess.Popen]
    admin: Admin

    def start_site(self, name: str) -> None:
        """Start a site, possibly again."""
        kit = self.kits[name]
        self.processes[name] = start_site(kit, kit / "site.toml")

    def start_server(self) -> None:
        """Start the server, possibly again."""
        kit = self.kits[SERVER]
        self.processes[SERVER] = start_server(kit, kit / "owner.toml")

    def home(self, run: str) -> Path:
        """Return the folder in which the server keeps a run."""
        return self.kits[SERVER] / "fedsolve" / "runs" / run


@contextlib.contextmanager
def local_federation(
    clients: int,
    sites: int,
    tell: Tell,
    allow: Sequence[str] = (),
    owned: Sequence[Table] | None = None,
) -> Iterator[LocalFederation]:
    """Start a server and sites with new certificates; remove all processes and files at the end.

    The problem's own clients are distributed over the sites in order, unless `owned` has the
    tables [data] and [limits] of each site. Jobs may use the names in `allow` beside what comes
    with Fedsolve.
    """
    names = [f"site-{number + 1}" for number in range(sites)]
    ends = [clients * number // sites for number in range(sites + 1)]
    started: dict[str, subprocess.Popen] = {}
    with temporary_folder() as folder:
        try:
            tell({"note": "making certificates"})
            kits = make_kits(folder / "kits", SERVER, free_port(), names)
            tell({"note": f"starting a server and {sites} sites"})
            allowed = {"allow": {"problems": list(allow)}}
            servers = kits[SERVER] / "owner.toml"
            servers.write_text(tomli_w.dumps(allowed), encoding="utf-8")
            started[SERVER] = start_server(kits[SERVER], servers)
            if owned is None:
                owned = [{"data": {"share": [a, b - a]}} for a, b in itertools.pairwise(ends)]
            for name, own in zip(names, owned, strict=True):
                file, limits = kits[name] / "site.toml", NO_LIMITS | own.get("limits", {})
                text = tomli_w.dumps(own | allowed | {"limits": limits})
                file.write_text(text, encoding="utf-8")
                started[name] = start_site(kits[name], file)
            admin = Admin(kits[ADMIN])
            try:
                yield LocalFederation(folder, kits, started, admin)
            finally:
                admin.close()
        finally:
            stop(list(started.values()))


def deploy_local(
    experiment: Experiment,
    sites: int,
    tell: Tell,
    running: LocalFederation | None = None,
    run: str = RUN,
) -> tuple[Runs, Records, str]:
    """Run an experiment over a federation on this machine, by default one that it starts.

    Returns its runs, which sites took part in them, and its status: `finished`, or `interrupted`
    after Ctrl-C.
    """
    status = "finished"
    with contextlib.ExitStack() as stack:
        if running is None:
            fewest = check_site_count(experiment, sites)
            allow = _imported_names(experiment.resolved)
            federation = stack.enter_context(local_federation(fewest, sites, tell, allow))
        else:
            federation = running
        try:
            run_on(federation, experiment, run, tell)
        except KeyboardInterrupt:
            status = "interrupted"
        home = federation.home(run)
        return saved_runs(experiment, home), participations(experiment, home), status


def check_site_count(experiment: Experiment, sites: int) -> int:
    """Raise if there are no sites, or more than clients; return the smallest number of clients."""
    fewest = min(problem.n for problem, _ in experiment.cells.values())
    if not 1 <= sites <= fewest:
        raise InvalidInput(f"Cannot distribute {fewest} clients over {sites} sites.")
    return fewest


def _imported_names(table: object) -> list[str]:
    """Return the names of other packages in a configuration, which its user may run here."""
    if not isinstance(table, dict):
        return []
    found = [name for value in table.values() for name in _imported_names(value)]
    kind = table.get("kind")
    return [*found, kind] if isinstance(kind, str) and ":" in kind else found


def run_on(federation: LocalFederation, experiment: Experiment, run: str, tell: Tell) -> Runs:
    """Run an experiment on a federation of this machine and return its runs."""
    sites = len(federation.processes) - 1
    supervise(federation.admin, experiment, run, tell, sites)
    return saved_runs(experiment, federation.home(run))
