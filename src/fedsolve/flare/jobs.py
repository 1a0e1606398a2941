"""The two ends of a FLARE job: `Coordinator` on the server, `SiteJob` on each site.

A job ships no code and names no path. It carries an experiment's configuration, and both ends build
the experiment from the packages that are installed with them.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path

import jax
from nvflare.collab import collab
from nvflare.collab.api.context import set_call_context

from fedsolve.errors import InvalidInput
from fedsolve.experiments.allowed import Allowed
from fedsolve.experiments.config import Experiment, resolve
from fedsolve.flare.alarms import REFUSE
from fedsolve.flare.held_out import HeldOut, held_out_rows
from fedsolve.flare.job_files import check_run_name
from fedsolve.flare.journal import JournalError, read
from fedsolve.flare.limits import Guard, Limits
from fedsolve.flare.participation import missing
from fedsolve.flare.processes import HOME, OWNER
from fedsolve.flare.roster import READY, Roster, TooFew
from fedsolve.flare.server import FOLDER, saved_participation, serve, terms_of
from fedsolve.flare.signatures import Identity
from fedsolve.flare.site import SiteClients
from fedsolve.flare.site_config import (
    allowed_names,
    check_data,
    read_owners_file,
    site_problem,
)
from fedsolve.flare.summing import SummingRoster
from fedsolve.privacy.distributed import Terms
from fedsolve.privacy.secure import SecureSum
from fedsolve.runtimes.compilation import keep_compiled_programs
from fedsolve.runtimes.placement import numbers_on_device, precision_of
from fedsolve.storage.arrays import encode
from fedsolve.storage.atomic import open_locked, write_atomically
from fedsolve.types import Table

PATIENCE = 20.0  # seconds to wait until the process of the run's previous job has ended
TOPIC = "fedsolve"  # of the administrator's commands to a running job
DEADLINE = 30.0  # seconds for an answer, unless the configuration says otherwise
CANCELLED = "cancelled"  # in a run's folder on the server, if it was ended for good
ENDING = 120.0  # seconds to wait for silent sites after the last round, unless it says otherwise
MOST_SAID = 20  # different lines about refused questions on a site's console
WITHOUT = "without.json"  # in a job's results: the sites that are missing at the end of a run
STOPPED = "stopped.json"  # in a job's results: why it ended before the end of its run
MOST_NEWS = 1000  # entries in one answer to the administrator
REPORT_TIMEOUT = 5.0  # seconds in which the administrator can fetch a finished job's last news


def built(text: str) -> Experiment:
    """Build the experiment that a job carries, from what this machine's owner allows."""
    owner = os.environ.get(OWNER)
    table = read_owners_file(Path(owner)) if owner else {}
    allowed = Allowed(frozenset(allowed_names(table)), files=False)
    with Limits.of(table).memory_limited():
        experiment = resolve("deployed", json.loads(text), allowed)
    if "stop" in experiment.options:
        raise InvalidInput("A deployment runs all its rounds; leave out run.stop.")
    if experiment.options.get("evaluate_at", "rounds") != "rounds":
        raise InvalidInput("A deployment evaluates by rounds; leave out run.evaluate_at.")
    _terms(experiment)
    if experiment.instances is not None:
        raise InvalidInput("A deployment uses the sites' own data; leave out run.instances.")
    return experiment


def _terms(experiment: Experiment) -> Terms | None:
    """Return the terms of a private run; raise if a deployment cannot keep them."""
    options = experiment.options
    every = options.get("evaluate_every", 1)
    given = options.get("aggregation"), options.get("privacy"), options["rounds"], every
    return terms_of(*given)


def _identity() -> Identity:
    """Return what this site signs with, from its kit."""
    with _details_in_log():
        return Identity(Path(os.environ[HOME]).parent)


def owners_limits() -> Limits:
    """Return the limits of this machine's owner."""
    with _details_in_log():
        return Limits.of(read_owners_file(Path(os.environ[OWNER])))


def _run_folder(run: str) -> Path:
    """Return the folder in which this machine keeps a run; make it if needed."""
    home = Path(os.environ[HOME], "runs", run)
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    return home


