"""FedSGM against independent transcriptions, its special cases, its invariants and true optima."""

import cvxpy as cp
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from tests.support import examples, oracles
from tests.support.trajectories import trajectory

ROUNDS = 200


@pytest.mark.parametrize("switching", ["hard", "soft"])
@pytest.mark.parametrize("participants", [None, 10])
@pytest.mark.parametrize("fraction", [1.0, 0.1])
def test_neyman_pearson_follows_the_transcription(switching, participants, fraction):
    """The paper's task, trajectory by trajectory, with compression both ways and sampling."""
    problem = fs.problems.neyman_pearson(clients=20)
    compressor = fs.Identity() if fraction == 1 else fs.TopK(fraction)
    algorithm = fs.FedSGM(
        step_size=0.3,
        tolerance=0.05,
        switching=fs.Hard() if switching == "hard" else fs.Soft(40),
        participants=participants,
        local_steps=5,
        uplink=compressor,
        downlink=compressor,
    )
    run = fs.solve(problem, algorithm, rounds=ROUNDS, seed=1, precision="float64")
    data = problem.samples.values
    clients = oracles.neyman_pearson_clients(data["majority"], data["minority"])
    path, average, (moved, sent, residual) = oracles.fedsgm(
        clients,
        np.zeros(30),
        run.history["cohort"],
        step_size=0.3,
        tolerance=0.05,
        switch=oracles.hard if switching == "hard" else oracles.soft(40),
        local_steps=5,
        uplink=lambda v: oracles.top_k(v, fraction),
        downlink=lambda v: oracles.top_k(v, fraction),
    )
    f = [np.mean([np.mean(np.logaddexp(0, a @ w)) for a in data["majority"]]) for w in path[1:]]
    g = [np.mean([client[1](w) for client in clients]) for w in path[1:]]
    np.testing.assert_allclose(run.params, path[-1], atol=1e-8)
    np.testing.assert_allclose(run.average, average, atol=1e-8)
    np.testing.assert_allclose(run.history["objective"], f, atol=1e-8)
    np.testing.assert_allclose(run.history["constraint"], g, atol=1e-8)
    if fraction < 1:
        np.testing.assert_allclose(run.state.clients, residual, atol=1e-7)
        # conservation: Σ Δ_j = Σ v_j + e_j, for every client
        np.testing.assert_allclose(
            np.asarray(sent) + np.asarray(run.state.clients), moved, atol=1e-7
        )


def test_every_iterate_follows_the_transcription():
    problem = examples.least_squares()
    algorithm = fs.FedSGM(
        0.02, 0.1, fs.Soft(3), local_steps=3, uplink=fs.TopK(0.4), downlink=fs.TopK(0.4)
    )
    path, state = trajectory(problem, algorithm, ROUNDS)
    expected, _, (_, _, residual) = oracles.fedsgm(
        examples.least_squares_clients(problem),
        np.zeros(5),
        [range(6)] * ROUNDS,
        step_size=0.02,
        tolerance=0.1,
        switch=oracles.soft(3),
        local_steps=3,
        uplink=lambda v: oracles.top_k(v, 0.4),
        downlink=lambda v: oracles.top_k(v, 0.4),
    )
    np.testing.assert_allclose(path, expected, atol=1e-9)
    np.testing.assert_allclose(state.clients, residual, atol=1e-9)


def test_projection_and_schedule_follow_the_transcription():
    problem = examples.least_squares()
    bounded = fs.Problem(
        examples.quadratic, problem.samples.values, np.zeros(5), examples.half_space, fs.Ball(0.5)
    )
    algorithm = fs.FedSGM(fs.Diminishing(0.2), 0.0, fs.Hard(), local_steps=2)
    path, _ = trajectory(bounded, algorithm, ROUNDS)

    def project(x):
        return x * min(1, 0.5 / max(np.linalg.norm(x), 1e-300))

    expected, _, _ = oracles.fedsgm(
        examples.least_squares_clients(problem),
        np.zeros(5),
        [range(6)] * ROUNDS,
        step_size=lambda t: 0.2 / np.sqrt(1 + t),
        tolerance=0.0,
        switch=oracles.hard,
        local_steps=2,
        project=project,
    )
    np.testing.assert_allclose(path, expected, atol=1e-9)
    assert np.linalg.norm(path, axis=1).max() <= 0.5 + 1e-12


# Special cases, each against a few lines of its own


def test_one_client_and_one_step_is_the_switching_gradient_method():
    problem = examples.least_squares(clients=1)
    path, _ = trajectory(problem, fs.FedSGM(0.05, 0.01), ROUNDS)
    ((grad_f, g, grad_g),) = examples.least_squares_clients(problem)
    w = np.zeros(5)
    for t in range(ROUNDS):
        np.testing.assert_allclose(path[t], w, atol=1e-10)
        w = w - 0.05 * (grad_f(w) if g(w) <= 0.01 else grad_g(w))


