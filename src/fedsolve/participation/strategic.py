"""Strategic clients: each chooses how much it contributes, and learns it round by round.

    N_{i,r+1} = Π[N_{i,r} − γ̃ ∂_{N_i}(c_i − a_i)(N̂_r)],   p_{i,r+1} = N_{i,r+1} / Σ_j N_{j,r+1}

These are lines 4, 10 and 12 of IncentFedAvg (`algorithms/incentfedavg.py`) as a weighting for any
algorithm: clients have weight p_{r+1}, and use ⌈N_{i,r}⌉ of their samples in the whole round. It
takes one more exchange per round than IncentFedAvg.
"""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float

from fedsolve.errors import InvalidInput
from fedsolve.federation.federation import Federation
from fedsolve.fields import Numbers, Scalar, check_kind, check_positive, optional, scalar
from fedsolve.games import Game
from fedsolve.games.parts import numbers
from fedsolve.participation.weighting import Methods, Up, Weighting, normalised
from fedsolve.problem.client import Client
from fedsolve.problem.problem import Problem
from fedsolve.problem.samples import counts, sets_of
from fedsolve.types import Info, PRNGKey, Vector

Contributions = Float[Array, " m"]


def first_contributions(game: Game, start: Numbers | None, dtype: DTypeLike) -> Contributions:
    """Return N̂_0, projected onto the bounds."""
    begin = 0.5 * (game.lower + game.upper) if start is None else start
    return game.project(jnp.broadcast_to(jnp.asarray(begin, dtype), (game.players,)))


def known_limits(game: Game) -> Info:
    """Return the limit of the contributions: the equilibrium, if one can be computed."""
    try:
        return {"participation": game.equilibrium()}
    except InvalidInput:
        return {}


def check_players(game: Game, start: Numbers | None, problem: Problem) -> None:
    """Raise if the players of a game are not the problem's clients."""
    if game.players != problem.n:
        raise InvalidInput(f"The game has {game.players} players, the problem {problem.n} clients.")
    if start is not None and np.shape(start) not in ((), (problem.n,)):
        raise InvalidInput(f"start must be one number for each of {problem.n} clients.")
    check_bounds(game, problem)


def check_bounds(game: Game, problem: Problem, first: int = 0) -> None:
    """Raise if clients cannot contribute what a game allows; they are its players from `first` on.

    At a site of a deployment only the site's own clients are there.
    """
    sizes, sets = counts(problem.samples), sets_of(problem.samples)
    lower, upper = (np.asarray(b)[first : first + problem.n] for b in (game.lower, game.upper))
    if (lower < sets).any():
        least = "one sample" if sets == 1 else f"one sample of each of {sets} sets"
        raise InvalidInput(
            f"Clients must contribute at least {least}; the lower bound of client "
            f"{first + np.argmin(lower)} is {lower.min():g}."
        )
    if (wrong := np.flatnonzero(np.ceil(upper) > sizes)).size:
        i = wrong[0]
        raise InvalidInput(
            f"Client {first + i} has {sizes[i]} samples, and the upper bound of its contribution "
            f"is {upper[i]:g}."
        )


def game_of(algorithm: object) -> Game | None:
    """Return the game that an algorithm's clients play, if they play one."""
    for part in (algorithm, getattr(algorithm, "weighting", None)):
        if isinstance(game := getattr(part, "game", None), Game):
            return game
    return None


class Strategic(Weighting):
    """Weight clients by what they choose to contribute, as players of a game.

    The weights p are part of the problem: minimise Σ p_i f_i. In every round client i uses a random
    subset of ⌈N_i⌉ of its samples. A client that does not answer keeps its N. The history has N
    after each round as `participation`.

    Args:
        game: The game that the clients play.
        step_size: γ̃, the step of the clients' choices; `game.monotonicity().step_size` is the
            largest that Lemma 4.3 allows.
        start: N̂_0, one number or one for each client; None for the middle of the bounds.

    Example:
        >>> import fedsolve as fs
        >>> import jax.numpy as jnp
        >>> game = fs.Game(
        ...     payoff=fs.games.RandomDiscovery([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]]),
        ...     cost=fs.games.LinearCost([0.9, 0.4, 0.9]),
        ...     lower=1,
        ...     upper=5,
        ... )
        >>> algorithm = fs.FedAvg(0.1, weighting=fs.Strategic(game, step_size=0.1))
        >>> algorithm.weighting.init(jnp.zeros(2), clients=3).tolist()
        [3.0, 3.0, 3.0]
    """

    game: Game
    step_size: Scalar = eqx.field(converter=scalar("step_size"))
    start: Numbers | None = eqx.field(converter=optional(numbers("start", 1)), default=None)

    def __check_init__(self):
        check_kind("game", self.game, Game)
        check_positive("step_size", self.step_size)

    def init(self, w: Vector, clients: int) -> Contributions:
        return first_contributions(self.game, self.start, w.dtype)

    def weigh(
        self,
        fed: Federation,
        methods: Methods,
        memory: Contributions,
        up: Up,
        key: PRNGKey,
    ) -> tuple[Float[Array, " n"], Contributions]:
        everyone = fed.everyone
        answers = fed.ask(methods.assess, everyone, memory, when=up)
        fed.contributions = memory
        new = memory.at[everyone].set(jnp.where(answers.arrived, answers.values, memory[everyone]))
        return normalised(new[everyone]), new

    def assess(self, client: Client, message: Contributions) -> Float[Array, ""]:
        return self.game.respond(client.index, message, self.step_size)

    def info(self, memory: Contributions) -> Info:
        return {"participation": memory}

    def limits(self) -> Info:
        return known_limits(self.game)

    def objective_weights(self, memory: Contributions) -> Contributions:
        return normalised(memory)

    def check(self, problem: Problem) -> None:
        check_players(self.game, self.start, problem)
