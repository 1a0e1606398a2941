"""Games of data participation against closed forms, complementarity conditions and CVXPY."""

import cvxpy as cp
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from fedsolve import games
from fedsolve.games.parts import Plain


def discovery(m, seed=0, regularization=1e-5, classes=10):
    """The paper's game: random discovery, θ_i uniform in [0, ‖q_i‖²], and its closed form N*."""
    rng = np.random.default_rng(seed)
    Q = rng.dirichlet(np.full(classes, 0.5), m)
    theta = rng.uniform(0, (Q**2).sum(axis=1))
    lower, upper = rng.integers(1, 50, m), rng.integers(2000, 6000, m)
    game = fs.Game(games.RandomDiscovery(Q), games.LinearCost(theta), lower, upper, regularization)
    best = np.clip(((Q**2).sum(axis=1) - theta) / regularization, lower, upper)
    return game, best


def affine(m, rng):
    """A strongly monotone affine game that is no potential game: F(N) = A N + b."""
    half = rng.standard_normal((m, m)) / np.sqrt(m)
    skew = rng.standard_normal((m, m)) / np.sqrt(m)
    A = half @ half.T + 0.05 * np.eye(m) + (skew - skew.T)
    b = rng.standard_normal(m)
    return fs.Game(None, games.QuadraticCost(A, b), np.zeros(m), rng.uniform(0.5, 2, m)), A, b


@pytest.mark.parametrize("m", [2, 10, 2000])
def test_random_discovery_has_its_closed_form(m):
    game, best = discovery(m)
    found = game.equilibrium()
    np.testing.assert_allclose(found, best, rtol=1e-9)
    assert ((found > game.lower) & (found < game.upper)).any()
    assert game.regret(found) < 1e-8
    assert game.regret(0.9 * found) > 1e-2


def test_affine_games_solve_their_complementarity_problem():
    """200 games: N_i at the lower bound and F_i ≥ 0, at the upper and F_i ≤ 0, or between and 0."""
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(200):
        game, A, b = affine(8, rng)
        N = game.equilibrium()
        F = A @ N + b
        low, high = game.lower + 1e-9 >= N, game.upper - 1e-9 <= N
        assert (F[low] >= -1e-8).all()
        assert (F[high] <= 1e-8).all()
        np.testing.assert_allclose(F[~low & ~high], 0, atol=1e-8)
        assert (game.lower <= N).all()
        assert (game.upper >= N).all()
        inside += (~low & ~high).sum()
    assert 200 < inside < 1400  # bounds are active for some and not for others


def test_affine_games_agree_with_cvxpy():
    """min (A N + b)·N + …: for a monotone affine VI, N* minimises the gap function of its convex
    program: slack variables u, v ≥ 0 with A N + b = u − v, and complementarity as the value."""
    rng = np.random.default_rng(2)
    for _ in range(5):
        game, A, b = affine(6, rng)
        N, u, v = cp.Variable(6), cp.Variable(6), cp.Variable(6)
        gap = cp.quad_form(N, cp.psd_wrap(0.5 * (A + A.T))) + b @ N + game.upper @ v
        program = cp.Problem(
            cp.Minimize(gap),
            [A @ N + b == u - v, u >= 0, v >= 0, N >= 0, game.upper >= N],
        )
        program.solve(solver=cp.CLARABEL)
        assert abs(program.value) < 1e-6
        np.testing.assert_allclose(game.equilibrium(), N.value, atol=1e-4)


def test_many_players_that_depend_on_each_other():
    game, A, b = affine(500, np.random.default_rng(3))
    N = game.equilibrium()
    residual = N - np.clip(N - (A @ N + b), game.lower, game.upper)
    assert np.abs(residual).max() < 1e-7