class SiteJob:
    """A site's end of a job.

    An error here is an answer to the server, so that the job goes on for the other sites. Details
    of errors in the owner's own files stay in this machine's log.
    """

    def __init__(self, experiment: str, run: str):
        self._text, self._run = experiment, run
        self._seconds = Limits.seconds  # that a question may take
        self._trouble = ""  # why this site cannot take part
        self._shares: dict[int, SiteClients] = {}
        self._alone: io.TextIOWrapper | None = None  # the locked file of the run's folder
        self._lock = threading.Lock()
        self._said: set[str] = set()  # why a question was refused, on this machine's console

    @collab.init
    def start(self) -> None:
        """Build the experiment; an error is reported with every answer."""
        keep_compiled_programs()
        try:
            check_run_name(self._run)
            with _details_in_log():
                check_data(Path(os.environ[OWNER]))
            limits = owners_limits()
            self._seconds = limits.seconds
            self._experiment = built(self._text)
            limits.check_problems(self._experiment)
            limits.check_privacy(self._experiment)
        except Exception as error:
            self._trouble = _reason(error)
            self._say(self._trouble)

    @collab.publish
    def answer(self, cell: int, data: bytes) -> bytes:
        """Answer a message of the server about the experiment's run number `cell`."""
        with self._lock:
            trouble = self._trouble
            if not trouble:
                try:
                    with self._time_limited():
                        return self._share(cell).answer(data)
                except Exception as error:
                    trouble = _reason(error)
            self._say(trouble)
            return encode({"status": "refused", "reason": trouble}, {})

    @contextlib.contextmanager
    def _time_limited(self) -> Iterator[None]:
        """End this process if a question takes longer than its owner allows.

        A compiled program cannot be stopped otherwise. Nothing is lost: it has not answered yet.
        """
        seconds = self._seconds

        def end() -> None:
            self._say(f"a question took more than {seconds:g} s, which its owner does not allow")
            os._exit(1)

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _show(self, line: str) -> None:
        """Show this machine's owner a line that nobody else gets."""
        print(f"{self._run}: {line}", file=sys.stderr, flush=True)

    def _say(self, trouble: str) -> None:
        """Tell this machine's owner, once, why the site refuses or will be refused."""
        if trouble not in self._said and len(self._said) < MOST_SAID:
            self._said.add(trouble)
            print(
                f"{self._run}: this site does not take part: {trouble}", file=sys.stderr, flush=True
            )

    def _share(self, cell: int) -> SiteClients:
        """Return this site's clients in one of the experiment's runs."""
        if cell not in self._shares:
            experiment = self._experiment
            if not isinstance(cell, int) or not 0 <= cell < len(experiment.runs):
                raise InvalidInput("There is no such run in this job.")
            variant, seed = experiment.runs[cell]
            problem, algorithm = experiment.cells[variant]
            home = _run_folder(self._run)
            if self._alone is None:
                self._alone = open_locked(home / "lock", PATIENCE)
            if self._alone is None:
                raise InvalidInput("An older job of this run is still running here.")
            with _details_in_log():
                own = site_problem(problem, Path(os.environ[OWNER]))
                held = held_out_rows(problem, Path(os.environ[OWNER]))
            limits, options = owners_limits(), experiment.options
            limits.check_samples(own)
            place, every = home / str(cell), options.get("evaluate_every", 1)
            place.mkdir(exist_ok=True, mode=0o700)
            guard = Guard(limits, place, options["rounds"], every)
            precision, seen = options.get("precision"), None
            if held is not None:
                with precision_of(precision) as dtype:
                    shown = limits if limits.held_out else None
                    seen = HeldOut(held, options["rounds"], self._show, dtype, shown)
            rule = options.get("aggregation")
            secure = rule if isinstance(rule, SecureSum) else None
            clients = SiteClients(
                place,
                own,
                algorithm,
                seed,
                precision,
                self._say,
                guard,
                seen,
                aggregation=secure,
                terms=_terms(experiment),
                identity=None if secure is None else _identity(),
            )
            self._shares = {cell: clients}
        return self._shares[cell]


Site = SiteJob  # the name in kits and job files


def _reason(error: Exception) -> str:
    """Return what the server may be told about an error; the rest goes to this machine's log."""
    if isinstance(error, InvalidInput) and not isinstance(error, JournalError):
        return str(error)
    traceback.print_exception(error)
    if isinstance(error, JournalError):
        return error.why
    if isinstance(error, OSError) and error.strerror:
        return f"its files: {error.strerror}; see this site's log"
    return f"{type(error).__name__}; see this site's log"  # its message may quote private data


