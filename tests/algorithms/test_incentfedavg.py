"""IncentFedAvg against its game, FedAvg and true optima; which samples a client may use."""

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
from tests.support import examples
from tests.support.strategic import a_game, mean_problem


def projected_gradient(game, start, step_size, rounds):
    """N ← Π[N − γ̃F(N)], plainly."""

    def step(N, _):
        N = game.project(N - step_size * game.pseudogradient(N))
        return N, N

    return jax.lax.scan(step, start, length=rounds)[1]


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


def test_a_subset_has_the_requested_number_of_distinct_samples():
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


def test_the_weighted_objective_is_that_of_the_clients_weights():
    """Also streamed; `test_conformance` and `flare/test_protocol` compare other runtimes."""
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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fs.IncentFedAvg(a_game(clients=4), 0.1, 1.0), "4 players, the problem 5 clients"),
        (
            lambda: fs.IncentFedAvg(a_game(upper=7), 0.1, 1.0),
            "Client 0 has 6 samples, and",
        ),
        (lambda: fs.IncentFedAvg(a_game(lower=0), 0.1, 1.0), "at least one sample"),
        (lambda: fs.IncentFedAvg(a_game(), 0.1, 0.0), "game_step_size must be positive"),
        (lambda: fs.IncentFedAvg(a_game(), 0.1, 1.0, start=[1.0, 2.0]), "start must be one number"),
        (lambda: fs.IncentFedAvg(a_game(), 0.1, 1.0, weighting="DataSize"), "give it no weighting"),
        (lambda: fs.FedAvg(0.1, weighting=fs.Strategic(a_game(upper=7), 1.0)), "has 6 samples"),
    ],
)
def test_bad_input_raises(make, message):
    with pytest.raises(fs.InvalidInput, match=message):
        fs.solve(mean_problem(), make(), rounds=1)
