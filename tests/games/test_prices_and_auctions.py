"""Prices under a budget, auctions, truthful reports, and players who are not always there."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs


def own_costs(curvature, rate, upper=100.0, lower=0.0):
    """Players without an influence on each other."""
    return fs.Game(
        None, fs.games.QuadraticCost(np.diag(curvature), rate), lower, np.full(len(rate), upper)
    )


@pytest.mark.parametrize("seed", range(3))
def test_best_prices_are_the_optimum_of_cvxpy(seed):
    """Of own costs: π_i = a_i N_i + b_i where N_i > 0, so the problem is convex in N."""
    import cvxpy as cp

    rng = np.random.default_rng(seed)
    a, b, budget = rng.uniform(0.5, 3, 5), rng.uniform(0, 4, 5), 6.0
    found = fs.games.best_prices(own_costs(a, b), budget)
    N = cp.Variable(5, nonneg=True)
    spent = cp.sum(cp.multiply(a, N**2)) + b @ N
    best = cp.Problem(cp.Maximize(cp.sum(N)), [spent <= budget]).solve(solver="CLARABEL")
    np.testing.assert_allclose(found.value, best, rtol=1e-5)
    np.testing.assert_allclose(found.contributions, N.value, atol=1e-3)
    assert found.spent <= budget * (1 + 1e-9)
    assert found.uniform < found.value


def test_best_prices_of_a_game_with_an_influence_beat_a_grid():
    """Two players, random coverage: no prices of a fine grid are better."""
    game = fs.Game(
        fs.games.RandomCoverage([[0.7, 0.3], [0.2, 0.8]]),
        fs.games.LinearCost([0.05, 0.02]),
        0.5,
        [20, 20],
        regularization=0.02,
    )

    def value(N):
        return N[0] + 0.3 * jnp.sqrt(N[1])

    found = fs.games.best_prices(game, 0.5, value)
    best = -np.inf
    for prices in itertools.product(np.linspace(0, 0.4, 17), repeat=2):
        N = game.with_payment(fs.games.PricePerSample(np.array(prices))).equilibrium(monotone=False)
        if np.dot(prices, N) <= 0.5:
            best = max(best, float(value(N)))
    assert found.value > best - 1e-6
    # what is told is what the prices bring
    paid = game.with_payment(found.payment)
    np.testing.assert_allclose(paid.equilibrium(), found.contributions, atol=1e-6)
    assert paid.regret(found.contributions) < 1e-6
    np.testing.assert_allclose(found.spent, found.payment.price @ found.contributions)


def test_players_who_contribute_their_least_are_not_paid():
    game = own_costs(np.ones(2), np.array([0.1, 50.0]), lower=1.0)
    found = fs.games.best_prices(game, budget=6.2)
    assert found.payment.price[1] == 0
    assert found.contributions[1] == 1
    np.testing.assert_allclose(found.contributions[0] * (found.contributions[0] + 0.1), 6.2)


def test_no_budget_and_enough_of_it():
    game = own_costs(np.ones(3), np.ones(3), upper=2.0)
    nothing = fs.games.best_prices(game, 0.0)
    assert not nothing.payment.price.any()
    assert nothing.spent == 0
    plenty = fs.games.best_prices(game, 1e4)
    np.testing.assert_allclose(plenty.contributions, 2.0, atol=1e-6)
    np.testing.assert_allclose(plenty.spent, 18.0, rtol=1e-5)  # a price of 3 is enough


def test_best_prices_refuse():
    with pytest.raises(fs.InvalidInput, match="budget"):
        fs.games.best_prices(own_costs(np.ones(2), np.ones(2)), -1.0)
    with pytest.raises(fs.InvalidInput, match="not monotone"):
        fs.games.best_prices(own_costs(-np.ones(2), np.ones(2)), 1.0)
    with pytest.raises(fs.InvalidInput, match="value of the least"):
        fs.games.best_prices(own_costs(np.ones(2), np.ones(2)), 1.0, lambda N: jnp.sum(jnp.log(N)))


@pytest.mark.parametrize("seed", range(6))
def test_the_auction_is_truthful_and_within_the_budget(seed):
    rng = np.random.default_rng(seed)
    costs, samples = rng.uniform(0.2, 3, 8), rng.integers(1, 40, 8).astype(float)
    budget = float(rng.uniform(10, 100))

    def mechanism(reports):
        found = fs.games.auction(reports, samples, budget)
        return found.contributions, found.payments

    found = fs.games.auction(costs, samples, budget)
    assert found.spent <= budget * (1 + 1e-12)
    assert (found.prices >= costs)[found.wins].all()
    assert fs.games.misreports(mechanism, costs).truthful
    # each price is the threshold: a little less wins, a little more loses
    for i in np.flatnonzero(found.wins):
        for factor, wins in ((1 - 1e-9, True), (1 + 1e-9, False)):
            other = costs.copy()
            other[i] = found.prices[i] * factor
            assert fs.games.auction(other, samples, budget).wins[i] == wins
    # and who pays the bids is told the more, the more is asked for
    if found.wins.any():

        def as_bid(reports):
            won = fs.games.auction(reports, samples, budget).contributions
            return won, won * reports

        factors = np.linspace(1, 1.01 * np.max(found.prices / costs), 1500)
        gains = fs.games.misreports(as_bid, costs, factors).gains
        threshold = (found.prices - costs) * found.contributions
        np.testing.assert_allclose(
            gains, threshold, atol=2 * (factors[1] - 1) * np.max(costs * samples)
        )
        assert np.all(gains[found.wins] > 0)


def test_prices_from_reported_costs_are_not_truthful():
    """With π_i from reports, to report a higher cost raises one's own price."""

    def mechanism(reports):
        found = fs.games.best_prices(own_costs(np.ones(2), reports), 4.0, starts=1)
        price = found.payment.price
        N = np.maximum(price - reports, 0)
        return N, price * N

    found = fs.games.misreports(mechanism, [1.0, 1.0], [0.5, 1.0, 1.2])
    assert not found.truthful


