"""Trackers: whoever follows runs from outside, such as MLflow, and never holds them up.

A `Tracker` is told of runs; a `Follower` does the telling, in a thread of its own. Where a tracker
fails, the run goes on: the tracker is asked later what it has, and told the rest.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsolve.errors import InvalidInput
from fedsolve.solving.result import History, frame
from fedsolve.storage.atomic import write_atomically

if TYPE_CHECKING:
    from fedsolve.experiments.config import Experiment

FIRST_PAUSE, LAST_PAUSE = 1.0, 10.0  # seconds between two tries
KNOWN = {"mlflow": "fedsolve.experiments.mlflow:MLflow"}


@dataclasses.dataclass(frozen=True, eq=False)
class Tracked:
    """A run as its trackers know it."""

    key: str  # the same when the run is resumed, and no other run's
    experiment: str
    seed: int
    variant: str = ""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)  # by dotted key
    group: str = ""  # the key that this run has in common with the others of its folder

    @property
    def name(self) -> str:
        return f"{self.variant}/seed-{self.seed}".lstrip("/")


class Tracker:
    """Follows runs. Every method may raise: then `begin` is called again after a while, and only
    the rounds that are not there yet are handed over again."""

    def __init__(self, address: str = ""):
        self.address = address  # where it is, for whoever resumes the run from another place

    def begin(self, run: Tracked) -> int:
        """A run starts or goes on: the last of its rounds that is there already."""
        return 0

    def rows(self, run: Tracked, entries: History) -> None:
        """Evaluated rounds, in order: `entries["round"]` says which."""

    def end(self, run: Tracked, status: str) -> None:
        """No more rows for now: `finished`, `interrupted` or `diverged`."""

    def keep(self, files: Sequence[Path]) -> None:
        """What the runs left, after all of them ended."""


class Table(Tracker):
    """`history.csv`, row by row while the runs go on: labels, seed, round, values."""

    def __init__(self, path: Path):
        super().__init__(str(path))
        self._path, self._frames = path, {}
        self._columns: list[str] = []  # of the file, as far as it is whole

    def begin(self, run: Tracked) -> int:
        if run in self._frames:  # something went wrong before: it is told everything again
            self._columns = []
        self._frames[run] = []
        return 0

    def rows(self, run: Tracked, entries: History) -> None:
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
    run: Tracked
    chunks: list[History] = dataclasses.field(default_factory=list)
    status: str = ""  # how it ended, once it did
    there: int = 0  # the last round that the tracker has,
    opened: bool = False  # once it was asked
    closed: bool = False

    @property
    def last(self) -> int:
        return max((int(c["round"][-1]) for c in self.chunks if len(c["round"])), default=0)

    @property
    def waiting(self) -> bool:
        new = bool(self.status) or not self.opened or self.last > self.there
        return new and not self.closed


class Follower:
    """Tells a tracker about runs. `progress = follower.follow(run)` goes to `solve`."""

    def __init__(
        self, tracker: Tracker, name: str, tell: Callable[[str], None] = lambda text: None
    ):
        self._tracker, self.name, self._tell = tracker, name, tell
        self._news = threading.Condition()
        self._runs: list[_Followed] = []
        self._files: list[Path] | None = None
        self._closing = False
        self._lost = ""  # why the tracker cannot be had
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def follow(self, run: Tracked) -> Callable[[int, int, History], None]:
        """A function that takes what `solve` tells its `progress`."""
        followed = _Followed(run)

        def progress(done: int, rounds: int, newest: History) -> None:
            with self._news:
                if followed not in self._runs:
                    self._runs.append(followed)
                followed.chunks.append(newest)
                self._news.notify()

        return progress

    def end(self, run: Tracked, status: str, history: History) -> None:
        """A run is over, with this history; rows that `progress` was not told are in it."""
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
        """Hands over what is left, unless the tracker fails once more or `impatient` says so:
        what it did not get, in words."""
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
        pause = FIRST_PAUSE
        while True:
            with self._news:
                self._news.wait_for(lambda: self._closing or self._something())
                if not self._something():
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
                    if self._closing:  # this was the last try
                        return
                    self._news.wait_for(lambda: self._closing, pause)
                pause = min(2 * pause, LAST_PAUSE)
            else:
                if self._lost:
                    self._tell(f"{self.name} is back, and has everything up to now.")
                self._lost, pause = "", FIRST_PAUSE

    def _something(self) -> bool:
        return any(each.waiting for each in self._runs) or bool(self._files)

    def _hand_over(self) -> None:
        """Everything there is at the moment; the lock is not held while the tracker works."""
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
    """All that follows the runs of a folder: its table, and the trackers that the user named,
    which are kept in `tracking.json` for the day on which the folder is resumed."""

    def __init__(
        self,
        folder: Path,
        named: Sequence[str],
        experiment: Experiment,
        tell: Callable[[str], None],
        key: str = "",  # where the runs have one of their own; else the folder's
    ):
        from fedsolve.experiments.config import settings_of

        kept = {"key": key or uuid.uuid4().hex, "experiment": experiment.name, "trackers": []}
        kept |= _read(folder)
        trackers = dict(made(text) for text in [*kept["trackers"], *named])
        if trackers:
            facts = json.dumps(kept | {"trackers": list(trackers)}, indent=2)
            write_atomically(folder / "tracking.json", facts.encode())
        self._folder = folder
        self._table = Follower(Table(folder / "history.csv"), "history.csv", tell)
        self._others = [Follower(tracker, name, tell) for name, tracker in trackers.items()]
        self._runs = [
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

    def follow(
        self, number: int, shown: Callable[[int, int, History], None]
    ) -> Callable[[int, int, History], None]:
        """What `solve` is to tell of the run of that number, besides what is shown."""
        told = [each.follow(self._runs[number]) for each in (self._table, *self._others)]

        def progress(done: int, rounds: int, newest: History) -> None:
            for each in (shown, *told):
                each(done, rounds, newest)

        return progress

    def end(self, number: int, status: str, history: History) -> None:
        for each in (self._table, *self._others):
            each.end(self._runs[number], status, history)

    def close_table(self) -> None:
        """The folder's own table is left alone from now on."""
        self._table.close()

    def close(self, impatient: Callable[[], bool]) -> list[str]:
        """What trackers did not get, a sentence each."""
        files = sorted(p for p in self._folder.glob("[!.]*") if p.is_file())
        missed = {f.name: f.close(files, impatient) for f in self._others}
        return [f"{name} did not get {what}." for name, what in missed.items() if what]


