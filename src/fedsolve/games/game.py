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
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from fedsolve.errors import InvalidInput
from fedsolve.fields import Scalar, check_count, check_positive, scalar
from fedsolve.games.parts import Numbers, Part, Players, PrivacyCost, Sum, as_part, numbers

GRID, GOLDEN = 33, 45  # deviations tried, then steps of a golden-section search around the best
PROBES = 8  # points of the box at which a game that is not affine is looked at
Profile = Float[np.ndarray, " m"]


@dataclasses.dataclass(frozen=True)
class Monotonicity:
    """μ_F and L_F of a game: (F(N) − F(M))·(N − M) ≥ μ‖N − M‖², ‖F(N) − F(M)‖ ≤ L‖N − M‖.

    `exact` for a game of parts that are known to be affine (`Part.affine`). Otherwise, and so for
    every function that a user wrote, they are estimates, the least and the greatest over that many
    `probes` of the box: the true μ can only be smaller and the true L only greater.
    """

    strong: float
    lipschitz: float
    exact: bool
    probes: int

    @property
    def step_size(self) -> float:
        """μ_F / L_F², the largest step of Lemma 4.3."""
        return self.strong / self.lipschitz**2 if self.strong > 0 else 0.0


class Game(eqx.Module):
    """A game of data participation.

    - `payoff(N)` and `cost(N)`: differentiable functions of all players' contributions that give
      one number for each player; ready ones are in `fs.games`. None for none.
    - `lower`, `upper`: each player's bounds; one number for all, or one for each.
    - `regularization`: λ, added as (λ/2) N_i² to every player's loss.
    """

    payoff: Part
    cost: Part
    lower: Numbers
    upper: Numbers
    regularization: Scalar = eqx.field(converter=scalar("regularization"))

    def __init__(
        self,
        payoff: Any,
        cost: Any,
        lower: Any,
        upper: Any,
        regularization: Any = 0.0,
    ):
        self.payoff, self.cost = as_part("payoff", payoff), as_part("cost", cost)
        bounds = {"lower": numbers("lower", 1)(lower), "upper": numbers("upper", 1)(upper)}
        lengths = {name: b.shape[0] for name, b in bounds.items() if b.ndim}
        for name, part in (("payoff", self.payoff), ("cost", self.cost)):
            if part.players is not None:
                lengths[name] = part.players
        if not lengths:
            raise InvalidInput("How many players? Give lower or upper as one number for each.")
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

    @property
    def players(self) -> int:
        """m."""
        return self.lower.shape[0]

    # Within JAX: what an algorithm needs

    def loss(self, N: Players) -> Players:
        """l_i(N) for all players: cost less payoff, and the regularisation."""
        return self.cost(N) - self.payoff(N) + 0.5 * self.regularization * N**2

    def pseudogradient(self, N: Any) -> Players:
        """F(N): every player's derivative of its own loss by its own contribution."""
        N = jnp.asarray(N, jnp.result_type(float))
        return self.cost.slope(N) - self.payoff.slope(N) + self.regularization * N

    def project(self, N: Players) -> Players:
        """The nearest contributions within the bounds."""
        return jnp.clip(N, self.lower, self.upper)

    def respond(self, index: Any, N: Players, step_size: Any) -> Float[Array, ""]:
        """One player's next contribution, N_i − γ̃ F_i(N), within its bounds (Algorithm 1, line 10):
        computed from its own derivative only."""
        own = self.cost.own_slope(index, N) - self.payoff.own_slope(index, N)
        slope = own + self.regularization * N[index]
        lower, upper = jnp.asarray(self.lower), jnp.asarray(self.upper)
        return jnp.clip(N[index] - step_size * slope, lower[index], upper[index])

    def jacobian(self, N: Any) -> Float[Array, "m m"]:
        """∂F_i / ∂N_j."""
        N = jnp.asarray(N, jnp.result_type(float))
        curvature = self.cost.slope_jacobian(N) - self.payoff.slope_jacobian(N)
        return curvature + self.regularization * jnp.eye(N.size, dtype=N.dtype)

    # On the host, in double precision: what a study needs

    def utility(self, N: Any) -> Profile:
        """−l_i(N): what each player gains."""
        return -self._in_double(_losses, N)

    def regrets(self, N: Any) -> Profile:
        """The most that each player gains by deviating alone: 0 for all at an equilibrium, and only
        there. Deviations are searched for over the whole interval, then around the best."""
        return self._in_double(_regrets, N)

    def regret(self, N: Any) -> float:
        """The most that any player gains by deviating alone: the certificate of an equilibrium."""
        return float(np.max(self.regrets(N)))

    @property
    def affine(self) -> bool:
        """Whether F is known to be affine, so that one Jacobian says all."""
        return self.payoff.affine and self.cost.affine

    def monotonicity(self, probes: int = PROBES, seed: int = 0) -> Monotonicity:
        """μ_F and L_F: exact for games known to be affine, estimated at `probes` points otherwise:
        the corners of the least and the greatest contributions, the middle, and points at random.
        """
        from fedsolve.games.equilibria import monotonicity

        check_count("probes", probes)
        return monotonicity(self, probes, seed)

    def equilibrium(self, tolerance: float = 1e-9, monotone: bool = True) -> Profile:
        """N*, by a semismooth Newton method that owes nothing to the learning run.

        To within `tolerance`, relative to the largest contribution. A game that is not monotone is
        refused, since its equilibria need not be unique, nor exist, nor be found by players who
        learn; with `monotone=False` one of them is looked for all the same. Monotonicity is proved
        for affine games, and looked for at 8 points otherwise: `regret` tells of what was found.
        """
        from fedsolve.games.equilibria import solve_equilibrium

        check_positive("tolerance", tolerance)
        return solve_equilibrium(self, tolerance, monotone)

    def with_payment(self, payment: Part | Callable) -> Game:
        """The same game with a payment on top of the payoff."""
        paid = Sum((self.payoff, as_part("payment", payment)))
        return Game(paid, self.cost, self.lower, self.upper, self.regularization)

    def without(self, gone: Any) -> Game:
        """The same game where those players (a mask) contribute nothing."""
        stay = ~np.asarray(gone, bool)
        lower, upper = np.where(stay, self.lower, 0.0), np.where(stay, self.upper, 0.0)
        return Game(self.payoff, self.cost, lower, upper, self.regularization)

    def check_profile(self, N: Any) -> Profile:
        """N as one number for each player, refused if it is not."""
        profile = np.asarray(N, float)
        if profile.shape != (self.players,) or not np.isfinite(profile).all():
            raise InvalidInput(
                f"N must hold one finite number for each of {self.players} players, "
                f"got shape {profile.shape}."
            )
        return profile

    def _in_double(self, function: Callable, N: Any) -> Profile:
        profile = self.check_profile(N)
        with jax.enable_x64(True):
            return np.asarray(function(in_double(self), jnp.asarray(profile)))


