"""The base class of algorithms that select for an epoch, and again in each of its rounds."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedsolve.algorithms.participating import Participating, as_selection, as_weighting
from fedsolve.errors import InvalidInput
from fedsolve.federation.federation import Federation
from fedsolve.fields import Scalar, check_count, optional, scalar
from fedsolve.participation.picks import Picks, no_picks, noted, picked
from fedsolve.participation.selection import Everyone, Selection
from fedsolve.participation.weighting import Methods, Uniform, Up, Weighting, Weights, normalised
from fedsolve.problem.client import Client
from fedsolve.problem.domains import project_capped
from fedsolve.problem.problem import Problem
from fedsolve.types import (
    ClientState,
    Cohort,
    Flags,
    Info,
    Message,
    PRNGKey,
    PyTree,
    Reply,
    Vector,
)

COUNTINGS = ("retained", "renormalised", "uniform")


def _as_counting(value: object) -> Any:
    """Convert a counting; `"renormalised"` was called `"weights"` in version 0.1."""
    return "renormalised" if value == "weights" else value


class Memory(NamedTuple):
    """The server's state of participation, and its selection for the epoch."""

    weighting: PyTree
    selection: PyTree
    cohort: Cohort | None  # None: all clients
    weights: Float[Array, " c"]  # π̂ of the cohort
    preferred: Float[Array, " c"] | None  # the weights by which it was selected; for `select_round`
    round_weighting: PyTree
    scores: Float[Array, " n"] | None  # its weights at the epoch's start; None: anew every round
    round_selection: PyTree
    availability: PyTree
    picks: Picks | None  # rounds in which each client was selected


