"""`variant="released"` against a transcription of the authors' program (FedADMM.m, 2023-02)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from fedsolve.problems.regression import deal
from fedsolve.runtimes.evaluation import client_values


def program(rows, targets, cohorts, k0, r0, logistic, start, lam=1e-3):
    """w after every averaging and ‖mean of gW‖² there, r_i, and inner steps."""
    m, n = len(rows), rows[0].shape[1]
    dim = np.asarray([len(a) for a in rows])
    ri = np.asarray([np.linalg.norm(a, 2) ** 2 for a in rows]) / dim
    if logistic:
        ri = ri / 5 + lam / dim
    diw, wri = 1 / dim / m, ri / m
    sigmai = r0 * wri
    wrsig = wri + sigmai

    def grad(i, x):
        ax = rows[i] @ x
        if logistic:
            return (rows[i].T @ (1 - targets[i] - 1 / (1 + np.exp(ax))) + lam * x) * diw[i]
        return rows[i].T @ (ax - targets[i]) * diw[i]

    eps, found, steps = np.full(m, float(start)), [], []
    pi, z = np.zeros((m, n)), np.zeros((m, n))
    for cohort in [*cohorts, []]:
        w = z.sum(axis=0) / sigmai.sum()
        gw = np.stack([grad(i, w) for i in range(m)])
        found.append((w, np.sum(gw.mean(axis=0) ** 2)))
        for _ in range(k0):
            for i in cohort:
                eps[i] *= 0.95
                sypi = sigmai[i] * w - pi[i]
                gxi, xi = gw[i], w
                for t in range(3):
                    xi = (wri[i] * xi + sypi - gxi) / wrsig[i]
                    sx = sigmai[i] * xi
                    steps.append(t)
                    if np.sum((sypi - sx - gxi) ** 2) < eps[i] * n:
                        break
                    gxi = grad(i, xi)
                pi[i] = sx - sypi
                z[i] = sx + pi[i]
    return found, ri, steps


def logistic_problem(m, rng):
    inputs = rng.standard_normal((60, 8))
    labels = (inputs @ rng.standard_normal(8) > 0).astype(float)
    return fs.problems.logistic_regression(
        inputs, labels, m, seed=4, split="random", variant="released"
    )


@pytest.mark.parametrize("accuracy", [None, 1e-5])
@pytest.mark.parametrize("logistic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_follows_the_program(logistic, accuracy):
    """With ε_i = k_0² one inner step is enough; with a small ε_i there are up to three."""
    m, k0, rng = 7, 4, np.random.default_rng(0)
    if logistic:
        problem = logistic_problem(m, rng)
    else:
        problem = fs.problems.linear_regression(m, 8, 5, 15, variant="released")
    values, on = problem.samples.values, np.asarray(problem.samples.mask)
    rows = [np.asarray(a, float)[mask] for a, mask in zip(values["inputs"], on, strict=True)]
    name = "labels" if logistic else "targets"
    targets = [np.asarray(b, float)[mask] for b, mask in zip(values[name], on, strict=True)]
    r0 = 0.05 if logistic else 0.5 / np.log10(9 + k0)
    start = k0**2 if accuracy is None else accuracy
    ri = program(rows, targets, [], k0, r0, logistic, start)[1]
    algorithm = fs.FedADMM(
        participants=4,
        local_iterations=k0,
        penalty=r0,
        lipschitz=ri,
        accuracy=accuracy,
        variant="released",
    )
    follow = {"w": lambda problem, params: params}
    run = fs.solve(
        problem,
        algorithm,
        rounds=12,
        stop=fs.Stationary(1e-30),
        follow=follow,
        precision="float64",
    )
    cohorts = run.history["cohort"]
    expected, _, steps = program(rows, targets, cohorts, k0, r0, logistic, start)
    for (w, err), mine, squared in zip(
        expected[1:], run.history["w"], run.history["squared_gradient"], strict=True
    ):
        np.testing.assert_allclose(mine, w, rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(squared / m**2, err, rtol=1e-7)
    assert set(steps) == ({0} if accuracy is None else {0, 1, 2})


def test_the_released_data():
    """⌈m/3⌉ rows are Student-t, ⌈m/3⌉ uniform; λ/(2 d_i); sizes differ."""
    problem = fs.problems.linear_regression(clients=10, size=4000, seed=3, variant="released")
    inputs = np.asarray(problem.samples.values["inputs"])[np.asarray(problem.samples.mask)]
    moments = np.mean(inputs**2, axis=1)
    assert np.bincount(np.digitize(moments, [1.25, 5.0])).tolist() == [len(inputs) - 8, 4, 4]
    plain = fs.problems.logistic_regression(
        np.zeros((60, 8)), np.zeros(60), 5, seed=4, split="random", variant="released"
    )
    sizes, w = np.asarray(plain.samples.mask).sum(axis=1), np.linspace(-1, 1, 8)
    with jax.enable_x64(True):
        zero = client_values(plain.on_device(np.float64), jnp.asarray(w))["objective"]
    assert len(set(sizes)) > 2
    np.testing.assert_allclose(zero, np.log(2) + 0.0005 * w @ w / sizes, rtol=1e-9)


def test_random_cuts_are_uniform_and_leave_no_client_without_samples():
    for samples, clients in ((12, 3), (200, 2), (5, 5)):
        parts = [deal(samples, clients, seed, "random") for seed in range(400)]
        sizes = np.asarray([[len(part) for part in division] for division in parts])
        assert (sizes.sum(axis=1) == samples).all()
        assert (sizes > samples / (40 * clients)).all()
        for division in parts[:20]:
            assert sorted(np.concatenate(division)) == list(range(samples))
        means = sizes.mean(axis=0)
        assert np.abs(means - samples / clients).max() < 0.15 * samples / clients
    counts = {}
    for seed in range(3000):
        key = tuple(len(part) for part in deal(5, 3, seed, "random"))
        counts[key] = counts.get(key, 0) + 1
    assert len(counts) == 6  # all compositions of 5 in 3 parts
    assert min(counts.values()) > 400
    with pytest.raises(fs.InvalidInput, match='split must be "equal" or "random"'):
        deal(5, 3, 0, "others")


def test_variants_have_names():
    with pytest.raises(fs.InvalidInput, match='variant must be "paper" or "released"'):
        fs.FedADMM(variant="code")
    with pytest.raises(fs.InvalidInput, match="needs inner_steps"):
        fs.FedADMM(variant="released", inner_steps=None)
    with pytest.raises(fs.InvalidInput, match='variant must be "paper" or "released"'):
        fs.problems.linear_regression(variant="code")
