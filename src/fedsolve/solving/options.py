"""The options of a run, checked once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from jax.sharding import Mesh

from fedsolve.algorithms.base import Algorithm
from fedsolve.errors import InvalidInput
from fedsolve.federation.clock import Clock, check_clock
from fedsolve.federation.milestones import COLUMNS, MOST, Milestones
from fedsolve.federation.options import Arrivals, Follow, RoundOptions, Stop
from fedsolve.federation.rules import Rule
from fedsolve.federation.state import State
from fedsolve.fields import check_count, check_kind, check_seed
from fedsolve.privacy.plan import Plan
from fedsolve.privacy.private import Private
from fedsolve.privacy.secure import SecureSum
from fedsolve.problem.problem import Problem
from fedsolve.runtimes.history import History
from fedsolve.runtimes.sharding import Devices, mesh_of
from fedsolve.solving.checkpoint import Checkpoint, fingerprint, how_often, load
from fedsolve.solving.stopping import Spent, check_stop, for_problem
from fedsolve.types import Function, Table

RUNTIMES = ("compiled", "debug", "streamed")
Progress = Callable[[int, int, History], object]  # rounds done, rounds, newest entries


@dataclasses.dataclass(frozen=True)
class Options:
    """What a run is told beside its problem and its algorithm; see `fedsolve.solve`."""

    rounds: int
    seed: int = 0
    evaluate_every: int = 1
    runtime: str = "compiled"
    precision: str | None = None
    clients_at_once: int | None = None
    arrivals: Arrivals | None = None
    checkpoint: str | Path | None = None
    checkpoint_every: int | str | None = None
    resume: State | Checkpoint | str | Path | None = None
    stop: Stop | None = None
    progress: Progress | None = None
    interrupted: Callable[[], bool] | None = None
    follow: Mapping[str, object] | None = None
    clock: Clock | None = None
    devices: Devices = None
    store: object = None  # a folder or a mutable mapping
    privacy: Private | None = None
    aggregation: Rule | None = None
    evaluate_at: str = "rounds"

    def check(self, problem: Problem, algorithm: Algorithm) -> None:
        """Raise if this cannot be run."""
        check_kind("problem", problem, Problem)
        check_kind("algorithm", algorithm, Algorithm)
        check_count("rounds", self.rounds)
        check_seed(self.seed)
        check_count("evaluate_every", self.evaluate_every)
        self._check_milestones()
        if self.clients_at_once is not None:
            check_count("clients_at_once", self.clients_at_once)
        if self.precision not in (None, "float32", "float64"):
            raise InvalidInput(f'precision must be "float32" or "float64", got {self.precision!r}.')
        check_stop(self.stop)
        check_clock(self.clock, problem.n)
        if self.runtime not in RUNTIMES:
            raise InvalidInput(
                f'runtime must be "compiled", "debug" or "streamed", got {self.runtime!r}.'
            )
        if self.mesh is not None and self.runtime != "compiled":
            raise InvalidInput(
                f"Several devices are for the compiled runtime, not for {self.runtime!r}."
            )
        if self.followed and self.runtime == "streamed":
            raise InvalidInput("The streamed runtime follows f, g and the metrics only.")
        how_often("checkpoint_every", self.checkpoint_every)
        if problem.trains_itself and not algorithm.trains_models:
            raise InvalidInput(
                f"{type(algorithm).__name__} takes no local steps that a training loop can "
                "replace; use FedAvg, PPBC, FedSGM or another algorithm with local steps."
            )
        if (problem.keeps_own or problem.averages_state) and not algorithm.trains_models:
            raise InvalidInput(
                f"{type(algorithm).__name__} moves w alone: it cannot train personal parameters, "
                'nor move a state (give buffers="frozen" to keep it as it is).'
            )
        algorithm.check(problem)
        self._check_rules()

    def load(self) -> State | Checkpoint | None:
        """Return what the run goes on from, read from its file if need be."""
        saved = load(self.resume) if isinstance(self.resume, str | Path) else self.resume
        if self.runtime == "streamed":
            self._check_streamed(saved)
        return saved

    def identity(self, problem: Problem, algorithm: Algorithm) -> Table:
        """Return what a checkpoint must agree with to belong to this run."""
        return {
            "problem": fingerprint(problem),
            "algorithm": fingerprint(algorithm),
            "seed": self.seed,
            "evaluate_every": self.evaluate_every
            if self.evaluate_at == "rounds"
            else f"{self.evaluate_every} {self.evaluate_at}",
            "precision": self.precision,
            "follow": fingerprint(self.followed),
            "clock": None if self.clock is None else fingerprint(self.clock),
            "aggregation": None if self.aggregation is None else fingerprint(self.aggregation),
            "privacy": self._fingerprint_of_privacy(),
        }

    def _fingerprint_of_privacy(self) -> str | None:
        """Return what the noise of a run depends on."""
        if self.privacy is None:
            return None
        chosen = self.privacy.noise is None and self.privacy.rounds is None
        return fingerprint(self.privacy, self.rounds if chosen else None)

    def _check_milestones(self) -> None:
        """Raise if this does not say when to evaluate."""
        if self.evaluate_at == "rounds":
            return
        if self.evaluate_at not in COLUMNS:
            words = ", ".join(["rounds", *COLUMNS])
            raise InvalidInput(f"evaluate_at must be one of {words}, got {self.evaluate_at!r}.")
        if self.evaluate_every >= MOST:
            raise InvalidInput(
                f"evaluate_every must be below 2^31 {self.evaluate_at}, got {self.evaluate_every}."
            )
        if self.privacy is not None:
            raise InvalidInput(
                "A private run plans its evaluations by rounds: leave out evaluate_at."
            )

    def _check_rules(self) -> None:
        """Raise if what stands between answers and algorithm cannot be used with the rest."""
        if self.aggregation is not None:
            check_kind("aggregation", self.aggregation, Rule)
        if self.privacy is None:
            return
        check_kind("privacy", self.privacy, Private)
        of_clients = self.privacy.unit == "client"
        sums = self.aggregation is None or isinstance(self.aggregation, SecureSum)
        if of_clients and not sums:
            raise InvalidInput(
                f"{type(self.aggregation).__name__} is no sum, and privacy covers sums only: leave "
                "out aggregation. Privacy bounds the norm of every answer already."
            )
        if self.privacy.evaluation == "outside":
            if self.stop is not None and not isinstance(self.stop, Spent):
                raise InvalidInput(
                    'With evaluation="outside" a rule would stop the run by exact values, which '
                    "privacy does not cover: leave out stop, or make the evaluation private."
                )
        elif not of_clients and getattr(self.stop, "gradient", False):
            raise InvalidInput(
                "A rule on ‖∇f(w)‖² sees every client's gradient without noise: stop by the "
                'objective, or give evaluation="outside".'
            )
        elif self.follow:
            raise InvalidInput(
                "What follow computes sees clients' data without noise, which privacy does not "
                'cover: leave it out, or give evaluation="outside".'
            )

    def plan(self, problem: Problem, algorithm: Algorithm) -> Plan | None:
        """Return what a private run adds and may spend."""
        if self.privacy is None:
            return None
        return self.privacy.plan(problem, algorithm, self.rounds, self.evaluate_every)

    def of_rounds(self, problem: Problem, plan: Plan | None = None) -> RoundOptions:
        """Return the options that are part of the compiled program."""
        return RoundOptions(
            self.arrivals,
            self.clients_at_once,
            for_problem(self.stop, problem),
            self.followed,
            self.clock,
            self.aggregation,
            None if plan is None else plan.applied,
            self.mesh,
            self.milestones,
        )

    @property
    def milestones(self) -> Milestones | None:
        """The numbers of messages or bytes after which to evaluate; None if rounds are counted."""
        if self.evaluate_at == "rounds":
            return None
        return Milestones(self.evaluate_at, np.asarray(self.evaluate_every, np.uint32))

    @property
    def mesh(self) -> Mesh | None:
        """The devices over which clients are shared out."""
        return mesh_of(self.devices)

    @property
    def followed(self) -> Follow:
        """What is to be followed, in a form that a compiled program can be kept for."""
        found: list[tuple[str, Function]] = []
        for name, function in (self.follow or {}).items():
            if not callable(function):
                raise InvalidInput(
                    f"follow[{name!r}] must be a function of (problem, params), got {function!r}."
                )
            found.append((name, function))
        return tuple(found)

    def _check_streamed(self, saved: State | Checkpoint | None) -> None:
        if self.checkpoint is not None and self.store is None:
            raise InvalidInput(
                "A checkpoint of a streamed run needs a store that stays: give store."
            )
        if isinstance(saved, State):
            raise InvalidInput(
                "A streamed run goes on from its checkpoint; a state has no clients."
            )
        if saved is None:
            return
        if "store" not in saved.head:
            raise InvalidInput(f"{saved.path} is not of a streamed run.")
        if self.store is None:
            raise InvalidInput(f"{saved.path} goes on with the store that it was made with.")
        if self.checkpoint is not None and not saved.of(Path(self.checkpoint)):
            raise InvalidInput(
                f"A streamed run goes on in its own checkpoint, {saved.path}: a store has the rows"
                " of one run."
            )
