"""FedADMM's theorems as functions, against runs of the method."""

import math
import warnings

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.theory import fedadmm
from fedsolve.theory.reference import least
from tests.support import examples


@pytest.mark.parametrize("penalty", [0.3, 0.6, 3.0])
def test_theorem_3_1_that_many_steps_are_enough(penalty):
    """(15) on random convex quadratics: the residual (6) is met after κ + 1 steps."""
    rng = np.random.default_rng(0)
    for accuracy in (1.0, 1e-3, 1e-9):
        root = rng.standard_normal((6, 6))
        hessian = root @ root.T
        hessian /= 2 * np.linalg.eigvalsh(hessian)[-1]  # α r = 1/2
        linear, w = rng.standard_normal((2, 6))
        best = np.linalg.solve(hessian + penalty * np.eye(6), penalty * w - linear)
        kappa = fedadmm.kappa(0.5, penalty, float(np.linalg.norm(w - best)), accuracy)
        v = w
        for _ in range(kappa + 1):
            v = (0.5 * v + penalty * w - hessian @ v - linear) / (0.5 + penalty)
        residual = hessian @ v + linear + penalty * (v - w)
        assert residual @ residual <= accuracy


def test_theorem_3_1_needs_a_penalty():
    with pytest.raises(fs.InvalidInput, match=r"needs a penalty above 0\.25"):
        fedadmm.kappa(0.5, 0.25, 1.0, 1.0)


def test_theorem_4_1_asks_for_three_times_the_smoothness():
    lipschitz = np.asarray([1.0, 2.0, 4.0])
    assert fedadmm.penalties_suffice(lipschitz, lipschitz)
    assert not fedadmm.penalties_suffice(0.99 * lipschitz, lipschitz)


def test_waiting_is_the_longest_time_without_a_client():
    assert fedadmm.waiting(np.asarray([[0, 1], [2, 0], [1, 2]]), 3) == 2
    assert fedadmm.waiting(np.asarray([[0], [1], [0]]), 2) == 2
    assert fedadmm.waiting(np.asarray([[0], [1]]), 3) == math.inf


def test_waiting_counts_answers_only():
    cohorts = np.asarray([[0, 1], [0, 1], [0, 1]])
    answered = np.asarray([[True, True], [True, False], [True, True]])
    assert fedadmm.waiting(cohorts, 2) == 1
    assert fedadmm.waiting(cohorts, 2, answered) == 2
    assert fedadmm.waiting(cohorts, 2, answered & [True, False]) == math.inf
    with pytest.raises(fs.InvalidInput, match=r"\(3,\), but the cohorts \(3, 2\)"):
        fedadmm.waiting(cohorts, 2, answered[:, 0])
    problem = examples.least_squares(constrained=False)
    algorithm = fs.FedADMM(availability=fs.participation.Bernoulli([1e-9, 1, 1, 1, 1, 1]))
    run = fs.solve(problem, algorithm, rounds=20)
    assert fedadmm.waiting(run.history["cohort"], 6, run.history["available"]) == math.inf


def released_stop(gradients, n, m, d, linear):
    """The program: gW has the columns ∇f_i(0)/m; err < tol."""
    columns = np.stack(gradients, axis=1) / m
    err = np.linalg.norm(columns.mean(axis=1)) ** 2
    tol = (2e-3 if linear else 5e-7) * n / m / d
    return min(tol, 0.2 * err), m**2  # of err, and ‖∇f‖² over err


@pytest.mark.parametrize("scale", [1.0, 1e-3])
@pytest.mark.parametrize("linear", [True, False])
def test_both_rules_are_as_written(scale, linear):
    """With small targets the part of ∇f(0) is the least of the two, in both rules."""
    problem = examples.least_squares(constrained=False)
    data = dict(problem.samples.values)
    problem = problem.with_clients(data | {"targets": scale * data["targets"]})
    clients = examples.least_squares_clients(problem)
    gradients = [gradient(np.zeros(5)) for gradient, _, _ in clients]
    slope = np.mean(gradients, axis=0)
    accuracy = 1e-3 if linear else 1e-7
    absolute = 5 * accuracy * 5 / (6 * 48)
    expected = min(slope @ slope / 5, absolute)
    options = {} if linear else {"accuracy": 1e-7}
    assert fedadmm.tolerance(problem, **options) == pytest.approx(expected, rel=1e-5)
    tol, over = released_stop(gradients, 5, 6, 48, linear)
    found = fedadmm.tolerance(problem, test="code", **options)
    assert found == pytest.approx(over * tol, rel=1e-5)
    if linear and scale < 1:
        assert expected == pytest.approx(slope @ slope / 5)
        assert found == pytest.approx(slope @ slope / 5, rel=1e-5)
    rule = fs.StationaryForSize(test="code", **options).of(problem)
    assert rule.below == pytest.approx(found)


