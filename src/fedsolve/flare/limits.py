"""What a site's owner lets a server ask, whatever the algorithm is.

Written in `site.toml`; these are the defaults:

    [limits]
    samples = 5             # least samples of a client that takes part
    evaluations = 10000     # evaluations of f and g in one run
    digits = 6              # significant digits of the values of f and g that are reported
    memory = 8.0            # GiB that building a job's problem may take
    seconds = 600.0         # that one question may take
    problems = ["adult"]    # built-in problems that jobs may name; all if left out
    secure = false          # whether answers may leave this site in secure sums only
    epsilon = 4.0           # the most that a job's privacy may spend; any job if left out

An evaluation is answered once for each round after which the run evaluates, in order, at one w.
Every question is a line in the run's `questions.log`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
import resource
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import psutil

from fedsolve.errors import InvalidInput
from fedsolve.experiments.config import Experiment, settings_of
from fedsolve.fields import check_count, check_positive, scalar
from fedsolve.privacy.secure import SecureSum
from fedsolve.problem.problem import Problem
from fedsolve.problem.samples import Samples
from fedsolve.storage.arrays import Refused
from fedsolve.types import PyTree, Table

EXACT = 17  # digits that leave a value as it is
LOG_SIZE = 10_000_000  # bytes of a log, after which it becomes the older one


@dataclasses.dataclass(frozen=True)
class Limits:
    """The owner's limits."""

    samples: int = 5
    evaluations: int = 10_000
    digits: int = 6
    memory: float = 8.0
    seconds: float = 600.0
    problems: tuple[str, ...] | None = None
    secure: bool = False
    epsilon: float | None = None

    @classmethod
    def of(cls, owners: Table) -> Limits:
        """Return the limits in an owner's file."""
        table = owners.get("limits", {})
        known = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(table, dict) or table.keys() - {*known}:
            raise InvalidInput(f"[limits] takes {', '.join(known)}.")
        for name in ("samples", "evaluations", "digits"):
            if name in table:
                check_count(f"limits.{name}", table[name])
        given: Table = dict(table)
        for name in ("memory", "seconds", "epsilon"):
            if name in table:
                given[name] = scalar(f"limits.{name}")(table[name])
                check_positive(f"limits.{name}", given[name])
        if not isinstance(table.get("secure", False), bool):
            raise InvalidInput("limits.secure takes true or false.")
        names = given.get("problems")
        if names is not None:
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise InvalidInput("limits.problems takes a list of names.")
            given["problems"] = tuple(name.replace("-", "_") for name in names)
        return cls(**given)

    @contextlib.contextmanager
    def memory_limited(self) -> Iterator[None]:
        """Raise if what is built in the block takes more memory than the owner allows."""
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = psutil.Process().memory_info().vms + int(self.memory * 2**30)
        limits = [most, *(each for each in (soft, hard) if each != resource.RLIM_INFINITY)]
        resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
        try:
            yield
        except MemoryError:
            text = f"The problem needs more memory than its owner allows: {self.memory:g} GiB."
            raise InvalidInput(text) from None
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

    def check_problems(self, experiment: Experiment) -> None:
        """Raise if a job names a built-in problem that the owner does not want."""
        for variant in experiment.cells:
            kind = str(settings_of(experiment.resolved, variant)["problem"])
            if self.problems is not None and ":" not in kind and kind not in self.problems:
                raise InvalidInput(f"{kind!r} is not among the built-in problems allowed here.")

    def check_privacy(self, experiment: Experiment) -> None:
        """Raise if a job would let answers leave with less protection than the owner wants."""
        private = experiment.options.get("privacy")
        if self.epsilon is not None:
            epsilon = None if private is None else private.epsilon
            if epsilon is None or float(epsilon) > self.epsilon:
                raise InvalidInput(
                    f"This site's owner wants run.privacy.epsilon of at most {self.epsilon:g}."
                )
        if self.secure and not isinstance(experiment.options.get("aggregation"), SecureSum):
            raise InvalidInput("This site's owner wants run.aggregation=SecureSum.")

    def check_samples(self, problem: Problem) -> None:
        """Raise if a client has too few samples, in any of its sets of samples."""
        if fewest_samples(problem.samples) < self.samples:
            raise InvalidInput(
                "A client here has fewer samples than this site's owner wants behind a value."
            )

    def rounded(self, values: PyTree) -> PyTree:
        """Round values to the owner's number of significant digits."""
        if self.digits >= EXACT:
            return values
        return jax.tree.map(lambda leaf: significant(np.asarray(leaf), self.digits), values)