def test_one_client_federation_equals_centralized():
    """One client's samples split evenly over four change nothing, with one step and everyone."""
    whole = examples.least_squares(clients=1, samples=8, constrained=False)
    data = whole.samples.values
    split = fs.Problem(
        examples.quadratic,
        {"inputs": data["inputs"].reshape(4, 2, 5), "targets": data["targets"].reshape(4, 2)},
        np.zeros(5),
    )
    one, _ = trajectory(whole, fs.FedSGM(0.05), 100)
    four, _ = trajectory(split, fs.FedSGM(0.05), 100)
    np.testing.assert_allclose(one, four, atol=1e-12)


def test_without_constraint_and_compression_it_is_fedavg():
    problem = examples.least_squares(constrained=False)
    path, _ = trajectory(problem, fs.FedSGM(0.05, local_steps=4), ROUNDS)
    clients = examples.least_squares_clients(problem)
    w = np.zeros(5)
    for t in range(ROUNDS):
        np.testing.assert_allclose(path[t], w, atol=1e-10)
        ends = []
        for grad_f, _, _ in clients:
            local = w
            for _ in range(4):
                local = local - 0.05 * grad_f(local)
            ends.append(local)
        w = np.mean(ends, axis=0)


def test_without_constraint_and_one_step_it_is_ef14():
    problem = examples.least_squares(constrained=False)
    path, _ = trajectory(problem, fs.FedSGM(0.05, uplink=fs.TopK(0.2)), ROUNDS)
    clients = examples.least_squares_clients(problem)
    w, errors = np.zeros(5), np.zeros((6, 5))
    for t in range(ROUNDS):
        np.testing.assert_allclose(path[t], w, atol=1e-10)
        wanted = errors + [grad_f(w) for grad_f, _, _ in clients]
        sent = np.asarray([oracles.top_k(v, 0.2) for v in wanted])
        errors = wanted - sent
        w = w - 0.05 * sent.mean(axis=0)


def test_one_step_hard_everyone_compressed_both_ways_is_safe_ef():
    problem = examples.least_squares()
    path, _ = trajectory(
        problem, fs.FedSGM(0.05, 0.02, uplink=fs.TopK(0.4), downlink=fs.TopK(0.6)), ROUNDS
    )
    clients = examples.least_squares_clients(problem)
    w, x, errors = np.zeros(5), np.zeros(5), np.zeros((6, 5))
    for t in range(ROUNDS):
        np.testing.assert_allclose(path[t], w, atol=1e-10)
        feasible = np.mean([g(w) for _, g, _ in clients]) <= 0.02
        wanted = errors + [grad_f(w) if feasible else grad_g(w) for grad_f, _, grad_g in clients]
        sent = np.asarray([oracles.top_k(v, 0.4) for v in wanted])
        errors = wanted - sent
        x = x - 0.05 * sent.mean(axis=0)
        w = w + oracles.top_k(x - w, 0.6)


def test_unbiased_uplink_without_constraint_is_fedcom():
    """FedCOM: everyone sends an unbiased compression of its local progress; nothing is kept."""
    problem = examples.least_squares(constrained=False)
    rand_k = fs.RandK(0.4)
    path, state = trajectory(problem, fs.FedSGM(0.02, local_steps=3, uplink=rand_k), 50, seed=7)
    assert jax.tree.leaves(state.clients) == []
    clients = examples.least_squares_clients(problem)
    w = np.zeros(5)
    with jax.enable_x64(True):
        for t in range(50):
            np.testing.assert_allclose(path[t], w, atol=1e-10)
            sent = []
            for j, (grad_f, _, _) in enumerate(clients):
                local = w
                for _ in range(3):
                    local = local - 0.02 * grad_f(local)
                key = jax.random.key(7)
                for part in (t, 1, j, 3):  # round, first exchange, client, after three steps
                    key = jax.random.fold_in(key, part)
                sent.append(rand_k(jnp.asarray((w - local) / 0.02), key).dense())
            w = w - 0.02 * np.mean(sent, axis=0)


def test_soft_switching_with_a_large_beta_is_hard_switching():
    problem = examples.least_squares()
    hard, _ = trajectory(problem, fs.FedSGM(0.02, 0.1, fs.Hard(), local_steps=3), ROUNDS)
    soft, _ = trajectory(problem, fs.FedSGM(0.02, 0.1, fs.Soft(1e12), local_steps=3), ROUNDS)
    blend, _ = trajectory(problem, fs.FedSGM(0.02, 0.1, fs.Soft(2.0), local_steps=3), ROUNDS)
    np.testing.assert_allclose(hard, soft, atol=1e-12)
    assert np.abs(hard - blend).max() > 1e-3
    on_the_boundary = jnp.zeros(())
    assert fs.Hard()(on_the_boundary) == 0  # g(w) ≤ ε is feasible
    assert fs.Soft(2.0)(on_the_boundary) == 1


