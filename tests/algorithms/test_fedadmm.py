"""FedADMM against an independent transcription, its fixed point, its lemma and its claims."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from tests.support import examples, oracles


def problem_of(clients=6, seed=0, **options):
    return examples.least_squares(clients=clients, seed=seed, constrained=False, **options)


def facts(problem):
    """∇f_i, r_i, and the least-squares optimum."""
    data = problem.samples.values
    inputs, targets = data["inputs"], data["targets"]
    gradients = [client[0] for client in examples.least_squares_clients(problem)]
    lipschitz = np.asarray([np.linalg.eigvalsh(a.T @ a / len(a))[-1] for a in inputs])
    optimum = np.linalg.lstsq(np.concatenate(inputs), np.concatenate(targets), rcond=None)[0]
    return gradients, lipschitz, optimum


def clients_of(run):
    return jax.tree.map(np.asarray, run.state.clients)


def augmented(problem, penalties, decay, w, local, pi, eps):
    """(22): the augmented Lagrangian with the accuracies still to come."""
    data = problem.samples.values
    total = 0.0
    for i, (a, y) in enumerate(zip(data["inputs"], data["targets"], strict=True)):
        gap = local[i] - w
        total += 0.5 * np.mean((a @ local[i] - y) ** 2) / len(local)
        total += gap @ pi[i] + penalties[i] / 2 * gap @ gap
        total += 29 * eps[i] / ((1 - decay) * penalties[i])
    return total


@pytest.mark.parametrize(
    ("participants", "k0", "accuracy", "most", "dual_start"),
    [(3, 4, None, 3, "zero"), (3, 3, 1e-6, 5, "gradient"), (2, 5, 1e-4, 1, "zero")],
)
def test_follows_the_transcription(participants, k0, accuracy, most, dual_start):
    """Every averaged w, and every client's dual, z and accuracy at the end."""
    problem = problem_of()
    gradients, lipschitz, _ = facts(problem)
    algorithm = fs.FedADMM(
        participants=participants,
        local_iterations=k0,
        accuracy=accuracy,
        inner_steps=most,
        lipschitz=lipschitz,
        dual_start=dual_start,
    )
    run = fs.solve(problem, algorithm, rounds=25, seed=2, precision="float64")
    penalties = 0.2 * lipschitz / 6
    path, steps = oracles.fedadmm(
        gradients,
        np.zeros(5),
        run.history["cohort"],
        k0,
        lipschitz,
        penalties,
        k0**2 if accuracy is None else accuracy,
        most=most,
        dual_start=dual_start,
    )
    data = problem.samples.values
    f = [
        0.5 * np.mean((np.einsum("nsd,d->ns", data["inputs"], w) - data["targets"]) ** 2)
        for w in path
    ]
    np.testing.assert_allclose(run.history["objective"], f, atol=1e-10)
    np.testing.assert_allclose(run.params, path[-1], atol=1e-10)
    _, local, pi, eps = steps[-1]
    np.testing.assert_allclose(run.state.clients.dual, pi, atol=1e-10)
    np.testing.assert_allclose(run.state.clients.accuracy, eps, rtol=1e-10)
    np.testing.assert_allclose(run.state.clients.sent, penalties[:, None] * local + pi, atol=1e-10)


@pytest.fixture(scope="module")
def solved():
    """Scheme 4.1's safest case: everyone, σ_i = 3 α_i r_i, residuals as small as asked for."""
    problem = problem_of()
    _, lipschitz, _ = facts(problem)
    algorithm = fs.FedADMM(
        local_iterations=3,
        penalty="theory",
        lipschitz=lipschitz,
        inner_steps=None,
        dual_start="gradient",
        accuracy=1.0,
        decay=0.9,
    )
    stop = fs.Stationary(below=1e-20)
    return problem, fs.solve(problem, algorithm, rounds=2000, precision="float64", stop=stop)


def test_the_fixed_point_is_the_least_squares_optimum(solved):
    problem, run = solved
    _, _, optimum = facts(problem)
    assert run.rounds < 2000
    assert run.history["squared_gradient"][-1] < 1e-20
    np.testing.assert_allclose(run.params, optimum, atol=1e-8)
    # at the optimum (19): α_i ∇f_i(w) + π_i = 0, so the duals add up to 0
    np.testing.assert_allclose(clients_of(run).dual.sum(axis=0), 0, atol=1e-9)


