"""Projections onto domains."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs


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
