"""Server optimizers: FedAvgM, FedAdagrad, FedYogi and FedAdam against their paper, and optax."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsolve as fs
from tests.support import examples

PROBLEM = examples.least_squares(clients=6, constrained=False)
GRADS = [grad for grad, _, _ in examples.least_squares_clients(PROBLEM)]
BATCHES = fs.Problem(
    examples.quadratic, {k: PROBLEM.samples.values[k] for k in ("inputs", "targets")}, np.zeros(5)
)


def mean_change(x, cohort, steps=3, eta=0.03):
    """Δ of Algorithm 1 of Reddi et al.: the mean of x_i − x."""
    changes = []
    for j in cohort:
        y = x
        for _ in range(steps):
            y = y - eta * GRADS[j](y)
        changes.append(y - x)
    return np.mean(changes, axis=0)


def solved(optimizer, **options):
    algorithm = fs.FedAvg(0.03, local_steps=3, participants=4, server_optimizer=optimizer)
    return fs.solve(PROBLEM, algorithm, rounds=12, seed=1, precision="float64", **options)


def test_momentum_on_the_server_is_fedavgm():
    """Hsu et al. (2019): v ← βv − Δ, x ← x − ηv."""
    run = solved(fs.SGD(0.7, momentum=0.8))
    x, v = np.zeros(5), np.zeros(5)
    for cohort in run.history["cohort"]:
        v = 0.8 * v - mean_change(x, cohort)
        x = x - 0.7 * v
    np.testing.assert_allclose(run.params, x, atol=1e-12)


@pytest.mark.parametrize("rule", ["adagrad", "yogi", "adam"])
def test_the_adaptive_steps_follow_algorithm_2(rule):
    run = solved(fs.AdaptiveStep(rule, 0.1, b1=0.6, b2=0.9, tau=0.01, initial=0.02))
    x, m, v = np.zeros(5), np.zeros(5), np.full(5, 0.02)
    for cohort in run.history["cohort"]:
        change = mean_change(x, cohort)
        m = 0.6 * m + 0.4 * change
        square = change**2
        if rule == "adagrad":
            v = v + square
        elif rule == "yogi":
            v = v - 0.1 * square * np.sign(v - square)
        else:
            v = 0.9 * v + 0.1 * square
        x = x + 0.1 * m / (np.sqrt(v) + 0.01)
    np.testing.assert_allclose(run.params, x, atol=1e-12)
    assert fs.AdaptiveStep(rule).initial is None
    first = solved(fs.AdaptiveStep(rule, tau=0.1)).state.server.moments
    assert first.second.shape == (5,)


def test_the_second_moment_begins_at_the_square_of_tau():
    rule = fs.AdaptiveStep("adam", tau=0.1).transform(jnp.int32(0))
    moments: Any = rule.init(jnp.zeros(2))
    np.testing.assert_allclose(moments.second, 0.01, rtol=1e-6)


OPTAX = {
    "SGD": (fs.SGD(0.7, momentum=0.8), optax.sgd(0.7, 0.8)),
    "Adam": (fs.Adam(0.1, b1=0.8, b2=0.95, eps=1e-4), optax.adam(0.1, 0.8, 0.95, 1e-4)),
    "Yogi": (fs.Yogi(0.1, b1=0.8, b2=0.95, eps=1e-2), optax.yogi(0.1, 0.8, 0.95, 1e-2)),
    "Adagrad": (fs.Adagrad(0.1, initial=0.2, eps=1e-3), optax.adagrad(0.1, 0.2, 1e-3)),
}


@pytest.mark.parametrize(("own", "other"), OPTAX.values(), ids=OPTAX)
def test_they_are_those_of_optax(own, other):
    run, theirs = solved(own), solved(other)
    np.testing.assert_allclose(run.params, theirs.params, atol=1e-12)
    x = np.zeros(5)
    with jax.enable_x64(True):
        state = other.init(jnp.asarray(x))
        for cohort in run.history["cohort"]:
            move, state = other.update(jnp.asarray(-mean_change(x, cohort)), state, jnp.asarray(x))
            x = np.asarray(optax.apply_updates(jnp.asarray(x), move))
    np.testing.assert_allclose(run.params, x, atol=1e-10)


AVERAGING = {
    "FedAvg": fs.FedAvg(0.03, local_steps=2, participants=3),
    "with a local optimizer": fs.FedAvg(0.5, local_steps=2, local_optimizer=fs.Adam(0.01)),
    "FedProx": fs.FedProx(0.03, local_steps=2, participants=3),
    "SCAFFOLD": fs.SCAFFOLD(0.03, local_steps=2, participants=3),
    "MIFA": fs.MIFA(0.03, participants=3),
    "FedVARP": fs.FedVARP(0.03, participants=3),
    "FedNova": fs.FedNova(0.03, participants=3),
    "FedAlt": fs.FedAlt(0.03, participants=3),
    "F3AST": fs.F3AST(0.02, participants=3),
    "with a downlink": fs.FedAvg(0.03, participants=3, downlink=fs.TopK(0.4)),
}


@pytest.mark.parametrize("algorithm", AVERAGING.values(), ids=AVERAGING)
def test_a_step_of_1_changes_nothing(algorithm):
    """Every algorithm that takes a server optimizer steps by it."""
    import dataclasses

    other = dataclasses.replace(algorithm, server_optimizer=fs.SGD(1.0))
    half = dataclasses.replace(algorithm, server_optimizer=fs.SGD(0.5))
    runs = [fs.solve(PROBLEM, a, 6, precision="float64") for a in (algorithm, other, half)]
    np.testing.assert_allclose(runs[0].params, runs[1].params, atol=1e-13)
    if "compression_error" in runs[0].history:
        one, two = (run.history["compression_error"] for run in runs[:2])
        np.testing.assert_allclose(one, two, atol=1e-12)
    assert np.abs(runs[0].params - runs[2].params).max() > 1e-3


def test_it_steps_within_the_domain_and_only_if_somebody_answered():
    problem = fs.Problem(
        examples.quadratic, BATCHES.samples.values, np.zeros(5), domain=fs.Ball(0.5)
    )
    algorithm = fs.FedAvg(0.1, server_optimizer=fs.SGD(1.0, momentum=0.9))

    def at_first(round, exchange, clients):
        return (round < 3) | (clients < 0)

    run = fs.solve(problem, algorithm, 3, precision="float64")
    assert np.linalg.norm(run.params) <= 0.5 + 1e-9
    silent = fs.solve(problem, algorithm, 8, precision="float64", arrivals=at_first)
    np.testing.assert_array_equal(run.params, silent.params)
    np.testing.assert_array_equal(
        run.state.server.moments[0].trace, silent.state.server.moments[0].trace
    )


def test_a_schedule_is_one_of_the_rounds():
    run = solved(fs.SGD(lambda round: jnp.where(round < 6, 1.0, 0.0)))
    np.testing.assert_allclose(
        run.params,
        fs.solve(
            PROBLEM,
            fs.FedAvg(0.03, local_steps=3, participants=4),
            6,
            seed=1,
            precision="float64",
        ).params,
        atol=1e-13,
    )


def test_a_new_number_compiles_nothing_and_sweeps():
    algorithm = fs.FedAvg(0.03, server_optimizer=fs.AdaptiveStep("adam", 0.1))
    grid: dict[str, Any] = {"server_optimizer.step_size": [0.1, 0.2]}
    swept = fs.sweep(PROBLEM, algorithm, 5, precision="float64", **grid)
    alone = fs.solve(
        PROBLEM,
        fs.FedAvg(0.03, server_optimizer=fs.AdaptiveStep("adam", 0.2)),
        5,
        precision="float64",
    )
    np.testing.assert_allclose(swept.runs[1].params, alone.params, atol=1e-12)


BAD = {
    "none": (
        lambda: fs.FedAvg(0.1, server_optimizer="adam"),
        "server_optimizer must be an Optimizer or one of optax, got 'adam'",
    ),
    "FedDyn": (
        lambda: fs.FedDyn(0.1, server_optimizer=fs.Adam(0.1)),
        "FedDyn has its own step of the server: leave out server_optimizer",
    ),
    "FedAvgAll": (
        lambda: fs.FedAvgAll(0.1, server_optimizer=fs.Adam(0.1)),
        "FedAvgAll has its own step of the server",
    ),
    "rule": (
        lambda: fs.AdaptiveStep("adan"),
        "rule must be one of adagrad, yogi, adam, got 'adan'",
    ),
    "tau": (lambda: fs.AdaptiveStep("adam", tau=0.0), "tau must be positive"),
    "b1": (lambda: fs.AdaptiveStep("adam", b1=1.0), "b1 must be at least 0 and below 1"),
    "step": (lambda: fs.Yogi(0.0), "step_size must be positive"),
    "initial": (lambda: fs.Adagrad(0.1, initial=-1.0), "initial must be at least 0"),
}


@pytest.mark.parametrize(("call", "sentence"), BAD.values(), ids=BAD)
def test_bad_input_raises_one_sentence(call, sentence):
    with pytest.raises(fs.InvalidInput, match=sentence):
        call()