def in_double(game: Game) -> Game:
    """The game with its numbers as arrays of double precision."""

    def place(leaf: Any) -> Any:
        known = eqx.is_array(leaf) or isinstance(leaf, np.ndarray | float | np.number)
        return jnp.asarray(leaf, jnp.float64) if known else leaf

    return jax.tree.map(place, game)


@eqx.filter_jit
def _losses(game: Game, N: Players) -> Players:
    return game.loss(N)


@eqx.filter_jit
def _regrets(game: Game, N: Players) -> Players:
    def alone(y: Players) -> Players:
        value = game.cost.alone(N, y) - game.payoff.alone(N, y)
        return value + 0.5 * game.regularization * y**2

    lower, width = game.lower, game.upper - game.lower
    values = lax.map(lambda t: alone(lower + t * width), jnp.linspace(0.0, 1.0, GRID))
    best = jnp.argmin(values, axis=0)
    left = jnp.maximum(best - 1, 0) / (GRID - 1)
    right = jnp.minimum(best + 1, GRID - 1) / (GRID - 1)
    ratio = (np.sqrt(5) - 1) / 2

    def narrow(_: Any, bracket: tuple[Players, Players]) -> tuple[Players, Players]:
        left, right = bracket
        inner, outer = right - ratio * (right - left), left + ratio * (right - left)
        lesser = alone(lower + inner * width) < alone(lower + outer * width)
        return jnp.where(lesser, left, inner), jnp.where(lesser, outer, right)

    left, right = lax.fori_loop(0, GOLDEN, narrow, (left, right))
    middle = alone(lower + 0.5 * (left + right) * width)
    return jnp.maximum(alone(N) - jnp.minimum(jnp.min(values, axis=0), middle), 0)
