"""FedAMD against a transcription of its paper."""

import numpy as np
import pytest

import fedsolve as fs
from tests.support import examples

PROBLEM = examples.least_squares(clients=6, constrained=False)
GRADS = [grad for grad, _, _ in examples.least_squares_clients(PROBLEM)]
DATA = PROBLEM.samples.values
BEST = np.linalg.lstsq(DATA["inputs"].reshape(-1, 5), DATA["targets"].reshape(-1), rcond=None)[0]


def test_fedamd_follows_its_paper():
    algorithm = fs.FedAMD(0.03, local_steps=3, participants=4, anchors=0.4, server_step_size=0.7)
    run = fs.solve(PROBLEM, algorithm, rounds=25, seed=2, precision="float64")
    x, cached = np.zeros(5), np.array([grad(np.zeros(5)) for grad in GRADS])
    for cohort, anchors in zip(run.history["cohort"], run.history["anchors"], strict=True):
        guide, moves = cached.mean(axis=0), []
        for i in cohort[~anchors]:
            before, here, g = x, x - 0.03 * guide, guide
            for _ in range(2):
                g = g + GRADS[i](here) - GRADS[i](before)
                before, here = here, here - 0.03 * g
            moves.append(x - here)
        for i in cohort[anchors]:
            cached[i] = GRADS[i](x)
        if moves:
            x = x - 0.7 * np.mean(moves, axis=0)
    assert 0 < run.history["anchors"].mean() < 0.7
    np.testing.assert_allclose(run.params, x, atol=1e-11)
    np.testing.assert_allclose(run.state.clients, cached, atol=1e-11)
    np.testing.assert_allclose(run.state.server.mean, cached.mean(axis=0), atol=1e-11)
    assert run.history["vectors_up"][0] == 6 + 4  # everyone begins
    assert (run.history["vectors_up"][1:] == 4).all()


def test_it_reaches_the_optimum_with_few_participants():
    algorithm = fs.FedAMD(0.03, local_steps=3, participants=2)
    run = fs.solve(PROBLEM, algorithm, 2500, evaluate_every=2500, precision="float64")
    assert np.linalg.norm(run.params - BEST) < 1e-6


def test_minibatches_of_a_step_are_the_same_in_both_gradients():
    """With equal Hessians the difference of two gradients of one minibatch has no noise."""
    rng = np.random.default_rng(0)
    problem = fs.Problem(
        lambda w, data: 0.5 * ((w - data["t"]) ** 2).sum(axis=1).mean(),
        {"t": rng.standard_normal((4, 20, 3))},
        np.zeros(3),
        batch_size=2,
    )
    algorithm = fs.FedAMD(0.1, local_steps=4, participants=2)
    run = fs.solve(problem, algorithm, 400, evaluate_every=400, precision="float64")
    best = problem.samples.values["t"].mean(axis=(0, 1))
    np.testing.assert_allclose(run.params, best, atol=1e-9)


BAD = {
    "anchors": (lambda: fs.FedAMD(0.1, anchors=1.0), "anchors must be between 0 and 1, got 1"),
    "optimizer": (lambda: fs.FedAMD(0.1, local_optimizer=fs.Adam(0.1)), "take their own steps"),
    "epochs": (lambda: fs.FedAMD(0.1, local_epochs=2), "take their own steps"),
    "uplink": (lambda: fs.FedAMD(0.1, uplink=fs.TopK(0.5)), "send their gradients as they are"),
}


@pytest.mark.parametrize(("call", "sentence"), BAD.values(), ids=BAD)
def test_bad_input_raises_one_sentence(call, sentence):
    with pytest.raises(fs.InvalidInput, match=sentence):
        call()
