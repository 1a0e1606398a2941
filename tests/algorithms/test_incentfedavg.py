"""IncentFedAvg against its game's recursion, FedAvg and true optima, and what a client may see."""

import cvxpy as cp
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from fedsolve import games
from fedsolve.algorithms.incentfedavg import SUBSET
from fedsolve.federation.state import State
from fedsolve.problem.samples import Samples
from fedsolve.runtimes.simulation import Simulation
from tests.support import examples, theorems


def mean_problem(clients=5, samples=6, size=3, seed=0, **options):
    """Each client wants w at its own samples' mean."""
    points = np.random.default_rng(seed).standard_normal((clients, samples, size))
    points += np.arange(clients)[:, None, None]
    return fs.Problem(
        lambda w, data: 0.5 * jnp.mean(jnp.sum((data["points"] - w) ** 2, axis=1)),
        {"points": points},
        np.zeros(size),
        **options,
    )


def projected_gradient(game, start, step_size, rounds):
    """N ← Π[N − γ̃F(N)], plainly."""

    def step(N, _):
        N = game.project(N - step_size * game.pseudogradient(N))
        return N, N

    return jax.lax.scan(step, start, length=rounds)[1]


def settling_game(best, pace=0.1):
    """F(N) = pace·(N − best)."""
    cost = games.QuadraticCost(pace * np.eye(len(best)), -pace * np.asarray(best))
    return fs.Game(None, cost, np.ones(len(best)), 8.0)


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_participation_is_projected_gradient_to_the_bit(precision):
    """Whatever the model does: random discovery, and a plain payoff in which all depend on all."""
    problem = mean_problem()
    plain = games.Game(
        lambda N: 3 * jnp.sqrt(N) - 0.01 * N * jnp.sum(N),
        games.LinearCost(0.2),
        np.ones(5),
        6,
        0.05,
    )
    for game in (examples.contribution_game(5, most=6), plain):
        start = np.linspace(1, 6, 5)
        run = fs.solve(
            problem, fs.IncentFedAvg(game, 0.1, 0.7, start=start), rounds=40, precision=precision
        )
        with jax.enable_x64(precision == "float64"):
            placed = jax.tree.map(
                lambda leaf: jnp.asarray(leaf, precision) if eqx.is_array_like(leaf) else leaf, game
            )
            begin = placed.project(jnp.asarray(start, precision))
            step_size = jnp.asarray(0.7, precision)
            expected = eqx.filter_jit(projected_gradient)(placed, begin, step_size, 40)
        assert run.history["participation"].shape == (40, 5)
        np.testing.assert_array_equal(run.history["participation"], expected)
        N = run.history["participation"]
        np.testing.assert_allclose(
            run.history["weights"], N / N.sum(axis=1, keepdims=True), rtol=1e-6
        )
        assert len(np.unique(N, axis=0)) > 5


def test_participation_follows_numpy():
    game = examples.contribution_game(5, most=6)
    run = fs.solve(mean_problem(), fs.IncentFedAvg(game, 0.1, 0.7), rounds=60, precision="float64")
    N, own = np.full(5, 4.0), (np.asarray(game.payoff.distributions) ** 2).sum(axis=1)
    for row in run.history["participation"]:
        N = np.clip(N - 0.7 * (game.cost.rate - own + 0.1 * N), 2, 6)
        np.testing.assert_allclose(row, N, rtol=1e-13)
    np.testing.assert_allclose(N, game.equilibrium(), rtol=0.02)


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


@pytest.mark.parametrize(("clients", "batch_size"), [(4, None), (4, 2), (5, 2)])
def test_equal_fixed_contributions_are_fedavg(clients, batch_size):
    """Without a choice, and all samples in use: to the bit for four clients, as products with 1/4
    are exact, however the compiler fuses them. (Clients carry a mask, as ragged ones do.)"""
    rng = np.random.default_rng(3)
    problem = fs.Problem(
        lambda w, data: 0.5 * jnp.mean(jnp.sum((data["points"] - w) ** 2, axis=1)),
        fs.stack_clients([{"points": rng.standard_normal((6, 3)) + i} for i in range(clients)]),
        np.zeros(3),
        batch_size=batch_size,
    )
    game = fs.Game(None, games.LinearCost(0.3), np.full(clients, 6.0), 6.0)
    options = {"local_steps": 3}
    if clients == 4:  # Top-K of numbers that differ by rounding may be others
        options |= {"uplink": fs.TopK(0.4), "downlink": fs.TopK(0.6)}
    ours = fs.solve(problem, fs.IncentFedAvg(game, 0.1, 1.0, **options), rounds=30, seed=4)
    fedavg = fs.solve(problem, fs.FedAvg(0.1, **options), rounds=30, seed=4)
    close = 0 if clients == 4 else 1e-6
    objective = ours.history["objective"]
    np.testing.assert_allclose(objective, fedavg.history["objective"], rtol=close)
    np.testing.assert_allclose(ours.params, fedavg.params, rtol=close)


