"""Contributions that are bids, and whether it pays to tell the truth.

The auction is the proportional share mechanism of Y. Singer, "Budget Feasible Mechanisms" (2010),
for offers of different size: the value of an offer is its number of samples. Offers are taken in
the order of the price that they ask for, as long as the price is at most the budget's share

    b_k ≤ B / (n_1 + … + n_k),

and a winner is paid the highest price at which it would still have won. So no bidder gains by
asking for another price than its cost, and what is paid is at most B: the price of each winner is
at most B / (samples of all winners).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float

from fedsolve.errors import InvalidInput
from fedsolve.fields import check_positive
from fedsolve.types import ArrayLike

Each = Float[np.ndarray, " m"]
Mechanism = Callable[[Each], tuple[Each, Each]]  # reports -> contributions, payments
FACTORS = np.concatenate([np.linspace(0.0, 2.0, 41), np.geomspace(2.1, 50.0, 20)])


@dataclasses.dataclass(frozen=True)
class Auction:
    """The outcome of an auction.

    Args:
        wins: Whose offers are taken.
        prices: What is paid for each sample; 0 for those who lose.
        contributions: The samples that each bidder contributes.
        spent: What is paid in total.

    Example:
        >>> import fedsolve as fs
        >>> found = fs.games.auction([1.0, 2.0, 9.0], samples=[10, 10, 10], budget=50.0)
        >>> found.wins.tolist(), found.prices.tolist(), found.spent
        ([True, True, False], [2.5, 2.5, 0.0], 50.0)
    """

    wins: Bool[np.ndarray, " m"]
    prices: Each
    contributions: Each
    spent: float

    @property
    def payments(self) -> Each:
        """What each bidder is paid."""
        return self.prices * self.contributions


def auction(bids: ArrayLike, samples: ArrayLike, budget: float) -> Auction:
    """Buy samples under a budget from bidders who name a price.

    Args:
        bids: The price for each sample that each bidder asks for, at least 0.
        samples: How many samples each bidder offers, positive.
        budget: What may be paid in total, at least 0.

    Returns:
        Who wins, and at which prices.

    Raises:
        InvalidInput: If a number is out of range, or there is not one bid for each offer.

    Example:
        >>> import fedsolve as fs
        >>> fs.games.auction([1.0, 3.0], samples=[5, 5], budget=20.0).contributions.tolist()
        [5.0, 0.0]
    """
    asked, offered = np.asarray(bids, float), np.asarray(samples, float)
    if asked.ndim != 1 or asked.shape != offered.shape or not len(asked):
        raise InvalidInput(
            f"There must be one bid for each offer, got shapes {asked.shape} and {offered.shape}."
        )
    for name, value, zero in (("bids", asked, True), ("samples", offered, False)):
        if not np.isfinite(value).all():
            raise InvalidInput(f"{name} must be finite.")
        check_positive(name, value, zero=zero)
    check_positive("budget", float(budget), zero=True)
    order = np.lexsort((np.arange(len(asked)), asked))
    fits = asked[order] * np.cumsum(offered[order]) <= budget
    wins = np.zeros(len(asked), bool)
    wins[order[fits]] = True
    prices = np.zeros(len(asked))
    for i in np.flatnonzero(wins):
        others = order[order != i]
        before = np.concatenate([[0.0], np.cumsum(offered[others])])
        until = np.append(asked[others], np.inf)  # the highest bid that has this place
        prices[i] = np.max(np.minimum(until, budget / (before + offered[i])))
    contributions = np.where(wins, offered, 0.0)
    return Auction(wins, prices, contributions, float(prices @ contributions))


@dataclasses.dataclass(frozen=True)
class Misreports:
    """What players can gain by reporting other costs than they have.

    Args:
        gains: The most that each player gains by a report of its own; 0 if the truth is best.
        reports: The report with which it gains most.

    Example:
        >>> import numpy as np
        >>> import fedsolve as fs
        >>> fs.games.Misreports(np.array([0.0, 0.5]), np.array([1.0, 2.0])).truthful
        False
    """

    gains: Each
    reports: Each

    @property
    def truthful(self) -> bool:
        """Whether nobody was found to gain."""
        return bool(np.all(self.gains <= 1e-9))


def misreports(mechanism: Mechanism, costs: ArrayLike, factors: ArrayLike = FACTORS) -> Misreports:
    """Search for reports that pay more than the truth, player by player.

    A player's utility is its payment less its true cost for each sample that it contributes. The
    others report the truth. What is found proves that a mechanism is not truthful; that nothing is
    found does not prove that it is.

    Args:
        mechanism: Function of all reported costs for a sample that returns contributions and
            payments, such as an auction or prices that are computed from reports.
        costs: The true cost for a sample of each player, at least 0.
        factors: The reports that are tried, as multiples of the true cost.

    Returns:
        The gains, and the reports that bring them.

    Raises:
        InvalidInput: If a cost is negative, or the mechanism returns something else than one number
            for each player, twice.

    Example:
        >>> import fedsolve as fs
        >>> def paid_as_bid(reports):
        ...     won = fs.games.auction(reports, [10, 10, 10], budget=50.0).contributions
        ...     return won, won * reports
        >>> def second_price(reports):
        ...     found = fs.games.auction(reports, [10, 10, 10], budget=50.0)
        ...     return found.contributions, found.payments
        >>> costs = [1.0, 2.0, 9.0]
        >>> [fs.games.misreports(rule, costs).truthful for rule in (paid_as_bid, second_price)]
        [False, True]
    """
    truth = np.asarray(costs, float)
    check_positive("costs", truth, zero=True)

    def utility(reports: Each, i: int) -> float:
        found = [np.asarray(each, float) for each in mechanism(reports)]
        if len(found) != 2 or any(each.shape != truth.shape for each in found):
            raise InvalidInput(
                f"The mechanism must return contributions and payments of {len(truth)} players."
            )
        contributions, payments = found
        return float(payments[i] - truth[i] * contributions[i])

    gains, reports = np.zeros(len(truth)), truth.copy()
    for i in range(len(truth)):
        honest = utility(truth.copy(), i)
        for factor in np.asarray(factors, float):
            tried = truth.copy()
            tried[i] *= factor
            gain = utility(tried, i) - honest
            if gain > gains[i]:
                gains[i], reports[i] = gain, tried[i]
    return Misreports(gains, reports)