@contextlib.contextmanager
def _details_in_log() -> Iterator[None]:
    """Print an error about the owner's files to this machine's log; raise one without details."""
    try:
        yield
    except InvalidInput as error:
        print(error, file=sys.stderr, flush=True)
        raise InvalidInput("Its data or its owner's file is not valid; see its log.") from None


class _NameTaken(InvalidInput):
    """Raised if a job has the name of a different run."""


def _results() -> Path:
    """Return the folder of the job's results."""
    return Path(collab.workspace.get_run_dir(collab.fl_ctx.get_job_id()))


class Coordinator:
    """The server's end of a job, which continues where the run's last job stopped."""

    def __init__(self, experiment: str, run: str, sites: Sequence[str] = ()):
        self._text, self._run = experiment, run
        self._expected = set(sites)  # connected when the job was submitted
        self._gave_up = False  # whether a run of this job has waited for silent sites in vain
        self._news: list[Table] = []
        self._reported = 0  # how many of them the administrator has
        self._links: list[Roster] = []
        self._make_room = False  # whether to end before the next round
        self._cancelled = False  # whether to end then for good
        self._revoked: set[str] = set()  # sites that are not asked any more

    @collab.main
    def run(self) -> None:
        """Run the experiment, or what is left of it, and report how it ended."""
        # A round calls out of its compiled program; JAX must not wait for itself there.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        keep_compiled_programs()
        collab.fl_ctx.get_engine().register_app_command(TOPIC, self._command)
        try:
            self._all_runs()
        except TooFew as few:
            if self._cancelled:
                (_run_folder(self._run) / CANCELLED).touch()
                self._stop(f"{self._run} was cancelled.")
            self._tell({"note": str(few), "missed": few.missed})
        except InvalidInput as error:
            self._stop(str(error), refused=isinstance(error, _NameTaken))
        except OSError as error:
            place = error.filename or "its folder"
            self._stop(f"The server cannot use {place}: {error.strerror or error}.")
        self._wait_until_reported()

    def _stop(self, why: str, refused: bool = False) -> None:
        """Report an error that ends this job; `refused` if the job never belonged to the run."""
        entry = {"error": why, "refused": refused}
        with contextlib.suppress(OSError):
            (_results() / STOPPED).write_text(json.dumps(entry))
        self._tell(entry)

    def _all_runs(self) -> None:
        check_run_name(self._run)
        experiment = built(self._text)
        home = _run_folder(self._run)
        self._alone = open_locked(home / "lock", PATIENCE)
        if self._alone is None:
            raise TooFew("another job of this run is still running")
        if (home / CANCELLED).exists():
            raise _NameTaken(f"{self._run} was cancelled; choose another name.")
        kept = home / "experiment.json"
        if not kept.exists():
            write_atomically(kept, json.dumps(experiment.resolved).encode())
        elif json.loads(kept.read_text()) != experiment.resolved:
            raise _NameTaken(f"{self._run} belongs to a different experiment; choose another name.")
        deadline = float(experiment.deploy.get("deadline", DEADLINE))
        transport = CollabTransport(deadline, self._tell, self._revoked)
        for cell in range(len(experiment.runs)):
            place = home / str(cell)
            place.mkdir(exist_ok=True, mode=0o700)
            if not (place / "done").exists():
                self._one_run(experiment, cell, place, transport)
                (place / "done").touch()
        results = _results()
        for cell in range(len(experiment.runs)):
            base, _ = read(home / str(cell) / FOLDER)
            (results / f"{cell}.safetensors").write_bytes(base or b"")
        (home / "done").touch()
        without = {
            site: why
            for cell in range(len(experiment.runs))
            for site, why in missing(saved_participation(home / str(cell) / FOLDER)).items()
        }
        (results / WITHOUT).write_text(json.dumps(without))
        self._tell({"done": True, "without": without})

    def _one_run(
        self, experiment: Experiment, cell: int, home: Path, transport: CollabTransport
    ) -> None:
        """Run one variant with one seed; `progress.jsonl` gets a line for each evaluated round."""
        variant, seed = experiment.runs[cell]
        problem, algorithm = experiment.cells[variant]
        options = experiment.options
        precision = options.get("precision")
        labels = {"cell": cell, "variant": variant, "seed": seed}
        with open(home / "progress.jsonl", "a", encoding="utf-8") as file:

            def tell(entry: Table) -> None:
                file.write(json.dumps(entry | {"at": time.time()}) + "\n")
                file.flush()
                self._tell(labels | entry)

            with precision_of(precision) as dtype:
                rule = options.get("aggregation")
                kind = Roster
                if isinstance(rule, SecureSum):
                    kind = functools.partial(SummingRoster, rule=rule, home=home)
                link = kind(
                    lambda messages: transport(cell, messages),
                    problem.on_device(dtype),
                    numbers_on_device(algorithm, dtype),
                    lambda text: tell({"note": text, "warning": not text.startswith(READY)}),
                    float(experiment.deploy.get("quorum", 0.0)),
                    int(experiment.deploy.get("sites", 1)),
                    str(experiment.deploy.get("alarms", REFUSE)),
                )
            self._links.append(link)
            patience = 0.0 if self._gave_up else experiment.deploy.get("patience", ENDING)
            serve(
                link,
                sorted({client.name for client in collab.clients} | self._expected),
                problem,
                algorithm,
                options["rounds"],
                seed,
                home,
                evaluate_every=options.get("evaluate_every", 1),
                precision=precision,
                progress=tell,
                go_on=lambda: not (self._make_room or self._cancelled),
                patience=float(patience),
                waiting=lambda sites: tell(_waiting(sites, float(patience))),
                aggregation=options.get("aggregation"),
                privacy=options.get("privacy"),
            )
            self._gave_up = bool(link.silent)

    def _tell(self, entry: Table) -> None:
        self._news.append(entry)

    def _command(self, topic: str, wish: object, context: object) -> Table:
        """Answer the administrator: news since the last question, rounds in which a site answered.

        The question may also ask to make room for another job, to end for good, or not to ask a
        site any more.
        """
        wish = wish if isinstance(wish, dict) else {}
        self._make_room = self._make_room or bool(wish.get("yield"))
        self._cancelled = self._cancelled or bool(wish.get("cancel"))
        self._revoked |= {str(site) for site in [wish.get("revoke")] if site}
        since = int(wish.get("since", 0))
        self._reported = max(self._reported, since)
        rounds = sum(link.rounds for link in self._links)
        return {"news": self._news[since : since + MOST_NEWS], "rounds": rounds}

    def _wait_until_reported(self) -> None:
        """Give the administrator time to fetch the last news, which are lost when the job ends."""
        end = time.monotonic() + REPORT_TIMEOUT
        while self._reported < len(self._news) and time.monotonic() < end:
            time.sleep(0.05)


