"""The safe bound on Lipschitz constants is never below them; power iteration is never above."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from fedsolve.algorithms.curvature import bounded, estimated, least_steps, margin, random_direction
from tests.support import examples


def spectra(kind, size, rng):
    """Eigenvalues of which the largest is hard to find: close to others, or one among many."""
    if kind == "close":
        return 1 - rng.uniform(0, 0.02, size)
    if kind == "alone":
        return np.append(rng.uniform(0, 0.9, size - 1), 1.0)
    if kind == "indefinite":
        return rng.choice([-1.0, 1.0], size) * rng.uniform(0, 1, size)
    if kind == "pair":
        return np.concatenate([[1.0, -1.0], rng.uniform(-0.98, 0.98, size - 2)])
    return rng.exponential(1.0, size) ** 3


@pytest.mark.parametrize("precision", [np.float32, np.float64])
@pytest.mark.parametrize("kind", ["close", "alone", "indefinite", "pair", "heavy"])
def test_the_bound_is_never_below_the_true_value(kind, precision):
    """2100 matrices in all. Diagonal ones do: the law of a random start is the same in every
    orthonormal basis."""
    rng = np.random.default_rng(0)
    with jax.enable_x64(precision == np.float64):
        for size in (5, 40, 300):
            values = np.stack([spectra(kind, size, rng) for _ in range(70)]).astype(precision)
            keys = jax.random.split(jax.random.key(size), len(values))

            def both(key, row):
                start = random_direction(key, row)
                return bounded(lambda v: row * v, start, 30), estimated(
                    lambda v: row * v, start, 30
                )

            safe, rough = jax.jit(jax.vmap(both))(keys, jnp.asarray(values))
            true = np.abs(values).max(axis=1)
            assert (safe >= true).all()
            assert (safe <= 1.002 * margin(size, 30) * true).all()
            assert (rough <= true * (1 + 1e-5)).all()


def test_power_iteration_can_miss_what_the_bound_covers():
    """Why the theorem's penalties need it."""
    row = jnp.append(jnp.linspace(0, 0.97, 999), 1.0)
    start = random_direction(jax.random.key(0), row)
    assert estimated(lambda v: row * v, start, 30) < 0.98
    assert 1 <= bounded(lambda v: row * v, start, 30) < 1.11


def test_margins():
    """By hand: e = (ln(1.648 √n/1e-9)/(2j − 1))²."""
    e = (np.log(1.648 * np.sqrt(1000) * 1e9) / 59) ** 2
    assert margin(1000, 30) == pytest.approx(1 / np.sqrt(1 - e))
    assert margin(30, 30) == 1
    assert np.isfinite(margin(1000, least_steps(1000)))
    assert margin(1000, least_steps(1000) - 1) == np.inf


def test_theory_penalties_suffice():
    problem = fs.problems.linear_regression(clients=8, size=60, smallest=30, largest=90)
    values, mask = problem.samples.values, np.asarray(problem.samples.mask)
    rows = [np.asarray(a, float)[on] for a, on in zip(values["inputs"], mask, strict=True)]
    lipschitz = np.asarray([np.linalg.norm(a, 2) ** 2 / len(a) for a in rows])
    run = fs.solve(problem, fs.FedADMM(penalty="theory"), rounds=1)
    penalties = np.asarray(run.state.clients.penalty)
    assert fs.theory.fedadmm.penalties_suffice(penalties, lipschitz)
    assert (penalties < 1.3 * 3 * lipschitz / 8).all()
    given = fs.solve(problem, fs.FedADMM(penalty="theory", lipschitz=lipschitz), rounds=1)
    np.testing.assert_allclose(given.state.clients.penalty, 3 * lipschitz / 8, rtol=1e-6)
    with pytest.raises(fs.InvalidInput, match="power_steps must be at least"):
        fs.solve(problem, fs.FedADMM(penalty="theory", power_steps=5), rounds=1)


def test_theory_penalties_in_the_smallest_problem():
    problem = examples.least_squares(constrained=False)
    run = fs.solve(problem, fs.FedADMM(penalty="theory", power_steps=5), rounds=1)
    lipschitz = [np.linalg.norm(a, 2) ** 2 / len(a) for a in problem.samples.values["inputs"]]
    assert fs.theory.fedadmm.penalties_suffice(run.state.clients.penalty, lipschitz)
