"""Penalty FedAvg and IPP-ConEx against transcriptions, special cases and true optima."""

from typing import Any

import numpy as np
import pytest

import fedsolve as fs
from tests.support import examples, oracles
from tests.support.trajectories import trajectory


@pytest.mark.parametrize("beta", [None, 2.0])
@pytest.mark.parametrize("fraction", [1.0, 0.4])
def test_penalty_follows_the_transcription(beta, fraction):
    problem = examples.least_squares()
    algorithm = fs.PenaltyFedAvg(
        0.02,
        0.1,
        fs.Hard() if beta is None else fs.Soft(beta),
        rho=3.0,
        participants=4,
        local_steps=3,
        uplink=fs.TopK(fraction),
        downlink=fs.TopK(fraction),
    )
    run = fs.solve(problem, algorithm, rounds=150, seed=1, precision="float64")
    path = oracles.penalty_fedavg(
        examples.least_squares_clients(problem),
        np.zeros(5),
        run.history["cohort"],
        step_size=0.02,
        tolerance=0.1,
        rho=3.0,
        local_steps=3,
        switch=oracles.hard if beta is None else oracles.soft(beta),
        uplink=lambda v: oracles.top_k(v, fraction),
        downlink=lambda v: oracles.top_k(v, fraction),
    )
    np.testing.assert_allclose(run.params, path[-1], atol=1e-10)
    switch = run.history["switch"]
    assert 0 < switch.mean() < 1  # both directions were followed
    assert ((switch > 0) & (switch < 1)).any() == (beta is not None)
    assert run.average is None


def test_without_a_penalty_it_is_fedavg():
    options: dict[str, Any] = {"local_steps": 4, "participants": 3}
    nothing, _ = trajectory(
        examples.least_squares(), fs.PenaltyFedAvg(0.05, rho=0.0, **options), 60
    )
    fedavg, _ = trajectory(
        examples.least_squares(constrained=False), fs.FedSGM(0.05, **options), 60
    )
    np.testing.assert_allclose(nothing, fedavg, atol=1e-12)
    free = fs.PenaltyFedAvg(0.05, rho=7.0, **options)
    free, _ = trajectory(examples.least_squares(constrained=False), free, 60)
    np.testing.assert_array_equal(free, fedavg)


def test_penalty_is_exact_above_the_multiplier_and_infeasible_below():
    """min f + ρ[g]₊ is the constrained optimum if and only if ρ is at least its multiplier."""
    problem = examples.least_squares()
    _, value, multiplier = examples.least_squares_optimum(problem, 0.0)
    assert multiplier > 0.1
    found = {}
    for factor in (0.5, 2.0):
        algorithm = fs.PenaltyFedAvg(fs.Diminishing(0.1, 0.7), rho=factor * multiplier)
        run = fs.solve(problem, algorithm, 4000, evaluate_every=4000, precision="float64")
        found[factor] = run
    assert found[0.5].history["constraint"][-1] > 0.1
    assert abs(found[2.0].history["constraint"][-1]) < 5e-3
    assert found[2.0].history["objective"][-1] == pytest.approx(value, abs=5e-3)


def centralized(problem):
    """f', g and g' of the whole problem."""
    clients = examples.least_squares_clients(problem)
    return (
        lambda x: np.mean([c[0](x) for c in clients], axis=0),
        lambda x: np.mean([c[1](x) for c in clients]),
        lambda x: np.mean([c[2](x) for c in clients], axis=0),
    )


def test_conex_follows_the_transcription():
    """With everyone taking part it is the centralized method, step by step."""
    problem = examples.least_squares()
    algorithm = fs.IPPConEx(
        0.1, 0.1, dual_step=0.4, extrapolation=0.9, proximal=0.3, constraint_proximal=0.2, steps=7
    )
    path, _ = trajectory(problem, algorithm, 28)
    f_prime, g, g_prime = centralized(problem)
    outputs, inner = oracles.ipp_conex(
        f_prime,
        lambda x: g(x) - 0.1,
        g_prime,
        np.zeros(5),
        outer=4,
        inner=7,
        eta=1 / 0.1,
        tau=1 / 0.4,
        theta=0.9,
        mu_0=0.3,
        mu_1=0.2,
    )
    np.testing.assert_allclose(path[7::7], outputs, atol=1e-10)
    within = [t for t in range(1, 29) if t % 7]
    np.testing.assert_allclose(path[within], inner[np.asarray(within) - 1], atol=1e-10)


def test_conex_reaches_the_constrained_optimum():
    problem = examples.least_squares()
    best, value, _ = examples.least_squares_optimum(problem, 0.0)
    algorithm = fs.IPPConEx(0.2, dual_step=0.3, proximal=0.2, steps=200)
    run = fs.solve(problem, algorithm, 6000, evaluate_every=200, precision="float64")
    gaps = np.abs(run.history["objective"] - value)
    assert gaps[-1] < 1e-5 < gaps[0]
    assert abs(run.history["constraint"][-1]) < 1e-5
    np.testing.assert_allclose(run.params, best, atol=1e-4)


def test_conex_needs_a_constraint():
    with pytest.raises(fs.InvalidInput, match="IPPConEx is for problems with a constraint"):
        fs.solve(examples.least_squares(constrained=False), fs.IPPConEx(0.1), rounds=1)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: fs.PenaltyFedAvg(0.1, rho=-1.0), "rho must be at least 0"),
        (lambda: fs.PenaltyFedAvg(-0.1, rho=1.0), "step_size must be positive"),
        (lambda: fs.PenaltyFedAvg(0.1, rho="much"), "rho must be a number"),
        (lambda: fs.IPPConEx(0.1, dual_step=0.0), "dual_step must be positive"),
        (lambda: fs.IPPConEx(0.1, proximal=-1.0), "proximal must be at least 0"),
        (lambda: fs.IPPConEx(0.1, steps=0), "steps must be a whole number from 1 up"),
    ],
)
def test_bad_numbers_raise(make, sentence):
    with pytest.raises(fs.InvalidInput, match=sentence):
        make()