def test_lemma_4_1_the_augmented_lagrangian_decreases():
    """Every iteration, by at least Σ σ_i/10 (‖Δw‖² + ‖Δw_i‖²), where σ_i = 3 α_i r_i."""
    problem, decay = problem_of(), 0.9
    _, lipschitz, _ = facts(problem)
    penalties = 3 * lipschitz / 6
    algorithm = fs.FedADMM(
        participants=3,
        local_iterations=1,
        penalty="theory",
        lipschitz=lipschitz,
        inner_steps=None,
        dual_start="gradient",
        accuracy=1e-3,
        decay=decay,
    )
    before, state = None, None
    for rounds in range(1, 41):
        run = fs.solve(problem, algorithm, rounds, precision="float64", resume=state, seed=1)
        clients = clients_of(run)
        # L^k is at w^{τ_k}, from which the round's iteration went
        w = np.asarray(state.w) if state is not None else None
        state = run.state
        if w is None:
            continue
        local = (clients.sent - clients.dual) / penalties[:, None]
        now = augmented(problem, penalties, decay, w, local, clients.dual, clients.accuracy)
        if before is not None:
            moved = np.sum((w - before[1]) ** 2) + np.sum((local - before[2]) ** 2, axis=1)
            assert before[0] - now >= penalties @ moved / 10 - 1e-12
        before = now, w, local


@pytest.mark.parametrize("k0", [2, 5])
def test_lemma_4_1_holds_in_every_local_iteration(k0):
    """As above, with several iterations a round, of the transcription, which our runs follow."""
    problem, decay = problem_of(), 0.9
    gradients, lipschitz, _ = facts(problem)
    penalties = 3 * lipschitz / 6
    draw = np.random.default_rng(0)
    cohorts = [draw.choice(6, 3, replace=False) for _ in range(20)]
    options = {"decay": decay, "most": 500, "dual_start": "gradient"}
    _, steps = oracles.fedadmm(
        gradients, np.zeros(5), cohorts, k0, lipschitz, penalties, 1e-3, **options
    )
    values = [augmented(problem, penalties, decay, *step) for step in steps[1:]]
    for (w, local, *_), (w_, local_, *_), value, value_ in zip(
        steps[1:], steps[2:], values, values[1:], strict=False
    ):
        moved = np.sum((w_ - w) ** 2) + np.sum((local_ - local) ** 2, axis=1)
        assert value - value_ >= penalties @ moved / 10 - 1e-12
    assert values[0] - values[-1] > 1e-4


def test_absent_clients_count_with_their_last_z_and_power_iteration_finds_r():
    problem = problem_of()
    _, lipschitz, _ = facts(problem)
    algorithm = fs.FedADMM(participants=2, local_iterations=2, power_steps=100)
    run = fs.solve(problem, algorithm, rounds=7, precision="float64")
    clients = clients_of(run)
    everyone = clients.sent.sum(axis=0) / clients.penalty.sum()
    np.testing.assert_allclose(run.params, everyone, atol=1e-12)
    last = run.history["cohort"][-1]
    some = clients.sent[last].sum(axis=0) / clients.penalty[last].sum()
    assert np.abs(run.params - some).max() > 1e-3
    np.testing.assert_allclose(6 * clients.smoothness, lipschitz, rtol=1e-3)
    np.testing.assert_allclose(30 * clients.penalty, lipschitz, rtol=1e-3)


def averagings(participants, k0):
    """The median over three instances of Example 5.1, until (30) holds."""
    algorithm = fs.FedADMM(participants=participants, local_iterations=k0)
    rounds = []
    for seed in range(3):
        problem = fs.problems.linear_regression(clients=40, size=40, seed=seed)
        stop = fs.Stationary(fs.theory.fedadmm.tolerance(problem))
        rounds.append(fs.solve(problem, algorithm, 500, stop=stop).rounds)
    return np.median(rounds)


@pytest.mark.slow
def test_averagings_fall_with_local_iterations_until_they_level_off_and_with_participants():
    """The paper's Figures 2 and 3, small; k_0 is a number, so it compiles once for all of them."""
    one, five, many, more = (averagings(20, k0) for k0 in (1, 5, 15, 30))
    assert one > 2 * five > 2 * many
    assert abs(more - many) <= 2
    assert averagings(6, 5) > 2 * five > 3 * averagings(36, 5)


