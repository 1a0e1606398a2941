"""ProxAL against a transcription and true optima, with global and with local constraints."""

import cvxpy as cp
import numpy as np
import pytest

import fedsolve as fs
from tests.support import examples, oracles
from tests.support.trajectories import trajectory


@pytest.mark.parametrize("each_client", [False, True])
def test_it_follows_the_transcription(each_client):
    problem = examples.least_squares()
    algorithm = fs.ProxAL(
        0.05, 0.1, beta=1.5, rho=0.8, steps=4, local_steps=3, each_client=each_client
    )
    path, _ = trajectory(problem, algorithm, 24)
    expected, mu = oracles.proxal(
        examples.least_squares_clients(problem),
        np.zeros(5),
        outer=6,
        inner=4,
        local_steps=3,
        eta=0.05,
        beta=1.5,
        rho=0.8,
        epsilon=0.1,
        shared=not each_client,
    )
    np.testing.assert_allclose(path[1:], expected, atol=1e-9)
    run = fs.solve(problem, algorithm, 24, precision="float64")
    np.testing.assert_allclose(run.history["multiplier"][-1], mu.mean(), atol=1e-9)
    assert mu.mean() > 0.1


@pytest.mark.parametrize("each_client", [pytest.param(False, marks=pytest.mark.slow), True])
def test_lost_answers_take_time_and_change_no_number(each_client):
    problem = examples.least_squares()
    algorithm = fs.ProxAL(0.05, 0.1, steps=3, local_steps=2, each_client=each_client)
    plain = fs.solve(problem, algorithm, 12, precision="float64")

    def two_thirds(round, exchange, clients):
        return (round + clients) % 3 != 0

    run = fs.solve(problem, algorithm, 24, precision="float64", arrivals=two_thirds)
    np.testing.assert_allclose(run.history["objective"][1::2], plain.history["objective"], 1e-12)
    np.testing.assert_array_equal(run.history["messages_up"], [4, 2] * 12)
    np.testing.assert_allclose(run.params, plain.params, rtol=1e-12)


def test_it_reaches_the_optimum_of_a_global_constraint_and_its_multiplier():
    problem = examples.least_squares()
    best, value, multiplier = examples.least_squares_optimum(problem, 0.2)
    algorithm = fs.ProxAL(0.1, 0.2, steps=10, local_steps=20)
    run = fs.solve(problem, algorithm, 200, evaluate_every=200, precision="float64")
    np.testing.assert_allclose(run.params, best, atol=1e-7)
    np.testing.assert_allclose(run.history["objective"][-1], value, atol=1e-7)
    np.testing.assert_allclose(run.history["constraint"][-1], 0.2, atol=1e-7)
    np.testing.assert_allclose(run.history["multiplier"][-1], multiplier, atol=1e-6)


def test_it_reaches_the_optimum_of_local_constraints():
    """Every client's own constraint, within a ball that binds, too."""
    base = examples.least_squares()
    data = base.samples.values
    problem = fs.Problem(
        examples.quadratic, data, np.zeros(5), examples.half_space, domain=fs.Ball(1.2)
    )
    w = cp.Variable(5)
    f = cp.sum_squares(data["inputs"].reshape(-1, 5) @ w - data["targets"].reshape(-1)) / 96
    program = cp.Problem(
        cp.Minimize(f), [data["normal"] @ w <= data["offset"] + 0.3, cp.norm(w) <= 1.2]
    )
    program.solve(solver=cp.CLARABEL)
    algorithm = fs.ProxAL(0.1, 0.3, beta=3.0, steps=10, local_steps=20, each_client=True)
    run = fs.solve(problem, algorithm, 300, evaluate_every=300, precision="float64")
    np.testing.assert_allclose(run.params, w.value, atol=2e-2)
    assert max(data["normal"] @ run.params - data["offset"]) <= 0.3 + 1e-2


def test_a_constraint_that_does_not_bind_has_multiplier_zero():
    problem = examples.least_squares()
    free = np.linalg.lstsq(
        problem.samples.values["inputs"].reshape(-1, 5),
        problem.samples.values["targets"].reshape(-1),
        rcond=None,
    )[0]
    algorithm = fs.ProxAL(0.1, 100.0, steps=10, local_steps=20)
    run = fs.solve(problem, algorithm, 200, evaluate_every=200, precision="float64")
    assert run.history["multiplier"][-1] == 0
    np.testing.assert_allclose(run.params, free, atol=1e-6)


def test_it_recovers_from_lost_answers():
    """Every third answer is lost for 60 rounds; the optimum is reached all the same."""
    problem = examples.least_squares()
    best, _, _ = examples.least_squares_optimum(problem, 0.0)

    def arrivals(round, exchange, clients):
        return (round > 60) | ((round + np.asarray(clients)) % 3 != 0)

    algorithm = fs.ProxAL(0.1, steps=10, local_steps=20)
    run = fs.solve(
        problem, algorithm, 300, evaluate_every=300, precision="float64", arrivals=arrivals
    )
    np.testing.assert_allclose(run.params, best, atol=0.05)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: fs.ProxAL(0.0), "step_size must be positive"),
        (lambda: fs.ProxAL(0.1, beta=0.0), "beta must be positive"),
        (lambda: fs.ProxAL(0.1, rho=-1.0), "rho must be positive"),
        (lambda: fs.ProxAL(0.1, steps=0), "steps must be a whole number"),
        (lambda: fs.ProxAL(0.1, tolerance=-1.0), "tolerance must be at least 0"),
    ],
)
def test_bad_numbers_raise(make, sentence):
    with pytest.raises(fs.InvalidInput, match=sentence):
        make()


def test_problems_that_it_cannot_solve_raise():
    free = examples.least_squares(constrained=False)
    with pytest.raises(fs.InvalidInput, match="needs a constraint that is a mean"):
        fs.solve(free, fs.ProxAL(0.1), 1)
    data = examples.least_squares().samples.values
    drawn = fs.Problem(
        examples.quadratic, data, np.zeros(5), lambda w, data: w[0] - 1, batch_size=2
    )
    with pytest.raises(fs.InvalidInput, match="leave out batch_size"):
        fs.solve(drawn, fs.ProxAL(0.1), 1)
