"""What runs inside FLARE's job processes: the coordinator on the server, a `Site` on each site.

A job ships no code and names no path: it carries an experiment's configuration, and both ends build
it from what is installed with them.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from nvflare.collab import collab

from fedsolve.errors import InvalidInput
from fedsolve.experiments.config import Experiment, resolve
from fedsolve.flare.journal import read
from fedsolve.flare.roster import Link, TooFew
from fedsolve.flare.server import FOLDER, serve
from fedsolve.flare.site import Share
from fedsolve.flare.site_config import allowed, check_data, owners_file, site_problem
from fedsolve.runtimes.compilation import keep_compiled_programs
from fedsolve.runtimes.placement import numbers_on_device, precision_of
from fedsolve.storage.arrays import encode
from fedsolve.storage.atomic import locked, write_atomically

HOME = "FEDSOLVE_HOME"  # where this machine keeps what must not be lost
OWNER = "FEDSOLVE_OWNER"  # the file in which this machine's owner names data and an allow-list
PATIENCE = 20.0  # seconds that a machine waits for an older job's process to be gone
TOPIC = "fedsolve"  # of the administrator's questions to a running job


def built(text: str) -> Experiment:
    """The experiment that a job carries, from what this machine's owner allows."""
    owner = os.environ.get(OWNER)
    names = allowed(owners_file(Path(owner))) if owner else []
    experiment = resolve("deployed", json.loads(text), names)
    if "stop" in experiment.options:
        raise InvalidInput("A deployment runs all its rounds; leave out run.stop.")
    if experiment.instances is not None:
        raise InvalidInput("A deployment's data are the sites' own; leave out run.instances.")
    return experiment


