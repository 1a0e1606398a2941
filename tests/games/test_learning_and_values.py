"""Payoffs from accuracy, and values of players, against closed forms and enumeration."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs

CURVE = fs.games.LearningCurve(top=0.95, gap=0.8, scale=40.0, rate=0.6)
N = np.array([30.0, 5.0, 80.0, 12.0])


def enumerated(value, m):
    """Shapley's value as the mean over all orders, straight from the definition."""
    total = np.zeros(m)
    orders = list(itertools.permutations(range(m)))
    for order in orders:
        who = np.zeros(m, bool)
        for i in order:
            before = value(who)
            who[i] = True
            total[i] += value(who) - before
    return total / len(orders)


def worth(who):
    """Neither additive nor symmetric."""
    return float(np.sqrt(N @ who) + 2 * (who[0] and who[2]) - 0.5 * who[1])


def test_shapley_is_the_mean_over_all_orders():
    found = fs.games.shapley(worth, 4)
    np.testing.assert_allclose(found.values, enumerated(worth, 4), rtol=1e-12)
    np.testing.assert_allclose(found.values.sum(), worth(np.ones(4, bool)), rtol=1e-12)
    assert found.evaluations == 16


def test_gtg_shapley_comes_to_shapley_and_cuts_evaluations():
    exact = enumerated(worth, 4)
    found = fs.games.gtg_shapley(worth, 4, tolerance=1e-5, most=3000)
    np.testing.assert_allclose(found.values, exact, atol=0.01 * np.abs(exact).sum())
    np.testing.assert_allclose(found.values.sum(), exact.sum(), rtol=1e-9)
    # truncation within an order: later players add nothing
    saturated = lambda who: min(float(who.sum()), 2.0)  # noqa: E731
    cut = fs.games.gtg_shapley(saturated, 8, within=0.0, most=1)
    assert cut.orders == 8
    assert cut.evaluations < 2 + 8 * 3
    np.testing.assert_allclose(cut.values.sum(), 2.0)
    # each player leads as often as any other
    first = fs.games.gtg_shapley(lambda who: float(who.any()), 5, most=1)
    np.testing.assert_allclose(first.values, 0.2)
    # truncation between rounds
    flat = fs.games.gtg_shapley(lambda who: 0.5 + 0.01 * who.any(), 5, between=0.02)
    assert flat.evaluations == 2
    assert not flat.values.any()


def test_leave_one_out():
    found = fs.games.leave_one_out(worth, 4)
    everyone = np.ones(4, bool)
    for i in range(4):
        np.testing.assert_allclose(found.values[i], worth(everyone) - worth(np.arange(4) != i))
    assert found.evaluations == 5


@pytest.mark.parametrize("kind", [fs.games.AccuracyPayoff, fs.games.LeaveOneOutPayoff])
def test_payoffs_of_accuracy_and_their_slopes(kind):
    reward = np.array([1.0, 2.0, 3.0, 4.0])
    payoff = kind(CURVE, reward)
    with jax.enable_x64(True):
        found, slopes = payoff(jnp.asarray(N)), payoff.slope(jnp.asarray(N))
        total, others = N.sum(), N.sum() - N
        less = 0 if kind is fs.games.AccuracyPayoff else np.asarray(CURVE(others))
        np.testing.assert_allclose(found, reward * (np.asarray(CURVE(total)) - less), rtol=1e-12)
        np.testing.assert_allclose(slopes, reward * float(jax.grad(CURVE)(total)), rtol=1e-9)


def test_the_shapley_payoff_is_shapleys_value_of_the_accuracy():
    def value(who):
        return float(CURVE(float(N @ who)))

    payoff = fs.games.ShapleyPayoff(CURVE, reward=2.0, orders=4096)
    with jax.enable_x64(True):
        found = np.asarray(payoff(jnp.asarray(N)))
        few = np.asarray(fs.games.ShapleyPayoff(CURVE, reward=2.0, orders=2)(jnp.asarray(N)))
        gain = 2 * float(CURVE(N.sum()) - CURVE(0.0))
    np.testing.assert_allclose(found, 2 * enumerated(value, 4), rtol=0.02)
    np.testing.assert_allclose([found.sum(), few.sum()], gain, rtol=1e-9)


def test_a_learning_curve_is_found_within_its_error():
    n = np.array([5, 10, 20, 50, 100, 300, 1000])
    rng, hits = np.random.default_rng(1), []
    for _ in range(20):
        noise = rng.normal(0, 0.01, (len(n), 5))
        found = fs.games.fit_learning_curve(n, np.asarray(CURVE(n))[:, None] + noise)
        assert 0 < found.misfit < 8
        hits.append(np.abs(np.asarray(found.curve(n)) - np.asarray(CURVE(n))) < 2 * found.error)
    assert np.mean(hits) > 0.85  # 95 % for an error of the right size
    assert found.error.max() < 0.02


def test_a_game_about_a_measured_accuracy_has_an_equilibrium():
    game = fs.Game(
        fs.games.AccuracyPayoff(CURVE, reward=100.0), fs.games.LinearCost(0.1), 0, np.full(3, 100.0)
    )
    N = game.equilibrium()
    assert game.regret(N) < 1e-5
    with jax.enable_x64(True):
        assert float(jax.grad(CURVE)(jnp.asarray(N.sum()))) == pytest.approx(0.001, rel=1e-4)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: fs.games.fit_learning_curve([1, 2, 3], np.ones((3, 2))), "at least 4 different"),
        (lambda: fs.games.fit_learning_curve([1, 2, 3, 4], np.ones((4, 1))), "at least two rep"),
        (lambda: fs.games.fit_learning_curve([1, 2, 3, 4], np.full((4, 2), np.nan)), "finite"),
        (lambda: fs.games.LearningCurve(0.9, 0.5, scale=0.0), "scale must be positive"),
        (lambda: fs.games.ShapleyPayoff(CURVE, 1.0, orders=3), "positive even number"),
        (lambda: fs.games.AccuracyPayoff(0.9), "curve must be"),
        (lambda: fs.games.shapley(lambda who: 0.0, 20), "too many"),
        (lambda: fs.games.leave_one_out(lambda who: np.nan, 2), "value of the coalition of 0, 1"),
        (lambda: fs.games.gtg_shapley(lambda who: 0.0, 2, within=-1.0), "within"),
    ],
)
def test_bad_input_raises(call, sentence):
    with pytest.raises(fs.InvalidInput, match=sentence):
        call()
