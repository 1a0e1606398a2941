"""What strategic behaviour costs, and what payments change.

Welfare is the sum of all players' utilities, W(N) = Σ_i (a_i − c_i − (λ/2) N_i²). Payments move
money from the server to the players, so they are no part of it; what they cost is reported apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from fedsolve.games.game import Game, Profile, in_double
from fedsolve.games.parts import Part, Players, PricePerSample


@dataclasses.dataclass(frozen=True)
class Anarchy:
    """The equilibrium against the social optimum: contributions, welfare, and the price of anarchy
    W(optimum) / W(equilibrium) (not a number where the equilibrium's welfare is not positive)."""

    equilibrium: Profile
    optimum: Profile
    welfare: float
    best_welfare: float

    @property
    def price(self) -> float:
        return self.best_welfare / self.welfare if self.welfare > 0 else float("nan")


@dataclasses.dataclass(frozen=True)
class Stay:
    """Who stays under a payment rule, when those who would be better off outside leave."""

    stays: Bool[np.ndarray, " m"]
    contributions: Profile
    utility: Profile  # with the payment; of those who left, what they have outside
    payment: Profile
    free_riders: Bool[np.ndarray, " m"]  # stay, and give no more than they must

    @property
    def spent(self) -> float:
        """What the server pays in all."""
        return float(self.payment.sum())

    @property
    def samples(self) -> float:
        """What the server gets in all."""
        return float(self.contributions.sum())


@eqx.filter_jit
def _total_loss(game: Game, N: Players) -> tuple[Any, Players]:
    return jax.value_and_grad(lambda N: jnp.sum(game.loss(N)))(N)


def social_optimum(game: Game, tolerance: float = 1e-9) -> Profile:
    """The contributions of greatest welfare (the nearest such, where welfare is not concave)."""
    import scipy.optimize

    lower, upper = np.asarray(game.lower, float), np.asarray(game.upper, float)
    width = np.where(upper > lower, upper - lower, 1.0)
    with jax.enable_x64(True):
        placed = in_double(game)

        def loss(share: np.ndarray) -> tuple[float, np.ndarray]:
            value, slope = _total_loss(placed, jnp.asarray(lower + share * width))
            return float(value), np.asarray(slope) * width

        found = scipy.optimize.minimize(
            loss,
            np.where(upper > lower, 0.5, 0.0),
            jac=True,
            method="L-BFGS-B",
            bounds=[
                (0.0, 1.0 if high > low else 0.0) for low, high in zip(lower, upper, strict=True)
            ],
            options={"maxiter": 10_000, "maxfun": 20_000, "ftol": 1e-16, "gtol": tolerance},
        )
    return np.clip(lower + found.x * width, lower, upper)


def anarchy(game: Game, tolerance: float = 1e-9) -> Anarchy:
    """What is lost because players look after themselves."""
    equilibrium, optimum = game.equilibrium(tolerance), social_optimum(game, tolerance)
    welfare, best = (float(game.utility(N).sum()) for N in (equilibrium, optimum))
    return Anarchy(equilibrium, optimum, welfare, best)


def externality_prices(game: Game, tolerance: float = 1e-9) -> PricePerSample:
    """Pigou's prices: player i is paid, for each sample, what one more of its samples is worth to
    all others at the social optimum. Under them the optimum is an equilibrium."""
    optimum = social_optimum(game, tolerance)
    with jax.enable_x64(True):
        placed, N = in_double(game), jnp.asarray(optimum)
        _, total = _total_loss(placed, N)
        own = eqx.filter_jit(Game.pseudogradient)(placed, N)
    return PricePerSample(np.asarray(own - total))


def who_stays(
    game: Game,
    payment: Part | Callable | None = None,
    outside: float | np.ndarray = 0.0,
    tolerance: float = 1e-9,
) -> Stay:
    """Plays the game with the payment; while someone would be better off `outside`, the worst off
    leaves (and contributes nothing), and the rest play again."""
    paid = game if payment is None else game.with_payment(payment)
    worth = np.broadcast_to(np.asarray(outside, float), (game.players,))
    gone = np.zeros(game.players, bool)
    while True:  # ends: nobody can leave twice
        playing = paid.without(gone)
        N = playing.equilibrium(tolerance)
        utility = playing.utility(N)
        missing = np.where(gone, 0.0, worth - utility)
        if missing.max() <= 1e-9 * max(1.0, np.abs(utility).max()):
            break
        gone[np.argmax(missing)] = True
    money = np.where(gone, 0.0, utility - game.utility(N))
    least = np.asarray(game.lower, float)
    riders = ~gone & (least + 1e-9 * np.maximum(1.0, least) >= N) & (np.asarray(game.upper) > least)
    return Stay(~gone, N, np.where(gone, worth, utility), money, riders)