def test_turnout_is_exact_for_few_players_and_close_for_many():
    rng = np.random.default_rng(0)
    Q, q = rng.dirichlet(np.ones(3), 4), np.array([0.3, 0.9, 1.0, 0.5])
    game = fs.Game(fs.games.RandomCoverage(Q), fs.games.LinearCost(0.01), 0, np.full(4, 20.0), 0.01)
    N = np.array([3.0, 7.0, 1.0, 4.0])
    expected = np.zeros(4)
    for there in itertools.product([0, 1], repeat=4):
        s = np.array(there)
        chance = np.prod(np.where(s == 1, q, 1 - q))
        expected += chance * (game.utility(N * s) + 0.005 * (N * s) ** 2)
    expected -= 0.005 * N**2
    exact, drawn = game.with_turnout(q), game.with_turnout(q, draws=15)
    np.testing.assert_allclose(exact.utility(N), expected, rtol=1e-6)
    assert exact.payoff.there.shape[0] == 8  # player 2 is always there
    many = fs.Game(
        fs.games.RandomDiscovery(rng.dirichlet(np.ones(3), 12)), fs.games.LinearCost(0.1), 0, 20
        * np.ones(12), 0.01,
    )  # fmt: skip
    sampled = many.with_turnout(0.5, draws=2000)
    N = rng.uniform(1, 20, 12)
    linear = many.utility(0.5 * N) + 0.005 * (0.5 * N) ** 2 - 0.005 * N**2
    np.testing.assert_allclose(sampled.utility(N), linear, rtol=0.02)
    assert drawn.payoff.there.shape[0] == 16
    with pytest.raises(fs.InvalidInput, match="probability must be above 0"):
        game.with_turnout(0.0)


def test_bad_games_and_bids_raise():
    def nan(N):
        return N * jnp.nan

    with pytest.raises(fs.InvalidInput, match="payoff of player 0 is nan"):
        fs.Game(nan, None, 0, np.ones(2))
    with pytest.raises(fs.InvalidInput, match="one number for each of 2 players"):
        fs.Game(lambda N: jnp.sum(N), None, 0, np.ones(2))
    with pytest.raises(fs.InvalidInput, match="budget"):
        fs.games.SharedBudget(-1.0)
    for bids, samples, budget in (([1.0], [1, 2], 1.0), ([-1.0], [1], 1.0), ([1.0], [0], 1.0)):
        with pytest.raises(fs.InvalidInput):
            fs.games.auction(bids, samples, budget)
    with pytest.raises(fs.InvalidInput, match="budget"):
        fs.games.auction([1.0], [1.0], -1.0)
    with pytest.raises(fs.InvalidInput, match="contributions and payments"):
        fs.games.misreports(lambda reports: (reports, reports[:1]), [1.0, 2.0])
