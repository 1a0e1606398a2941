"""MIFA, FedVARP and FedNova, each against a transcription of its paper."""

import numpy as np
import pytest

import fedsolve as fs
from tests.support import examples

parts = fs.participation
PROBLEM = examples.least_squares(clients=6, constrained=False)
GRADS = [grad for grad, _, _ in examples.least_squares_clients(PROBLEM)]
DATA = PROBLEM.samples.values
BEST = np.linalg.lstsq(DATA["inputs"].reshape(-1, 5), DATA["targets"].reshape(-1), rcond=None)[0]
ETA, STEPS = 0.03, 3


def pseudo_gradient(j, w):
    y = w
    for _ in range(STEPS):
        y = y - ETA * GRADS[j](y)
    return (w - y) / ETA


def test_mifa_follows_its_paper():
    """Algorithm 1 of Gu et al. with a table of all G^i, under outages."""
    algorithm = fs.MIFA(ETA, local_steps=STEPS, participants=4, availability=0.6)
    run = fs.solve(PROBLEM, algorithm, rounds=25, seed=2, precision="float64")
    w, latest = np.zeros(5), np.zeros((6, 5))
    for cohort, up in zip(run.history["cohort"], run.history["available"], strict=True):
        for j in cohort[up]:
            latest[j] = pseudo_gradient(j, w)
        w = w - ETA * latest.mean(axis=0)
    np.testing.assert_allclose(run.params, w, atol=1e-11)
    np.testing.assert_allclose(run.state.server.mean, latest.mean(axis=0), atol=1e-11)
    np.testing.assert_allclose(run.state.clients, latest, atol=1e-11)


def test_fedvarp_follows_its_paper():
    """Algorithm 1 of Jhunjhunwala et al., where the server keeps all y_i."""
    algorithm = fs.FedVARP(ETA, local_steps=STEPS, participants=2)
    run = fs.solve(PROBLEM, algorithm, rounds=25, seed=2, precision="float64")
    w, y = np.zeros(5), np.zeros((6, 5))
    for cohort in run.history["cohort"]:
        new = {j: pseudo_gradient(j, w) for j in cohort}
        v = np.mean([new[j] - y[j] for j in cohort], axis=0) + y.mean(axis=0)
        w = w - ETA * v
        for j in cohort:
            y[j] = new[j]
    np.testing.assert_allclose(run.params, w, atol=1e-11)
    np.testing.assert_allclose(run.state.clients, y, atol=1e-11)


@pytest.mark.parametrize("kind", [fs.MIFA, fs.FedVARP, fs.FedNova])
def test_with_everyone_they_are_fedavg(kind):
    one = fs.solve(PROBLEM, kind(ETA, local_steps=STEPS), 9, precision="float64")
    other = fs.solve(PROBLEM, fs.FedAvg(ETA, local_steps=STEPS), 9, precision="float64")
    np.testing.assert_allclose(one.params, other.params, atol=1e-12)


@pytest.mark.parametrize("kind", [fs.MIFA, fs.FedVARP])
def test_the_noise_of_the_choice_vanishes(kind):
    """With one step, three of six at random converge to the optimum; FedAvg stays around it."""
    settings = {"rounds": 1500, "evaluate_every": 1500, "precision": "float64"}
    run = fs.solve(PROBLEM, kind(0.05, participants=3), **settings)
    assert np.linalg.norm(run.params - BEST) < 1e-8
    noisy = fs.solve(PROBLEM, fs.FedAvg(0.05, participants=3), **settings)
    assert np.linalg.norm(noisy.params - BEST) > 1e-2


@pytest.mark.parametrize("kind", [fs.MIFA, fs.FedVARP])
def test_a_biased_uplink_loses_nothing(kind):
    """The server holds what clients believe that it holds, and they converge all the same."""
    algorithm = kind(0.03, participants=4, uplink=fs.TopK(0.4))
    run = fs.solve(PROBLEM, algorithm, 2000, evaluate_every=2000, precision="float64")
    np.testing.assert_allclose(
        run.state.server.mean, np.asarray(run.state.clients).mean(axis=0), atol=1e-10
    )
    assert np.linalg.norm(run.params - BEST) < 1e-6