class SelectingTwice(Participating):
    """Base class of algorithms that select clients for an epoch, and among them in every round.

    When an epoch of several rounds begins, the weighting computes the weights π of all clients, and
    `select_epoch` selects by them. In every round, `select_round` selects among the clients of the
    epoch, by the same weights or by those of `round_weighting`.

    `round` starts with `self.choose_epoch` and `self.choose_round`.

    Args:
        weighting: The weights π of clients, or the name of a weighting.
        availability: Which clients are up; a number is the probability of being up.
        select_epoch: The selection at the beginning of an epoch, or its name.
        select_round: The selection in every round; None for all clients of the epoch.
        round_weighting: The weights for `select_round`; None for the epoch's weights.
        cap: α, keeps weights on {π ≥ 0, Σπ = 1, π_m ≤ α/M}; None for none. It bounds weights in
            the sum; who is preferred is decided by the weights before.
        counting: What selected clients have for a weight in the sum. `"retained"`: their π_m, so
            that weights in the sum are less than 1 in all, as in Algorithm 1. `"renormalised"`:
            π_m scaled to sum to 1 over those selected, and below the cap again. `"uniform"`: 1/M.
            Where a selection counts equally (`Proportional`, `equal=True`), weights only select,
            and 1/M is what is retained.
        participants: Not used; see `select_epoch`.
        selection: Not used; see `select_epoch`.
    """

    tells_cohort = False

    select_epoch: Selection = eqx.field(converter=as_selection, default="Everyone", kw_only=True)
    select_round: Selection | None = eqx.field(
        converter=optional(as_selection), default=None, kw_only=True
    )
    round_weighting: Weighting | None = eqx.field(
        converter=optional(as_weighting), default=None, kw_only=True
    )
    cap: Scalar | None = eqx.field(converter=optional(scalar("cap")), default=None, kw_only=True)
    counting: str = eqx.field(static=True, converter=_as_counting, default="retained", kw_only=True)

    def __check_init__(self):
        if self.counting not in COUNTINGS:
            raise InvalidInput(
                f"counting must be one of {', '.join(COUNTINGS)}, got {self.counting!r}."
            )
        if self.participants is not None or self.selection is not None:
            raise InvalidInput(
                f"{type(self).__name__} selects twice: give select_epoch and select_round instead "
                "of participants and selection."
            )
        if self.round_weighting is not None and self.select_round is None:
            raise InvalidInput("round_weighting is for select_round; give both.")

    @property
    def selecting(self) -> Selection:
        return self.select_epoch

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if self.round_weighting is not None:
            self.round_weighting.check(problem)
            if self.round_weighting.watches_cohort:
                name = type(self.round_weighting).__name__
                raise InvalidInput(f"{name} must be told who takes part: not a round_weighting.")
        if self.select_round is not None and self.select_round.size is not None:
            check_count("select_round.count", self.select_round.size, most=problem.n)
        if self.select_round is not None and self.select_round.counts_unbiased:
            self._check_unbiased()
        if isinstance(self.cap, float):
            self._check_cap(self.cap, problem.n)

    def _check_cap(self, cap: float, clients: int) -> None:
        """Raise if selected clients cannot have weights below the cap that sum to 1."""
        if not 1 <= cap <= clients:
            raise InvalidInput(f"cap must be from 1 to the {clients} clients, got {cap:g}.")
        fewest = self.senders(clients)
        if self.counting == "renormalised" and fewest * cap < clients:
            raise InvalidInput(
                f"{fewest} clients of weight at most cap/{clients} cannot sum to 1: cap must be at "
                f"least {clients / fewest:g}."
            )

    def senders(self, clients: int) -> int:
        """Return C, how many clients are selected to send in a round."""
        rules = (self.select_epoch, self.select_round)
        sizes = [rule.size for rule in rules if rule is not None and rule.size is not None]
        return min([clients, *sizes])

    def largest_weight(self, clients: int) -> float:
        """Return α: weights in the sum are at most α/M."""
        rules = (self.select_epoch, self.select_round)
        equally = any(rule is not None and rule.counts_equally for rule in rules)
        unweighted = isinstance(self.weighting, Uniform)
        if self.counting != "renormalised" and (
            self.counting == "uniform" or equally or unweighted
        ):
            return 1.0
        return float(clients) if self.cap is None else float(self.cap)

    # On the server

    def init_participation(self, w: Vector, clients: int) -> Memory:
        everyone = isinstance(self.select_epoch, Everyone)
        size = min(self.select_epoch.size or clients, clients)
        rounds = self.round_weighting
        return Memory(
            self.weighting.init(w, clients),
            self.select_epoch.init(clients),
            None if everyone else jnp.zeros(size, jnp.int32),
            jnp.zeros(size, w.dtype),
            None if self.select_round is None else jnp.zeros(size, w.dtype),
            None if rounds is None else rounds.init(w, clients),
            None if rounds is None or self.availability is None else jnp.zeros(clients, w.dtype),
            None if self.select_round is None else self.select_round.init(clients),
            None if self.availability is None else self.availability.init(clients),
            no_picks(clients) if self.counts_picks else None,
        )

    @property
    def counts_picks(self) -> bool:
        weighs = self.round_weighting is not None or not isinstance(self.weighting, Uniform)
        rules = (self.select_epoch, self.select_round)
        return weighs and any(not isinstance(rule, Everyone | None) for rule in rules)

    def choose_epoch(self, fed: Federation, begins: Up, key: PRNGKey) -> None:
        """Select for the epoch if one begins: π̂ = R̂(π) (lines 4, 5), asking all clients."""
        old, n = fed.participation, fed.clients
        scores, wanted = self.weigh(fed, begins, key)
        weights: Weights = None  # π; None: 1/M for all
        if scores is not None:
            weights = scores if self.counting == "renormalised" else normalised(scores)
            if self.cap is not None:
                weights = project_capped(weights, jnp.asarray(self.cap) / n)
                scores = jnp.where(weights > 0, scores, 0)  # they still order those at the cap
        cohort, turn = self.select_epoch.select(scores, n, old.selection, key)
        own = preferred = jnp.full(len(cohort), 1 / n, fed.w.dtype)
        if weights is not None and scores is not None:
            own, preferred = self.counted(self.select_epoch, weights[cohort], n), scores[cohort]
        if self.counting == "renormalised" and self.cap is not None:
            own = self.shares(own, n)
        new = old._replace(
            weighting=wanted,
            selection=turn,
            cohort=None if old.cohort is None else cohort,
            weights=own,
            preferred=None if old.preferred is None else preferred,
        )
        fed.participation = jax.tree.map(lambda a, b: jnp.where(begins, a, b), new, old)

    def choose_round(
        self, fed: Federation, begins: Up, key: PRNGKey
    ) -> tuple[Cohort, Float[Array, " m"]]:
        """Select for the round: π̃ = R̃(π̂) (line 10).

        Returns:
            The cohort that sends in this round, and its weights π̃.
        """
        memory = fed.participation
        cohort = fed.everyone if memory.cohort is None else memory.cohort
        own = memory.weights
        if self.select_round is not None:
            nobody = jnp.zeros(fed.clients, own.dtype)
            chosen = nobody.at[cohort].set(own)
            if self.round_weighting is not None:
                scores = jnp.where(chosen > 0, self.score(fed, begins, chosen > 0, key), 0)
            else:
                scores = jnp.where(chosen > 0, nobody.at[cohort].set(memory.preferred), 0)
            memory = fed.participation
            cohort, turn = self.select_round.select(
                scores, fed.clients, memory.round_selection, jax.random.fold_in(key, 5)
            )
            own = jnp.where(scores[cohort] > 0, chosen[cohort], 0)
            own = self.counted(self.select_round, own, fed.clients)
            fed.participation = memory._replace(round_selection=turn)
        return cohort, own if self.counting != "renormalised" else self.shares(own, fed.clients)

    def counted(
        self, selection: Selection, own: Float[Array, " c"], clients: int
    ) -> Float[Array, " c"]:
        """Return what those selected retain of their weights: R zeroes the others."""
        if self.counting == "uniform" or selection.counts_equally:
            return (own > 0).astype(own.dtype) / clients
        return own

    def score(self, fed: Federation, begins: Up, chosen: Flags, key: PRNGKey) -> Float[Array, " n"]:
        """Compute the weights of `round_weighting` for the clients chosen for the epoch.

        With an availability they are those of the epoch's first round, when all can be asked.
        """
        rule, memory = self.round_weighting, fed.participation
        assert rule is not None
        always = self.availability is None
        asked = chosen if always else chosen & begins
        methods = Methods(self.assess_round, self.tell_size)
        own = jax.random.fold_in(key, 4)
        scores, known = rule.weigh(fed, methods, memory.round_weighting, asked, own)
        scores = jnp.ones(fed.clients, fed.w.dtype) if scores is None else scores
        if not always:
            scores = jnp.where(begins, scores, memory.scores)
        fed.participation = memory._replace(
            round_weighting=known, scores=None if always else scores
        )
        return scores

    def shares(self, own: Float[Array, " c"], clients: int) -> Float[Array, " c"]:
        """Normalise the weights of selected clients and project them below the cap, if any.

        Clients of weight 0 get some weight only if the others are all at the cap.
        """
        total = jnp.sum(own)
        own = own / jnp.where(total > 0, total, 1)
        if self.cap is None:
            return own
        return project_capped(jnp.where(own > 0, own, -2), jnp.asarray(self.cap) / clients)

    def count(self, fed: Federation, cohort: Cohort, sends: Flags) -> Info:
        """Count who sends in this round; return what to record of it."""
        picks = picked(fed.participation.picks, cohort, sends)
        fed.participation = fed.participation._replace(picks=picks)
        return noted(picks, fed.round + 1)

    def learn(self, fed: Federation, direction: Vector) -> None:
        super().learn(fed, direction)
        if self.round_weighting is not None:
            memory = fed.participation
            known = self.round_weighting.learn(memory.round_weighting, direction)
            fed.participation = memory._replace(round_weighting=known)

    # On a client

    def assess_round(
        self, client: Client, state: ClientState, *message: Message
    ) -> tuple[ClientState, Reply]:
        """Reply to `round_weighting`."""
        assert self.round_weighting is not None
        return state, self.round_weighting.assess(client, *message)
