"""Skewness of gradients, and quantities that are followed during a run."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from tests.support import examples


def test_skewness_is_that_of_the_dense_matrices():
    problem = examples.least_squares(clients=7)
    rng = np.random.default_rng(0)
    w = rng.standard_normal(problem.size)
    with jax.enable_x64(True):
        placed = problem.on_device(jnp.float64)
        found = fs.theory.skewness(placed, jnp.asarray(w))
        one = [jax.tree.map(lambda leaf, j=j: leaf[j], placed.samples) for j in range(problem.n)]
        a = np.stack([jax.grad(placed.objective)(jnp.asarray(w), s) for s in one])
        g = placed.constraint.function
        b = np.stack([jax.grad(g)(jnp.asarray(w), s) for s in one])
        found = jax.tree.map(np.asarray, found)
    local = np.mean([np.outer(p, q) - np.outer(q, p) for p, q in zip(a, b, strict=True)], axis=0)
    x, y = a.mean(axis=0), b.mean(axis=0)
    total = np.outer(x, y) - np.outer(y, x)
    v_f = np.mean(np.sum((a - x) ** 2, axis=1))
    v_g = np.mean(np.sum((b - y) ** 2, axis=1))
    np.testing.assert_allclose(found.total, np.linalg.norm(total))
    np.testing.assert_allclose(found.local, np.linalg.norm(local))
    np.testing.assert_allclose(found.difference, np.linalg.norm(local - total))
    np.testing.assert_allclose(
        (found.objective_variance, found.constraint_variance, found.bound),
        (v_f, v_g, np.sqrt(2 * v_f * v_g)),
    )
    assert 0 < found.difference <= found.bound


def test_skewness_makes_nothing_larger_than_the_gradients():
    """Neither d × d nor n × n: 3 clients with 50,000 parameters, 50,000 clients with 3."""
    for n, d in ((3, 50_000), (50_000, 3)):
        problem = fs.Problem(
            lambda w, data: data["a"] @ w,
            {"a": np.ones((n, d), np.float32), "b": np.ones((n, d), np.float32)},
            np.zeros(d, np.float32),
            lambda w, data: data["b"] @ w,
        )
        made = eqx.filter_jit(fs.theory.skewness).lower(problem.on_device(), jnp.zeros(d)).compile()
        memory = made.compiled.memory_analysis()
        assert memory.temp_size_in_bytes < 60 * n * d


def test_followed_quantities_are_in_the_history(problems):
    problem, _ = problems[0]

    def length(problem, params):
        return jnp.linalg.norm(params)

    follow = {"skewness": fs.theory.skewness, "length": length, "w": lambda problem, params: params}
    algorithm = fs.FedSGM(0.1, 0.05, participants=4)
    run = fs.solve(problem, algorithm, 6, evaluate_every=2, follow=follow)
    np.testing.assert_allclose(run.history["w"][-1], run.params)
    np.testing.assert_allclose(run.history["length"][-1], np.linalg.norm(run.params), rtol=1e-6)
    again = fs.theory.skewness(problem, run.params)
    for name in ("total", "local", "difference", "bound"):
        expected = getattr(again, name)
        np.testing.assert_allclose(run.history[f"skewness.{name}"][-1], expected, rtol=1e-4)
    slow = fs.solve(
        problem, algorithm, 2, evaluate_every=2, follow={"length": length}, runtime="debug"
    )
    np.testing.assert_allclose(slow.history["length"], run.history["length"][:1], rtol=1e-5)
    swept = fs.sweep(problem, algorithm, 6, seeds=(0,), evaluate_every=2, follow={"length": length})
    np.testing.assert_allclose(swept[0].history["length"], run.history["length"], rtol=1e-5)
    with pytest.raises(fs.InvalidInput, match="the problem has none"):
        fs.theory.skewness(examples.least_squares(constrained=False), np.zeros(3))