def check_run_name(run: Any) -> None:
    """Refuses a run's name that is no plain name: on every machine it is a folder's."""
    if not isinstance(run, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", run):
        shown = str(run)[:80]
        raise InvalidInput(
            f"A run's name has letters, digits, `.`, `_` and `-`, 64 at most, got {shown!r}."
        )


class Site:
    """A site's end of a job. Whatever is wrong here is an answer, not the end of everyone's job.
    What is wrong with this machine's own files is for its owner: the server hears that it is."""

    def __init__(self, experiment: str, run: str):
        self._text, self._run, self._trouble = experiment, run, ""
        self._shares: dict[int, Share] = {}
        self._alone: Any = None  # the lock of the run's folder
        self._lock = threading.Lock()

    @collab.init
    def start(self) -> None:
        keep_compiled_programs()
        _, self._trouble = _tried(self._build)

    @collab.publish
    def answer(self, cell: int, data: bytes) -> bytes:
        with self._lock:
            trouble, reply = self._trouble, b""
            if not trouble:
                reply, trouble = _tried(lambda: self._share(cell).answer(data))
            return encode({"status": "refused", "reason": trouble}, {}) if trouble else reply

    def _build(self) -> None:
        check_run_name(self._run)
        _for_the_owner(lambda: check_data(Path(os.environ[OWNER])))
        self._experiment = built(self._text)

    def _share(self, cell: int) -> Share:
        """This site's clients in one of the experiment's runs."""
        if cell not in self._shares:
            experiment = self._experiment
            if not isinstance(cell, int) or not 0 <= cell < len(experiment.runs):
                raise InvalidInput("There is no such run in this job.")
            variant, seed = experiment.runs[cell]
            problem, algorithm = experiment.cells[variant]
            home = Path(os.environ[HOME], "runs", self._run)
            home.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self._alone is None:
                self._alone = locked(home / "lock", PATIENCE)
            if self._alone is None:
                raise InvalidInput("An older job still has this run here.")
            own = _for_the_owner(lambda: site_problem(problem, Path(os.environ[OWNER])))
            precision = experiment.options.get("precision")
            self._shares = {cell: Share(home / str(cell), own, algorithm, seed, precision)}
        return self._shares[cell]


def _tried(act: Callable[[], Any]) -> tuple[Any, str]:
    """What it gives; or what the server may hear of why it gives nothing."""
    try:
        return act(), ""
    except InvalidInput as error:
        return None, str(error)
    except Exception as error:  # its message may quote what is on this machine
        traceback.print_exc()
        return None, f"{type(error).__name__}; this site's own log says more"


def _for_the_owner(act: Callable[[], Any]) -> Any:
    """What is wrong with an owner's own files is in this machine's log, and nowhere else."""
    try:
        return act()
    except InvalidInput as error:
        print(error, file=sys.stderr, flush=True)
        told = "Its own data or its owner's file are not right; its log says why."
        raise InvalidInput(told) from None


class Coordinator:
    """The server's end of a job: it goes on where the last job of this run stopped."""

    def __init__(self, experiment: str, run: str):
        self._text, self._run = experiment, run
        self._news: list[dict[str, Any]] = []
        self._heard = 0  # how many of them the administrator has
        self._links: list[Link] = []
        self._yield = False

    @collab.main
    def run(self) -> None:
        # A round calls out of its program; JAX must not wait for itself there.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        keep_compiled_programs()
        collab.fl_ctx.get_engine().register_app_command(TOPIC, self._command)
        try:
            self._all_runs()
        except TooFew as few:
            self._tell({"note": str(few), "missed": few.missed})
        except InvalidInput as error:
            self._tell({"error": str(error)})
        self._wait_until_told()

    def _all_runs(self) -> None:
        check_run_name(self._run)
        experiment = built(self._text)
        home = Path(os.environ[HOME], "runs", self._run)
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._alone = locked(home / "lock", PATIENCE)
        if self._alone is None:
            raise TooFew("another job still has this run")
        kept = home / "experiment.json"
        if not kept.exists():
            write_atomically(kept, json.dumps(experiment.resolved).encode())
        elif json.loads(kept.read_text()) != experiment.resolved:
            raise InvalidInput(f"{self._run} is another experiment's run; choose another name.")
        calls = Calls(float(experiment.deploy.get("deadline", 30.0)), self._tell)
        for cell, (variant, seed) in enumerate(experiment.runs):
            place = home / str(cell)
            place.mkdir(exist_ok=True, mode=0o700)
            if not (place / "done").exists():
                self._one_run(experiment, cell, variant, seed, place, calls)
                (place / "done").touch()
        results = Path(collab.workspace.get_run_dir(collab.fl_ctx.get_job_id()))
        for cell in range(len(experiment.runs)):
            base, _ = read(home / str(cell) / FOLDER)
            (results / f"{cell}.safetensors").write_bytes(base or b"")
        (home / "done").touch()
        self._tell({"done": True})

    def _one_run(
        self, experiment: Experiment, cell: int, variant: str, seed: int, home: Path, calls: Calls
    ) -> None:
        problem, algorithm = experiment.cells[variant]
        options = experiment.options
        precision = options.get("precision")
        facts = {"cell": cell, "variant": variant, "seed": seed}
        with open(home / "progress.jsonl", "a", encoding="utf-8") as file:

            def tell(entry: dict[str, Any]) -> None:
                file.write(json.dumps(entry | {"at": time.time()}) + "\n")
                file.flush()
                self._tell(facts | entry)

            with precision_of(precision) as dtype:
                link = Link(
                    lambda messages: calls(cell, messages),
                    problem.on_device(dtype),
                    numbers_on_device(algorithm, dtype),
                    lambda text: tell({"note": text}),
                    float(experiment.deploy.get("quorum", 0.0)),
                )
            self._links.append(link)
            serve(
                link,
                [client.name for client in collab.clients],
                problem,
                algorithm,
                options["rounds"],
                seed,
                home,
                evaluate_every=options.get("evaluate_every", 1),
                precision=precision,
                progress=tell,
                go_on=lambda: not self._yield,
            )

    # The administrator's questions

    def _tell(self, entry: dict[str, Any]) -> None:
        self._news.append(entry)

    def _command(self, topic: str, wish: Any, context: Any) -> dict[str, Any]:
        """News since the last question, and in how many rounds somebody was heard; and whether to
        make room for another job."""
        wish = wish if isinstance(wish, dict) else {}
        self._yield = self._yield or bool(wish.get("yield"))
        since = int(wish.get("since", 0))
        self._heard = max(self._heard, since)
        rounds = sum(link.rounds for link in self._links)
        return {"news": self._news[since : since + 1000], "rounds": rounds}

    def _wait_until_told(self, seconds: float = 5.0) -> None:
        """A job that ended takes its news along: give the administrator a moment to hear them."""
        end = time.monotonic() + seconds
        while self._heard < len(self._news) and time.monotonic() < end:
            time.sleep(0.05)


class Calls:
    """One message to each of some sites at once. A site that does not answer in time is dead for
    the rest of the job, and is not waited for again; one that this job has not is dead, too."""

    def __init__(self, deadline: float, tell: Any):
        self._deadline, self._tell = deadline, tell
        self._dead: set[str] = set()

    def _lose(self, site: str) -> None:
        self._dead.add(site)
        self._tell({"lost": site})

    def __call__(self, cell: int, messages: dict[str, bytes]) -> Mapping[str, bytes | Exception]:
        for site in messages.keys() - {client.name for client in collab.clients} - self._dead:
            self._lose(site)
        waiting: dict[str, Any] = {
            site: collab.get_clients([site])(blocking=False, timeout=self._deadline).answer(
                cell, data
            )
            for site, data in messages.items()
            if site not in self._dead
        }
        found: dict[str, bytes | Exception] = {}
        for site, queue in waiting.items():
            for _, data in queue:
                found[site] = data
            for failed, error in queue.failures.items():
                found[failed] = RuntimeError(str(error).splitlines()[-1] if str(error) else "lost")
                self._lose(failed)
        if collab.is_aborted:
            raise TooFew("the job was ended")
        return found
