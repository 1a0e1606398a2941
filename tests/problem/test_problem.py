"""Problems: structured parameters, Equinox models, metrics."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import fedsolve as fs
from fedsolve.federation.state import State
from fedsolve.runtimes.evaluation import evaluate
from tests.support import examples
from tests.support.clients import ragged


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


def test_state_is_made_for_every_client():
    problem = examples.least_squares().on_device()
    state = State.start(problem, fs.FedSGM(0.1, uplink=fs.TopK(0.5)), jax.random.key(0))
    assert state.clients.shape == (6, 5)


def test_columns_that_are_meant_are_accepted():
    """A column times a row of as many weights as there are samples is no pair of samples."""
    rng = np.random.default_rng(0)
    data = {"x": rng.standard_normal((3, 8, 1)), "y": rng.standard_normal((3, 8))}

    def wide(params, data):  # 8 hidden units, and 8 samples
        hidden = jnp.tanh(data["x"] * params["first"] + params["bias"])
        return jnp.mean((hidden @ params["second"] - data["y"]) ** 2)

    def column(w, data):
        return jnp.mean((data["x"] @ w - data["y"][:, None]) ** 2)

    weights = {"first": np.ones(8), "bias": np.zeros(8), "second": np.ones(8)}
    assert fs.Problem(wide, data, weights).dimension == 24
    assert fs.Problem(column, data, np.zeros((1, 1))).dimension == 1