def _waiting(sites: list[str], patience: float) -> Table:
    """Return the news that a run waits for sites after its last round."""
    text = f"waiting up to {patience:g} s for {', '.join(sites)} to evaluate the last parameters"
    return {"note": text, "warning": True, "waiting": sites}


class CollabTransport:
    """Send a message to each of some sites at once and collect the answers.

    A site that does not answer within the deadline counts as dead for the rest of the job and is
    not asked again; so does a site that is not part of the job. A revoked site is not asked at all.
    """

    def __init__(self, deadline: float, tell: Callable[[Table], None], revoked: Set[str]):
        self._deadline, self._tell, self._revoked = deadline, tell, revoked
        self._dead: set[str] = set()
        self._context = collab.context

    def __call__(self, cell: int, messages: dict[str, bytes]) -> Mapping[str, bytes | Exception]:
        """Return each site's answer, or the error in its place; dead sites have no entry."""
        # JAX calls from any of its threads, and FLARE knows its context in one thread only.
        set_call_context(self._context)
        for site in messages.keys() - {client.name for client in collab.clients} - self._dead:
            self._lose(site)
        waiting: Table = {  # results that arrive later
            site: collab.get_clients([site])(blocking=False, timeout=self._deadline).answer(
                cell, data
            )
            for site, data in messages.items()
            if site not in self._dead | self._revoked
        }
        revoked = encode({"status": "refused", "reason": "its kit was revoked"}, {})
        found: dict[str, bytes | Exception] = dict.fromkeys(
            messages.keys() & self._revoked, revoked
        )
        for site, queue in waiting.items():
            for _, data in queue:
                found[site] = data
            for failed, error in queue.failures.items():
                found[failed] = RuntimeError(str(error).splitlines()[-1] if str(error) else "lost")
                self._lose(failed)
        if collab.is_aborted:
            raise TooFew("the job was aborted")
        return found

    def _lose(self, site: str) -> None:
        self._dead.add(site)
        self._tell({"lost": site})