def test_the_model_converges_to_the_minimiser_at_the_equilibrium():
    """min Σ p_i(N*) f_i by CVXPY, and not min (1/m) Σ f_i. A client's samples are all the same, so
    that f_i is known exactly whatever subset is drawn."""
    rng = np.random.default_rng(5)
    A, y = rng.standard_normal((6, 4, 3)), rng.standard_normal((6, 4)) * 2
    problem = fs.Problem(
        lambda w, data: 0.5 * jnp.mean((data["A"] @ w - data["y"]) ** 2),
        {"A": np.repeat(A[:, None], 8, axis=1), "y": np.repeat(y[:, None], 8, axis=1)},
        np.zeros(3),
    )
    game = examples.contribution_game()
    run = fs.solve(problem, fs.IncentFedAvg(game, 0.2, 2.0), rounds=1500, precision="float64")

    def minimiser(p):
        w = cp.Variable(3)
        parts = [p[i] * cp.sum_squares(A[i] @ w - y[i]) / 8 for i in range(6)]
        cp.Problem(cp.Minimize(sum(parts))).solve(solver=cp.CLARABEL)
        return w.value

    best = game.equilibrium()
    np.testing.assert_allclose(run.params, minimiser(best / best.sum()), atol=1e-5)
    assert np.abs(run.params - minimiser(np.full(6, 1 / 6))).max() > 0.02


def test_random_subsets_converge_on_average_with_a_diminishing_step():
    """f_i seen through random subsets and minibatches: the minimum is Σ p_i(N*) · mean of i."""
    problem = mean_problem(clients=6, samples=8, batch_size=2)
    game = examples.contribution_game()
    algorithm = fs.IncentFedAvg(game, fs.Diminishing(0.8, 0.7), 2.0, local_steps=2)
    run = fs.solve(problem, algorithm, rounds=20_000, evaluate_every=20_000)
    best = game.equilibrium()
    means = np.asarray(problem.samples.values["points"]).mean(axis=1)
    np.testing.assert_allclose(run.params, best / best.sum() @ means, atol=0.03)


def test_a_subset_has_exactly_so_many_distinct_samples():
    """f = w[s] for sample s: one full step moves w by 1/⌈N⌉ at the samples that were looked at."""
    problem = fs.Problem(
        lambda w, data: jnp.mean(w[data["s"]]), {"s": np.arange(50)[None]}, np.zeros(50)
    )
    game = fs.Game(None, lambda N: 0.05 * (N - 7.3) ** 2, np.asarray([1.0]), 50.0)
    algorithm = fs.IncentFedAvg(game, 1.0, 1.0, start=[48.5])
    seen, N, state = [], 48.5, State.start(problem.on_device(), algorithm, jax.random.key(0))
    step = eqx.filter_jit(lambda state: Simulation(problem.on_device(), state).play(algorithm))
    for _ in range(20):
        after, info = step(state)
        used = np.asarray(state.w - after.w)
        looked = used > 1e-3
        assert looked.sum() == np.ceil(np.float32(N))
        np.testing.assert_allclose(used[looked], 1 / np.ceil(N), rtol=1e-4)
        seen.append(looked)
        N, state = float(info["participation"][0]), after
    assert np.ceil(N) < 15
    assert not np.array_equal(seen[-1], seen[-2])  # drawn anew
    assert np.any(seen[-5:], axis=0).sum() > 20


