"""IncentFedAvg's lemma and theorems: their formulas and their bounds in runs."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from fedsolve import games
from tests.support import theorems
from tests.support.strategic import a_game, mean_problem, settling_game


@pytest.mark.parametrize("count", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_lemma_4_3_holds_in_games(count):
    """‖N̂_r − N*‖ and |p_{i,r} − p_i*| stay below the promised line, for γ̃ up to μ_F/L_F²."""
    rng, problem = np.random.default_rng(2), mean_problem(clients=4, samples=9)
    for number in range(count):
        half, skew = rng.standard_normal((2, 4, 4))
        A = 0.3 * half @ half.T + rng.uniform(0.05, 1) * np.eye(4) + (skew - skew.T)
        cost = games.QuadraticCost(A, -A @ rng.uniform(-2, 12, 4))
        game = fs.Game(None, cost, np.ones(4), rng.uniform(5, 9, 4))
        start = rng.uniform(1, 9, 4)
        start = np.clip(start, game.lower, game.upper)
        share = 1.0 if number % 2 else rng.uniform(0.1, 1)
        promise = fs.theory.participation(game, start, share * game.monotonicity().step_size)
        algorithm = fs.IncentFedAvg(game, 0.01, promise.step_size, start=start)
        run = fs.solve(problem, algorithm, rounds=40, precision="float64")
        best = game.equilibrium()
        line = promise.rate ** np.arange(1, 41)
        away = np.linalg.norm(run.history["participation"] - best, axis=1)
        assert (away <= promise.distance * line + 1e-8).all()
        off = np.abs(run.history["weights"] - best / best.sum()).max(axis=1)
        assert (off <= promise.delta * line + 1e-8).all()


def test_theorem_4_8_follows_from_its_lemmas():
    """The bound and r̂ against the proof, step by step."""
    game, start = settling_game([6.0, 2.0, 1.0]), np.asarray([2.0, 4.0, 6.0])
    for H, L, B, step in ((1, 1.0, 1.0, 2.0), (3, 0.2, 1.7, 2.0), (2, 5.0, 2.0, 9.0)):
        said = fs.theory.incentfedavg(
            game,
            start,
            5000,
            local_steps=H,
            smoothness=L,
            noise=0.3,
            dissimilarity=(0.7, B),
            distance=0.4,
            optimum_gradients=0.9,
            game_step_size=step,
        )
        learned = said.participation
        assert learned.delta == pytest.approx(2 * np.sqrt(45) / 9)
        assert learned.rate == pytest.approx(1 - 0.05 * step)
        given = (3, H, 5000, said.first, L, 0.3, 0.7, B, learned.delta, learned.rate, 0.4, 0.9)
        left, c_min, consensus, bound = theorems.strategic_convex(said.step_size, *given)
        assert left >= 0.25 - 1e-12
        assert min(c_min, consensus) > 0
        assert said.bound == pytest.approx(bound)
        if said.first:  # not later than it must be
            d = learned.delta * learned.rate ** (said.first - 1)
            assert d > 1 or 3 * L * B**2 * d**1.5 > 0.25


def test_theorem_4_8_holds_where_weights_have_to_be_learned():
    """f(x̄_avg) − f* below the bound, from weights p_0 that are far from p*, with two local steps.
    All samples of a client are the same, so that nothing is random; its steps are known from x̂_r.
    The minimiser for equal weights is not so good, and neither is the start."""
    centres = np.asarray([[1.0, 0.0], [0.0, 3.0], [-3.0, -1.0]])
    problem = fs.Problem(
        lambda w, data: 0.5 * jnp.mean(jnp.sum((data["points"] - w) ** 2, axis=1)),
        {"points": np.repeat(centres[:, None], 8, axis=1)},
        np.asarray([1.0, -0.5]),
    )
    N = np.asarray([6.0, 2.0, 1.0])
    game, start, p, rounds = settling_game(N), np.asarray([2.0, 4.0, 6.0]), N / 9, 16_000
    best = p @ centres

    def f(x):
        return p @ (0.5 * ((centres - x) ** 2).sum(axis=1))

    G, B = fs.theory.convex_dissimilarity(p, 1.0, f(best), np.zeros(3))
    own = ((centres - best) ** 2).sum()
    given = {"local_steps": 2, "smoothness": 1.0, "noise": 0.0, "dissimilarity": (G, B)}
    given |= {"optimum_gradients": own, "game_step_size": 2.0}
    first = fs.theory.incentfedavg(game, start, rounds, distance=9.0, **given)
    algorithm = fs.IncentFedAvg(game, first.step_size, 2.0, local_steps=2, start=start)
    run = fs.solve(
        problem,
        algorithm,
        rounds,
        follow={"w": lambda problem, params: params},
        precision="float64",
    )
    x = np.vstack([problem.params, run.history["w"][:-1]])  # x̂_0 … x̂_{R−1}
    distance = np.linalg.norm(x[first.first] - best)  # known now
    said = fs.theory.incentfedavg(game, start, rounds, distance=distance, **given)
    assert (said.step_size, said.first) == (first.step_size, first.first)
    assert said.participation.delta > 1
    assert said.first > 10
    middle = x - said.step_size * (x - run.history["weights"] @ centres)  # x̄ after one local step
    average = 0.5 * (x + middle)[said.first :].mean(axis=0)
    assert 0 < f(average) - f(best) <= said.bound
    for other in (problem.params, centres.mean(axis=0)):
        assert f(other) - f(best) > said.bound
    away = np.linalg.norm(np.vstack([start, run.history["participation"][:-1]]) - N, axis=1)
    assert (away[said.first :] ** 2).mean() <= said.equilibrium_bound


def test_theorem_4_5_by_hand():
    game, start, R = settling_game([5.0, 5.0, 5.0]), np.full(3, 4.9), 4000
    B, G = 1.5, 0.8
    given = {"local_steps": 2, "smoothness": 1.0, "noise": 0.5, "dissimilarity": (G, B), "gap": 2.0}
    nonconvex = fs.theory.incentfedavg(game, start, R, **given)
    assert nonconvex.theorem == "Theorem 4.5"
    longer = fs.theory.incentfedavg(game, start, 400_000, **given)
    assert longer.bound < 0.3 * nonconvex.bound
    gamma, H, m, r = nonconvex.step_size, 2, 3, nonconvex.first
    delta, rho = nonconvex.participation.delta, nonconvex.participation.rate
    assert gamma == pytest.approx(min(1 / 32, np.sqrt(2 / 153) / (m * B * H), 1 / np.sqrt(R * H)))
    by_hand = 16 * 2.0 / (gamma * H * (R - r)) + 8 * gamma * 0.25
    by_hand += 76.5 * (0.25 + m * G**2) * m * H**2 * gamma**2
    weight = (rho ** (2 * r) - rho ** (2 * R)) / ((1 - rho**2) * (R - r))
    by_hand += 16 * m**2 * delta**2 * G**2 * (1 + 2 * gamma) * weight
    assert nonconvex.bound == pytest.approx(by_hand)
    assert np.sqrt(17) * m * B * delta * rho**r <= 1 + 1e-12


def test_assumptions_left_open_are_listed():
    given = {"smoothness": 1.0, "noise": 0.5, "dissimilarity": (1.0, 2.0), "distance": 1.0}
    game = settling_game([5.0, 5.0, 5.0])
    late = fs.theory.incentfedavg(game, np.full(3, 2.0), 100, local_steps=2, **given)
    assert any("after round r̂ = " in sentence for sentence in late.unchecked)
    assert any("on one subset" in sentence for sentence in late.unchecked)
    once = fs.theory.incentfedavg(game, np.full(3, 5.0), 100, local_steps=1, **given)
    assert not any("r̂" in sentence or "subset" in sentence for sentence in once.unchecked)


def test_theorems_raise_outside_their_assumptions():
    given = {"local_steps": 1, "smoothness": 1.0, "noise": 1.0, "dissimilarity": (1.0, 2.0)}
    with pytest.raises(fs.InvalidInput, match="one of them"):
        fs.theory.incentfedavg(a_game(), np.full(5, 3.0), 10, **given)
    with pytest.raises(fs.InvalidInput, match="too few"):
        fs.theory.incentfedavg(a_game(), np.full(5, 6.0), 1, gap=1.0, **given)
    with pytest.raises(fs.InvalidInput, match="is above"):
        fs.theory.participation(a_game(), np.full(5, 3.0), 11.0)
    with pytest.raises(fs.InvalidInput, match="strongly monotone"):
        fs.theory.participation(fs.Game(None, games.LinearCost(1.0), np.ones(2), 2.0), [1.0, 1.0])


def rounds_by_formula(R, game, start, eps, H, L, nu, G, B, gap):
    """Whether Theorem 4.5 (i) with γ = 1/√(RH) and r̂ = R/2 gives ε."""
    best, constants = game.equilibrium(), game.monotonicity()
    m, rho = len(best), 1 - 0.5 * constants.strong**2 / constants.lipschitz**2
    away = np.linalg.norm(start - best)
    delta = (m - 1) * away / best.sum()
    gamma, r = 1 / np.sqrt(R * H), R // 2
    allowed = gamma <= min(1 / 32, np.sqrt(2 / 153) / (m * B * H), 1 / (np.sqrt(3) * H)) / L
    allowed &= np.log(17 * (m * delta * B) ** 2) / (2 * np.log(1 / rho)) <= r
    settled = (rho ** (2 * r) - rho ** (2 * R)) / ((1 - rho**2) * (R - r))
    bound = 16 * gap / (gamma * (R - r) * H) + 8 * L * gamma * nu**2
    bound += 76.5 * (nu**2 + m * G**2) * m * L**2 * H**2 * gamma**2
    bound += 16 * (m * delta * G) ** 2 * (1 + 2 * L * gamma) * settled
    return allowed and max(bound, settled * away**2) <= eps


@pytest.mark.parametrize("eps", [5.0, 0.5, 0.05])
def test_the_rounds_of_theorem_4_5_are_the_least_that_suffice(eps):
    game, start = settling_game([6.0, 2.0, 1.0]), np.asarray([2.0, 4.0, 6.0])
    given = {"local_steps": 2, "smoothness": 1.5, "noise": 0.5, "dissimilarity": (0.8, 1.2)}
    found = fs.theory.incentfedavg_rounds(game, start, eps, gap=2.0, **given)
    letters = (game, start, eps, 2, 1.5, 0.5, 0.8, 1.2, 2.0)
    assert rounds_by_formula(found.rounds, *letters)
    assert not rounds_by_formula(found.rounds - 1, *letters)
    assert found.step_size == pytest.approx(1 / np.sqrt(2 * found.rounds))
    said = fs.theory.incentfedavg(
        game, start, found.rounds, gap=2.0, step_size=found.step_size, **given
    )
    assert said.largest >= found.step_size
    m, H, L, away = 3, 2, 1.5, np.sqrt(45)
    spread, delta, rho = 0.25 + m * 0.64, 2 * np.sqrt(45) / 9, said.participation.rate
    assert found.terms["R_1"] == pytest.approx(
        (4 + L**2 * 0.5**4 + m**2 * L**4 * H**4 * spread**2) / (H * eps**2)
    )
    inside = away**2 * max(np.sqrt(192) * m * (m - 1) / 9 * 0.8, 1) ** 2
    inside /= (1 - rho**2) * L**2 * eps
    assert found.terms["R_2"] == pytest.approx(np.log(inside) / np.log(1 / rho))
    late = np.log(17 * m**2 * delta**2 * 1.2**2) / np.log(1 / rho)
    assert found.terms["R_3"] == pytest.approx(late)
    assert found.terms["H(mBL)²"] == pytest.approx(H * (m * 1.2 * L) ** 2)
    assert found.terms["L²/H"] == pytest.approx(L**2 / H)


def test_the_rounds_of_theorem_4_8():
    game, start = settling_game([6.0, 2.0, 1.0]), np.asarray([2.0, 4.0, 6.0])
    given = {"local_steps": 2, "smoothness": 1.0, "noise": 0.3, "dissimilarity": (0.7, 1.2)}
    given |= {"distance": 0.4, "optimum_gradients": 0.9, "game_step_size": 2.0}
    found = fs.theory.incentfedavg_rounds(game, start, 0.1, **given)
    step = found.step_size
    enough = fs.theory.incentfedavg(game, start, found.rounds, step_size=step, **given)
    assert enough.bound <= 0.1
    fewer = found.rounds - 1
    with pytest.raises(fs.InvalidInput, match="is above"):  # γ = 1/√(RH) is what needs so many
        fs.theory.incentfedavg(game, start, fewer, step_size=1 / np.sqrt(2 * fewer), **given)
    finer = fs.theory.incentfedavg_rounds(game, start, 1e-3, **given)
    last = fs.theory.incentfedavg(game, start, finer.rounds, **given).bound
    assert last <= 1e-3 < fs.theory.incentfedavg(game, start, finer.rounds - 1, **given).bound
    delta, rho, m = 2 * np.sqrt(45) / 9, 0.9, 3
    assert finer.terms["R_1"] == pytest.approx((0.4**4 + 0.3**4) / (2 * 1e-6))
    assert finer.terms["R_2"] == pytest.approx(np.sqrt((0.09 + m * 0.49) / (2 * 1e-3)))
    third = (m**2 * delta**2 * 0.49 / ((1 - rho**2) * 1e-3)) ** (2 / 3) / 2 ** (1 / 3)
    assert finer.terms["R_3"] == pytest.approx(third)
    fourth = delta**1.5 * (m * 0.49 + 0.9) / ((1 - rho**1.5) * 1e-3)
    assert finer.terms["R_4"] == pytest.approx(fourth)


CENTRES = np.asarray([[1.0, 0.0], [0.0, 3.0], [-3.0, -1.0]])


def noisy(spread, loss, centres=CENTRES, start=(1.0, -0.5)):
    """Eight samples around each centre, of which a step sees one; and the largest variance."""
    points = centres[:, None] + spread * np.random.default_rng(3).standard_normal((3, 8, 2))
    points += (centres - points.mean(axis=1))[:, None]
    variance = ((points - centres[:, None]) ** 2).sum(axis=2).mean(axis=1).max()
    problem = fs.Problem(
        lambda w, data: jnp.mean(jnp.sum(loss(data["points"] - w), axis=1)),
        {"points": points},
        np.asarray(start),
        batch_size=1,
    )
    return problem, points, np.sqrt(variance)


def iterates(problem, algorithm, rounds, seed):
    """x̂_0 … x̂_{R−1}."""
    follow = {"w": lambda problem, params: params}
    run = fs.solve(problem, algorithm, rounds, follow=follow, precision="float64", seed=seed)
    return np.vstack([problem.params, run.history["w"][:-1]])


def test_theorem_4_8_holds_with_noise():
    """The mean over runs of f(x̄_avg) − f*, with ν > 0. With H = 1 every step's gradient is that of
    one sample, uniform over all (Assumption 2.1 (ii)); ν² is the variance of a client's samples."""
    problem, points, nu = noisy(0.7, lambda z: 0.5 * z**2)
    N = np.asarray([6.0, 2.0, 1.0])
    game, start, p, rounds = settling_game(N), np.asarray([2.0, 4.0, 6.0]), N / 9, 24_000
    own = 0.5 * ((points - CENTRES[:, None]) ** 2).sum(axis=2).mean(axis=1)
    best = p @ CENTRES
    least = p @ (own + 0.5 * ((CENTRES - best) ** 2).sum(axis=1))
    G, B = fs.theory.convex_dissimilarity(p, 1.0, least, own)
    given = {"local_steps": 1, "smoothness": 1.0, "noise": nu, "dissimilarity": (G, B)}
    given |= {"optimum_gradients": ((CENTRES - best) ** 2).sum(), "game_step_size": 2.0}
    first = fs.theory.incentfedavg(game, start, rounds, distance=9.0, **given)
    algorithm = fs.IncentFedAvg(game, first.step_size, 2.0, start=start)
    gaps, distances = [], []
    for seed in range(3):
        x = iterates(problem, algorithm, rounds, seed)
        average = x[first.first :].mean(axis=0)
        gaps.append(0.5 * ((average - best) ** 2).sum())
        distances.append(((x[first.first] - best) ** 2).sum())
    said = fs.theory.incentfedavg(
        game, start, rounds, distance=float(np.sqrt(np.mean(distances))), **given
    )
    assert said.first == first.first > 0
    assert nu > 0.5
    assert 0 < np.mean(gaps) <= said.bound
    for other in (problem.params, CENTRES.mean(axis=0)):  # the bound says something
        assert 0.5 * ((other - best) ** 2).sum() > said.bound
    noiseless = given | {"noise": 0.0}
    quiet = fs.theory.incentfedavg(game, start, rounds, distance=0.0, **noiseless)
    assert quiet.bound < said.bound


