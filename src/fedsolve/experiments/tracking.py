"""Experiment trackers such as MLflow, fed from a background thread.

A `Tracker` receives the history of runs; a `Follower` passes it on in a thread, so that a slow or
unreachable tracker never delays a run. After a failure the tracker is asked which rounds it has,
and gets the others.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from fedsolve import types
from fedsolve.errors import InvalidInput
from fedsolve.experiments.config import Experiment, settings_of
from fedsolve.runtimes.history import History
from fedsolve.solving.result import Columns, frame
from fedsolve.storage.atomic import write_atomically

FIRST_PAUSE, LAST_PAUSE = 1.0, 10.0  # seconds between two attempts
KNOWN = {"mlflow": "fedsolve.experiments.mlflow:MLflow"}
Progress = Callable[[int, int, History], None]  # rounds done, rounds, newest entries: see `solve`


@dataclasses.dataclass(frozen=True, eq=False)
class Tracked:
    """A run as a tracker identifies it.

    Args:
        key: A text that no other run has; the same when the run is resumed.
        experiment: The experiment's name.
        seed: The run's seed.
        variant: The experiment's variant, if it has several.
        settings: The run's settings by dotted key, such as `algorithm.step_size`.
        group: A key that all runs of an experiment's folder share; empty if it has one run.

    Example:
        >>> import fedsolve as fs
        >>> fs.Tracked("3f2a-0", "neyman-pearson", seed=0, variant="soft").name
        'soft/seed-0'
    """

    key: str
    experiment: str
    seed: int
    variant: str = ""
    settings: dict[str, object] = dataclasses.field(default_factory=dict)
    group: str = ""

    @property
    def name(self) -> str:
        """The run's name within its experiment."""
        return f"{self.variant}/seed-{self.seed}".lstrip("/")


class Tracker:
    """Base class of experiment trackers, which receive the history of runs.

    Override the methods that the tracker needs. Each of them may raise: `begin` is then called
    again after a pause, and only rounds that are missing are passed again.

    Args:
        address: Where the tracker keeps its data. It is stored with the run, so that the run can
            be resumed from another folder.

    Example:
        >>> import fedsolve as fs
        >>> class Printing(fs.Tracker):
        ...     def rows(self, run, entries):
        ...         print(run.name, entries["round"])
        >>> follower = fs.Follower(Printing(), "printing")
        >>> tracked = fs.Tracked("first", "trial", seed=0)
        >>> problem = fs.problems.neyman_pearson(clients=3)
        >>> run = fs.solve(problem, fs.FedSGM(0.1, 0.05), rounds=2)
        >>> follower.end(tracked, "finished", run.history)
        >>> missed = follower.close()
        seed-0 [1 2]
    """

    def __init__(self, address: str = ""):
        self.address = address

    def begin(self, run: Tracked) -> int:
        """Start or continue a run.

        Args:
            run: The run.

        Returns:
            The last round of the run that the tracker already has; 0 if it has none.
        """
        return 0

    def rows(self, run: Tracked, entries: History) -> None:
        """Take evaluated rounds of a run, in order.

        Args:
            run: The run.
            entries: Columns of the history by name, one entry for each round in
                `entries["round"]`.
        """

    def end(self, run: Tracked, status: str) -> None:
        """End a run; when it is resumed, `begin` is called again.

        Args:
            run: The run.
            status: `"finished"`, `"interrupted"` or `"diverged"`.
        """

    def keep(self, files: Sequence[Path]) -> None:
        """Take the files of the experiment's folder, after all runs have ended.

        Args:
            files: Configuration, history, parameters, pictures.
        """


class Table(Tracker):
    """Writes `history.csv` while the runs go on: labels, seed, round, values."""

    def __init__(self, path: Path):
        super().__init__(str(path))
        self._path, self._frames = path, {}
        self._columns: list[str] = []  # of the file; empty if it must be written anew

    def begin(self, run: Tracked) -> int:
        """Return 0: after a failure, all rows of the run are written again."""
        if run in self._frames:
            self._columns = []
        self._frames[run] = []
        return 0

    def rows(self, run: Tracked, entries: Columns) -> None:
        """Append rows to the file, or write it anew if the columns changed."""
        import pandas as pd

        new = frame({"variant": run.variant} if run.variant else {}, run.seed, entries)
        self._frames[run].append(new)
        if list(new.columns) == self._columns:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(new.to_csv(index=False, header=False))
        else:
            every = [each for frames in self._frames.values() for each in frames]
            whole = pd.concat(every, ignore_index=True)
            write_atomically(self._path, whole.to_csv(index=False).encode())
            self._columns = list(whole.columns)


