"""Clients' samples: different sizes, padding, masks and minibatches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from fedsolve.problem.samples import Samples
from fedsolve.runtimes.evaluation import evaluate
from tests.support import examples
from tests.support.clients import SIZES, client, mean_loss, ragged


def masked_loss(w, data):
    loss = (data["x"] @ w - data["y"]) ** 2
    return jnp.mean(loss, where=data["mask"]) + 0.1 * jnp.sum(w**2)


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