def test_theorem_4_5_holds_with_noise():
    """Smooth and not convex: Σ log(1 + z²/2), with 1 ≥ φ'' ≥ −1/8 and |φ'| ≤ 1/√2. So L = 1, G = 1
    for two entries, and the variance of a gradient is at most that of a sample."""
    problem, points, nu = noisy(0.3, lambda z: jnp.log1p(z**2 / 2), 0.2 * CENTRES, (1.4, 1.4))
    N = np.asarray([6.0, 2.0, 1.0])
    game, start, p, rounds = settling_game(N), np.asarray([5.9, 2.0, 1.1]), N / 9, 20_000

    def slopes(x):
        z = x - points
        return z / (1 + z**2 / 2)

    def f(x):
        return p @ np.log1p((x - points) ** 2 / 2).sum(axis=2).mean(axis=1)

    given = {"local_steps": 1, "smoothness": 1.0, "noise": nu, "dissimilarity": (1.0, 0.0)}
    said = fs.theory.incentfedavg(game, start, rounds, gap=f(problem.params), **given)
    algorithm = fs.IncentFedAvg(game, said.step_size, said.game_step_size, start=start)
    squares = []
    for seed in range(3):
        x = iterates(problem, algorithm, rounds, seed)[said.first :]
        squares.append(np.mean([((p @ slopes(w).mean(axis=1)) ** 2).sum() for w in x[::50]]))
    assert said.first == 0
    assert np.mean(squares) <= said.bound
    worst = ((p @ slopes(problem.params).mean(axis=1)) ** 2).sum()
    assert worst > said.bound  # it says something