@dataclasses.dataclass(eq=False)
class _Followed:
    """What a follower knows of a run."""

    run: Tracked
    chunks: list[Columns] = dataclasses.field(default_factory=list)
    status: str = ""  # set when the run has ended
    there: int = 0  # the last round that the tracker has; valid once `opened`
    opened: bool = False
    closed: bool = False

    @property
    def last(self) -> int:
        return max((int(c["round"][-1]) for c in self.chunks if len(c["round"])), default=0)

    @property
    def waiting(self) -> bool:
        new = bool(self.status) or not self.opened or self.last > self.there
        return new and not self.closed


class Follower:
    """Passes the history of runs to a tracker, in a background thread.

    A tracker that fails is tried again after 1, 2, 4, 8 and then every 10 seconds; the run does not
    wait for it.

    Args:
        tracker: The tracker.
        name: The tracker's name in messages.
        tell: Called with a sentence when the tracker fails, and when it works again.

    Example:
        >>> import fedsolve as fs
        >>> follower = fs.Follower(fs.Tracker(), "my tracker")
        >>> tracked = fs.Tracked("first", "trial", seed=0)
        >>> run = fs.solve(
        ...     fs.problems.neyman_pearson(clients=3),
        ...     fs.FedSGM(0.1, 0.05),
        ...     rounds=2,
        ...     progress=follower.follow(tracked),
        ... )
        >>> follower.end(tracked, "finished", run.history)
        >>> follower.close()  # what the tracker did not get
        ''
    """

    def __init__(
        self, tracker: Tracker, name: str, tell: Callable[[str], None] = lambda text: None
    ):
        self._tracker, self.name, self._tell = tracker, name, tell
        self._news = threading.Condition()
        self._runs: list[_Followed] = []
        self._files: list[Path] | None = None
        self._closing = False
        self._lost = ""  # why the tracker failed, until it works again
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def follow(self, run: Tracked) -> Progress:
        """Start to follow a run.

        Args:
            run: The run.

        Returns:
            A function to pass to `fs.solve` as `progress`.
        """
        followed = _Followed(run)

        def progress(done: int, rounds: int, newest: Columns) -> None:
            with self._news:
                if followed not in self._runs:
                    self._runs.append(followed)
                followed.chunks.append(newest)
                self._news.notify()

        return progress

    def end(self, run: Tracked, status: str, history: Columns) -> None:
        """End a run.

        Args:
            run: The run.
            status: `"finished"`, `"interrupted"` or `"diverged"`.
            history: The run's whole history; rounds that were not passed to `progress` are taken
                from it.
        """
        with self._news:
            followed = next((f for f in self._runs if f.run is run), None)
            if followed is None:
                self._runs.append(followed := _Followed(run))
            if rest := _after(history, followed.last):
                followed.chunks.append(rest)
            followed.status = status
            self._news.notify()

    def close(
        self, files: Sequence[Path] = (), impatient: Callable[[], bool] = lambda: False
    ) -> str:
        """Pass on what is left, and end the thread; a tracker that fails is not tried again.

        Args:
            files: Files for the tracker's `keep`.
            impatient: Asked repeatedly while the tracker works; True ends the wait.

        Returns:
            What the tracker did not get, in words; empty if it has everything.
        """
        with self._news:
            self._files, self._closing = list(files), True
            self._news.notify()
        while self._thread.is_alive() and not impatient():
            self._thread.join(0.05)
        with self._news:
            late = [each for each in self._runs if each.waiting]
            missed = [f"{each.run.name} after round {each.there}" for each in late]
            missed += ["the files"] if self._files else []
        return f"{', '.join(missed)} ({self._lost or 'it is slow'})" if missed else ""

    def _work(self) -> None:
        """Pass on what there is until the follower is closed (the thread's function)."""
        pause = FIRST_PAUSE
        while True:
            with self._news:
                self._news.wait_for(lambda: self._closing or self._has_work())
                if not self._has_work():
                    return
            try:
                self._hand_over()
            except Exception as error:  # whatever the tracker's library raises
                if not self._lost:
                    self._tell(
                        f"{self.name} does not answer ({_reason(error)}). The run goes on; what"
                        " is missed is sent when it is back."
                    )
                self._lost = _reason(error)
                for each in self._runs:
                    each.opened = False
                with self._news:
                    if self._closing:  # this was the last attempt
                        return
                    self._news.wait_for(lambda: self._closing, pause)
                pause = min(2 * pause, LAST_PAUSE)
            else:
                if self._lost:
                    self._tell(f"{self.name} is back, and has everything up to now.")
                self._lost, pause = "", FIRST_PAUSE

    def _has_work(self) -> bool:
        return any(each.waiting for each in self._runs) or bool(self._files)

    def _hand_over(self) -> None:
        """Pass on everything there is now; the lock is not held while the tracker works."""
        for each in list(self._runs):
            if not each.waiting:
                continue
            if not each.opened:
                each.there = self._tracker.begin(each.run)
                each.opened = True
            with self._news:
                status, chunks = each.status, list(each.chunks)
            for chunk in chunks:
                if entries := _after(chunk, each.there):
                    self._tracker.rows(each.run, entries)
                    each.there = int(entries["round"][-1])
            if status:
                self._tracker.end(each.run, status)
                each.closed = True
        if self._files:
            self._tracker.keep(self._files)
            self._files = None


