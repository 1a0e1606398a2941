"""Clients whose samples are pooled into one client."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from fedsolve.runtimes.evaluation import evaluate
from tests.support import examples


def test_pooled_clients_are_one():
    problem = fs.problems.neyman_pearson(clients=20)
    whole = problem.pooled()
    assert whole.n == 1
    assert whole.samples.values["majority"].shape == (1, 280, 30)
    w = 0.1 * jnp.ones(30)
    one, many = (evaluate(p.on_device(), w) for p in (whole, problem))
    for name in ("objective", "constraint"):  # clients are of one size
        assert float(one[name]) == pytest.approx(float(many[name]), rel=1e-6)


def test_pooling_leaves_padding_behind():
    rng = np.random.default_rng(0)
    clients = [{"x": rng.standard_normal((n, 2)), "y": rng.standard_normal(n)} for n in (3, 5)]
    problem = fs.Problem(
        lambda w, data: np.float32(0.5) * ((data["x"] @ w - data["y"]) ** 2).mean(),
        fs.stack_clients(clients),
        np.ones(2),
    )
    whole = problem.pooled()
    np.testing.assert_array_equal(
        whole.samples.values["x"][0], np.concatenate([c["x"] for c in clients])
    )
    assert whole.samples.mask.shape == (1, 8)
    assert whole.samples.mask.all()
    found = evaluate(whole.on_device(), jnp.ones(2))["objective"]
    residual = np.concatenate([c["x"].sum(axis=1) - c["y"] for c in clients])
    assert float(found) == pytest.approx(0.5 * np.mean(residual**2), rel=1e-6)


def test_one_value_a_client_cannot_be_pooled():
    with pytest.raises(fs.InvalidInput, match="Only samples can be pooled"):
        examples.least_squares().pooled()