def test_pseudogradients_are_the_diagonal_of_the_jacobian():
    rng = np.random.default_rng(4)
    Q = rng.dirichlet(np.ones(5), 7)
    parts = [
        games.RandomDiscovery(Q),
        games.RandomCoverage(Q),
        games.LinearCost(rng.uniform(size=7)),
        games.PrivacyCost(0.1, rng.uniform(1, 2, 7), 30.0),
        games.QuadraticCost(rng.standard_normal((7, 7)), rng.standard_normal(7)),
        games.PricePerSample(0.3),
        games.SharedBudget(4.0),
    ]

    @eqx.filter_jit
    def look(part, N, y):
        each = jnp.arange(7)
        return {
            "slope": part.slope(N),
            "own": jax.vmap(lambda i: part.own_slope(i, N))(each),
            "alone": part.alone(N, y),
            "rows": part.slope_jacobian(N),
            "by hand": jnp.diagonal(jax.jacfwd(part)(N)),
            "one by one": jax.vmap(lambda i: part(N.at[i].set(y[i]))[i])(each),
        }

    with jax.enable_x64(True):
        N, y = jnp.asarray(rng.uniform(1, 5, (2, 7)))
        for part in parts:
            found, plain = look(part, N, y), look(Plain(lambda N, part=part: part(N)), N, y)
            for name in found:
                np.testing.assert_allclose(
                    plain[name], found[name], atol=1e-12, err_msg=f"{type(part).__name__} {name}"
                )
            np.testing.assert_allclose(found["slope"], found["by hand"], atol=1e-12)
            np.testing.assert_allclose(found["slope"], found["own"], atol=1e-12)
            np.testing.assert_allclose(found["alone"], found["one by one"], atol=1e-12)


def test_the_payoffs_are_those_of_the_paper():
    rng = np.random.default_rng(5)
    Q, N = rng.dirichlet(np.ones(4), 3), rng.uniform(1, 6, 3)
    discovery = [sum(Q[i] @ Q[j] * N[j] for j in range(3)) for i in range(3)]
    coverage = [
        1 - 0.5 * sum(Q[i, c] * np.prod((1 - Q[:, c]) ** N) for c in range(4)) for i in range(3)
    ]
    with jax.enable_x64(True):
        np.testing.assert_allclose(games.RandomDiscovery(Q)(jnp.asarray(N)), discovery)
        np.testing.assert_allclose(games.RandomCoverage(Q)(jnp.asarray(N)), coverage)


def test_coverage_is_finite_and_exact_for_tens_of_thousands():
    """Against 200-digit arithmetic where the product is of any size, and with a pure class."""
    from decimal import Decimal, getcontext

    getcontext().prec = 200
    Q = np.asarray([[0.999, 0.001], [0.0005, 0.9995], [1.0, 0.0]])
    N = np.asarray([40_000.0, 3.0, 20_000.0])
    game = fs.Game(games.RandomCoverage(Q), games.LinearCost(0.1), np.ones(3), np.full(3, 5e4))
    missed = [(1 - Decimal(Q[0, c])) ** 40_000 * (1 - Decimal(Q[1, c])) ** 3 for c in range(2)]
    missed[0] *= Decimal(2) ** -20_000  # the pure class, far below any float
    expected = [
        float(1 - sum(Decimal(Q[i, c]) * missed[c] for c in range(2)) / 2) for i in range(3)
    ]
    np.testing.assert_allclose(-game.utility(N) - 0.1 * N, -np.asarray(expected), rtol=1e-9)
    look = eqx.filter_jit(lambda game, N: (game.pseudogradient(N), game.jacobian(N)))
    for point in (N, np.ones(3), np.full(3, 5e4)):
        assert all(np.isfinite(each).all() for each in look(game, jnp.asarray(point)))


def test_monotonicity_is_exact_for_affine_games_and_labelled_otherwise():
    game, A, _ = affine(20, np.random.default_rng(6))
    found = game.monotonicity()
    assert found.exact
    np.testing.assert_allclose(found.strong, np.linalg.eigvalsh(A + A.T)[0] / 2, rtol=1e-9)
    np.testing.assert_allclose(found.lipschitz, np.linalg.norm(A, 2), rtol=1e-9)
    assert found.step_size == found.strong / found.lipschitz**2

    private = fs.Game(None, games.PrivacyCost(0.1, 2.0, 100.0), np.ones(5), np.full(5, 90.0))
    estimate = private.monotonicity()
    assert not estimate.exact
    # F' = κ/(A − N)², so μ = κ/(A − 1)² is at the lower bounds, and L ≤ κ/(A − 90)²
    np.testing.assert_allclose(estimate.strong, 2 / 99**2, rtol=1e-6)
    assert 2 / 99**2 < estimate.lipschitz <= 2 / 10**2


def kinked(bend, where, upper):
    """F is affine below `where` and has another slope above."""
    return fs.Game(
        None,
        lambda N: 0.05 * N**2 + 0.5 * bend * jnp.maximum(N - where, 0) ** 2 - 30 * N,
        np.ones(3),
        upper,
    )