class Tracking:
    """The followers of an experiment's runs: for its `history.csv`, and for the user's trackers.

    The names of the trackers are kept in `tracking.json`, for when the experiment is resumed.
    `key` identifies the experiment; by default it is random.
    """

    def __init__(
        self,
        folder: Path,
        named: Sequence[str],
        experiment: Experiment,
        tell: Callable[[str], None],
        key: str = "",
    ):
        kept: types.Table = {"key": key or uuid.uuid4().hex, "experiment": experiment.name}
        kept |= {"trackers": []} | _read(folder)
        for text in kept["trackers"]:  # a folder from elsewhere must not import anything
            if (name := text.partition("=")[0]) not in KNOWN and text not in named:
                experiment.allowed.check(name, f"{folder / 'tracking.json'}")
        trackers = dict(made(text) for text in [*kept["trackers"], *named])
        if trackers:
            facts = json.dumps(kept | {"trackers": list(trackers)}, indent=2)
            write_atomically(folder / "tracking.json", facts.encode())
        self._folder = folder
        self._table = Follower(Table(folder / "history.csv"), "history.csv", tell)
        self._others = [Follower(tracker, name, tell) for name, tracker in trackers.items()]
        self.runs = [
            Tracked(
                key=f"{kept['key']}-{number}",
                experiment=kept["experiment"],
                seed=seed,
                variant=variant,
                settings=settings_of(experiment.resolved, variant),
                group=kept["key"] if len(experiment.runs) > 1 else "",
            )
            for number, (variant, seed) in enumerate(experiment.runs)
        ]

    def follow(self, number: int, shown: Progress) -> Progress:
        """Return the `progress` for the run of that number, which also calls `shown`."""
        followers = [each.follow(self.runs[number]) for each in (self._table, *self._others)]

        def progress(done: int, rounds: int, newest: History) -> None:
            for each in (shown, *followers):
                each(done, rounds, newest)

        return progress

    def end(self, number: int, status: str, history: History) -> None:
        """End the run of that number for all trackers."""
        for each in (self._table, *self._others):
            each.end(self.runs[number], status, history)

    def close_table(self) -> None:
        """Finish `history.csv`, so that the final one can be written."""
        self._table.close()

    def close(self, impatient: Callable[[], bool]) -> list[str]:
        """Close the trackers, and say what they did not get, a sentence each."""
        files = sorted(p for p in self._folder.glob("[!.]*") if p.is_file())
        missed = {f.name: f.close(files, impatient) for f in self._others}
        return [f"{name} did not get {what}." for name, what in missed.items() if what]


def made(text: str) -> tuple[str, Tracker]:
    """Make a tracker from `name` or `name=address`; a name may be `module:Class`.

    Also return the text with the tracker's own address, which is valid from any folder.
    """
    name, _, address = text.partition("=")
    module, _, kind = KNOWN.get(name, name).partition(":")
    if not kind:
        known = ", ".join(KNOWN)
        raise InvalidInput(
            f"{text!r} is not a known tracker; known: {known}, or your own as module:Class."
        )
    try:
        found = getattr(importlib.import_module(module), kind, None)
    except ImportError as error:
        raise InvalidInput(f"The tracker {text} cannot be imported: {error}.") from None
    if not (isinstance(found, type) and issubclass(found, Tracker)):
        raise InvalidInput(f"{module}:{kind} is not a subclass of fedsolve.Tracker.")
    tracker = found(address)
    return (f"{name}={tracker.address}" if tracker.address else name), tracker


def _read(folder: Path) -> types.Table:
    try:
        return json.loads((folder / "tracking.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{folder / 'tracking.json'} cannot be read: {error}.") from None


def _after(entries: Columns, last: int) -> History:
    """Return the entries of later rounds; empty if there are none."""
    later = entries["round"] > last if "round" in entries else np.zeros(0, bool)
    kept = {name: values[later] for name, values in entries.items()} if later.any() else {}
    return History(kept)


def _reason(error: BaseException) -> str:
    """Return the message of the error that caused all others, in one line."""
    while below := error.__cause__ or error.__context__:
        error = below
    text = str(error).strip().partition("\n")[0]
    return (text if len(text) <= 200 else f"{text[:200]}…") or type(error).__name__
