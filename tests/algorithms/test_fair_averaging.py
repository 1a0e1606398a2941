"""q-FedAvg and AFL against transcriptions, special cases and true optima; Safe-EF as FedSGM."""

from typing import Any

import cvxpy as cp
import numpy as np
import pytest

import fedsolve as fs
from tests.support import examples, oracles
from tests.support.trajectories import trajectory


def losses(problem):
    """(f_j, ∇f_j) of `least_squares`, in NumPy."""
    data = problem.samples.values

    def client(a, y):
        return (
            lambda w: np.mean((a @ w - y) ** 2) / 2,
            lambda w: a.T @ (a @ w - y) / len(y),
        )

    return [client(*row) for row in zip(data["inputs"], data["targets"], strict=True)]


@pytest.mark.parametrize("q", [0.5, 1.0, 3.0])
def test_q_fedavg_follows_the_transcription(q):
    problem = examples.least_squares(constrained=False)
    algorithm = fs.QFedAvg(0.05, fairness=q, participants=4, local_steps=3)
    run = fs.solve(problem, algorithm, rounds=40, seed=1, precision="float64")
    path = oracles.q_fedavg(
        losses(problem), np.zeros(5), run.history["cohort"], q, 1 / 0.05, local_steps=3
    )
    np.testing.assert_allclose(run.params, path[-1], atol=1e-10)


def test_q_fedavg_without_fairness_is_fedavg():
    problem = examples.least_squares()
    options: dict[str, Any] = {"local_steps": 4, "participants": 3, "uplink": fs.TopK(0.4)}
    plain, _ = trajectory(problem, fs.QFedAvg(0.05, fairness=0, **options), 30)
    fedavg, _ = trajectory(problem, fs.FedAvg(0.05, **options), 30)
    np.testing.assert_allclose(plain, fedavg, atol=1e-12)
    adam: dict[str, Any] = {"local_steps": 4, "local_optimizer": fs.Adam(0.01)}
    plain, _ = trajectory(problem, fs.QFedAvg(0.7, fairness=0, **adam), 10)
    fedavg, _ = trajectory(problem, fs.FedAvg(0.7, **adam), 10)
    np.testing.assert_allclose(plain, fedavg, atol=1e-12)


@pytest.mark.parametrize("q", [1, 3])
def test_q_fedavg_reaches_the_optimum_of_q_ffl(q):
    """f_q is the (q + 1)-norm of the losses, to the power: convex, solved by CVXPY."""
    problem = examples.least_squares(constrained=False)
    data, w = problem.samples.values, cp.Variable(5)
    each = [
        cp.sum_squares(a @ w - y) / (2 * len(y))
        for a, y in zip(data["inputs"], data["targets"], strict=True)
    ]
    cp.Problem(cp.Minimize(cp.pnorm(cp.hstack(each), q + 1))).solve(solver=cp.CLARABEL)
    run = fs.solve(
        problem, fs.QFedAvg(0.2, fairness=q), 2000, evaluate_every=2000, precision="float64"
    )
    np.testing.assert_allclose(run.params, w.value, atol=1e-4)


def test_the_worst_loss_falls_as_q_grows():
    problem, worst = examples.least_squares(constrained=False), []
    for q in (0, 1, 5):
        run = fs.solve(problem, fs.QFedAvg(0.2, fairness=q), 1500, evaluate_every=1500)
        worst.append(max(f(run.params) for f, _ in losses(problem)))
    assert worst[0] - worst[1] > 0.02
    assert worst[1] - worst[2] > 0.02


def test_q_fedavg_takes_clients_by_weight():
    """With weights p, both sums have them: the fixed point is the optimum of Σ p_k F_k^{q+1}."""
    problem = fs.Problem(
        lambda w, data: 0.5 * ((w - data["x"]) ** 2).mean() + 1.0,
        [{"x": np.full((3, 1), 0.0)}, {"x": np.full((1, 1), 4.0)}],
        params=np.ones(1),
    )
    algorithm = fs.QFedAvg(0.3, fairness=1.0, weighting="DataSize")
    run = fs.solve(problem, algorithm, 3000, evaluate_every=3000, precision="float64")
    w = float(run.params[0])
    first, second = 0.5 * w**2 + 1, 0.5 * (w - 4) ** 2 + 1
    assert 3 * first * w == pytest.approx(second * (4 - w), abs=1e-8)