def test_monotonicity_is_checked_far_from_the_lower_bounds():
    """L_F = 1.1 above N = 100. With the 0.1 from below, μ_F/L_F² would be 10, and the players would
    go from 1 to 300 and back for ever."""
    game = kinked(1.0, 100, 300.0)
    found = game.monotonicity()
    assert not found.exact
    np.testing.assert_allclose((found.strong, found.lipschitz), (0.1, 1.1))
    best = game.equilibrium()
    np.testing.assert_allclose(best, 130 / 1.1)  # 0.1N + (N − 100) = 30
    said = fs.theory.participation(game, np.full(3, 300.0))
    assert not said.exact
    N = np.full(3, 300.0)
    for round in range(200):
        assert np.linalg.norm(N - best) <= said.distance * said.rate**round + 1e-9
        N = np.clip(N - said.step_size * (0.1 * N + np.maximum(N - 100, 0) - 30), 1, 300)
    with pytest.raises(fs.InvalidInput, match="not monotone"):
        kinked(-1.0, 900, 1000.0).equilibrium()


def test_only_what_is_known_to_be_affine_is_exact():
    """A plain function may be anything between the probes."""
    plain = fs.Game(None, lambda N: 0.05 * N**2, np.ones(3), 9.0)
    assert not plain.monotonicity().exact
    rng = np.random.default_rng(0)
    linear = games.RandomDiscovery(rng.dirichlet(np.ones(4), 3))
    game = fs.Game(linear, games.QuadraticCost(np.eye(3), np.ones(3)), np.ones(3), 9.0, 0.1)
    assert game.with_payment(games.PricePerSample(0.3)).monotonicity().exact
    assert not game.with_payment(games.SharedBudget(2.0)).monotonicity().exact
    assert not game.with_payment(lambda N: N).monotonicity().exact


def test_private_players_meet_the_closed_form_and_plain_functions_do_as_well():
    """F_i = θ − w + κ/(A − N): N* = clip(A − κ/(w − θ))."""
    theta, gain, kappa = np.asarray([0.1, 0.1, 0.1, 0.6]), 0.5, np.asarray([2.0, 20.0, 60.0, 2.0])
    best = np.clip(100 - kappa / np.where(gain > theta, gain - theta, 1e-9), 1, 90)
    ready = fs.Game(
        games.PricePerSample(gain), games.PrivacyCost(theta, kappa, 100.0), np.ones(4), 90
    )
    plain = fs.Game(
        lambda N: gain * N,
        lambda N: theta * N - kappa * jnp.log(1 - N / 100),
        np.ones(4),
        90,
    )
    np.testing.assert_allclose(ready.equilibrium(), best, rtol=1e-8)
    np.testing.assert_allclose(plain.equilibrium(), best, rtol=1e-8)
    assert best[0] == 90
    assert best[3] == 1


def test_a_game_that_is_not_monotone_raises_with_a_remedy():
    rng = np.random.default_rng(7)
    Q = rng.dirichlet(np.full(4, 0.5), 6)
    game = fs.Game(games.RandomCoverage(Q), games.LinearCost(1e-3), np.ones(6), np.full(6, 4000.0))
    with pytest.raises(fs.InvalidInput, match=r"not monotone.*regularization of .* \(an est"):
        game.equilibrium()
    any_equilibrium = game.equilibrium(monotone=False)
    assert game.regret(any_equilibrium) < 1e-9
    enough = 1.1 * -game.monotonicity().strong
    tamed = fs.Game(game.payoff, game.cost, game.lower, game.upper, enough)
    assert tamed.regret(tamed.equilibrium()) < 1e-9


def test_regret_is_the_gain_of_the_best_deviation():
    game, best = discovery(6, seed=8)
    N = np.clip(best * np.linspace(0.2, 1.5, 6), game.lower, game.upper)
    gains = []
    for i in range(6):
        tries = np.linspace(game.lower[i], game.upper[i], 20_001)
        own = np.asarray(game.payoff.distributions[i]) @ game.payoff.distributions[i]
        loss = (game.cost.rate[i] - own) * tries + 0.5e-5 * tries**2
        here = (game.cost.rate[i] - own) * N[i] + 0.5e-5 * N[i] ** 2
        gains.append(here - loss.min())
    np.testing.assert_allclose(game.regrets(N), gains, atol=1e-5)
    assert game.regret(N) == game.regrets(N).max()


