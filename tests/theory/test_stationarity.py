"""Weakly convex problems: distance to near-stationary points."""

import cvxpy as cp
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from tests.support.logistic import RADIUS, SIZE, random_problem


def test_weakly_convex_runs_keep_the_bound_on_stationarity():
    """Theorem 10 where it says something: ‖w_t − ŵ(w_t)‖, on average over the feasible rounds, is
    below a bound that X's diameter and the start are above. f_j(w) = a_j·w − (ρ/2)‖w‖² on the unit
    disc, ρ-weakly convex and no more, and g_j affine: every constant is known."""
    rng, rho, rounds = np.random.default_rng(0), 0.25, 40_000
    turn = rng.uniform(-0.3, 0.3, (2, 16)) + np.asarray([[np.pi], [np.arctan2(0.6, 0.8)]])
    a, b = np.stack([np.cos(turn), np.sin(turn)], axis=-1)
    problem = fs.Problem(
        lambda w, data: 0.75 * data["a"] @ w - rho / 2 * w @ w,
        {"a": a, "b": b},
        np.asarray([0.2, -0.5]),
        lambda w, data: data["b"] @ w - 0.6,
        fs.Ball(1.0),
    )
    inside = -0.99 * np.linalg.norm(b.mean(axis=0)) - 0.6
    known = {"lipschitz": 1.0, "rho": rho, "rho_hat": 1.5, "feasible_value": inside}
    algorithm = fs.FedSGM.from_theory(problem, rounds, **known)
    promise = algorithm.guarantee
    assert promise.is_stationarity

    def away(w):
        found = fs.theory.stationarity(problem, w, 1.5, rho)
        assert found.accuracy <= 1e-4
        return found.distance

    assert away(problem.params) > promise.bound
    assert promise.bound < promise.distance == 2.0
    run = fs.solve(
        problem,
        algorithm,
        rounds,
        evaluate_every=1000,
        follow={"w": lambda problem, params: params},
        precision="float64",
    )
    feasible = run.history["w"][run.history["constraint"] <= promise.tolerance]
    assert len(feasible) > 10
    assert np.mean([away(w) for w in feasible[::4]]) <= promise.bound
    with pytest.raises(fs.InvalidInput, match="not about w̄"):
        run.certificate()


def test_stationarity_against_cvxpy_and_at_a_solution():
    """In a convex problem ŵ(w) is a proximal point that CVXPY can find, and w* is its own."""
    problem = random_problem(1)
    rng = np.random.default_rng(2)
    w = rng.standard_normal(SIZE)
    found = fs.theory.stationarity(problem, w, rho_hat=0.8, rho=0.0, accuracy=1e-5)
    x, z = (problem.samples.values[k].reshape(-1, SIZE) for k in ("x", "z"))
    y = cp.Variable(SIZE)
    f, g = cp.sum(cp.logistic(x @ y)) / len(x), cp.sum(cp.logistic(-z @ y)) / len(z) - 0.6
    near = cp.Minimize(f + 0.4 * cp.sum_squares(y - w))
    cp.Problem(near, [g <= 0, cp.norm(y) <= RADIUS]).solve(solver=cp.CLARABEL)
    np.testing.assert_allclose(found.nearest, y.value, atol=1e-4)
    np.testing.assert_allclose(found.distance, np.linalg.norm(w - y.value), atol=1e-4)
    best = fs.theory.optimum(problem, 1e-9)
    still = fs.theory.stationarity(problem, best.point, rho_hat=0.8, rho=0.0, accuracy=1e-4)
    assert still.distance < 1e-3
    with pytest.raises(fs.InvalidInput, match="rho_hat must exceed rho = 2"):
        fs.theory.stationarity(problem, w, rho_hat=1.0, rho=2.0)
    with pytest.raises(fs.InvalidInput, match="params has 3 numbers, and the problem 6"):
        fs.theory.stationarity(problem, np.zeros(3), rho_hat=1.0)


def test_phase_retrieval_is_weakly_convex_and_no_more():
    """f + (ρ/2)‖·‖² is convex for the ρ of the docstring, and f is not; g is, and g(0) < 0."""
    problem = fs.problems.phase_retrieval(clients=4, size=3, samples=20)
    data = problem.samples.values
    weighted = np.einsum("nsi,ns,nsj->nij", data["x"], data["y"], data["x"]) / 20
    rho = np.linalg.eigvalsh(weighted).max()
    one = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), problem.samples)
    bend = jax.jit(jax.hessian(problem.objective))
    for w in 1.5 * np.random.default_rng(0).standard_normal((20, 3)):
        assert np.linalg.eigvalsh(bend(jnp.asarray(w, jnp.float32), one)).min() > -rho - 1e-4
    assert np.linalg.eigvalsh(bend(jnp.zeros(3), one)).min() < -0.1
    assert problem.constraint.function(jnp.zeros(3), one) == -0.5
