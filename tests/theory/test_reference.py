"""Reference solutions against closed forms and CVXPY."""

import cvxpy as cp
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs


def test_a_problem_may_know_its_optimum():
    """min a·w under b·w ≤ c and ‖w‖ ≤ r has a closed form, in the plane of a and b."""
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((2, 4, 5))
    mean_a, mean_b = a.mean(axis=0), b.mean(axis=0)
    across = mean_a - mean_a @ mean_b / (mean_b @ mean_b) * mean_b
    level, radius = -0.3, 1.5
    best = level * mean_a @ mean_b / (mean_b @ mean_b) - np.linalg.norm(across) * np.sqrt(
        radius**2 - level**2 / (mean_b @ mean_b)
    )
    problem = fs.Problem(
        lambda w, data: data["a"] @ w,
        {"a": a, "b": b},
        np.zeros(5),
        lambda w, data: data["b"] @ w - level,
        fs.Ball(radius),
        optimum=best,
    )
    np.testing.assert_allclose(fs.theory.optimum(problem, 1e-7).value, best, atol=1e-7)
    exact = float(np.linalg.norm(np.concatenate([a, b]), axis=1).max())
    seen = fs.theory.estimate(problem, points=8)
    np.testing.assert_allclose(seen.lipschitz, exact)  # gradients are the same everywhere
    assert (seen.distance, seen.diameter) == (radius, 2 * radius)
    algorithm = fs.FedSGM.from_theory(problem, 500, points=8)
    found = fs.solve(problem, algorithm, 500).certificate()
    assert found.source == "the problem's own"
    assert found.optimum == best
    assert found.holds
    moved = problem.with_clients({"a": a + 1, "b": b})
    assert moved.optimum is None  # other clients have another optimum
    with pytest.raises(fs.InvalidInput, match="optimum is the least value"):
        fs.Problem(lambda w, data: w.sum(), {"a": a}, np.zeros(5), optimum=np.nan)


@pytest.mark.parametrize("domain", [fs.Box(-0.5, 1.0), fs.Simplex(1.0), fs.WholeSpace()])
def test_reference_solutions_in_every_domain(domain):
    """Least squares with a linear constraint, against CVXPY."""
    rng = np.random.default_rng(5)
    a, y, b = rng.standard_normal((3, 8, 4)), rng.standard_normal((3, 8)), rng.random((3, 4))
    problem = fs.Problem(
        lambda w, data: jnp.mean((data["a"] @ w - data["y"]) ** 2),
        {"a": a, "y": y, "b": b},
        np.full(4, 0.25),
        lambda w, data: data["b"] @ w - 0.5,
        domain,
    )
    w = cp.Variable(4)
    limits = [b.mean(axis=0) @ w <= 0.5]
    if isinstance(domain, fs.Box):
        limits += [w >= -0.5, w <= 1]
    if isinstance(domain, fs.Simplex):
        limits += [w >= 0, cp.sum(w) == 1]
    loss = cp.sum_squares(a.reshape(-1, 4) @ w - y.reshape(-1)) / 24
    program = cp.Problem(cp.Minimize(loss), limits)
    program.solve(solver=cp.CLARABEL)
    distance = 10.0 if isinstance(domain, fs.WholeSpace) else None
    found = fs.theory.optimum(problem, 1e-6, distance=distance)
    np.testing.assert_allclose(found.value, program.value, atol=2e-6)
    assert found.accuracy <= 1e-6


def test_the_sizes_of_domains():
    """`farthest`, `diameter` and `lowest` against points drawn from the sets."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal(4))
    for domain in (fs.Ball(1.5, 0.3), fs.Box(-0.5, 1.0), fs.Simplex(2.0)):
        far = 30 * rng.standard_normal((4000, 4))
        points = np.asarray(jax.vmap(domain.project)(jnp.asarray(far)))
        distances = np.linalg.norm(points - np.asarray(x), axis=1)
        assert 0.97 * domain.farthest(x) < distances.max() <= domain.farthest(x) + 1e-5
        across = np.linalg.norm(points[:2000, None] - points[None, 2000:2200], axis=-1)
        assert 0.95 * domain.diameter(4) < across.max() <= domain.diameter(4) + 1e-5
        lowest = (points @ np.asarray(x)).min()
        assert domain.lowest(x) - 1e-5 <= lowest < domain.lowest(x) + 0.1
    assert fs.WholeSpace().farthest(x) == np.inf