@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize("ragged", [False, True])
def test_nothing_outside_the_subset_is_ever_touched(batch_size, ragged):
    """A round with everything else set to NaN is the same, to the bit."""
    rng = np.random.default_rng(6)
    sizes = [9, 6, 8] if ragged else [9, 9, 9]
    clients = fs.stack_clients(
        [{"inputs": rng.standard_normal((k, 2)), "targets": rng.standard_normal(k)} for k in sizes]
    )
    if not ragged:
        del clients["mask"]
    problem = fs.Problem(
        examples.quadratic, clients, np.zeros(2), batch_size=batch_size
    ).on_device()
    game = fs.Game(None, games.LinearCost(0.1), np.ones(3), np.asarray(sizes, float))
    algorithm = fs.IncentFedAvg(game, 0.1, 1.0, local_steps=4, start=[4.2, 2.0, 7.9])
    state = State.start(problem, algorithm, jax.random.key(7))
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(7), 0), 1)  # round, exchange

    def keep(index, samples, count):
        own = jax.random.fold_in(jax.random.fold_in(key, index), SUBSET)
        return samples.subset(own, count)

    chosen = jax.vmap(keep)(jnp.arange(3), problem.samples, jnp.asarray([5, 2, 8]))
    values = {name: np.array(leaf) for name, leaf in problem.samples.values.items()}
    for i, count in enumerate([5, 2, 8]):
        inside = np.unique(np.asarray(chosen.order[i]))
        assert len(inside) == count == np.asarray(chosen.mask[i]).sum()
        assert inside.max() < sizes[i]
        outside = np.setdiff1d(np.arange(9), inside)
        for leaf in values.values():
            leaf[i, outside] = np.nan
    poisoned = eqx.tree_at(
        lambda p: p.samples,
        problem,
        Samples(jax.tree.map(jnp.asarray, values), problem.samples.mask),
    )
    play = eqx.filter_jit(lambda problem: Simulation(problem, state).play(algorithm)[0].w)
    clean = play(problem)
    assert np.isfinite(clean).all()
    assert np.any(clean != 0)
    np.testing.assert_array_equal(clean, play(poisoned))


@pytest.mark.slow
def test_subsets_of_several_sets_keep_their_proportions():
    data = fs.stack_clients(
        [{"a": np.arange(12.0), "b": np.arange(4.0)}, {"a": np.arange(8.0), "b": np.arange(4.0)}]
    )
    samples = Samples({"a": data["a"], "b": data["b"]}, data["mask"])
    one = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), samples)
    some = one.subset(jax.random.key(0), 8).gathered()
    assert int(some.mask["a"].sum()) == 6
    assert int(some.mask["b"].sum()) == 2
    least = one.subset(jax.random.key(0), 1).gathered()
    assert int(least.mask["b"].sum()) == 1
    again = one.subset(jax.random.key(0), 8).subset(jax.random.key(1), 4).gathered()
    assert set(np.asarray(again.values["a"])) <= set(np.asarray(some.values["a"]))


def test_a_client_that_does_not_answer_keeps_its_contribution():
    game = examples.contribution_game(5, most=6)
    own = (np.asarray(game.payoff.distributions) ** 2).sum(axis=1)

    def sometimes(round, exchange, clients):
        return (round + jnp.asarray(clients)) % 3 != 0

    for algorithm in (
        fs.IncentFedAvg(game, 0.1, 0.7),
        fs.FedAvg(0.1, weighting=fs.Strategic(game, 0.7)),
    ):
        run = fs.solve(
            mean_problem(), algorithm, rounds=30, arrivals=sometimes, precision="float64"
        )
        N = np.full(5, 4.0)
        for round, row in enumerate(run.history["participation"]):
            moved = np.clip(N - 0.7 * (game.cost.rate - own + 0.1 * N), 2, 6)
            N = np.where((round + np.arange(5)) % 3 != 0, moved, N)
            np.testing.assert_allclose(row, N, rtol=1e-12)
    up = fs.solve(mean_problem(), fs.IncentFedAvg(game, 0.1, 0.7, availability=0.5), rounds=30)
    stays = np.diff(up.history["participation"], axis=0) == 0
    assert (stays | up.history["available"][1:]).all()


WANTED = np.asarray([6.0, 2.0, 1.0])  # N*
CENTRES = np.asarray([0.0, 1.0, 4.0])
MEANS = {"weighted": WANTED @ CENTRES / 9, "plain": CENTRES.mean()}


