"""Algorithms that select twice: once an epoch of several rounds, and among those in every round."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from fedsolve.algorithms.participating import Participating, as_selection, as_weighting
from fedsolve.errors import InvalidInput
from fedsolve.federation.federation import Federation
from fedsolve.fields import Scalar, check_count, optional, scalar
from fedsolve.participation.selection import Everyone, Selection
from fedsolve.participation.weighting import Methods, Weighting
from fedsolve.problem.client import Client
from fedsolve.problem.domains import project_capped
from fedsolve.problem.problem import Problem
from fedsolve.types import Cohort


class Memory(NamedTuple):
    """What the server remembers about participation: of its parts, and whom it chose for the
    epoch."""

    weighting: PyTree
    selection: PyTree
    cohort: Any  # None: everyone
    weights: Float[Array, " c"]  # of the cohort, not made to sum to 1
    round_weighting: PyTree
    scores: Float[Array, " n"] | None  # by it, from the epoch's start; None if asked every round
    round_selection: PyTree
    availability: PyTree


class SelectingTwice(Participating):
    """Weights π are asked for when an epoch begins, of all clients; `select_epoch` is applied to
    them then, and `select_round` in every round to those that it left, by their weights or by what
    `round_weighting` says (None: all of them).

    - `cap`: α, weights stay on {π ≥ 0, Σπ = 1, π_m ≤ α/M}, also after a selection.
    - `counting="uniform"`: whoever is selected counts 1/M, so that weights do not sum to 1.

    `round` begins with `self.choose_epoch` and `self.choose_round`.
    """

    select_epoch: Selection = eqx.field(converter=as_selection, default="Everyone", kw_only=True)
    select_round: Selection | None = eqx.field(
        converter=optional(as_selection), default=None, kw_only=True
    )
    round_weighting: Weighting | None = eqx.field(
        converter=optional(as_weighting), default=None, kw_only=True
    )
    cap: Scalar | None = eqx.field(converter=optional(scalar("cap")), default=None, kw_only=True)
    counting: str = eqx.field(static=True, default="weights", kw_only=True)

    def __check_init__(self):
        if self.counting not in ("weights", "uniform"):
            raise InvalidInput(f'counting must be "weights" or "uniform", got {self.counting!r}.')
        if self.participants is not None or self.selection is not None:
            raise InvalidInput(
                f"{type(self).__name__} selects twice: give select_epoch and select_round in place "
                "of participants and selection."
            )
        if self.round_weighting is not None and self.select_round is None:
            raise InvalidInput("round_weighting says whom select_round selects; give both.")

    @property
    def selecting(self) -> Selection:
        return self.select_epoch

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if self.round_weighting is not None:
            self.round_weighting.check(problem)
        if self.select_round is not None and self.select_round.size is not None:
            check_count("select_round.count", self.select_round.size, most=problem.n)
        if isinstance(self.cap, float):
            self._check_cap(self.cap, problem.n)

    def _check_cap(self, cap: float, clients: int) -> None:
        if not 1 <= cap <= clients:
            raise InvalidInput(f"cap must be from 1 to the {clients} clients, got {cap:g}.")
        rules = (self.select_epoch, self.select_round)
        sizes = [rule.size for rule in rules if rule is not None and rule.size is not None]
        fewest = min(sizes, default=clients)
        if self.counting == "weights" and fewest * cap < clients:
            raise InvalidInput(
                f"{fewest} clients of weight at most cap/{clients} cannot sum to 1: cap must be at "
                f"least {clients / fewest:g}."
            )

    # On the server

    def init_participation(self, w: Float[Array, " d"], clients: int) -> Memory:
        everyone = isinstance(self.select_epoch, Everyone)
        size = min(self.select_epoch.size or clients, clients)
        rounds = self.round_weighting
        return Memory(
            self.weighting.init(w, clients),
            self.select_epoch.init(clients),
            None if everyone else jnp.zeros(size, jnp.int32),
            jnp.zeros(size, w.dtype),
            None if rounds is None else rounds.init(w, clients),
            None if rounds is None or self.availability is None else jnp.zeros(clients, w.dtype),
            None if self.select_round is None else self.select_round.init(clients),
            None if self.availability is None else self.availability.init(clients),
        )

    def choose_epoch(self, fed: Federation, begins: Any, key: Key[Array, ""]) -> None:
        """π̂ = R̂(π), if an epoch begins (lines 4, 5). All clients can be asked then."""
        old, n = fed.participation, fed.clients
        weights, wanted = self.weigh(fed, begins, key)
        if self.cap is not None:
            free = jnp.full(n, 1 / n, fed.w.dtype) if weights is None else weights
            weights = project_capped(free, jnp.asarray(self.cap) / n)
        cohort, turn = self.select_epoch.select(weights, n, old.selection, key)
        own = _counts(self.select_epoch, weights, cohort, fed.w.dtype)
        new = old._replace(
            weighting=wanted,
            selection=turn,
            cohort=None if old.cohort is None else cohort,
            weights=own if self.cap is None else self.shares(own, n),
        )
        fed.participation = jax.tree.map(lambda a, b: jnp.where(begins, a, b), new, old)

    def choose_round(
        self, fed: Federation, begins: Any, key: Key[Array, ""]
    ) -> tuple[Cohort, Float[Array, " m"]]:
        """π̃ = R̃(π̂): who sends in this round, and what each counts (line 10)."""
        memory = fed.participation
        cohort = fed.everyone if memory.cohort is None else memory.cohort
        own = memory.weights
        if self.select_round is not None:
            chosen = jnp.zeros(fed.clients, own.dtype).at[cohort].set(own)
            scores = chosen
            if self.round_weighting is not None:
                scores = jnp.where(chosen > 0, self.score(fed, begins, chosen > 0, key), 0)
            memory = fed.participation
            cohort, turn = self.select_round.select(
                scores, fed.clients, memory.round_selection, jax.random.fold_in(key, 5)
            )
            own = jnp.where(scores[cohort] > 0, chosen[cohort], 0)
            if self.select_round.counts_equally:
                own = (own > 0).astype(own.dtype)
            fed.participation = memory._replace(round_selection=turn)
        if self.counting == "uniform":
            return cohort, (own > 0).astype(own.dtype) / fed.clients
        return cohort, self.shares(own, fed.clients)

    def score(self, fed: Federation, begins: Any, wanted: Any, key: Key[Array, ""]) -> Any:
        """What the round's weighting says of those wanted; with an availability, what it said when
        all of them could be asked."""
        rule, memory = self.round_weighting, fed.participation
        assert rule is not None
        sure = self.availability is None
        asked = wanted if sure else wanted & begins
        methods = Methods(self.assess_round, self.tell_size)
        own = jax.random.fold_in(key, 4)
        scores, known = rule.weigh(fed, methods, memory.round_weighting, asked, own)
        scores = jnp.ones(fed.clients, fed.w.dtype) if scores is None else scores
        if not sure:
            scores = jnp.where(begins, scores, memory.scores)
        fed.participation = memory._replace(round_weighting=known, scores=None if sure else scores)
        return scores

    def shares(self, own: Float[Array, " c"], clients: int) -> Float[Array, " c"]:
        """What those selected count: made to sum to 1 and, if there is a cap, projected below it.
        Who had no weight gets some only if the others cannot have it all."""
        total = jnp.sum(own)
        own = own / jnp.where(total > 0, total, 1)
        if self.cap is None:
            return own
        return project_capped(jnp.where(own > 0, own, -2), jnp.asarray(self.cap) / clients)

    def learn(self, fed: Federation, direction: Float[Array, " d"]) -> None:
        super().learn(fed, direction)
        if self.round_weighting is not None:
            memory = fed.participation
            known = self.round_weighting.learn(memory.round_weighting, direction)
            fed.participation = memory._replace(round_weighting=known)

    # On a client

    def assess_round(
        self, client: Client, state: PyTree, *message: PyTree
    ) -> tuple[PyTree, PyTree]:
        assert self.round_weighting is not None
        return state, self.round_weighting.assess(client, *message)


def _counts(selection: Selection, weights: Any, cohort: Cohort, dtype: Any) -> Float[Array, " c"]:
    """What those selected count, not made to sum to 1."""
    if weights is None:
        return jnp.ones(len(cohort), dtype)
    own = weights[cohort]
    return (own > 0).astype(dtype) if selection.counts_equally else own.astype(dtype)
