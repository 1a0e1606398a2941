"""Games of data participation: clients choose how much they contribute.

Paper: "Incentive-Aware Federated Averaging with Performance Guarantees under Strategic
Participation", section 2.

    player i minimises  l_i(N) = c_i(N) − a_i(N) + (λ/2) N_i²   over   N_i in [N_i^min, N_i^max]

| here | paper | |
|---|---|---|
| `payoff`, `cost` | a(N), c(N) | one number for each of m players |
| `lower`, `upper` | N^min, N^max | |
| `regularization` | λ | makes a monotone game strongly monotone |
| `pseudogradient` | F(N) | F_i = ∂_{N_i} l_i |
| `monotonicity` | μ_F, L_F | Assumption 2.2 (ii) |
| `equilibrium` | N* | solves VI(Π [N_i^min, N_i^max], F) |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from fedsolve.errors import InvalidInput
from fedsolve.fields import Scalar, check_count, check_positive, scalar
from fedsolve.games.parts import (
    Index,
    Numbers,
    Part,
    Players,
    PrivacyCost,
    Sum,
    as_part,
    numbers,
)
from fedsolve.types import ArrayLike

GRID, GOLDEN = 33, 45  # deviations tried, then steps of a golden-section search around the best
PROBES = 8  # points of the box at which the Jacobian of a game that is not affine is evaluated
Profile = Float[np.ndarray, " m"]  # the players' contributions, on the host


@dataclasses.dataclass(frozen=True)
class Monotonicity:
    """The constants μ_F and L_F of a game.

    They are those of (F(N) − F(M))·(N − M) ≥ μ‖N − M‖² and ‖F(N) − F(M)‖ ≤ L‖N − M‖.

    They are exact for a game whose parts are all known to be affine (`Part.affine`). Otherwise,
    as for every function that a user wrote, they are estimates from some points of the box: the
    true μ can only be smaller and the true L only greater.

    Args:
        strong: μ_F.
        lipschitz: L_F.
        exact: Whether both are exact.
        probes: The number of points at which the Jacobian was evaluated.

    Example:
        >>> import fedsolve as fs
        >>> fs.games.Monotonicity(strong=0.5, lipschitz=1.0, exact=True, probes=1).step_size
        0.5
    """

    strong: float
    lipschitz: float
    exact: bool
    probes: int

    @property
    def step_size(self) -> float:
        """The largest step size of Lemma 4.3, μ_F / L_F²."""
        return self.strong / self.lipschitz**2 if self.strong > 0 else 0.0


class Game(eqx.Module):
    """A game of data participation.

    Args:
        payoff: a(N): a part such as `RandomDiscovery`, or a differentiable function of all
            players' contributions that returns one number for each player; None for zero.
        cost: c(N), in the same form.
        lower: N^min, one number for all players or one for each.
        upper: N^max, likewise.
        regularization: λ, which adds (λ/2) N_i² to every player's loss.

    Raises:
        InvalidInput: If the numbers of players differ or are unknown, the bounds are not
            0 ≤ lower ≤ upper, or payoff or cost do not return one finite number for each player.

    Example:
        >>> import fedsolve as fs
        >>> game = fs.Game(
        ...     payoff=fs.games.RandomDiscovery([[0.5, 0.5], [1.0, 0.0]]),
        ...     cost=fs.games.LinearCost([0.25, 0.75]),
        ...     lower=1,
        ...     upper=[4, 2],
        ...     regularization=0.1,
        ... )
        >>> game.equilibrium().round(3).tolist()
        [2.5, 2.0]
    """

    payoff: Part
    cost: Part
    lower: Numbers
    upper: Numbers
    regularization: Scalar = eqx.field(converter=scalar("regularization"))

    def __init__(
        self,
        payoff: object,
        cost: object,
        lower: ArrayLike,
        upper: ArrayLike,
        regularization: Scalar | int = 0.0,
    ):
        self.payoff, self.cost = as_part("payoff", payoff), as_part("cost", cost)
        bounds = {"lower": numbers("lower", 1)(lower), "upper": numbers("upper", 1)(upper)}
        lengths = {name: b.shape[0] for name, b in bounds.items() if b.ndim}
        for name, part in (("payoff", self.payoff), ("cost", self.cost)):
            if part.players is not None:
                lengths[name] = part.players
        if not lengths:
            raise InvalidInput(
                "The number of players is unknown: give lower or upper as one number for each."
            )
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise InvalidInput(f"The numbers of players differ: {listed}.")
        shape = (next(iter(lengths.values())),)
        self.lower, self.upper = (
            np.broadcast_to(b, shape).copy()
            if isinstance(b, np.ndarray)
            else jnp.broadcast_to(b, shape)
            for b in bounds.values()
        )
        self.regularization = regularization
        self._check()

    def _check(self) -> None:
        """Raise for bounds or parts that do not fit; bounds that JAX traces are not checked."""
        check_positive("regularization", self.regularization, zero=True)
        if not (isinstance(self.lower, np.ndarray) and isinstance(self.upper, np.ndarray)):
            return
        if (wrong := np.flatnonzero((self.lower < 0) | (self.lower > self.upper))).size:
            i = wrong[0]
            raise InvalidInput(
                "Bounds must be 0 ≤ lower ≤ upper; "
                f"player {i} has {self.lower[i]:g} and {self.upper[i]:g}."
            )
        if isinstance(self.cost, PrivacyCost) and np.any(
            np.asarray(self.cost.available) <= self.upper
        ):
            raise InvalidInput("PrivacyCost needs available above the upper bound of every player.")
        for name, part in (("payoff", self.payoff), ("cost", self.cost)):
            wanted = jax.ShapeDtypeStruct(self.lower.shape, jnp.result_type(float))
            try:
                found = eqx.filter_eval_shape(part, wanted).shape
            except Exception as error:
                raise InvalidInput(
                    f"The {name} failed on {self.players} players: {error}"
                ) from error
            if found != self.lower.shape:
                raise InvalidInput(
                    f"The {name} must give one number for each of {self.players} players, "
                    f"got shape {found}."
                )
            middle = 0.5 * (self.lower + self.upper)
            told = np.asarray(part(jnp.asarray(middle, jnp.result_type(float))))
            if not np.isfinite(told).all():
                i = int(np.argmin(np.isfinite(told)))
                raise InvalidInput(
                    f"The {name} of player {i} is {told[i]} in the middle of the bounds."
                )

    @property
    def players(self) -> int:
        """The number of players, m."""
        return self.lower.shape[0]

    # Inside JAX, for algorithms

    def loss(self, N: Players) -> Players:
        """Return l_i(N) of all players: cost less payoff, plus the regularization.

        Args:
            N: The contributions of all players.

        Returns:
            One loss for each player.
        """
        return self.cost(N) - self.payoff(N) + 0.5 * self.regularization * N**2

    def pseudogradient(self, N: ArrayLike) -> Players:
        """Return F(N): every player's derivative of its own loss by its own contribution.

        Args:
            N: The contributions of all players.

        Returns:
            One derivative for each player.
        """
        N = jnp.asarray(N, jnp.result_type(float))
        return self.cost.slope(N) - self.payoff.slope(N) + self.regularization * N

    def project(self, N: Players) -> Players:
        """Return the nearest contributions within the bounds.

        Args:
            N: The contributions of all players.

        Returns:
            The contributions, clipped to the bounds.
        """
        return jnp.clip(N, self.lower, self.upper)

    def respond(self, index: Index, N: Players, step_size: Scalar | int) -> Float[Array, ""]:
        """Return one player's next contribution (Algorithm 1, line 10).

        It is N_i − γ̃ F_i(N), clipped to the bounds, computed from the player's own derivative only.

        Args:
            index: The player, i.
            N: The contributions of all players.
            step_size: γ̃.

        Returns:
            The player's next contribution.
        """
        own = self.cost.own_slope(index, N) - self.payoff.own_slope(index, N)
        slope = own + self.regularization * N[index]
        lower, upper = jnp.asarray(self.lower), jnp.asarray(self.upper)
        return jnp.clip(N[index] - step_size * slope, lower[index], upper[index])

    def jacobian(self, N: ArrayLike) -> Float[Array, "m m"]:
        """Return the Jacobian of the pseudogradient.

        Args:
            N: The contributions of all players.

        Returns:
            ∂F_i / ∂N_j, in row i and column j.
        """
        N = jnp.asarray(N, jnp.result_type(float))
        curvature = self.cost.slope_jacobian(N) - self.payoff.slope_jacobian(N)
        return curvature + self.regularization * jnp.eye(N.size, dtype=N.dtype)

    # On the host, in double precision, for studies

    def utility(self, N: ArrayLike) -> Profile:
        """Return −l_i(N): the gain of each player.

        Args:
            N: The contributions of all players.

        Returns:
            One utility for each player.
        """
        return -self._in_double(_losses, N)

    def regrets(self, N: ArrayLike) -> Profile:
        """Return the most that each player gains by deviating alone.

        It is 0 for all players at an equilibrium, and only there. Deviations are searched over the
        whole interval, then around the best one.

        Args:
            N: The contributions of all players.

        Returns:
            One regret for each player.
        """
        return self._in_double(_regrets, N)

    def regret(self, N: ArrayLike) -> float:
        """Return the largest of the `regrets`, which certifies an equilibrium where it is 0.

        Args:
            N: The contributions of all players.

        Returns:
            The most that any player gains by deviating alone.
        """
        return float(np.max(self.regrets(N)))

    @property
    def affine(self) -> bool:
        """Whether F is known to be affine, so that its Jacobian is constant."""
        return self.payoff.affine and self.cost.affine

    def monotonicity(self, probes: int = PROBES, seed: int = 0) -> Monotonicity:
        """Compute μ_F and L_F: exact for games known to be affine, otherwise estimates.

        Args:
            probes: The number of points for an estimate: the corners of least and of greatest
                contributions, the middle, and points at random.
            seed: The seed of the random points.

        Returns:
            The constants, and whether they are exact.
        """
        from fedsolve.games.equilibria import monotonicity

        check_count("probes", probes)
        return monotonicity(self, probes, seed)

    def equilibrium(self, tolerance: float = 1e-9, monotone: bool = True) -> Profile:
        """Compute the equilibrium N*, by a semismooth Newton method.

        The equilibria of a game that is not monotone need not be unique, need not exist, and need
        not be found by players who learn. Monotonicity is proved for affine games and checked at 8
        points for others; `regret` certifies the result.

        Args:
            tolerance: The accuracy, relative to the largest contribution.
            monotone: Whether to raise for a game that is not monotone; with False, the method
                tries to find one of its equilibria.

        Returns:
            The contributions of all players at the equilibrium.

        Raises:
            InvalidInput: If the game is not monotone, or no equilibrium was found.
        """
        from fedsolve.games.equilibria import solve_equilibrium

        check_positive("tolerance", tolerance)
        return solve_equilibrium(self, tolerance, monotone)

    def with_payment(self, payment: Part | Callable) -> Game:
        """Return the game with a payment in addition to the payoff.

        Args:
            payment: A part such as `PricePerSample`, or a function of N.

        Returns:
            The game with the payment.
        """
        paid = Sum((self.payoff, as_part("payment", payment)))
        return Game(paid, self.cost, self.lower, self.upper, self.regularization)

    def with_turnout(self, probability: ArrayLike, draws: int = 256, seed: int = 0) -> Game:
        """Return the game in which players are there in some rounds only.

        A player that is there contributes N_i, one that is not contributes nothing. Players choose
        N_i for the mean over all that can happen.

        Args:
            probability: The probability that a player is there, above 0; one number for all players
                or one for each.
            draws: The number of cases over which means are computed. They are exact if there are no
                more than that, 2^m; otherwise cases are drawn.
            seed: The seed of the draws.

        Returns:
            The game of means.

        Raises:
            InvalidInput: If a probability is not above 0 and at most 1.

        Example:
            >>> import fedsolve as fs
            >>> cost = fs.games.QuadraticCost([[1.0, 0.0], [0.0, 1.0]], rate=-2.0)
            >>> game = fs.Game(None, cost, lower=0, upper=5, regularization=1.0)
            >>> half = game.with_turnout(0.5).equilibrium()
            >>> game.equilibrium().round(3).tolist(), half.round(3).tolist()
            ([1.0, 1.0], [0.667, 0.667])
        """
        from fedsolve.games.turnout import Turnout, turnouts

        cases, weights = turnouts(np.asarray(probability), self.players, draws, seed)
        payoff, cost = (Turnout(part, cases, weights) for part in (self.payoff, self.cost))
        return Game(payoff, cost, self.lower, self.upper, self.regularization)

    def without(self, gone: ArrayLike) -> Game:
        """Return the game in which some players contribute nothing.

        Args:
            gone: A mask of these players.

        Returns:
            The game with their bounds set to 0.
        """
        stay = ~np.asarray(gone, bool)
        lower, upper = np.where(stay, self.lower, 0.0), np.where(stay, self.upper, 0.0)
        return Game(self.payoff, self.cost, lower, upper, self.regularization)

    def check_profile(self, N: ArrayLike) -> Profile:
        """Return N as an array of one number for each player.

        Args:
            N: The contributions of all players.

        Returns:
            The contributions in double precision.

        Raises:
            InvalidInput: If N has another shape, or a value that is not finite.
        """
        profile = np.asarray(N, float)
        if profile.shape != (self.players,) or not np.isfinite(profile).all():
            raise InvalidInput(
                f"N must hold one finite number for each of {self.players} players, "
                f"got shape {profile.shape}."
            )
        return profile

    def _in_double(self, function: Callable[[Game, Players], Players], N: ArrayLike) -> Profile:
        """Evaluate a function of the game and N in double precision."""
        profile = self.check_profile(N)
        with jax.enable_x64(True):
            return np.asarray(function(in_double(self), jnp.asarray(profile)))


def in_double(game: Game) -> Game:
    """Return the game with its numbers as arrays of double precision."""

    def place(leaf: object) -> object:
        known = eqx.is_array(leaf) or isinstance(leaf, np.ndarray | float | np.number)
        return jnp.asarray(leaf, jnp.float64) if known else leaf

    return jax.tree.map(place, game)


@eqx.filter_jit
def _losses(game: Game, N: Players) -> Players:
    return game.loss(N)


@eqx.filter_jit
def _regrets(game: Game, N: Players) -> Players:
    """Search every player's interval: a grid, then a golden-section search around the best."""

    def alone(y: Players) -> Players:
        value = game.cost.alone(N, y) - game.payoff.alone(N, y)
        return value + 0.5 * game.regularization * y**2

    lower, width = game.lower, game.upper - game.lower
    values = lax.map(lambda t: alone(lower + t * width), jnp.linspace(0.0, 1.0, GRID))
    best = jnp.argmin(values, axis=0)
    left = jnp.maximum(best - 1, 0) / (GRID - 1)
    right = jnp.minimum(best + 1, GRID - 1) / (GRID - 1)
    ratio = (np.sqrt(5) - 1) / 2

    def narrow(step: Index, bracket: tuple[Players, Players]) -> tuple[Players, Players]:
        left, right = bracket
        inner, outer = right - ratio * (right - left), left + ratio * (right - left)
        lesser = alone(lower + inner * width) < alone(lower + outer * width)
        return jnp.where(lesser, left, inner), jnp.where(lesser, outer, right)

    left, right = lax.fori_loop(0, GOLDEN, narrow, (left, right))
    middle = alone(lower + 0.5 * (left + right) * width)
    return jnp.maximum(alone(N) - jnp.minimum(jnp.min(values, axis=0), middle), 0)