def test_average_is_over_feasible_rounds_and_absent_without_any():
    problem = examples.least_squares()
    path, state = trajectory(problem, fs.FedSGM(0.02, 0.0), 60)
    g = [np.mean([c[1](w) for c in examples.least_squares_clients(problem)]) for w in path[:-1]]
    feasible = np.asarray(g) <= 0
    assert 0 < feasible.sum() < 60
    np.testing.assert_allclose(state.server.average, path[:-1][feasible].mean(axis=0), atol=1e-9)

    never = fs.Problem(
        examples.quadratic, problem.samples.values, np.zeros(5), lambda w, data: 1 + 0 * w[0]
    )
    assert fs.solve(never, fs.FedSGM(0.02), rounds=5).average is None


def neyman_pearson_optimum(problem, tolerance, radius):
    data = problem.samples.values
    a, b = data["majority"].reshape(-1, 30), data["minority"].reshape(-1, 30)  # clients of one size
    w = cp.Variable(30)
    f, g = cp.sum(cp.logistic(a @ w)) / len(a), cp.sum(cp.logistic(-b @ w)) / len(b)
    program = cp.Problem(cp.Minimize(f), [g <= tolerance, cp.norm(w) <= radius])
    program.solve(solver=cp.CLARABEL)
    assert program.status == "optimal"
    return float(program.value)


@pytest.mark.parametrize("switching", [fs.Hard(), fs.Soft(5000.0)])
def test_neyman_pearson_converges_to_the_constrained_optimum(switching):
    """With a diminishing step, w̄ reaches min f subject to g ≤ ε and ‖w‖ ≤ 5, both active.

    (Soft switching settles within 1/β below the tolerance, hence the large β.)
    """
    problem = fs.problems.neyman_pearson(clients=5, radius=5.0)
    best = neyman_pearson_optimum(problem, 0.05, 5.0)
    algorithm = fs.FedSGM(fs.Diminishing(10.0), 0.05, switching)
    gaps = []
    for rounds in (1000, 10_000, 60_000):
        run = fs.solve(problem, algorithm, rounds, evaluate_every=rounds, precision="float64")
        a, b = problem.samples.values["majority"], problem.samples.values["minority"]
        f = np.mean(np.logaddexp(0, a @ run.average))
        g = np.mean(np.logaddexp(0, -(b @ run.average)))
        assert g <= 0.05 + 1e-9  # g is convex, and w̄ averages points where it is below
        gaps.append(f - best)
    assert gaps[0] > gaps[1] > gaps[2] > -1e-6
    assert gaps[2] < 0.01 * best


def test_soft_switching_violates_less_than_hard():
    """The forerunner's claim on its task: n = 10, everyone, Rand-K, E = 5, T = 100, ε = 0.1."""
    problem = fs.problems.neyman_pearson(clients=10)

    def violations(switching, seed):
        algorithm = fs.FedSGM(0.1, 0.1, switching, local_steps=5, uplink=fs.RandK(0.5))
        g = fs.solve(problem, algorithm, rounds=100, seed=seed).history["constraint"]
        first = int(np.argmax(g <= 0.1))
        assert g[first] <= 0.1
        return int(np.sum(g[first:] > 0.1))

    hard = [violations(fs.Hard(), seed) for seed in range(3)]
    soft = [violations(fs.Soft(40.0), seed) for seed in range(3)]
    assert sum(hard) >= 4 * max(sum(soft), 1)


def test_an_unbiased_downlink_raises():
    with pytest.raises(fs.InvalidInput, match="downlink must be contractive"):
        fs.FedSGM(0.1, downlink=fs.RandK(0.5))


def test_a_local_optimizer_takes_the_place_of_plain_steps():
    """SGD with η and a server that moves all the way is FedSGM; Adam is not, and keeps to g ≤ ε."""
    problem = examples.least_squares()
    options = {"participants": 4, "local_steps": 3, "uplink": fs.TopK(0.6)}
    plain = fs.FedSGM(0.05, 0.1, fs.Soft(5.0), **options)
    same = fs.FedSGM(1.0, 0.1, fs.Soft(5.0), local_optimizer=fs.SGD(0.05), **options)
    settings = {"rounds": 40, "evaluate_every": 5, "precision": "float64"}
    one, other = (fs.solve(problem, algorithm, **settings) for algorithm in (plain, same))
    np.testing.assert_allclose(other.params, one.params, rtol=1e-10)
    np.testing.assert_allclose(other.average, one.average, rtol=1e-10)
    np.testing.assert_allclose(other.history["switch"], one.history["switch"], atol=1e-10)
    adam = fs.FedSGM(1.0, 0.1, local_steps=3, local_optimizer=fs.Adam(0.01))
    run = fs.solve(problem, adam, 600, evaluate_every=600)
    start = 0.5 * np.mean(problem.samples.values["targets"] ** 2)
    assert run.history["constraint"][-1] < 0.2
    assert run.history["objective"][-1] < 0.8 * start
