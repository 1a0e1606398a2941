"""The Neyman-Pearson problem and its losses."""

import jax
import jax.numpy as jnp
import numpy as np

import fedsolve as fs
from fedsolve.problems.losses import logistic


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


def test_the_logistic_loss_is_exact_far_out_and_at_zero():
    z = jnp.asarray([-80.0, -20.0, -1.0, 0.0, 1.0, 20.0, 80.0])
    np.testing.assert_allclose(logistic(z), np.logaddexp(0, np.float64(z)), rtol=1e-6)
    slopes = jax.vmap(jax.grad(logistic))(z)
    np.testing.assert_allclose(slopes, 1 / (1 + np.exp(-np.float64(z))), rtol=1e-6)