def test_tolerance_counts_samples():
    """Sparse rows in pieces, two sets, and one value for each client."""
    rows, labels = fs.problems.like_real_sim(samples=40, size=30, nonzeros=9.0)
    sparse = fs.problems.sparse_regression(rows, labels, 4, width=2)
    assert fedadmm.tolerance(sparse, 1e-7) == pytest.approx(5e-7 * 30 / (4 * 40))
    values = {"y": np.asarray([1.0, 5.0, 9.0])}
    single = fs.Problem(lambda w, data: ((data["y"] - w) ** 2).sum(), values, np.zeros(1))
    assert fedadmm.tolerance(single) == pytest.approx(5e-3 / (3 * 3))


def test_theorem_4_3_follows_from_its_lemmas():
    """c of the proof: (59) and three times (66), with (65), (60) and (69), summed up."""
    sigma, eps, nu = np.asarray([0.2, 0.5, 0.3]), np.asarray([1e-3, 2e-3, 5e-3]), 0.9
    found = fedadmm.rate(sigma, 2.0, eps, waiting=3, local_iterations=4, decay=nu)
    m, s0, k0 = 3, 3, 4
    both = 1 / 3 + 3 * 3  # of m Σ σ²‖Δw̄‖² and of m Σ σ²‖Δw‖², in (59) and in three times (66)
    own = both * (1 + 2 / 15)  # of m Σ ‖σΔw_i‖² at k, by (65); 4/15 of those before
    server = both * 2 * s0  # of m Σ ‖σ(w^{t+1} − w^t)‖²
    inexact = both * 48 + 9
    window = 10 * max(own, server) * m * sigma.max()
    start = 2.0 + np.sum(29 * eps / ((1 - nu) * sigma))
    c = window * (s0 + 1) * start + inexact * m * np.sum(s0 * eps / (1 - nu))
    assert found.constant == pytest.approx(c)
    printed = 940 * s0 * (s0 + 1) * m * 0.5 * start / 9 + np.sum(169 * m * s0 * eps / (1 - nu))
    assert found.printed == pytest.approx(printed)
    assert found.bound(100) == pytest.approx(c * k0 / (100 - s0 * k0))
    assert found.bound(s0 * k0) == math.inf
    k = found.iterations(0.7)
    assert k == math.ceil((c + 0.7 * s0) * k0 / 0.7)
    assert found.bound(k) <= 0.7 < found.bound(k - 2)
    assert found.communication_rounds(0.7) == math.ceil(2 * k / k0)


def test_theorem_4_3_holds_in_a_run():
    problem = examples.least_squares(constrained=False)
    algorithm = fs.FedADMM(
        penalty="theory",
        local_iterations=2,
        accuracy=1e-6,
        inner_steps=None,
        dual_start="gradient",
        selection=fs.participation.Cyclic(3),
    )
    run = fs.solve(
        problem, algorithm, rounds=60, stop=fs.Stationary(1e-30), precision="float64", seed=1
    )
    penalties = np.asarray(run.state.clients.penalty)
    start, best = 0.5 * np.mean(problem.samples.values["targets"] ** 2), least(problem)
    s0 = fedadmm.waiting(run.history["cohort"], 6)
    assert s0 == 2
    rate = fedadmm.rate(penalties, start - best, 1e-6, int(s0), 2)
    squared = np.minimum.accumulate(run.history["squared_gradient"])
    for averagings in range(3, 60):
        assert squared[averagings - 1] <= rate.bound(2 * averagings)


def test_theorem_4_3_raises_outside_its_assumptions():
    with pytest.raises(fs.InvalidInput, match="ν_i from 1/2"):
        fedadmm.rate([1.0], 1.0, 1.0, 1, 1, decay=0.4)
    with pytest.raises(fs.InvalidInput, match="gap must be at least 0"):
        fedadmm.rate([1.0], -1.0, 1.0, 1, 1)


def test_both_counts():
    problem = examples.least_squares(constrained=False)
    assert fedadmm.communication_rounds(7) == 14
    assert fedadmm.communication_rounds(7, count="code") == 7
    with pytest.raises(fs.InvalidInput, match='"paper" or "code"'):
        fedadmm.communication_rounds(7, count="mine")
    with pytest.raises(fs.InvalidInput, match='"paper" or "code"'):
        fedadmm.tolerance(problem, test="mine")


def test_a_penalty_below_what_the_theorem_asks_for_is_told():
    options = {"gap": 1.0, "accuracy": 1e-3, "waiting": 1, "local_iterations": 2}
    lipschitz = [1.0, 2.0]
    with pytest.warns(UserWarning, match="client 1 has 2.9, and needs 3"):
        fs.theory.fedadmm.rate([1.5, 2.9], **options, lipschitz=lipschitz)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        enough = fs.theory.fedadmm.rate([1.5, 3.0], **options, lipschitz=lipschitz)
    assert enough.constant == fs.theory.fedadmm.rate([1.5, 3.0], **options).constant
