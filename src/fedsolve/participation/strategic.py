"""Strategic clients: what each contributes is its own choice, learned round by round.

    N_{i,r+1} = Π[N_{i,r} − γ̃ ∂_{N_i}(c_i − a_i)(N̂_r)],   p_{i,r+1} = N_{i,r+1} / Σ_j N_{j,r+1}

is lines 4, 10 and 12 of IncentFedAvg (`algorithms/incentfedavg.py`), as a weighting for any
algorithm: clients count by p_{r+1}, and all they do in the round is on ⌈N_{i,r}⌉ of their samples.
It costs an exchange of its own, which IncentFedAvg saves.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree

from fedsolve.errors import InvalidInput
from fedsolve.federation.federation import Federation
from fedsolve.fields import Scalar, check_kind, check_positive, scalar
from fedsolve.games import Game
from fedsolve.games.parts import numbers
from fedsolve.participation.weighting import Methods, Up, Weighting, normalised
from fedsolve.problem.client import Client
from fedsolve.problem.problem import Problem
from fedsolve.problem.samples import counts

Contributions = Float[Array, " m"]


def start_field() -> Any:
    """A field that holds N̂_0, one number for each client; None: the middle of the bounds."""
    return eqx.field(
        converter=lambda value: None if value is None else numbers("start", 1)(value), default=None
    )


def first_contributions(game: Game, start: Any, dtype: Any) -> Contributions:
    """N̂_0, within the bounds."""
    begin = 0.5 * (game.lower + game.upper) if start is None else start
    return game.project(jnp.broadcast_to(jnp.asarray(begin, dtype), (game.players,)))


def settling(game: Game) -> dict[str, Any]:
    """Where contributions settle: at the equilibrium, if the game has one that can be found."""
    try:
        return {"participation": game.equilibrium()}
    except InvalidInput:
        return {}


def check_players(game: Game, start: Any, problem: Problem) -> None:
    """Refuses a game whose players are not the problem's clients."""
    if game.players != problem.n:
        raise InvalidInput(f"The game has {game.players} players, the problem {problem.n} clients.")
    if start is not None and np.shape(start) not in ((), (problem.n,)):
        raise InvalidInput(f"start must be one number for each of {problem.n} clients.")
    sizes, lower, upper = counts(problem.samples), np.asarray(game.lower), np.asarray(game.upper)
    if (lower < 1).any():
        raise InvalidInput(
            f"Clients must contribute a sample at least; the lower bound of client "
            f"{np.argmin(lower)} is {lower.min():g}."
        )
    if (wrong := np.flatnonzero(np.ceil(upper) > sizes)).size:
        i = wrong[0]
        raise InvalidInput(
            f"Client {i} has {sizes[i]} samples, and the upper bound of its contribution is "
            f"{upper[i]:g}."
        )


class Strategic(Weighting):
    """Clients as players of a game: gives an algorithm its weights p and, every round anew, random
    subsets of ⌈N_i⌉ samples. `step_size` is γ̃ (`game.monotonicity().step_size` is the largest that
    Lemma 4.3 allows), `start` is N̂_0 (the middle of the bounds unless told).

    A client that does not answer keeps its N. The history's `participation` is N after the round.
    """

    game: Game
    step_size: Scalar = eqx.field(converter=scalar("step_size"))
    start: Any = start_field()

    def __check_init__(self):
        check_kind("game", self.game, Game)
        check_positive("step_size", self.step_size)

    def init(self, w: Float[Array, " d"], clients: int) -> Contributions:
        return first_contributions(self.game, self.start, w.dtype)

    def weigh(
        self,
        fed: Federation,
        methods: Methods,
        memory: Contributions,
        up: Up,
        key: Key[Array, ""],
    ) -> tuple[Float[Array, " n"], Contributions]:
        everyone = fed.everyone
        answers = fed.ask(methods.assess, everyone, memory, when=up)
        fed.contributions = memory
        new = memory.at[everyone].set(jnp.where(answers.arrived, answers.values, memory[everyone]))
        return normalised(new[everyone]), new

    def assess(self, client: Client, message: Contributions) -> Float[Array, ""]:
        return self.game.respond(client.index, message, self.step_size)

    def info(self, memory: PyTree) -> dict[str, Any]:
        return {"participation": memory}

    def limits(self) -> dict[str, Any]:
        return settling(self.game)

    def objective_weights(self, memory: Contributions) -> Contributions:
        return normalised(memory)

    def check(self, problem: Problem) -> None:
        check_players(self.game, self.start, problem)