def fewest_samples(samples: Samples) -> int:
    """Return the smallest number of samples of a client, in any of its sets of samples.

    Without a mask, an array with one vector for each client may be its samples or something else of
    it: such arrays count only if there are no others.
    """
    masks = jax.tree.leaves(samples.mask)
    if masks:
        return min(int(np.asarray(mask).sum(1).min()) for mask in masks)
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(samples.values) if np.ndim(leaf) > 1]
    tables = [shape for shape in shapes if len(shape) > 2]
    return min((shape[1] for shape in tables or shapes), default=1)


def significant(values: np.ndarray, digits: int) -> np.ndarray:
    """Round floating-point numbers to a number of significant digits."""
    if not np.issubdtype(values.dtype, np.floating):
        return values
    rounded = [float(f"{value:.{digits - 1}e}") for value in values.ravel().tolist()]
    return np.asarray(rounded, values.dtype).reshape(values.shape)


class Guard:
    """Applies an owner's limits to the questions of one run.

    Args:
        limits: The owner's limits.
        home: The run's folder, for the log and for what must outlast a process.
        rounds: The number of rounds of the run.
        evaluate_every: After how many rounds it evaluates.

    Raises:
        InvalidInput: If the run has more evaluations than the owner allows.
    """

    def __init__(self, limits: Limits, home: Path, rounds: int, evaluate_every: int):
        self._limits, self._rounds, self._every = limits, rounds, evaluate_every
        if (wanted := -(-rounds // evaluate_every)) > limits.evaluations:
            raise InvalidInput(
                f"The run has {wanted} evaluations, and this site's owner allows "
                f"{limits.evaluations}; evaluate less often."
            )
        self._kept, self._log = home / "evaluations.json", home / "questions.log"
        try:
            found = json.loads(self._kept.read_text())
        except FileNotFoundError:
            found = {"round": 0, "w": ""}
        self._round, self._w = found["round"], found["w"]

    def evaluation(self, round: int, at: PyTree) -> None:
        """Raise `Refused` unless f and g may be told after this round, at these parameters."""
        leaves = [np.ascontiguousarray(leaf).tobytes() for leaf in jax.tree.leaves(at)]
        digest = hashlib.sha256(b"".join(leaves)).hexdigest()
        if (round, digest) == (self._round, self._w):
            return  # the same values again
        last = round == self._rounds
        if not 0 < round <= self._rounds or not (last or round % self._every == 0):
            raise Refused(f"the run has no evaluation after round {round}")
        if round <= self._round:
            raise Refused(
                f"it told f and g after round {self._round}, and does not at other parameters"
            )
        self._round, self._w = round, digest
        kept = {"round": round, "w": digest}
        self._kept.with_suffix(".new").write_text(json.dumps(kept))
        self._kept.with_suffix(".new").replace(self._kept)

    def values(self, values: PyTree) -> PyTree:
        """Return values as they may leave."""
        return self._limits.rounded(values)

    def log(self, head: Table, answer: str) -> None:
        """Write a line about a question for the owner."""
        parts = [f"{name} {head[name]}" for name in ("round", "exchange", "method") if name in head]
        parts += [f"and f, g after round {head['look']}"] if "look" in head else []
        asked = " ".join([str(head.get("kind")), *parts])[:200]
        line = "".join(c if c.isprintable() else " " for c in f"{asked}: {answer}")
        if self._log.exists() and self._log.stat().st_size > LOG_SIZE:
            self._log.replace(self._log.with_suffix(".old"))
        at = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
        with open(self._log, "a", encoding="utf-8") as file:
            file.write(f"{at} {line}\n")