def one_number(constraint=None):
    """f_i = ½(w − CENTRES_i)², the same at all of a client's samples."""
    return fs.Problem(
        lambda w, data: 0.5 * jnp.mean((data["x"] - w[0]) ** 2),
        {"x": np.repeat(CENTRES[:, None], 8, axis=1)},
        np.asarray([3.0]),
        constraint,
    )


FIXED = fs.Strategic(fs.Game(None, None, WANTED, WANTED), 1.0)
MOVING = fs.Strategic(settling_game(WANTED), 1.0, start=[1.0, 4.0, 8.0])


@pytest.mark.parametrize(
    "algorithm",
    [
        fs.FedAvg(0.2, weighting=MOVING),
        fs.FedSGM(0.2, weighting=MOVING),
        fs.FedAlt(0.2, weighting=MOVING),
        fs.FedSim(0.2, weighting=FIXED),
        fs.FedADMM(penalty="theory", weighting=MOVING),
        fs.FedADMM(penalty="theory", weighting=MOVING, participants=2, uplink=fs.Float16()),
        fs.FedADMM(penalty="theory", weighting=FIXED, dual_start="gradient", availability=0.6),
        fs.PPBC(0.2, weighting=FIXED),
        fs.PPBC(fs.Diminishing(0.3, 0.8), weighting=MOVING, select_round=fs.participation.Top(1)),
    ],
    ids=lambda a: f"{type(a).__name__} {'moving' if a.weighting is MOVING else 'fixed'}",
)
def test_strategic_clients_are_minimised_for_by_their_weights(algorithm):
    """Σ p_i(N*) f_i has its minimum at 2/3, the plain mean at 5/3."""
    rounds = 4000 if isinstance(algorithm, fs.PPBC) else 400
    run = fs.solve(one_number(), algorithm, rounds, evaluate_every=rounds)
    close = 0.03 if isinstance(algorithm, fs.PPBC) else 1e-4
    np.testing.assert_allclose(run.params, MEANS["weighted"], atol=close)
    assert abs(run.params[0] - MEANS["plain"]) > 0.9
    np.testing.assert_allclose(run.history["participation"][-1], WANTED, rtol=1e-4)
    each = 0.5 * (CENTRES - run.params) ** 2
    np.testing.assert_allclose(run.history["objective"][-1], each.mean(), rtol=1e-5)
    np.testing.assert_allclose(run.history["weighted_objective"][-1], WANTED @ each / 9, rtol=1e-4)


def test_strategic_clients_are_constrained_by_their_weights():
    """g_i = w − CENTRES_i/2 ≤ 0 on average is w ≤ 1/3 by weights, where Σ p_i f_i is least on the
    boundary, and w ≤ 5/6 plainly, where it is least inside."""
    problem = one_number(lambda w, data: w[0] - jnp.mean(data["x"]) / 2)
    for algorithm in (
        fs.FedSGM(fs.Diminishing(0.3, 0.7), weighting=FIXED),
        fs.IPPConEx(0.2, weighting=FIXED),
    ):
        run = fs.solve(problem, algorithm, 3000, evaluate_every=3000)
        np.testing.assert_allclose(run.params, MEANS["weighted"] / 2, atol=5e-3)
        np.testing.assert_allclose(run.history["weighted_constraint"][-1], 0, atol=5e-3)
        np.testing.assert_allclose(run.history["constraint"][-1], -0.5, atol=5e-3)


@pytest.mark.parametrize("kind", [fs.SCAFFOLD, fs.FedDyn, fs.FedAvgAll])
def test_what_minimises_the_plain_mean_refuses_strategic_clients(kind):
    with pytest.raises(fs.InvalidInput, match="minimises the plain mean over clients"):
        fs.solve(one_number(), kind(0.1, weighting=FIXED), 1)


def test_the_weighted_objective_is_that_of_the_clients_weights():
    """Also streamed; `test_conformance` and `test_flare_protocol` compare other runtimes."""
    game = examples.contribution_game(5, most=6)
    algorithm = fs.IncentFedAvg(game, 0.1, 0.7, participants=3)
    problem = mean_problem()
    run = fs.solve(problem, algorithm, 2)
    points = np.asarray(problem.samples.values["points"])
    f = 0.5 * ((points - run.params) ** 2).sum(axis=2).mean(axis=1)
    weights, said = run.history["weights"][-1], run.history["weighted_objective"]
    np.testing.assert_allclose(said[-1], weights @ f, rtol=1e-5)
    streamed = fs.solve(problem, algorithm, 2, runtime="streamed")
    np.testing.assert_allclose(streamed.history["weighted_objective"], said, rtol=1e-6)
    assert len(run.plot().axes) == 3  # with the plain objective and the contributions


