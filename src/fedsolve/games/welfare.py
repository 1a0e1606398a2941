"""Welfare of games: the price of anarchy, and the effect of payments.

Welfare is the sum of all players' utilities, W(N) = Σ_i (a_i − c_i − (λ/2) N_i²). Payments move
money from the server to the players, so they are not part of it; their cost is reported separately.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from fedsolve.games.game import Game, Profile, in_double
from fedsolve.games.parts import Part, Players, PricePerSample
from fedsolve.types import ArrayLike


@dataclasses.dataclass(frozen=True)
class Anarchy:
    """The equilibrium of a game compared with its social optimum.

    Args:
        equilibrium: The contributions at the equilibrium.
        optimum: The contributions of greatest welfare.
        welfare: W at the equilibrium.
        best_welfare: W at the optimum.

    Example:
        >>> import numpy as np
        >>> import fedsolve as fs
        >>> fs.games.Anarchy(np.ones(2), 2 * np.ones(2), welfare=4.0, best_welfare=5.0).price
        1.25
    """

    equilibrium: Profile
    optimum: Profile
    welfare: float
    best_welfare: float

    @property
    def price(self) -> float:
        """W(optimum) / W(equilibrium); NaN where the equilibrium's welfare is not positive."""
        return self.best_welfare / self.welfare if self.welfare > 0 else float("nan")


@dataclasses.dataclass(frozen=True)
class Stay:
    """The players who stay in a game when those who would be better off outside leave.

    Args:
        stays: Whether each player stays.
        contributions: N at the equilibrium of those who stay; 0 for the others.
        utility: Each player's utility with the payment; for those who left, the one outside.
        payment: What each player is paid.
        free_riders: Whether each player stays and contributes no more than its lower bound.

    Example:
        >>> import numpy as np
        >>> import fedsolve as fs
        >>> both = np.array([True, True])
        >>> found = fs.games.Stay(both, np.array([2.0, 3.0]), np.ones(2), np.ones(2) / 2, ~both)
        >>> found.spent, found.samples
        (1.0, 5.0)
    """

    stays: Bool[np.ndarray, " m"]
    contributions: Profile
    utility: Profile
    payment: Profile
    free_riders: Bool[np.ndarray, " m"]

    @property
    def spent(self) -> float:
        """The total of all payments."""
        return float(self.payment.sum())

    @property
    def samples(self) -> float:
        """The total of all contributions."""
        return float(self.contributions.sum())


@eqx.filter_jit
def _total_loss(game: Game, N: Players) -> tuple[Float[Array, ""], Players]:
    """Return −W(N) and its gradient."""
    return jax.value_and_grad(lambda N: jnp.sum(game.loss(N)))(N)


def social_optimum(game: Game, tolerance: float = 1e-9) -> Profile:
    """Compute the contributions of greatest welfare.

    Where welfare is not concave, the result is a local maximum.

    Args:
        game: The game.
        tolerance: The tolerance of the gradient.

    Returns:
        The contributions of all players.

    Example:
        >>> import fedsolve as fs
        >>> game = fs.Game(
        ...     payoff=fs.games.RandomDiscovery([[0.5, 0.5], [1.0, 0.0]]),
        ...     cost=fs.games.LinearCost([0.25, 0.75]),
        ...     lower=1,
        ...     upper=[40, 20],
        ...     regularization=0.1,
        ... )
        >>> fs.games.social_optimum(game).round(3).tolist()
        [7.5, 7.5]
    """
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
    """Compare the equilibrium of a game with its social optimum.

    Args:
        game: A monotone game.
        tolerance: The tolerance of both.

    Returns:
        Contributions and welfare of both; `price` is the price of anarchy.

    Raises:
        InvalidInput: If no equilibrium was found.

    Example:
        >>> import fedsolve as fs
        >>> game = fs.Game(
        ...     payoff=fs.games.RandomDiscovery([[0.5, 0.5], [1.0, 0.0]]),
        ...     cost=fs.games.LinearCost([0.25, 0.75]),
        ...     lower=1,
        ...     upper=[40, 20],
        ...     regularization=0.1,
        ... )
        >>> round(fs.games.anarchy(game).price, 3)
        1.8
    """
    equilibrium, optimum = game.equilibrium(tolerance), social_optimum(game, tolerance)
    welfare, best = (float(game.utility(N).sum()) for N in (equilibrium, optimum))
    return Anarchy(equilibrium, optimum, welfare, best)


def externality_prices(game: Game, tolerance: float = 1e-9) -> PricePerSample:
    """Compute Pigou's prices, under which the social optimum is an equilibrium.

    Player i is paid, for each sample, the value of one more of its samples to all others at the
    social optimum.

    Args:
        game: The game.
        tolerance: The tolerance of the social optimum.

    Returns:
        The payment with these prices.

    Example:
        >>> import fedsolve as fs
        >>> game = fs.Game(
        ...     payoff=fs.games.RandomDiscovery([[0.5, 0.5], [1.0, 0.0]]),
        ...     cost=fs.games.LinearCost([0.25, 0.75]),
        ...     lower=1,
        ...     upper=[40, 20],
        ...     regularization=0.1,
        ... )
        >>> fs.games.externality_prices(game).price.round(3).tolist()
        [0.5, 0.5]
    """
    optimum = social_optimum(game, tolerance)
    with jax.enable_x64(True):
        placed, N = in_double(game), jnp.asarray(optimum)
        _, total = _total_loss(placed, N)
        own = eqx.filter_jit(Game.pseudogradient)(placed, N)
    return PricePerSample(np.asarray(own - total))


def who_stays(
    game: Game,
    payment: Part | Callable | None = None,
    outside: ArrayLike = 0.0,
    tolerance: float = 1e-9,
) -> Stay:
    """Find the players who stay in the game when leaving is allowed.

    All play the game with the payment. While any player would be better off outside, the one that
    gains most by it leaves and contributes nothing, and the others play again.

    Args:
        game: A monotone game.
        payment: A payment in addition to the payoff: a part, or a function of N.
        outside: The utility outside the game, one number for all players or one for each.
        tolerance: The tolerance of the equilibria.

    Returns:
        The players who stay, with contributions, utilities and payments.

    Raises:
        InvalidInput: If no equilibrium was found.

    Example:
        >>> import fedsolve as fs
        >>> game = fs.Game(
        ...     payoff=fs.games.RandomDiscovery([[0.5, 0.5], [1.0, 0.0]]),
        ...     cost=fs.games.LinearCost([0.25, 0.75]),
        ...     lower=1,
        ...     upper=[40, 20],
        ...     regularization=0.1,
        ... )
        >>> found = fs.games.who_stays(game, fs.games.PricePerSample(0.5), outside=1.0)
        >>> found.stays.tolist(), found.contributions.round(3).tolist()
        ([True, True], [7.5, 7.5])
    """
    paid = game if payment is None else game.with_payment(payment)
    worth = np.broadcast_to(np.asarray(outside, float), (game.players,))
    gone = np.zeros(game.players, bool)
    while True:  # every pass but the last removes one player
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