def test_a_compressed_uplink_reaches_the_same_point():
    problem = problem_of()
    _, _, optimum = facts(problem)
    settings = {"participants": 4, "local_iterations": 3, "penalty": 1.0}
    algorithm = fs.FedADMM(**settings, uplink=fs.TopK(0.4))
    run = fs.solve(problem, algorithm, rounds=600, precision="float64")
    np.testing.assert_allclose(run.params, optimum, atol=1e-6)
    full = fs.solve(problem, fs.FedADMM(**settings), rounds=600, precision="float64")
    assert run.history["bytes_up"][-1] < full.history["bytes_up"][-1]


def test_a_client_that_was_not_heard_at_first_joins_later():
    problem = problem_of()
    _, _, optimum = facts(problem)

    def late(round, exchange, clients):
        return (jnp.asarray(clients) != 2) | (round > 3)

    algorithm = fs.FedADMM(local_iterations=3, penalty=1.0, dual_start="gradient")
    run = fs.solve(problem, algorithm, rounds=500, arrivals=late, precision="float64")
    np.testing.assert_allclose(run.params, optimum, atol=1e-8)
    np.testing.assert_allclose(run.state.server.penalties, clients_of(run).penalty.sum())


def test_a_new_weight_scales_what_a_client_sends_and_nothing_else():
    """Divided by α_i the local problem is the same, and so is the number of inner steps."""
    problem = problem_of().on_device()
    own = jax.tree.map(lambda leaf: leaf[0], problem.samples)
    client = problem.client(own, problem.start(), jnp.int32(0), jnp.int32(0), jax.random.key(0))
    algorithm = fs.FedADMM(penalty=1.0, local_iterations=3, accuracy=1e-3)
    begun, _ = algorithm.begin(client, algorithm.init_client(client.w), jnp.asarray(0.5))
    one, other = (
        algorithm.improve(client, begun, jnp.full(6, share))[1][0].dense() for share in (0.5, 0.005)
    )
    assert np.linalg.norm(one) > 0.01
    np.testing.assert_allclose(0.01 * one, other, rtol=1e-5)


def test_a_neural_network_with_minibatches():
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((8, 40, 2)).astype(np.float32)
    labels = (inputs.prod(axis=2) > 0).astype(np.float32)  # not linearly separable

    def loss(net, data):
        logits = jax.vmap(net)(data["inputs"])[:, 0]
        return jnp.mean(jax.nn.softplus(logits) - data["labels"] * logits)

    net = eqx.nn.MLP(2, 1, 16, 1, jax.nn.tanh, key=jax.random.key(0))
    problem = fs.Problem(loss, {"inputs": inputs, "labels": labels}, net, batch_size=20)
    algorithm = fs.FedADMM(
        participants=4, local_iterations=3, penalty=1.0, lipschitz=4.0, accuracy=1e-6
    )
    run = fs.solve(problem, algorithm, rounds=400)
    assert run.history["objective"][0] > 0.6
    assert run.history["objective"][-20:].mean() < 0.4


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"penalty": "big"}, "penalty must be a number"),
        ({"penalty": -1.0}, "penalty must be positive"),
        ({"lipschitz": [1.0, 2.0]}, "lipschitz has 2 numbers, but there are 6 clients"),
        ({"dual_start": "ones"}, 'dual_start must be "zero" or "gradient"'),
        ({"uplink": fs.RandK(0.5)}, "must be contractive"),
        ({"participants": 9}, "participants is 9, but there are only 6"),
    ],
)
def test_bad_settings_raise(options, sentence):
    with pytest.raises(fs.InvalidInput, match=sentence):
        fs.solve(problem_of(), fs.FedADMM(**options), rounds=1)


def test_scheme_4_1_and_the_first_answers():
    """Everyone within s_0 = 3 rounds; and of 4 drawn only the first 2 count."""
    problem = problem_of()
    _, _, optimum = facts(problem)
    parts = fs.participation
    cyclic = fs.FedADMM(local_iterations=3, penalty=1.0, selection=parts.Cyclic(2))
    run = fs.solve(problem, cyclic, rounds=600, precision="float64")
    assert fs.theory.fedadmm.waiting(run.history["cohort"], 6) == 3
    np.testing.assert_allclose(run.params, optimum, atol=1e-6)
    first = parts.FirstAnswers(2)
    late = fs.FedADMM(participants=4, local_iterations=3, penalty=1.0, availability=first)
    run = fs.solve(problem, late, rounds=600, precision="float64")
    assert (run.history["available"].sum(axis=1) == 2).all()
    np.testing.assert_allclose(run.params, optimum, atol=1e-6)
