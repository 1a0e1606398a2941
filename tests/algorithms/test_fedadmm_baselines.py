"""FedADMM's baselines, each against its own transcription from its paper."""

import numpy as np
import pytest

import fedsolve as fs
from tests.support import examples

STEP, STEPS = 0.05, 3


@pytest.fixture(scope="module")
def problem():
    return examples.least_squares(constrained=False)


def gradients(problem):
    return [client[0] for client in examples.least_squares_clients(problem)]


def prox(slopes, cohorts, proximity=0.4):
    w = np.zeros(5)
    for cohort in cohorts:
        ends = []
        for i in cohort:
            v = w.copy()
            for _ in range(STEPS):
                v = v - STEP * (slopes[i](v) + proximity * (v - w))
            ends.append(v)
        w = np.mean(ends, axis=0)  # (17)
    return w


def everyone_s_last(slopes, cohorts):
    """Algorithm 2 of FedADMM's paper, with γ/m = STEP and k_0 = STEPS."""
    local = np.zeros((6, 5))
    for cohort in cohorts:
        w = local.mean(axis=0)  # (18)
        for i in cohort:
            local[i] = w
            for _ in range(STEPS):
                local[i] = local[i] - STEP * slopes[i](local[i])
    return local.mean(axis=0)


def personal(slopes, cohorts, alternate, alpha=0.5, mu=0.3):
    w, own = np.zeros(5), np.zeros((6, 5))
    for cohort in cohorts:
        ends = []
        for i in cohort:
            u, v = w.copy(), own[i]
            if alternate:
                for _ in range(STEPS):
                    v = v - STEP * (alpha * slopes[i](v) + mu * (v - w))
                for _ in range(STEPS):
                    u = u - STEP * ((1 - alpha) * slopes[i](u) + mu * (u - v))
            else:
                for _ in range(STEPS):
                    du = (1 - alpha) * slopes[i](u) + mu * (u - v)
                    dv = alpha * slopes[i](v) + mu * (v - u)
                    u, v = u - STEP * du, v - STEP * dv
            own[i] = v
            ends.append(u)
        w = np.mean(ends, axis=0)
    return w, own


@pytest.mark.parametrize("kind", ["FedProx", "FedAvgAll", "FedAlt", "FedSim"])
def test_follows_its_transcription(problem, kind):
    options = {"participants": 3, "local_steps": STEPS}
    if kind == "FedProx":
        options["proximity"] = 0.4
    if kind in ("FedAlt", "FedSim"):
        options["proximity"] = 0.3
    algorithm = getattr(fs, kind)(STEP, **options)
    run = fs.solve(problem, algorithm, rounds=12, precision="float64")
    slopes, cohorts = gradients(problem), run.history["cohort"]
    if kind == "FedProx":
        expected = prox(slopes, cohorts)
    elif kind == "FedAvgAll":
        expected = everyone_s_last(slopes, cohorts)
    else:
        expected, own = personal(slopes, cohorts, kind == "FedAlt")
        np.testing.assert_allclose(run.state.clients.personal, own, atol=1e-12)
    np.testing.assert_allclose(run.params, expected, atol=1e-12)


def test_fedalts_optimiser_follows_its_schedule(problem):
    """SGD as an optimiser is the plain steps, also where its step size falls."""
    falling = fs.Cosine(STEP, 9)
    options = {"participants": 3, "local_steps": STEPS, "personal_step_size": STEP}
    plain = fs.FedAlt(falling, **options)
    optimised = fs.FedAlt(1.0, local_optimizer=fs.SGD(falling), **options)
    one, other = (fs.solve(problem, a, rounds=9, precision="float64") for a in (plain, optimised))
    np.testing.assert_allclose(one.params, other.params, atol=1e-13)


def test_without_a_proximal_term_fedprox_is_fedavg(problem):
    options = {"participants": 3, "local_steps": STEPS}
    one = fs.solve(problem, fs.FedProx(STEP, proximity=0.0, **options), rounds=9)
    other = fs.solve(problem, fs.FedAvg(STEP, **options), rounds=9)
    np.testing.assert_array_equal(one.params, other.params)


def test_personal_parameters_fit_their_clients_better_than_shared_ones(problem):
    run = fs.solve(problem, fs.FedAlt(0.2, local_steps=5), rounds=150, precision="float64")
    data = problem.samples.values
    own, shared = (
        0.5 * np.mean((np.einsum("nsd,nd->ns", data["inputs"], w) - data["targets"]) ** 2)
        for w in (run.state.clients.personal, np.tile(run.params, (6, 1)))
    )
    assert own < 0.2 * shared


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: fs.FedProx(0.1, proximity=-1.0), "proximity must be at least 0"),
        (lambda: fs.FedAvgAll(0.1, uplink=fs.RandK(0.5)), "must be contractive"),
        (lambda: fs.FedSim(0.1, personal_steps=3), "leave out personal_steps"),
        (lambda: fs.FedAlt(0.1, personal_steps=0), "personal_steps must be a whole number"),
    ],
)
def test_bad_settings_raise(make, sentence):
    with pytest.raises(fs.InvalidInput, match=sentence):
        make()
