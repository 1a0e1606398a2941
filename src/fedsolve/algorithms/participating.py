"""The base class of algorithms in which a part of the clients takes part in each round."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from typing import ClassVar, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fedsolve import participation
from fedsolve.algorithms.base import Algorithm
from fedsolve.errors import InvalidInput
from fedsolve.federation.federation import Federation
from fedsolve.federation.replies import Replies
from fedsolve.fields import check_count, check_kind, optional
from fedsolve.participation.availability import Availability, as_availability
from fedsolve.participation.picks import Picks, no_picks, noted, picked
from fedsolve.participation.selection import Everyone, Random, Selection
from fedsolve.participation.weighting import Methods, Uniform, Up, Weighting, Weights
from fedsolve.problem.client import Client
from fedsolve.problem.problem import Problem
from fedsolve.types import (
    ClientState,
    Cohort,
    Flag,
    Flags,
    Info,
    Message,
    PRNGKey,
    PyTree,
    Reply,
    ServerState,
    Vector,
)

Part = TypeVar("Part", Weighting, Selection)


class Drawn(NamedTuple):
    """The participants of a round, as `Participating.draw` returns them.

    Args:
        cohort: The clients' indices, for `fed.ask(method, cohort)`.
        weights: Their weights, for `replies.mean(weights)`; None if all are equal.
        available: Which of them can be asked, for `fed.ask(..., when=available)`; True for all.
        noted: What the weighting records in the history.
        unbiased: Whether the weights are Horvitz-Thompson weights, for a sum that estimates the
            mean over all clients.

    Example:
        >>> import fedsolve as fs
        >>> import jax.numpy as jnp
        >>> drawn = fs.Drawn(cohort=jnp.asarray([0, 3]), weights=None, available=True)
        >>> list(drawn.info)
        ['cohort']
    """

    cohort: Cohort
    weights: Float[Array, " m"] | None
    available: Flag | Flags
    noted: Mapping[str, PyTree] = types.MappingProxyType({})
    unbiased: bool = False

    def mean(self, replies: Replies) -> PyTree:
        """Return the weighted mean of the replies that arrived, or its unbiased estimate."""
        return replies.sum(self.weights) if self.unbiased else replies.mean(self.weights)

    @property
    def info(self) -> Info:
        """What to record in the history: the cohort, and which of it was available."""
        info: Info = {"cohort": self.cohort, **self.noted}
        return info if self.available is True else info | {"available": self.available}


class Memory(NamedTuple):
    """The server's state of participation."""

    weighting: PyTree
    selection: PyTree
    availability: PyTree
    picks: Picks | None = None  # rounds in which each client was selected; None: not counted


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
    """Base class of algorithms in which some clients take part in each round.

    `round` starts with `drawn = self.draw(fed, key)`, and passes its update to `self.learn`.

    Args:
        participants: How many clients take part, drawn uniformly; None for all. Alternatively,
            give a `selection`.
        weighting: The weights of clients (`fedsolve.participation.Weighting`) or its name. They
            weight the mean of the answers, and a selection may use them.
        selection: Which clients are drawn (`fedsolve.participation.Selection`).
        availability: Which clients are up (`fedsolve.participation.Availability`); a number is the
            probability of being up.
    """

    weighs_objective: ClassVar[bool] = True  # whether it can minimise Σ p_m f_m
    takes_unbiased: ClassVar[bool] = False  # whether it averages by `Drawn.mean`
    tells_cohort: ClassVar[bool] = True  # whether weightings learn who took part (`watch`)

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
        """The selection, given as `selection` or by `participants`."""
        if self.selection is not None:
            return self.selection
        return Everyone() if self.participants is None else Random(self.participants)

    def check(self, problem: Problem) -> None:
        if self.participants is not None:
            check_count("participants", self.participants, most=problem.n)
        elif self.selecting.size is not None:
            check_count("selection.count", self.selecting.size, most=problem.n)
        self.weighting.check(problem)
        weighted = type(self.weighting).objective_weights is not Weighting.objective_weights
        if weighted and not self.weighs_objective:
            raise InvalidInput(
                f"{type(self).__name__} minimises the plain mean over clients, and "
                f"{type(self.weighting).__name__} puts weights on the clients' objectives: FedAvg, "
                "FedSGM, PPBC or FedADMM can do that."
            )
        if self.weighting.watches_cohort and not self.tells_cohort:
            raise InvalidInput(
                f"{type(self.weighting).__name__} must be told who takes part, which "
                f"{type(self).__name__} does not do: use FedAvg, SCAFFOLD or another algorithm "
                "that selects once in a round."
            )
        if self.availability is not None:
            self.availability.check(problem.n)
        if self.selecting.counts_unbiased:
            self._check_unbiased()

    def _check_unbiased(self) -> None:
        """Raise if a mean cannot be estimated without bias."""
        if not self.takes_unbiased:
            raise InvalidInput(
                f"{type(self).__name__} cannot use Horvitz-Thompson weights: FedAvg, FedVARP, "
                "SCAFFOLD and FedNova can."
            )
        if self.availability is None:
            return
        if not isinstance(self.weighting, Uniform):
            raise InvalidInput(
                f"With an availability, {type(self.weighting).__name__} weights only clients that "
                "are up, so the probabilities of the selection are not known: leave out one of "
                "them, or the selection's unbiased weights."
            )
        self.availability.rate(0, 0)  # raises if it is not known

    def limits(self) -> Info:
        return self.weighting.limits()

    def objective_weights(
        self, server: ServerState, participation: PyTree
    ) -> Float[Array, " n"] | None:
        return self.weighting.objective_weights(participation.weighting)

    # On the server

    def init_participation(self, w: Vector, clients: int) -> PyTree:
        return Memory(
            self.weighting.init(w, clients),
            self.selecting.init(clients),
            None if self.availability is None else self.availability.init(clients),
            no_picks(clients) if self.counts_picks else None,
        )

    @property
    def counts_picks(self) -> bool:
        """Whether to count how often each client is selected: if some are preferred to others."""
        return not isinstance(self.weighting, Uniform) and not isinstance(self.selecting, Everyone)

    def draw(self, fed: Federation, key: PRNGKey) -> Drawn:
        """Draw the participants of this round; the weighting may ask clients.

        Args:
            fed: The federation.
            key: A random key.
        """
        memory, n = fed.participation, fed.clients
        up, after = self.draw_available(fed, jax.random.fold_in(key, 1))
        weights, wanted = self.weigh(fed, up, key)
        cohort, turn = self.selecting.select(weights, n, memory.selection, key)
        available: Flag | Flags = True
        if self.availability is not None:
            available = self.answering(fed, cohort, jnp.asarray(up)[cohort], key)
        joins = self.selecting.joins(cohort, jax.random.fold_in(key, 4))
        if joins is not True:
            available = joins if available is True else available & joins
        own = None
        if weights is not None:
            own = weights[cohort]
            available = available & (own > 0)  # clients of weight 0 only fill up the cohort
        if self.weighting.watches_cohort:
            methods = Methods(self.assess, self.tell_size)
            wanted = self.weighting.watch(fed, methods, wanted, cohort, available)
        picks = picked(memory.picks, cohort, available)
        fed.participation = Memory(wanted, turn, after, picks)
        info = self.weighting.info(wanted) | noted(picks, fed.round + 1)
        if self.selecting.counts_unbiased:
            own = self.horvitz_thompson(fed, weights, cohort)
            return Drawn(cohort, own, available, info, unbiased=True)
        return Drawn(cohort, None if self.selecting.counts_equally else own, available, info)

    def horvitz_thompson(
        self, fed: Federation, weights: Weights, cohort: Cohort
    ) -> Float[Array, " m"]:
        """Return p_j/π_j, with p_j the client's weight in the mean and π_j = P(j answers)."""
        n = fed.clients
        chances = self.selecting.inclusion(weights, n)[cohort]
        if self.availability is not None:
            chances = chances * self.availability.rate(cohort, fed.round)
        base = self.weighting.objective_weights(fed.participation.weighting)
        if base is None and not self.selecting.counts_equally:
            base = weights
        own = jnp.full(len(cohort), 1 / n, fed.w.dtype) if base is None else base[cohort]
        return own / chances.astype(own.dtype)

    def weigh(self, fed: Federation, up: Up, key: PRNGKey) -> tuple[Weights, PyTree]:
        """Compute the weights of all clients, asking those that are up.

        Returns:
            The weights, and the weighting's memory after this round.
        """
        memory, own = fed.participation.weighting, jax.random.fold_in(key, 2)
        return self.weighting.weigh(fed, Methods(self.assess, self.tell_size), memory, up, own)

    def draw_available(self, fed: Federation, key: PRNGKey) -> tuple[Up, PyTree]:
        """Draw which clients are up.

        Returns:
            A flag for each client, or True for all; and the availability's memory after this round.
        """
        if self.availability is None:
            return True, None
        memory = fed.participation.availability
        return self.availability.draw(fed.clients, fed.round, memory, key)

    def answering(self, fed: Federation, cohort: Cohort, up: Flags, key: PRNGKey) -> Flags:
        """Return which clients of the cohort answer, given which of them are up."""
        if self.availability is None:
            return up
        late = jax.random.fold_in(key, 3)
        fed.delays = self.availability.delays(fed.clients, late)
        return self.availability.answering(cohort, up, fed.clients, late)

    def learn(self, fed: Federation, direction: Vector) -> None:
        """Pass the server's descent direction of this round to the weighting."""
        memory = fed.participation
        known = self.weighting.learn(memory.weighting, direction)
        fed.participation = memory._replace(weighting=known)

    # On a client

    def assess(
        self, client: Client, state: ClientState, *message: Message
    ) -> tuple[ClientState, Reply]:
        """Reply to the weighting."""
        return state, self.weighting.assess(client, *message)

    def tell_size(self, client: Client, state: ClientState) -> tuple[ClientState, Int[Array, ""]]:
        """Reply with the number of samples."""
        return state, jnp.asarray(client.size, jnp.int32)