def test_the_social_optimum_and_the_price_of_anarchy_have_closed_forms():
    """W is separable: the optimum weighs ‖Q q_i‖₁ where the equilibrium weighs ‖q_i‖²."""
    game, best = discovery(12, seed=9, regularization=1e-3)
    Q = np.asarray(game.payoff.distributions)
    optimum = np.clip(((Q @ Q.T).sum(axis=0) - game.cost.rate) / 1e-3, game.lower, game.upper)
    found = games.anarchy(game)
    np.testing.assert_allclose(found.optimum, optimum, rtol=1e-5)
    np.testing.assert_allclose(found.equilibrium, best, rtol=1e-8)

    def welfare(N):
        return (Q @ Q.T @ N - game.cost.rate * N - 0.5e-3 * N**2).sum()

    np.testing.assert_allclose(found.price, welfare(optimum) / welfare(best), rtol=1e-8)
    assert found.price > 1

    paid = game.with_payment(games.externality_prices(game))
    np.testing.assert_allclose(paid.equilibrium(), optimum, rtol=1e-4)  # Pigou


def test_who_stays_depends_on_the_payment():
    """Random discovery of one class: everyone gains ΣN. Player i costs θ_i a sample, must give at
    least 10, and would be as well off elsewhere with what everyone gives for nothing."""
    theta = np.asarray([0.5, 2.0, 4.0, 30.0])
    game = fs.Game(
        games.RandomDiscovery(np.ones((4, 1))),
        games.LinearCost(theta),
        np.full(4, 10.0),
        100.0,
        0.01,
    )
    # Equilibrium: N_1 = (1 − 0.5)/0.01 = 50, the others give 10 and no more: 80 in all.
    alone = games.who_stays(game)
    np.testing.assert_array_equal(alone.stays, [True, True, True, False])
    np.testing.assert_array_equal(alone.free_riders, [False, True, True, False])
    np.testing.assert_allclose(alone.contributions, [50, 10, 10, 0], atol=1e-6)
    np.testing.assert_allclose(alone.utility, [70 - 25 - 12.5, 70 - 20.5, 70 - 40.5, 0], atol=1e-5)
    assert alone.spent == 0

    paid = games.who_stays(game, games.PricePerSample(25.0))
    assert paid.stays.all()
    np.testing.assert_allclose(paid.payment, 25 * paid.contributions)
    assert paid.samples > alone.samples
    shared = games.who_stays(game, games.SharedBudget(200.0))
    assert shared.spent <= 200 + 1e-6


def test_class_distributions_are_shares_of_labels():
    Q = games.class_distributions([[0, 0, 1], np.asarray([2, 2, 2, 0])], classes=4)
    np.testing.assert_allclose(Q, [[2 / 3, 1 / 3, 0, 0], [0.25, 0, 0.75, 0]])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: games.class_distributions([[0, 1], []]), "at least one label"),
        (lambda: games.class_distributions([[0, 7]], classes=4), "label 7, but only 4 classes"),
        (lambda: fs.Game(None, None, 0, 1), "number of players is unknown"),
        (lambda: fs.Game(None, None, [0, 0], [1, 1, 1]), "numbers of players differ"),
        (lambda: fs.Game(None, None, [0, 3], [1, 2]), "player 1 has 3 and 2"),
        (lambda: fs.Game(None, None, [0, 0], 1, -1.0), "regularization must be at least 0"),
        (
            lambda: fs.Game(lambda N: N.sum(), None, [0, 0], 1),
            "payoff must give one number for each",
        ),
        (lambda: fs.Game("much", None, [0, 0], 1), "payoff must be a function of N"),
        (lambda: games.RandomDiscovery([[0.5, 0.6]]), "add up to 1"),
        (lambda: games.LinearCost([0.1, np.nan]), "rate has a value that is not finite"),
        (
            lambda: fs.Game(None, games.PrivacyCost(1.0, 1.0, 5.0), [0, 0], 9),
            "available above the upper bound",
        ),
        (lambda: fs.Game(None, None, [0, 0], 1).regret([1.0]), "one finite number for each of 2"),
    ],
)
def test_bad_games_raise(make, message):
    with pytest.raises(fs.InvalidInput, match=message):
        make()
