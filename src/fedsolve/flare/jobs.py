"""What runs inside FLARE's job processes: the coordinator on the server, a `Site` on each site.

A job ships no code and names no path: it carries an experiment's configuration, and both ends build
it from what is installed with them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvflare.collab import collab

from fedsolve.config import Experiment, resolve
from fedsolve.errors import InvalidInput
from fedsolve.flare.data import site_problem
from fedsolve.flare.server import Link, serve
from fedsolve.flare.site import Share
from fedsolve.simulation import keep_compiled_programs
from fedsolve.solving import numbers_on_device, precision_of

HOME = "FEDSOLVE_HOME"  # where this machine keeps what must not be lost
SITE = "FEDSOLVE_SITE"  # the file in which a site's owner names its data


def experiment_of(text: str) -> Experiment:
    """The one run that a job is about."""
    experiment = resolve("deployed", json.loads(text))
    if len(experiment.cells) != 1 or len(experiment.seeds) != 1:
        raise InvalidInput("A deployment runs one variant with one seed; choose with --set.")
    if "stop" in experiment.options:
        raise InvalidInput("A deployment runs all its rounds; leave out run.stop.")
    return experiment


class Site:
    """A site's end of a job."""

    def __init__(self, experiment: str, run: str):
        self._experiment, self._run = experiment, run

    @collab.init
    def start(self) -> None:
        keep_compiled_programs(Path(os.environ[HOME], "programs"))
        experiment = experiment_of(self._experiment)
        ((problem, algorithm),) = experiment.cells.values()
        home = Path(os.environ[HOME], "runs", self._run)
        share = site_problem(problem, Path(os.environ[SITE]))
        self._share = Share(
            home, share, algorithm, experiment.seeds[0], experiment.options.get("precision")
        )

    @collab.publish
    def answer(self, data: bytes) -> bytes:
        return self._share.answer(data)


class Coordinator:
    """The server's end of a job: it goes on where the last job of this run stopped."""

    def __init__(self, experiment: str, run: str, deadline: float = 30.0):
        self._experiment, self._run, self._deadline = experiment, run, deadline

    @collab.main
    def run(self) -> None:
        keep_compiled_programs(Path(os.environ[HOME], "programs"))
        experiment = experiment_of(self._experiment)
        ((problem, algorithm),) = experiment.cells.values()
        options = dict(experiment.options)
        precision = options.get("precision")
        home = Path(os.environ[HOME], "runs", self._run)
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(home / "progress.jsonl", "a", encoding="utf-8") as file:

            def tell(entry: dict[str, Any]) -> None:
                file.write(json.dumps(entry) + "\n")
                file.flush()

            with precision_of(precision) as dtype:
                link = Link(
                    Calls(self._deadline),
                    problem.on_device(dtype),
                    numbers_on_device(algorithm, dtype),
                    lambda text: tell({"note": text, "at": time.time()}),
                )
            link.hello([client.name for client in collab.clients])
            serve(
                link,
                problem,
                algorithm,
                options["rounds"],
                experiment.seeds[0],
                home,
                evaluate_every=options.get("evaluate_every", 1),
                precision=precision,
                progress=tell,
            )
        (home / "done").touch()


class Calls:
    """One message to each of some sites at once. A site that does not answer in time is dead for
    the rest of the job, and is not waited for again."""

    def __init__(self, deadline: float):
        self._deadline, self._dead = deadline, set()

    def __call__(self, messages: dict[str, bytes]) -> Mapping[str, bytes | Exception]:
        waiting: dict[str, Any] = {
            site: collab.get_clients([site])(blocking=False, timeout=self._deadline).answer(data)
            for site, data in messages.items()
            if site not in self._dead
        }
        found: dict[str, bytes | Exception] = {}
        for site, queue in waiting.items():
            for _, data in queue:
                found[site] = data
            for failed, error in queue.failures.items():
                found[failed] = RuntimeError(str(error).splitlines()[-1] if str(error) else "lost")
                self._dead.add(failed)
        if collab.is_aborted:
            print("the job was ended", file=sys.stderr)
            raise RuntimeError("the job was ended")
        if messages and not any(isinstance(reply, bytes) for reply in found.values()):
            raise RuntimeError("no site answers any more")
        return found