def test_a_negative_loss_stops_q_fedavg():
    problem = fs.Problem(
        lambda w, data: w[0] * data["sign"], {"sign": np.array([1.0, -1.0])}, params=np.ones(1)
    )
    with pytest.raises(fs.Diverged, match="client 1"):
        fs.solve(problem, fs.QFedAvg(0.1, fairness=1.0), 3)


def test_a_loss_of_zero_is_no_fault():
    problem = fs.Problem(
        lambda w, data: 0.5 * (w[0] - data["x"]) ** 2, {"x": np.array([1.0, 1.0])}, np.ones(1)
    )
    for q in (0.5, 1, 2):
        run = fs.solve(problem, fs.QFedAvg(0.1, fairness=q), 3)
        np.testing.assert_array_equal(run.params, 1)


def test_afl_follows_the_transcription():
    problem = examples.least_squares(constrained=False)
    algorithm = fs.AFL(0.03, weight_step=0.02, participants=4, local_steps=2)
    run = fs.solve(problem, algorithm, rounds=60, seed=1, precision="float64")
    path, mixtures = oracles.afl(
        losses(problem), np.zeros(5), run.history["cohort"], 0.03, 0.02, local_steps=2
    )
    np.testing.assert_allclose(run.params, path[-1], atol=1e-10)
    np.testing.assert_allclose(run.average, path[1:].mean(axis=0), atol=1e-10)
    np.testing.assert_allclose(run.history["largest_weight"], mixtures[1:].max(axis=1), atol=1e-10)
    assert mixtures[-1].min() == 0  # the projection was at work
    each = np.array([f(path[-1]) for f, _ in losses(problem)])
    np.testing.assert_allclose(run.history["weighted_objective"][-1], mixtures[-1] @ each)


def test_afl_reaches_the_saddle_point():
    problem = examples.least_squares(constrained=False)
    data, w = problem.samples.values, cp.Variable(5)
    each = [
        cp.sum_squares(a @ w - y) / (2 * len(y))
        for a, y in zip(data["inputs"], data["targets"], strict=True)
    ]
    program = cp.Problem(cp.Minimize(cp.maximum(*each)))
    program.solve(solver=cp.CLARABEL)
    algorithm = fs.AFL(0.1, weight_step=0.02)
    run = fs.solve(problem, algorithm, 6000, evaluate_every=6000, precision="float64")
    np.testing.assert_allclose(run.params, w.value, atol=2e-4)
    np.testing.assert_allclose(run.history["weighted_objective"][-1], program.value, atol=1e-5)
    assert run.history["objective"][-1] < program.value - 0.1  # which is the mean


def test_afl_with_a_part_of_the_clients_is_right_on_average():
    problem = examples.least_squares(constrained=False)
    whole = fs.solve(problem, fs.AFL(0.05, weight_step=0.0), 1, precision="float64").params
    part = fs.AFL(0.05, weight_step=0.0, participants=2)
    found = fs.sweep(problem, part, rounds=1, seeds=range(300), precision="float64")
    steps = np.array([run.params for run in found.runs])
    error = steps.std(axis=0) / np.sqrt(len(steps))
    assert np.all(np.abs(steps.mean(axis=0) - whole) < 4 * error)


def test_afl_without_a_weight_step_is_fedavg():
    problem = examples.least_squares()
    options: dict[str, Any] = {"local_steps": 4, "participants": 3, "uplink": fs.TopK(0.4)}
    afl, _ = trajectory(problem, fs.AFL(0.05, weight_step=0.0, **options), 30)
    fedavg, _ = trajectory(problem, fs.FedAvg(0.05, **options), 30)
    np.testing.assert_allclose(afl, fedavg, atol=1e-12)


