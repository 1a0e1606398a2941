"""LagrangianFedAvg against a transcription, a closed form and true optima."""

from typing import Any

import numpy as np
import pytest

import fedsolve as fs
from tests.support import examples, oracles
from tests.support.trajectories import trajectory


def projection(target, normal, offset):
    """The projection of a point onto a half-space, as a problem of one client."""
    return fs.Problem(
        objective=lambda w, data: 0.5 * ((w - data["target"]) ** 2).sum(),
        clients={"target": np.array([target])},
        params=np.zeros(len(target)),
        constraint=lambda w, data: (np.asarray(normal) * w).sum() - offset,
    )


@pytest.mark.parametrize("bound", [None, 0.15])
def test_it_follows_the_transcription(bound):
    problem = examples.least_squares()
    algorithm = fs.LagrangianFedAvg(
        0.02, tolerance=0.1, dual_step=0.05, dual_bound=bound, participants=4, local_steps=3
    )
    run = fs.solve(problem, algorithm, rounds=60, seed=1, precision="float64")
    path, duals = oracles.lagrangian_fedavg(
        examples.least_squares_clients(problem),
        np.zeros(5),
        run.history["cohort"],
        step_size=0.02,
        dual_step=0.05,
        tolerance=0.1,
        bound=np.inf if bound is None else bound,
        local_steps=3,
    )
    np.testing.assert_allclose(run.params, path[-1], atol=1e-10)
    np.testing.assert_allclose(run.history["dual"], duals[1:], atol=1e-10)
    np.testing.assert_allclose(run.average, path[:-1].mean(axis=0), atol=1e-10)
    assert duals.max() > 0.14


def test_the_multiplier_of_a_projection():
    """min ½‖w − t‖² with a·w ≤ b + ε has λ* = (a·t − b − ε)/‖a‖² and w* = t − λ* a."""
    target, normal = np.array([2.0, 1.0, -1.0]), np.array([1.0, 2.0, 0.5])
    problem = projection(target, normal, 0.5)
    multiplier = (normal @ target - 0.5 - 0.1) / (normal @ normal)
    algorithm = fs.LagrangianFedAvg(0.1, tolerance=0.1, dual_step=0.1)
    run = fs.solve(problem, algorithm, 1500, evaluate_every=1500, precision="float64")
    np.testing.assert_allclose(run.history["dual"][-1], multiplier, atol=1e-8)
    np.testing.assert_allclose(run.params, target - multiplier * normal, atol=1e-8)
    np.testing.assert_allclose(run.history["constraint"][-1], 0.1, atol=1e-8)


def test_a_bound_below_the_multiplier_is_a_linear_penalty():
    """λ stays at Λ, and w is the minimum of f + Λ g: t − Λ a."""
    target, normal = np.array([2.0, 1.0]), np.array([1.0, 2.0])
    problem = projection(target, normal, 0.0)
    algorithm = fs.LagrangianFedAvg(0.1, dual_step=0.1, dual_bound=0.3)
    run = fs.solve(problem, algorithm, 600, evaluate_every=600, precision="float64")
    assert run.history["dual"][-1] == 0.3
    np.testing.assert_allclose(run.params, target - 0.3 * normal, atol=1e-8)


def test_a_constraint_that_does_not_bind_has_multiplier_zero():
    problem = projection([0.5, 0.5], [1.0, 1.0], 3.0)
    run = fs.solve(problem, fs.LagrangianFedAvg(0.1, dual_step=0.5), 200, precision="float64")
    np.testing.assert_array_equal(run.history["dual"], 0)
    np.testing.assert_allclose(run.params, 0.5, atol=1e-8)


def test_it_reaches_the_constrained_optimum_and_its_multiplier():
    problem = examples.least_squares()
    best, value, multiplier = examples.least_squares_optimum(problem, 0.0)
    algorithm = fs.LagrangianFedAvg(0.1, dual_step=0.05)
    run = fs.solve(problem, algorithm, 3000, evaluate_every=3000, precision="float64")
    np.testing.assert_allclose(run.params, best, atol=1e-5)
    np.testing.assert_allclose(run.history["objective"][-1], value, atol=1e-5)
    np.testing.assert_allclose(run.history["dual"][-1], multiplier, atol=1e-4)


def test_without_a_dual_step_it_is_fedavg():
    problem = examples.least_squares()
    options: dict[str, Any] = {"local_steps": 4, "participants": 3, "uplink": fs.TopK(0.4)}
    nothing, _ = trajectory(problem, fs.LagrangianFedAvg(0.05, dual_step=0.0, **options), 30)
    fedavg, _ = trajectory(problem, fs.FedAvg(0.05, **options), 30)
    np.testing.assert_allclose(nothing, fedavg, atol=1e-12)


def test_the_multiplier_waits_for_answers():
    problem = projection([2.0], [1.0], -1.0)

    def second_round(round, exchange, clients):
        return np.ones(len(clients), bool) & (round == 1)

    algorithm = fs.LagrangianFedAvg(1.0, tolerance=0.1, dual_step=1.0)
    run = fs.solve(problem, algorithm, rounds=4, arrivals=second_round)
    np.testing.assert_allclose(run.history["dual"], [0, 0.9, 0.9, 0.9], rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: fs.LagrangianFedAvg(0.1, dual_step=-1.0), "dual_step must be at least 0"),
        (lambda: fs.LagrangianFedAvg(0.1, dual_step="big"), "dual_step must be a number"),
        (lambda: fs.LagrangianFedAvg(0.1, dual_step=1, tolerance=-1), "tolerance must be at least"),
        (lambda: fs.LagrangianFedAvg(0.1, dual_step=1, dual_bound=0), "dual_bound must be pos"),
        (lambda: fs.LagrangianFedAvg(0.0, dual_step=1), "step_size must be positive"),
    ],
)
def test_bad_numbers_raise(make, sentence):
    with pytest.raises(fs.InvalidInput, match=sentence):
        make()


def test_a_problem_without_a_constraint_raises():
    problem = examples.least_squares(constrained=False)
    with pytest.raises(fs.InvalidInput, match="needs a problem with a constraint"):
        fs.solve(problem, fs.LagrangianFedAvg(0.1, dual_step=1), rounds=1)