def made(text: str) -> tuple[str, Tracker]:
    """A tracker by `name` or `name=address`, and how to name it in another folder. A name is one
    that Fedsolve knows, or `module:Class` of your own."""
    name, _, address = text.partition("=")
    module, _, kind = KNOWN.get(name, name).partition(":")
    if not kind:
        raise InvalidInput(f"--track {text}: known are {', '.join(KNOWN)}, or your module:Class.")
    try:
        found = getattr(importlib.import_module(module), kind, None)
    except ImportError as error:
        raise InvalidInput(f"--track {text}: {error}.") from None
    if not (isinstance(found, type) and issubclass(found, Tracker)):
        raise InvalidInput(f"--track {text}: {module}:{kind} is no fedsolve.Tracker.")
    tracker = found(address)
    return (f"{name}={tracker.address}" if tracker.address else name), tracker


def _read(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "tracking.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{folder / 'tracking.json'} cannot be read: {error}.") from None


def _after(entries: History, last: int) -> History:
    """The entries of later rounds; empty if there are none."""
    later = entries["round"] > last if "round" in entries else np.zeros(0, bool)
    kept = {name: values[later] for name, values in entries.items()} if later.any() else {}
    return History(kept)


def _reason(error: BaseException) -> str:
    """What is at the bottom of it, in a line."""
    while below := error.__cause__ or error.__context__:
        error = below
    text = str(error).strip().partition("\n")[0]
    return (text if len(text) <= 200 else f"{text[:200]}…") or type(error).__name__