def ragged():
    """Scalar quadratics on clients of 2, 4 and 8 equal samples: in passes, 1, 2 and 4 steps."""
    target = np.array([1.0, 3.0, -2.0])
    clients = [{"t": np.full(n, t)} for n, t in zip((2, 4, 8), target, strict=True)]
    return (
        fs.Problem(
            lambda w, data: (
                0.5 * (((w - data["t"]) ** 2) * data["mask"]).sum() / data["mask"].sum()
            ),
            fs.stack_clients(clients),
            np.zeros(1),
            batch_size=2,
        ),
        target,
    )


def test_fednova_follows_its_paper():
    problem, target = ragged()
    algorithm = fs.FedNova(0.1, local_epochs=1, weighting="DataSize")
    run = fs.solve(problem, algorithm, rounds=7, precision="float64")
    w, tau, p = 0.0, np.array([1, 2, 4]), np.array([2, 4, 8]) / 14
    for _ in range(7):
        d = (w - target) * (1 - 0.9**tau) / 0.1 / tau
        w = w - 0.1 * (p @ tau) * (p @ d)
    np.testing.assert_allclose(run.params, w, atol=1e-12)
    np.testing.assert_allclose(run.history["effective_steps"], p @ tau, atol=1e-12)


def test_fednova_finds_the_minimum_and_fedavg_another_point():
    """With small steps FedAvg minimises Σ τ_j f_j (Theorem 1 of Wang et al.), FedNova Σ f_j."""
    problem, target = ragged()
    tau = np.array([1, 2, 4])
    for kind, expected in (
        (fs.FedAvg, tau @ target / tau.sum()),
        (fs.FedNova, target.mean()),
    ):
        run = fs.solve(problem, kind(5e-3, local_epochs=1), 1500, evaluate_every=1500)
        np.testing.assert_allclose(run.params, expected, atol=2e-2)


def test_fednova_with_momentum_divides_by_the_weight_of_the_gradients():
    """With a constant gradient the change is η‖a‖₁ times it, whatever the momentum."""
    problem = fs.Problem(
        lambda w, data: w @ data["a"], {"a": np.array([[1.0], [3.0]])}, np.zeros(1)
    )
    for steps, rho in ((1, 0.5), (4, 0.5), (3, 0.0)):
        optimizer = fs.SGD(0.1, momentum=rho)
        algorithm = fs.FedNova(1.0, local_steps=steps, local_optimizer=optimizer)
        run = fs.solve(problem, algorithm, 1, precision="float64")
        length = sum(sum(rho**k for k in range(s + 1)) for s in range(steps))
        np.testing.assert_allclose(run.history["effective_steps"], length, atol=1e-12)
        np.testing.assert_allclose(run.params, -2.0 * 0.1 * length, atol=1e-12)


BAD = {
    "MIFA": (lambda: fs.MIFA(0.1, uplink=fs.RandK(0.5)), "The uplink must be contractive"),
    "FedVARP": (lambda: fs.FedVARP(0.1, uplink=fs.RandK(0.5)), "The uplink must be contractive"),
    "FedNova": (
        lambda: fs.FedNova(0.1, local_optimizer=fs.Adam(0.1)),
        "known for gradient descent and fs.SGD, not for Adam",
    ),
    "strategic": (
        lambda: fs.solve(
            PROBLEM,
            fs.MIFA(0.1, weighting=fs.Strategic(examples.contribution_game(), 2.0)),
            1,
        ),
        "MIFA minimises the plain mean over clients",
    ),
}


@pytest.mark.parametrize(("call", "sentence"), BAD.values(), ids=BAD)
def test_bad_input_raises_one_sentence(call, sentence):
    with pytest.raises(fs.InvalidInput, match=sentence):
        call()
