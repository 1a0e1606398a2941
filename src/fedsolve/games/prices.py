"""A server that leads: prices for samples that make the most of a budget.

    maximise V(N*(π))   subject to   Σ_i π_i N_i*(π) ≤ B,   π ≥ 0,

where N*(π) is the equilibrium of the game with the payment π_i N_i (a Stackelberg game). For
players that are not at a bound, F_i(N*) = π_i, so with the Jacobian J of F

    dN*/dπ = J_AA⁻¹   for the free players A, else 0,

which gives the gradients of value and budget. Since π_i = F_i(N) there, it is also a problem in N,

    maximise V(N)   subject to   Σ_i max(F_i(N), 0) N_i ≤ B   over the players that are paid,

which is convex for players with convex costs of their own and a concave V. In general it is not: a
player that would contribute its least number of samples anyway is cheaper without a price. So both
forms are solved from several starts, one for each number of players that are paid at first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from fedsolve.errors import InvalidInput
from fedsolve.fields import check_count, check_positive
from fedsolve.games.game import Game, Profile, in_double
from fedsolve.games.parts import Players, PricePerSample

_HALVINGS = 50
Chosen = Float[np.ndarray, " p"]  # a number for each player that is paid


@dataclasses.dataclass(frozen=True)
class BestPrices:
    """Prices that a server sets under a budget.

    Args:
        payment: The prices, for `game.with_payment` or `who_stays`.
        contributions: The equilibrium with them.
        spent: What is paid.
        value: The server's value of the contributions.
        uniform: The value with one price for all under the same budget.

    Example:
        >>> import fedsolve as fs
        >>> cost = fs.games.QuadraticCost([[2.0, 0.0], [0.0, 2.0]], rate=0.0)
        >>> game = fs.Game(None, cost, lower=0, upper=[10, 10])
        >>> found = fs.games.best_prices(game, budget=4.0)
        >>> found.contributions.round(4).tolist(), round(found.spent, 4)
        ([1.0, 1.0], 4.0)
    """

    payment: PricePerSample
    contributions: Profile
    spent: float
    value: float
    uniform: float


def best_prices(
    game: Game,
    budget: float,
    value: Callable[[Players], Float[Array, ""]] | None = None,
    starts: int = 8,
    tolerance: float = 1e-10,
) -> BestPrices:
    """Find prices for samples with the greatest value to the server under a budget.

    The result is at least as good as one price for all, and a local optimum; that it is the global
    one is certain only where the problem is convex, as for players with costs of their own only.

    Args:
        game: A monotone game.
        budget: B, at least 0.
        value: V, a differentiable function of all contributions; None for their sum.
        starts: From how many sets of paid players to start.
        tolerance: The tolerance of the equilibria.

    Returns:
        The prices, and what they bring.

    Raises:
        InvalidInput: If the budget is negative, the value is not a number, or the game is not
            monotone.

    Example:
        >>> import fedsolve as fs
        >>> cost = fs.games.QuadraticCost([[1.0, 0.0], [0.0, 4.0]], rate=0.0)
        >>> found = fs.games.best_prices(fs.Game(None, cost, lower=0, upper=[9, 9]), budget=5.0)
        >>> found.contributions.round(3).tolist(), found.payment.price.round(3).tolist()
        ([2.0, 0.5], [2.0, 2.0])
    """
    check_positive("budget", float(budget), zero=True)
    check_count("starts", starts)
    game.equilibrium(tolerance)  # raises where the game is not monotone
    solver = _Leader(game, value, tolerance)
    none = np.zeros(game.players)
    best = none, solver.equilibrium(none)
    if budget == 0:
        return solver.result(*best, uniform=solver.worth(best[1]))
    even = solver.exhaust(np.ones(game.players), budget)
    uniform = solver.worth(even[1])
    candidates = [best, even]
    threshold = np.argsort(solver.slopes(np.asarray(game.lower, float)), kind="stable")
    counts = np.unique(np.linspace(game.players, 1, starts).round().astype(int))[::-1]
    for count in counts:
        paid = np.zeros(game.players)
        paid[threshold[:count]] = 1
        start = solver.exhaust(paid, budget)
        candidates.append(start)
        candidates.append(solver.improve(start[0], budget))
        candidates.append(solver.choose(paid > 0, start[1], budget))
    allowed = [c for c in candidates if c[0] @ c[1] <= budget * (1 + 1e-9)]
    prices, N = max(allowed, key=lambda c: solver.worth(c[1]))
    return solver.result(*solver.trimmed(prices, N), uniform=uniform)


class _Leader:
    """The equilibrium and its derivative by the prices."""

    def __init__(
        self, game: Game, value: Callable[[Players], Float[Array, ""]] | None, tolerance: float
    ):
        self._tolerance = tolerance
        self._value = jax.jit(jax.value_and_grad(jnp.sum if value is None else value))
        self._lower, self._upper = np.asarray(game.lower, float), np.asarray(game.upper, float)
        with jax.enable_x64(True):
            self._placed = in_double(game)
        self._paid = game.with_payment(PricePerSample(np.zeros(game.players)))
        self._slopes = eqx.filter_jit(Game.pseudogradient)
        self._jacobian = eqx.filter_jit(Game.jacobian)
        worth = self.worth(self._lower)
        if not np.isfinite(worth):
            raise InvalidInput(f"The value of the least contributions is {worth}.")

    def equilibrium(self, prices: Profile) -> Profile:
        paid = eqx.tree_at(lambda game: game.payoff.parts[-1].price, self._paid, prices)
        return paid.equilibrium(self._tolerance, monotone=False)  # a price changes no Jacobian

    def slopes(self, N: Profile) -> Profile:
        """Return F(N): the price at which each player would stay where it is."""
        with jax.enable_x64(True):
            return np.asarray(self._slopes(self._placed, jnp.asarray(N)))

    def worth(self, N: Profile) -> float:
        with jax.enable_x64(True):
            return float(self._value(jnp.asarray(N, float))[0])

    def derivative(self, N: Profile, prices: Profile) -> tuple[np.ndarray, Profile]:
        """Return dN*/dπ, and the gradient of V by N."""
        with jax.enable_x64(True):
            jacobian = np.asarray(self._jacobian(self._placed, jnp.asarray(N)))
            slope = np.asarray(self._value(jnp.asarray(N))[1])
        width = np.maximum(self._upper - self._lower, 1e-300)
        free = (self._lower + 1e-9 * width < N) & (self._upper - 1e-9 * width > N)
        moves = np.zeros_like(jacobian)
        if free.any():
            own = jacobian[np.ix_(free, free)]
            moves[np.ix_(free, free)] = np.linalg.pinv(own, rcond=1e-12)
        return moves, slope

    def exhaust(self, direction: Profile, budget: float) -> tuple[Profile, Profile]:
        """Return the greatest multiple of a direction of prices that the budget allows."""

        def spends(size: float) -> tuple[bool, Profile]:
            N = self.equilibrium(size * direction)
            return float(size * direction @ N) <= budget, N

        low, high, found = 0.0, 1.0, self.equilibrium(0 * direction)
        enough = np.abs(self.slopes(self._upper)).max() + 1.0
        while high < 1e12:
            fits, N = spends(high)
            if not fits:
                break
            low, found = high, N
            if high > 4 * enough:
                break  # everyone is at its upper bound
            high *= 2
        for _ in range(_HALVINGS):
            if high - low <= 1e-12 * high:
                break
            middle = 0.5 * (low + high)
            fits, N = spends(middle)
            low, high = (middle, high) if fits else (low, middle)
            found = N if fits else found
        return low * direction, found

    def improve(self, start: Profile, budget: float) -> tuple[Profile, Profile]:
        """Solve from a start, by sequential quadratic programming."""
        import scipy.optimize

        size = max(float(start.max()), 1e-12)
        scale = max(abs(self.worth(self.equilibrium(start))), 1e-12)
        memory: dict[bytes, tuple[Profile, np.ndarray, Profile]] = {}

        def at(x: Profile) -> tuple[Profile, np.ndarray, Profile]:
            key = x.tobytes()
            if key not in memory:
                N = self.equilibrium(np.maximum(x, 0) * size)
                memory[key] = N, *self.derivative(N, x)
            return memory[key]

        def loss(x: Profile) -> tuple[float, Profile]:
            N, moves, slope = at(x)
            return -self.worth(N) / scale, -size * moves.T @ slope / scale

        def left(x: Profile) -> float:
            return 1 - size * float(x @ at(x)[0]) / budget

        def left_slope(x: Profile) -> Profile:
            N, moves, _ = at(x)
            return -size * (N + size * moves.T @ x) / budget

        found = scipy.optimize.minimize(
            loss,
            start / size,
            jac=True,
            method="SLSQP",
            bounds=[(0.0, None if up > low else 0.0) for low, up in self._bounds()],
            constraints={"type": "ineq", "fun": left, "jac": left_slope},
            options={"maxiter": 200, "ftol": 1e-12},
        )
        prices = np.maximum(found.x, 0) * size
        N = self.equilibrium(prices)
        if prices @ N <= budget:
            return prices, N
        return self.exhaust(prices / max(prices.max(), 1e-300), budget)

    def choose(
        self, paid: Bool[np.ndarray, " m"], start: Profile, budget: float
    ) -> tuple[Profile, Profile]:
        """Solve for the contributions of the players that are paid, and set their prices."""
        import scipy.optimize

        width = np.maximum(self._upper - self._lower, 1e-300)[paid]
        scale = max(abs(self.worth(start)), 1e-12)

        def at(x: Chosen) -> Profile:
            N = self._lower.copy()
            N[paid] += x * width
            return N

        def loss(x: Chosen) -> tuple[float, Chosen]:
            N = at(x)
            with jax.enable_x64(True):
                worth, slope = self._value(jnp.asarray(N))
            return -float(worth) / scale, -np.asarray(slope)[paid] * width / scale

        def left(x: Chosen) -> float:
            N = at(x)
            return 1 - float(np.maximum(self.slopes(N), 0)[paid] @ N[paid]) / budget

        def left_slope(x: Chosen) -> Chosen:
            N = at(x)
            F = self.slopes(N)
            with jax.enable_x64(True):
                jacobian = np.asarray(self._jacobian(self._placed, jnp.asarray(N)))
            counted = np.where(paid & (F > 0), N, 0)
            return -(np.maximum(F, 0) + jacobian.T @ counted)[paid] * width / budget

        found = scipy.optimize.minimize(
            loss,
            np.clip((start[paid] - self._lower[paid]) / width, 0, 1),
            jac=True,
            method="SLSQP",
            bounds=[(0.0, 1.0)] * int(paid.sum()),
            constraints={"type": "ineq", "fun": left, "jac": left_slope},
            options={"maxiter": 200, "ftol": 1e-12},
        )
        wanted = at(np.clip(found.x, 0, 1))
        above = paid & (wanted > self._lower + 1e-9 * (self._upper - self._lower))
        prices = np.where(above, np.maximum(self.slopes(wanted), 0), 0.0)
        N = self.equilibrium(prices)
        if prices @ N <= budget or not prices.any():
            return prices, N
        return self.exhaust(prices / prices.max(), budget)

    def _bounds(self) -> list[tuple[float, float]]:
        return list(zip(self._lower, self._upper, strict=True))

    def trimmed(self, prices: Profile, N: Profile) -> tuple[Profile, Profile]:
        """Lower the prices that are higher than a player's contribution needs."""
        needed = np.maximum(self.slopes(N), 0)
        width = np.maximum(self._upper - self._lower, 1e-300)
        prices = np.where(self._lower + 1e-9 * width >= N, 0.0, np.minimum(prices, needed))
        after = self.equilibrium(prices)
        return (prices, after) if self.worth(after) >= self.worth(N) - 1e-9 else (prices, N)

    def result(self, prices: Profile, N: Profile, uniform: float) -> BestPrices:
        spent = float(prices @ N)
        return BestPrices(PricePerSample(prices), N, spent, self.worth(N), uniform)