def test_safe_ef_is_fedsgm_to_the_bit():
    problem = examples.least_squares()
    top: dict[str, Any] = {"uplink": fs.TopK(0.4), "downlink": fs.TopK(0.6)}
    one = fs.solve(problem, fs.SafeEF(0.05, 0.1, **top), 40)
    other = fs.solve(problem, fs.FedSGM(0.05, 0.1, **top), 40)
    np.testing.assert_array_equal(one.params, other.params)
    np.testing.assert_array_equal(one.average, other.average)
    path, average, _ = oracles.fedsgm(
        examples.least_squares_clients(problem),
        np.zeros(5),
        [range(6)] * 40,
        0.05,
        0.1,
        oracles.hard,
        uplink=lambda v: oracles.top_k(v, 0.4),
        downlink=lambda v: oracles.top_k(v, 0.6),
    )
    precise = fs.solve(problem, fs.SafeEF(0.05, 0.1, **top), 40, precision="float64")
    np.testing.assert_allclose(precise.params, path[-1], atol=1e-10)
    np.testing.assert_allclose(precise.average, average, atol=1e-10)
    from_theory = fs.SafeEF.from_theory(problem, 20, distance=3.0, lipschitz=5.0)
    assert from_theory.guarantee is not None


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: fs.QFedAvg(0.1, fairness=-1), "fairness must be at least 0"),
        (lambda: fs.QFedAvg(0.1, fairness="much"), "fairness must be a number"),
        (lambda: fs.QFedAvg(0, fairness=1), "step_size must be positive"),
        (lambda: fs.AFL(0.1, weight_step=-1), "weight_step must be at least 0"),
        (lambda: fs.AFL(0.1, weight_step=1, weighting="DataSize"), "draws them uniformly"),
        (lambda: fs.AFL(0.1, weight_step=1, selection=fs.participation.Top(2)), "uniformly"),
        (lambda: fs.SafeEF(0.1, local_steps=2), "Safe-EF has no other local_steps"),
        (lambda: fs.SafeEF(0.1, switching=fs.Soft(1.0)), "has no other switching"),
        (lambda: fs.SafeEF(0.1, participants=2), "has no other participants"),
        (lambda: fs.SafeEF(0.1, error_feedback=False), "has no other error_feedback"),
        (lambda: fs.SafeEF(0.1, uplink=fs.RandK(0.5)), "The uplink must be contractive"),
        (lambda: fs.FedAvgAll(0.1, error_feedback=False), "no error feedback to turn off"),
    ],
)
def test_bad_arguments_raise(make, sentence):
    with pytest.raises(fs.InvalidInput, match=sentence):
        make()


def test_without_error_feedback_what_is_dropped_is_lost():
    """The ablation: Top-K alone, for FedSGM and FedAvg, against the transcription."""
    problem = examples.least_squares()
    algorithm = fs.FedSGM(
        0.05, 0.1, uplink=fs.TopK(0.4), local_steps=2, participants=4, error_feedback=False
    )
    run = fs.solve(problem, algorithm, 40, seed=1, precision="float64")
    path, _, _ = oracles.fedsgm(
        examples.least_squares_clients(problem),
        np.zeros(5),
        run.history["cohort"],
        0.05,
        0.1,
        oracles.hard,
        local_steps=2,
        uplink=lambda v: oracles.top_k(v, 0.4),
        feedback=False,
    )
    np.testing.assert_allclose(run.params, path[-1], atol=1e-10)
    assert run.state.clients is None
    assert "uplink_error" not in run.history
    with_it = fs.solve(
        problem,
        fs.FedSGM(0.05, 0.1, uplink=fs.TopK(0.4), local_steps=2, participants=4),
        40,
        seed=1,
    )
    assert not np.allclose(with_it.params, run.params, atol=1e-3)
    for made in (fs.SCAFFOLD, fs.FedDyn, fs.MOON, fs.FedSim):
        bare = made(0.02, uplink=fs.TopK(0.4), error_feedback=False)
        kept = fs.solve(problem, bare, 2).state.clients
        assert getattr(kept, "residual", None) is None