def test_strategic_gives_any_algorithm_weights_and_subsets():
    game = examples.contribution_game(5, most=6)
    problem = mean_problem()
    options = {"rounds": 300, "precision": "float64"}
    incent = fs.solve(problem, fs.IncentFedAvg(game, 0.05, 0.7), **options)
    for algorithm in (
        fs.FedAvg(0.05, weighting=fs.Strategic(game, 0.7)),
        fs.FedSGM(0.05, weighting=fs.Strategic(game, 0.7)),
    ):
        run = fs.solve(problem, algorithm, **options)
        np.testing.assert_array_equal(run.history["participation"], incent.history["participation"])
        assert not np.array_equal(run.params, fs.solve(problem, fs.FedAvg(0.05), **options).params)
    whole = fs.Game(None, None, np.full(5, 6.0), 6.0)
    same = fs.solve(problem, fs.FedAvg(0.05, weighting=fs.Strategic(whole, 1.0)), **options)
    plain = fs.solve(problem, fs.FedAvg(0.05), **options)
    np.testing.assert_allclose(same.params, plain.params, rtol=1e-12)


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


def test_what_the_theorems_leave_open_is_said():
    given = {"smoothness": 1.0, "noise": 0.5, "dissimilarity": (1.0, 2.0), "distance": 1.0}
    game = settling_game([5.0, 5.0, 5.0])
    late = fs.theory.incentfedavg(game, np.full(3, 2.0), 100, local_steps=2, **given)
    assert any("after round r̂ = " in sentence for sentence in late.unchecked)
    assert any("on one subset" in sentence for sentence in late.unchecked)
    once = fs.theory.incentfedavg(game, np.full(3, 5.0), 100, local_steps=1, **given)
    assert not any("r̂" in sentence or "subset" in sentence for sentence in once.unchecked)


def a_game(lower=2.0, upper=6.0, clients=5):
    return fs.Game(None, games.LinearCost(0.1), np.full(clients, lower), upper, 0.1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fs.IncentFedAvg(a_game(clients=4), 0.1, 1.0), "4 players, the problem 5 clients"),
        (
            lambda: fs.IncentFedAvg(a_game(upper=7), 0.1, 1.0),
            "Client 0 has 6 samples, and",
        ),
        (lambda: fs.IncentFedAvg(a_game(lower=0), 0.1, 1.0), "a sample at least"),
        (lambda: fs.IncentFedAvg(a_game(), 0.1, 0.0), "game_step_size must be positive"),
        (lambda: fs.IncentFedAvg(a_game(), 0.1, 1.0, start=[1.0, 2.0]), "start must be one number"),
        (lambda: fs.IncentFedAvg(a_game(), 0.1, 1.0, weighting="DataSize"), "give it no weighting"),
        (lambda: fs.FedAvg(0.1, weighting=fs.Strategic(a_game(upper=7), 1.0)), "has 6 samples"),
    ],
)
def test_bad_input_gets_a_sentence(make, message):
    with pytest.raises(fs.InvalidInput, match=message):
        fs.solve(mean_problem(), make(), rounds=1)


def test_theory_refuses_what_it_cannot_promise():
    given = {"local_steps": 1, "smoothness": 1.0, "noise": 1.0, "dissimilarity": (1.0, 2.0)}
    with pytest.raises(fs.InvalidInput, match="one of them"):
        fs.theory.incentfedavg(a_game(), np.full(5, 3.0), 10, **given)
    with pytest.raises(fs.InvalidInput, match="too few"):
        fs.theory.incentfedavg(a_game(), np.full(5, 6.0), 1, gap=1.0, **given)
    with pytest.raises(fs.InvalidInput, match="is above"):
        fs.theory.participation(a_game(), np.full(5, 3.0), 11.0)
    with pytest.raises(fs.InvalidInput, match="strongly monotone"):
        fs.theory.participation(fs.Game(None, games.LinearCost(1.0), np.ones(2), 2.0), [1.0, 1.0])
