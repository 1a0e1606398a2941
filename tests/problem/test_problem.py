"""Problems: structures, ragged clients, minibatches, constraints, domains."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from fedsolve.federation.replies import Replies
from fedsolve.federation.state import State
from fedsolve.problem.client import Client
from fedsolve.problem.samples import Samples
from fedsolve.problems.losses import logistic
from fedsolve.runtimes.evaluation import evaluate
from tests.support import examples

SIZES = (3, 7, 1, 5)


def ragged(seed=0, size=4):
    rng = np.random.default_rng(seed)
    return [{"x": rng.standard_normal((n, size)), "y": rng.standard_normal(n)} for n in SIZES]


def mean_loss(w, data):
    return jnp.mean((data["x"] @ w - data["y"]) ** 2) + 0.1 * jnp.sum(w**2)


def masked_loss(w, data):
    loss = (data["x"] @ w - data["y"]) ** 2
    return jnp.mean(loss, where=data["mask"]) + 0.1 * jnp.sum(w**2)


def client(problem, index, key=0):
    placed = problem.on_device()
    samples = jax.tree.map(lambda leaf: leaf[index], placed.samples)
    w = placed.start()
    return Client(placed, samples, w, jnp.int32(0), jnp.int32(index), jax.random.key(key))


@pytest.mark.parametrize("loss", [mean_loss, masked_loss])
def test_ragged_clients_have_their_exact_values_and_gradients(loss):
    clients = ragged()
    problem = fs.Problem(loss, fs.stack_clients(clients), np.zeros(4))
    w = np.arange(4.0) / 3
    with jax.enable_x64(True):
        placed = problem.on_device()
        for index, data in enumerate(clients):
            own = client(problem, index)
            own.w = placed.start()
            expected = jax.value_and_grad(mean_loss)(jnp.asarray(w), data)
            np.testing.assert_allclose(own.objective(jnp.asarray(w)), expected[0], rtol=1e-12)
            np.testing.assert_allclose(own.grad(jnp.asarray(w)), expected[1], rtol=1e-12)
            assert own.size == SIZES[index]


def test_stacking_pads_with_real_samples_and_masks_them():
    stacked = fs.stack_clients(ragged())
    assert stacked["x"].shape == (4, 7, 4)
    np.testing.assert_array_equal(stacked["mask"].sum(axis=1), SIZES)
    np.testing.assert_array_equal(stacked["x"][2], np.repeat(ragged()[2]["x"], 7, axis=0))


def test_tuples_and_arrays_can_be_ragged_too():
    clients = [(data["x"], data["y"]) for data in ragged()]
    problem = fs.Problem(
        lambda w, data: jnp.mean((data[0] @ w - data[1]) ** 2),
        fs.stack_clients(clients),
        np.ones(4),
    )
    got = evaluate(problem.on_device(), jnp.ones(4))["objective"]
    expected = np.mean([np.mean((x @ np.ones(4) - y) ** 2) for x, y in clients])
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_sets_of_samples_can_be_ragged_separately():
    rng = np.random.default_rng(0)
    sizes = [(2, 5), (4, 1), (3, 3)]
    clients = [
        {"a": rng.standard_normal((m, 3)), "b": rng.standard_normal((n, 3))} for m, n in sizes
    ]
    problem = fs.Problem(
        lambda w, data: jnp.mean(jax.nn.softplus(data["a"] @ w)),
        fs.stack_clients(clients),
        np.ones(3),
        constraint=lambda w, data: jnp.mean(jax.nn.softplus(-data["b"] @ w)),
    )
    found = evaluate(problem.on_device(), jnp.ones(3))
    f = np.mean([np.mean(np.logaddexp(0, c["a"].sum(axis=1))) for c in clients])
    g = np.mean([np.mean(np.logaddexp(0, -c["b"].sum(axis=1))) for c in clients])
    np.testing.assert_allclose(found["objective"], f, rtol=1e-5)
    np.testing.assert_allclose(found["constraint"], g, rtol=1e-5)
    assert client(problem, 0).size == 7


def test_a_loss_that_is_no_average_must_look_at_the_mask():
    stacked = fs.stack_clients(ragged())
    with pytest.raises(fs.InvalidInput, match="not an average over samples"):
        fs.Problem(lambda w, data: jnp.sum((data["x"] @ w) ** 2), stacked, np.zeros(4))


def test_minibatch_gradients_are_unbiased_and_never_touch_padding():
    problem = fs.Problem(mean_loss, fs.stack_clients(ragged()), np.zeros(4), batch_size=2)
    own = client(problem, 0)
    w = jnp.arange(4.0) / 3
    keys = jax.random.split(jax.random.key(1), 20_000)
    gradients = jax.vmap(lambda key: own.grad(w, key))(keys)
    expected = jax.grad(mean_loss)(w, ragged()[0])
    error = gradients.std(axis=0) / np.sqrt(len(keys))
    assert np.all(np.abs(gradients.mean(axis=0) - expected) < 5 * error)
    drawn = jax.vmap(lambda key: own._samples.draw(key, 2).values["y"])(keys)
    assert set(np.unique(drawn)) == set(np.float32(ragged()[0]["y"]))


def test_minibatch_rows_belong_together():
    x = np.arange(40.0).reshape(2, 20, 1)
    samples = jax.tree.map(lambda leaf: jnp.asarray(leaf[1]), Samples({"x": x, "y": x[..., 0] * 3}))
    batch = samples.draw(jax.random.key(0), 6)
    np.testing.assert_array_equal(batch.values["x"][:, 0] * 3, batch.values["y"])


def test_stochastic_runs_draw_new_samples_in_every_step():
    data = examples.least_squares().samples.values
    problem = fs.Problem(
        examples.quadratic,
        {k: data[k] for k in ("inputs", "targets")},
        np.zeros(5),
        batch_size=2,
    )
    own = client(problem, 0)
    steps = [jax.random.fold_in(own.key, step) for step in range(3)]
    gradients = [np.asarray(own.grad(own.w, key)) for key in steps]
    assert not np.allclose(gradients[0], gradients[1])
    run = fs.solve(problem, fs.FedSGM(0.02, local_steps=3), rounds=300, evaluate_every=100)
    full = fs.solve(
        fs.Problem(examples.quadratic, problem.samples.values, np.zeros(5)),
        fs.FedSGM(0.02, local_steps=3),
        rounds=300,
        evaluate_every=100,
    )
    assert run.history["objective"][-1] < 1.2 * full.history["objective"][-1]


# Structures


def network(params, data):
    hidden = jnp.tanh(data["inputs"] @ params["first"]["weight"] + params["first"]["bias"])
    return jnp.mean((hidden @ params["second"] - data["targets"]) ** 2)


def test_parameters_keep_their_structure_and_algorithms_never_see_it():
    data = examples.least_squares().samples.values
    rng = np.random.default_rng(0)
    params = {
        "first": {"weight": rng.standard_normal((5, 3)), "bias": np.zeros(3)},
        "second": rng.standard_normal(3),
    }
    problem = fs.Problem(network, {k: data[k] for k in ("inputs", "targets")}, params)
    assert problem.size == 21
    run = fs.solve(problem, fs.FedSGM(0.01, local_steps=2), rounds=100)
    assert jax.tree.structure(run.params) == jax.tree.structure(params)
    assert run.params["first"]["weight"].shape == (5, 3)
    assert run.history["objective"][-1] < 0.7 * run.history["objective"][0]
    placed = problem.on_device()
    round_trip = placed.layout.unravel(placed.start())
    for a, b in zip(jax.tree.leaves(round_trip), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_an_equinox_model_can_be_the_parameters():
    data = examples.least_squares().samples.values
    model = eqx.nn.MLP(5, "scalar", 8, 2, activation=jax.nn.tanh, key=jax.random.key(0))

    def loss(model, data):
        return jnp.mean((jax.vmap(model)(data["inputs"]) - data["targets"]) ** 2)

    problem = fs.Problem(loss, {k: data[k] for k in ("inputs", "targets")}, model)
    assert problem.size == sum(x.size for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
    run = fs.solve(problem, fs.FedSGM(0.02, local_steps=2, uplink=fs.TopK(0.3)), rounds=60)
    assert run.params.activation is model.activation
    assert run.history["objective"][-1] < 0.5 * run.history["objective"][0]
    np.testing.assert_allclose(
        np.mean([loss(run.params, {k: v[i] for k, v in data.items()}) for i in range(6)]),
        run.history["objective"][-1],
        rtol=1e-5,
    )


def test_an_equinox_model_on_ragged_clients():
    model = eqx.nn.MLP(4, "scalar", 3, 1, activation=jax.nn.tanh, key=jax.random.key(0))

    def loss(model, data):
        return jnp.mean((jax.vmap(model)(data["x"]) - data["y"]) ** 2)

    problem = fs.Problem(loss, fs.stack_clients(ragged()), model)
    got = evaluate(problem.on_device(), problem.start())["objective"]
    np.testing.assert_allclose(got, np.mean([loss(model, data) for data in ragged()]), rtol=1e-5)


def test_metrics_are_followed_on_test_data():
    data = examples.least_squares().samples.values
    problem = fs.Problem(
        examples.quadratic,
        {k: data[k] for k in ("inputs", "targets")},
        np.zeros(5),
        test=np.ones(5),
        metrics={"distance": lambda w, test: jnp.linalg.norm(w - test)},
    )
    run = fs.solve(problem, fs.FedSGM(0.05), rounds=5)
    np.testing.assert_allclose(
        run.history["distance"][-1], np.linalg.norm(run.params - 1), rtol=1e-5
    )


def test_neyman_pearson_is_the_papers_task():
    problem = fs.problems.neyman_pearson(clients=20)
    majority, minority = problem.samples.values["majority"], problem.samples.values["minority"]
    assert majority.shape == (20, 14, 30)  # 285 and 170 training samples of each class
    assert minority.shape == (20, 8, 30)
    every = np.concatenate([majority.reshape(-1, 30), minority.reshape(-1, 30)])
    assert np.abs(every.mean(axis=0)).max() < 0.1
    assert np.abs(every.std(axis=0) - 1).max() < 0.1
    assert len(problem.test["majority"]) + len(problem.test["minority"]) == 114
    again = fs.problems.neyman_pearson(clients=20)
    np.testing.assert_array_equal(again.samples.values["minority"], minority)
    other = fs.problems.neyman_pearson(clients=20, seed=1)
    assert not np.array_equal(other.samples.values["minority"], minority)


# Constraints


def replies_of(constraint, problem, w):
    placed = problem.on_device()
    measured = [client(problem, i).measure(w) for i in range(problem.n)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *measured)
    return placed.constraint.combine(Replies(stacked, jnp.ones(problem.n, bool)))


def gap_statistics(w, data):
    """Counts and sums of a rate in two groups, as demographic parity needs them."""
    rate, group = jax.nn.sigmoid(data["x"] @ w), data["group"]
    real = data["mask"]
    return {
        "in": jnp.sum(rate * group * real),
        "in_count": jnp.sum(group * real),
        "out": jnp.sum(rate * (1 - group) * real),
        "out_count": jnp.sum((1 - group) * real),
    }


def gap(sums):
    return jnp.abs(
        sums["in"] / jnp.maximum(sums["in_count"], 1)
        - sums["out"] / jnp.maximum(sums["out_count"], 1)
    )


def fair_problem(**options):
    rng = np.random.default_rng(3)
    clients = [
        {
            "x": rng.standard_normal((n, 3)),
            "y": rng.standard_normal(n),
            "group": rng.integers(0, 2, n).astype(float),
        }
        for n in (6, 9, 4)
    ]
    problem = fs.Problem(
        lambda w, data: jnp.mean((data["x"] @ w - data["y"]) ** 2, where=data["mask"]),
        fs.stack_clients(clients),
        np.ones(3),
        constraint=fs.Statistics(gap_statistics, gap),
        **options,
    )
    return problem, clients


def test_statistics_constraint_is_the_gap_over_everybody():
    problem, clients = fair_problem()
    w = jnp.asarray([0.5, -1.0, 2.0])
    value, focus = replies_of(problem.constraint, problem, w)
    x = np.concatenate([c["x"] for c in clients])
    group = np.concatenate([c["group"] for c in clients])
    rate = 1 / (1 + np.exp(-(x @ np.asarray(w))))
    np.testing.assert_allclose(value, abs(rate[group == 1].mean() - rate[group == 0].mean()), 1e-5)
    assert focus is None
    own = clients[1]
    rate = 1 / (1 + np.exp(-(own["x"] @ np.asarray(w))))
    local = abs(rate[own["group"] == 1].mean() - rate[own["group"] == 0].mean())
    np.testing.assert_allclose(client(problem, 1).constraint(w), local, rtol=1e-5)


def test_statistics_of_a_minibatch_stand_for_the_whole_client():
    problem, clients = fair_problem(batch_size=3)
    own = client(problem, 1)
    keys = jax.random.split(jax.random.key(0), 4000)
    counts = jax.vmap(lambda key: own.measure(own.w, key)["in_count"])(keys)
    error = counts.std() / np.sqrt(len(keys))
    assert abs(counts.mean() - clients[1]["group"].sum()) < 5 * error


def test_fedsgm_holds_a_statistics_constraint():
    """The group is visible in the data and in the target, so the best model has a wide gap."""
    rng = np.random.default_rng(0)
    group = rng.integers(0, 2, (6, 40)).astype(float)
    x = rng.standard_normal((6, 40, 3)) + 2 * group[..., None] * np.asarray([1, 0, 0])
    data = {"x": x, "y": x[..., 0], "group": group, "mask": np.ones((6, 40), bool)}

    def problem(constraint):
        return fs.Problem(
            lambda w, data: jnp.mean((data["x"] @ w - data["y"]) ** 2),
            data,
            np.zeros(3),
            constraint,
        )

    held = fs.solve(
        problem(fs.Statistics(gap_statistics, gap)), fs.FedSGM(0.02, 0.1, participants=3), 500
    )
    free = fs.solve(problem(None), fs.FedSGM(0.02, participants=3), 500)
    stats = gap_statistics(
        jnp.asarray(free.params), {k: v.reshape(240, *v.shape[2:]) for k, v in data.items()}
    )
    assert gap(stats) > 0.25
    assert held.history["constraint"][-100:].mean() < 0.15
    assert held.history["objective"][-1] > free.history["objective"][-1] + 0.1


def first_part(w, data):
    return data["x"][0] @ w - 1.0


def second_part(w, data):
    return 2.0 - data["x"][0] @ w


def test_maximum_is_the_largest_of_the_global_constraints_and_clients_descend_that_one():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 1, 3))
    problem = fs.Problem(
        lambda w, data: jnp.sum(w**2),
        {"x": x},
        np.ones(3),
        constraint=fs.Maximum(first_part, fs.Mean(second_part)),
    )
    for w in (np.asarray([1.0, 2.0, 3.0]), -np.asarray([1.0, 2.0, 3.0])):
        value, focus = replies_of(problem.constraint, problem, jnp.asarray(w))
        parts = [np.mean(x[:, 0] @ w - 1.0), np.mean(2.0 - x[:, 0] @ w)]
        np.testing.assert_allclose(value, max(parts), rtol=1e-5)
        gradient = client(problem, 2).constraint_grad(jnp.asarray(w), focus)
        sign = 1 if np.argmax(parts) == 0 else -1
        np.testing.assert_allclose(gradient, sign * x[2, 0], rtol=1e-5)


def test_fedsgm_satisfies_a_maximum_of_constraints():
    """minimise ‖w − c‖² with w_0 ≤ 1 and w_1 ≤ −1: the optimum is the corner."""
    problem = fs.Problem(
        lambda w, data: jnp.sum((w - data["c"]) ** 2),
        {"c": np.tile([3.0, 2.0, 1.0], (4, 1))},
        np.zeros(3),
        constraint=fs.Maximum(lambda w, data: w[0] - 1, lambda w, data: w[1] + 1),
    )
    run = fs.solve(problem, fs.FedSGM(fs.Diminishing(0.5)), rounds=3000, evaluate_every=3000)
    np.testing.assert_allclose(run.average, [1, -1, 1], atol=0.1)


# Domains


@pytest.mark.parametrize(
    ("domain", "inside"),
    [
        (fs.Ball(1.5, 0.2), lambda x: np.linalg.norm(x - 0.2) <= 1.5 + 1e-9),
        (fs.Box(-0.5, 0.7), lambda x: (x >= -0.5).all() and (x <= 0.7).all()),
        (fs.Simplex(2.0), lambda x: (x >= 0).all() and abs(x.sum() - 2) < 1e-9),
        (fs.WholeSpace(), lambda x: True),
    ],
)
def test_projections_are_the_nearest_points(domain, inside):
    """z = Π(x) if and only if ⟨x − z, y − z⟩ ≤ 0 for all y inside; and Π is the identity inside."""
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        points = [np.asarray(domain.project(jnp.asarray(p))) for p in rng.normal(0, 3, (60, 5))]
        for x in rng.normal(0, 3, (20, 5)):
            z = np.asarray(domain.project(jnp.asarray(x)))
            assert inside(z)
            assert max((x - z) @ (y - z) for y in points) < 1e-8
            np.testing.assert_allclose(domain.project(jnp.asarray(z)), z, atol=1e-9)


def test_a_users_projection_sees_the_users_structure():
    problem = fs.Problem(
        lambda p, data: jnp.sum((p["a"] - data["t"]) ** 2) + jnp.sum((p["b"] - 5) ** 2),
        {"t": np.full((3, 2), 4.0)},
        {"a": np.zeros(2), "b": np.zeros(1)},
        domain=lambda p: {"a": jnp.clip(p["a"], 0, 1), "b": p["b"]},
    )
    run = fs.solve(problem, fs.FedSGM(0.1), rounds=100)
    np.testing.assert_allclose(run.params["a"], 1, atol=1e-6)
    np.testing.assert_allclose(run.params["b"], 5, atol=1e-4)


def test_state_is_made_for_every_client():
    problem = examples.least_squares().on_device()
    state = State.start(problem, fs.FedSGM(0.1, uplink=fs.TopK(0.5)), jax.random.key(0))
    assert state.clients.shape == (6, 5)


def test_the_logistic_loss_is_exact_far_out_and_at_zero():
    z = jnp.asarray([-80.0, -20.0, -1.0, 0.0, 1.0, 20.0, 80.0])
    np.testing.assert_allclose(logistic(z), np.logaddexp(0, np.float64(z)), rtol=1e-6)
    slopes = jax.vmap(jax.grad(logistic))(z)
    np.testing.assert_allclose(slopes, 1 / (1 + np.exp(-np.float64(z))), rtol=1e-6)
