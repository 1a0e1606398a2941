"""Algorithms whose rounds have participants: who is wanted, who is drawn, who answers."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PyTree

from fedsolve import participation
from fedsolve.algorithms.base import Algorithm
from fedsolve.errors import InvalidInput
from fedsolve.federation.federation import Federation
from fedsolve.fields import check_count, check_kind, optional
from fedsolve.participation.availability import Availability, as_availability
from fedsolve.participation.selection import Everyone, Random, Selection
from fedsolve.participation.weighting import Methods, Uniform, Weighting
from fedsolve.problem.client import Client
from fedsolve.problem.problem import Problem
from fedsolve.types import Cohort

Part = TypeVar("Part", Weighting, Selection)


class Drawn(NamedTuple):
    """The participants of a round.

    - `cohort`: clients' indices, for `fed.ask(method, cohort)`.
    - `weights`: what each counts, for `replies.mean(weights)`; None where all count the same.
    - `available`: who of them can be asked, for `fed.ask(..., when=available)`; True for all.
    - `noted`: what the weighting writes in the history.
    """

    cohort: Cohort
    weights: Float[Array, " m"] | None
    available: Any
    noted: Mapping[str, Any] = types.MappingProxyType({})

    @property
    def info(self) -> dict[str, Any]:
        """For the history: who was drawn, who of them was up if not all must be, and what the
        weighting has to say."""
        info: dict[str, Any] = {"cohort": self.cohort, **self.noted}
        return info if self.available is True else info | {"available": self.available}


class Memory(NamedTuple):
    """What the server remembers about participation, between rounds."""

    weighting: PyTree
    selection: PyTree
    availability: PyTree


def as_weighting(value: object) -> Weighting:
    """Convert what a user may give for a weighting: the weighting, its name, or None."""
    if isinstance(value, str):
        return _by_name("weighting", value, Weighting)
    return check_kind("weighting", Uniform() if value is None else value, Weighting)


def as_selection(value: object) -> Selection:
    """Convert what a user may give for a selection: the selection or its name."""
    if isinstance(value, str):
        return _by_name("selection", value, Selection)
    return check_kind("selection", value, Selection)


def _by_name(field: str, name: str, kind: type[Part]) -> Part:
    """Make the weighting or selection of that name, which must need no arguments."""
    known = {
        name: part
        for name in participation.__all__
        if inspect.isclass(part := getattr(participation, name))
        and issubclass(part, kind)
        and not inspect.isabstract(part)
    }
    if name not in known:
        raise InvalidInput(f"{field} {name!r} is not known; there are {', '.join(known)}.")
    parameters = inspect.signature(known[name]).parameters.values()
    if needed := [p.name for p in parameters if p.default is p.empty]:
        raise InvalidInput(f"{name} needs arguments: give {name}({', '.join(needed)}).")
    return known[name]()


class Participating(Algorithm):
    """An algorithm in which some clients take part in a round.

    - `participants`: that many clients, drawn uniformly; everyone if None. Or, in its place,
    - `selection`: who is drawn, by the weights that
    - `weighting` gives: who is wanted.
    - `availability`: who answers; a number is the probability of being up.

    `round` begins with `drawn = self.draw(fed, key)` and gives its update to `self.learn`.
    """

    weighs_objective: ClassVar[bool] = True  # Σ p_m f_m, where the weighting has such p

    participants: int | None = eqx.field(static=True, default=None, kw_only=True)
    weighting: Weighting = eqx.field(converter=as_weighting, default=None, kw_only=True)
    selection: Selection | None = eqx.field(
        converter=optional(as_selection), default=None, kw_only=True
    )
    availability: Availability | None = eqx.field(
        converter=as_availability, default=None, kw_only=True
    )

    def __check_init__(self):
        if self.participants is not None:
            check_count("participants", self.participants)
            if self.selection is not None:
                raise InvalidInput("Give participants (drawn uniformly) or a selection, not both.")

    @property
    def selecting(self) -> Selection:
        """The selection, whichever way it was given."""
        if self.selection is not None:
            return self.selection
        return Everyone() if self.participants is None else Random(self.participants)

    def check(self, problem: Problem) -> None:
        if self.participants is not None:
            check_count("participants", self.participants, most=problem.n)
        elif self.selecting.size is not None:
            check_count("selection.count", self.selecting.size, most=problem.n)
        self.weighting.check(problem)
        told = type(self.weighting).objective_weights is not Weighting.objective_weights
        if told and not self.weighs_objective:
            raise InvalidInput(
                f"{type(self).__name__} minimises the plain mean over clients, and "
                f"{type(self.weighting).__name__} makes clients count as it says: FedAvg, FedSGM, "
                "PPBC or FedADMM can do that."
            )
        if self.availability is not None:
            self.availability.check(problem.n)

    def limits(self) -> dict[str, Any]:
        return self.weighting.limits()

    def objective_weights(self, server: PyTree, participation: PyTree) -> Any:
        return self.weighting.objective_weights(participation.weighting)

    # On the server

    def init_participation(self, w: Float[Array, " d"], clients: int) -> Any:
        return Memory(
            self.weighting.init(w, clients),
            self.selecting.init(clients),
            None if self.availability is None else self.availability.init(clients),
        )

    def draw(self, fed: Federation, key: Key[Array, ""]) -> Drawn:
        """The participants of this round. Clients may be asked for it."""
        memory, n = fed.participation, fed.clients
        up, after = self.draw_available(fed, jax.random.fold_in(key, 1))
        weights, wanted = self.weigh(fed, up, key)
        cohort, turn = self.selecting.select(weights, n, memory.selection, key)
        fed.participation = Memory(wanted, turn, after)
        noted = self.weighting.info(wanted)
        available: Any = True
        if self.availability is not None:
            available = self.answering(fed, cohort, up[cohort], key)
        if weights is None:
            return Drawn(cohort, None, available, noted)
        own = weights[cohort]
        available = available & (own > 0)  # those that fill up the cohort are not wanted
        return Drawn(cohort, None if self.selecting.counts_equally else own, available, noted)

    def weigh(self, fed: Federation, up: Any, key: Key[Array, ""]) -> tuple[Any, PyTree]:
        """The weights of all clients, asking those of them that are up, and the weighting's memory
        after this."""
        memory, own = fed.participation.weighting, jax.random.fold_in(key, 2)
        return self.weighting.weigh(fed, Methods(self.assess, self.tell_size), memory, up, own)

    def draw_available(self, fed: Federation, key: Key[Array, ""]) -> tuple[Any, PyTree]:
        """Who of all clients is up, and the availability's memory after this."""
        if self.availability is None:
            return True, None
        memory = fed.participation.availability
        return self.availability.draw(fed.clients, fed.round, memory, key)

    def answering(self, fed: Federation, cohort: Cohort, up: Any, key: Key[Array, ""]) -> Any:
        """Who of the cohort answers, given who of it is up."""
        if self.availability is None:
            return up
        late = jax.random.fold_in(key, 3)
        fed.delays = self.availability.delays(fed.clients, late)
        return self.availability.answering(cohort, up, fed.clients, late)

    def learn(self, fed: Federation, direction: Float[Array, " d"]) -> None:
        """Tells the weighting along which direction (downhill) the server moved."""
        memory = fed.participation
        known = self.weighting.learn(memory.weighting, direction)
        fed.participation = memory._replace(weighting=known)

    # On a client

    def assess(self, client: Client, state: PyTree, *message: PyTree) -> tuple[PyTree, PyTree]:
        return state, self.weighting.assess(client, *message)

    def tell_size(self, client: Client, state: PyTree) -> tuple[PyTree, Int[Array, ""]]:
        return state, jnp.asarray(client.size, jnp.int32)
