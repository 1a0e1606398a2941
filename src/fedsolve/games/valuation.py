"""What each player adds to a coalition: leave-one-out, Shapley's value, GTG-Shapley.

The value of a coalition is any function of a mask of players, such as the test accuracy of the
model that is averaged from their updates.

GTG-Shapley: Z. Liu, Y. Chen, H. Yu, Y. Liu and L. Cui, "GTG-Shapley: Efficient and Accurate
Participant Contribution Evaluation in Federated Learning" (2022), Algorithm 1, for one round.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float

from fedsolve.errors import InvalidInput
from fedsolve.fields import check_count, check_positive

MOST_EXACT = 16  # players for whom all coalitions are evaluated
Worth = Callable[[Bool[np.ndarray, " m"]], float]
Each = Float[np.ndarray, " m"]


@dataclasses.dataclass(frozen=True)
class Valuation:
    """What each player adds, and what it took to find out.

    Args:
        values: One for each player.
        evaluations: The number of different coalitions that were evaluated.
        orders: The number of orders of the players that were used; 0 if none.

    Example:
        >>> import numpy as np
        >>> import fedsolve as fs
        >>> fs.games.Valuation(np.array([1.0, 2.0]), evaluations=4, orders=0).values.sum()
        np.float64(3.0)
    """

    values: Each
    evaluations: int
    orders: int = 0


class _Known:
    """A value function that evaluates each coalition once."""

    def __init__(self, value: Worth, players: int):
        check_count("players", players)
        self._value, self.players = value, players
        self.found: dict[bytes, float] = {}

    def __call__(self, coalition: Bool[np.ndarray, " m"]) -> float:
        key = coalition.tobytes()
        if key not in self.found:
            worth = float(self._value(coalition.copy()))
            if not math.isfinite(worth):
                members = ", ".join(map(str, np.flatnonzero(coalition))) or "nobody"
                raise InvalidInput(f"The value of the coalition of {members} is {worth}.")
            self.found[key] = worth
        return self.found[key]


def leave_one_out(value: Worth, players: int) -> Valuation:
    """Compute v(all) − v(all but i) for every player.

    Args:
        value: v, a function of a mask of players that returns a number.
        players: The number of players m.

    Returns:
        The values, from m + 1 evaluations.

    Raises:
        InvalidInput: If a coalition's value is not finite.

    Example:
        >>> import fedsolve as fs
        >>> fs.games.leave_one_out(lambda who: float(who.sum()) ** 2, players=3).values.tolist()
        [5.0, 5.0, 5.0]
    """
    known = _Known(value, players)
    everyone = np.ones(players, bool)
    values = [known(everyone) - known(np.arange(players) != i) for i in range(players)]
    return Valuation(np.asarray(values), len(known.found))


def shapley(value: Worth, players: int) -> Valuation:
    """Compute Shapley's value, exactly, from all coalitions.

    Args:
        value: v, a function of a mask of players that returns a number.
        players: The number of players m, at most 16.

    Returns:
        The values, which add up to v(all) − v(nobody).

    Raises:
        InvalidInput: If there are too many players, or a coalition's value is not finite.

    Example:
        >>> import fedsolve as fs
        >>> fs.games.shapley(lambda who: float(who[0] and who.any()), players=2).values.tolist()
        [1.0, 0.0]
    """
    check_count("players", players)
    if players > MOST_EXACT:
        raise InvalidInput(
            f"All coalitions of {players} players are too many; gtg_shapley samples orders."
        )
    known, values = _Known(value, players), np.zeros(players)
    bits = np.arange(players)
    for number in range(2**players):
        who = (number >> bits) & 1 == 1
        size = int(who.sum())
        for i in np.flatnonzero(~who):
            weight = math.factorial(size) * math.factorial(players - size - 1)
            values[i] += weight * (known(who | (bits == i)) - known(who))
    return Valuation(values / math.factorial(players), len(known.found))


def gtg_shapley(
    value: Worth,
    players: int,
    between: float = 0.0,
    within: float = 0.0,
    tolerance: float = 0.01,
    most: int = 100,
    seed: int = 0,
) -> Valuation:
    """Estimate Shapley's value by guided sampling with truncation (GTG-Shapley).

    Orders are drawn m at a time, and each player leads one of them. Nothing is evaluated where all
    together add at most `between` to nobody, and an order is cut where what is left to add is at
    most `within`.

    Args:
        value: v, a function of a mask of players that returns a number.
        players: The number of players m.
        between: ε_b: all values are 0 if |v(all) − v(nobody)| is at most that.
        within: ε_i: later players of an order add 0 once |v(all) − v(first ones)| is at most that.
        tolerance: Sampling ends when m more orders change the values by at most that, relative to
            their sum of absolute values.
        most: The largest number of times that m orders are drawn.
        seed: The seed of the orders.

    Returns:
        The estimates.

    Raises:
        InvalidInput: If a tolerance is negative, or a coalition's value is not finite.

    Example:
        >>> import fedsolve as fs
        >>> found = fs.games.gtg_shapley(lambda who: float(who @ [1.0, 2.0, 3.0]), players=3)
        >>> found.values.round(6).tolist()
        [1.0, 2.0, 3.0]
    """
    for name, number in (("between", between), ("within", within), ("tolerance", tolerance)):
        check_positive(name, float(number), zero=True)
    check_count("most", most)
    known, rng = _Known(value, players), np.random.default_rng(seed)
    nobody, everyone = known(np.zeros(players, bool)), known(np.ones(players, bool))
    if abs(everyone - nobody) <= between:
        return Valuation(np.zeros(players), len(known.found))
    total, orders, before = np.zeros(players), 0, None
    for _ in range(most):
        for leader in range(players):
            others = rng.permutation(np.delete(np.arange(players), leader))
            who, worth = np.zeros(players, bool), nobody
            for i in [leader, *others]:
                if abs(everyone - worth) <= within:
                    break
                who[i] = True
                added = known(who) - worth
                total[i] += added
                worth += added
            orders += 1
        now = total / orders
        size = max(float(np.abs(now).sum()), 1e-300)
        if before is not None and np.abs(now - before).sum() <= tolerance * size:
            break
        before = now
    return Valuation(total / orders, len(known.found), orders)
