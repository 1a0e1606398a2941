"""Linear models on frozen features: the loss, the features, and the known minimum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from fedsolve.problems import frozen
from tests.support import examples

rng = np.random.default_rng(0)
IMAGES = rng.random((60, 12, 12, 1)).astype(np.float32)


def test_the_loss_is_the_penalised_cross_entropy():
    data = {
        "x": rng.standard_normal((7, 4)),
        "y": np.array([0, 1, 2, 0, 1, 2, 0]),
        "mask": np.array([1, 1, 1, 1, 1, 0, 0], bool),
    }
    w = rng.standard_normal((4, 3))
    scores = data["x"][:5] @ w
    losses = np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(5), data["y"][:5]]
    expected = losses.mean() + 0.05 * (w**2).sum()
    np.testing.assert_allclose(frozen.SoftmaxLoss(0.1)(jnp.asarray(w), data), expected, rtol=1e-5)
    right = (scores.argmax(axis=1) == data["y"][:5]).mean()
    np.testing.assert_allclose(frozen.accuracy(jnp.asarray(w), data), right, rtol=1e-6)


def test_components_are_those_of_the_singular_values():
    train, test = frozen._components(IMAGES[:40], IMAGES[40:], 3)
    flat = IMAGES[:40].reshape(40, -1)
    centred = flat - flat.mean(axis=0)
    _, values, _ = np.linalg.svd(centred, full_matrices=False)
    np.testing.assert_allclose((train**2).sum(axis=0), values[:3] ** 2, rtol=1e-3)
    assert test.shape == (20, 3)


def test_responses_are_means_over_quarters():
    train, _ = frozen._responses(IMAGES[:5], IMAGES[5:7], 2)
    filters = np.random.default_rng(0).standard_normal((5, 5, 1, 2))
    filters -= filters.mean(axis=(0, 1, 2))
    picture = IMAGES[0, :, :, 0]
    seen = np.zeros((4, 4, 2))
    for i in range(4):
        for j in range(4):
            patch = picture[2 * i : 2 * i + 5, 2 * j : 2 * j + 5]
            seen[i, j] = np.maximum(np.tensordot(patch, filters[:, :, 0], 2), 0)
    expected = [seen[a : a + 2, b : b + 2].mean(axis=(0, 1)) for a in (0, 2) for b in (0, 2)]
    np.testing.assert_allclose(train[0], np.concatenate(expected), rtol=1e-4, atol=1e-5)


def test_features_are_standardised_by_the_training_images():
    train, test = frozen._standardised(IMAGES[:40, 0, 0], IMAGES[40:, 0, 0] + 1)
    np.testing.assert_allclose(train[:, :-1].mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(train[:, :-1].std(axis=0), 1, rtol=1e-4)
    assert (train[:, -1] == 1).all()
    assert test[:, 0].mean() > 1


@examples.needs_data("mnist")
@pytest.mark.parametrize(
    "partition",
    ["uneven", *(pytest.param(p, marks=pytest.mark.slow) for p in ("iid", "two_groups"))],
)
def test_the_problem_has_ten_clients_and_a_known_minimum(partition, monkeypatch):
    from fedsolve.papers.decisive import known_minimum

    monkeypatch.setenv("FEDSOLVE_DATA", str(examples.DATA))
    problem = fs.problems.frozen_features("mnist", partition=partition, size=5, samples=300)
    assert (problem.n, problem.dimension) == (10, 60)
    least = known_minimum(problem)
    run = fs.solve(problem, fs.FedAvg(1.0), 300, evaluate_every=300, precision="float64")
    assert 0 < run.history["objective"][-1] - least < 0.1
    assert 0.3 < run.history["test_accuracy"][-1] < 1
    with jax.enable_x64(True):
        assert np.isfinite(problem.on_device().validate(problem.start()))


BAD = {
    "dataset": ({"dataset": "svhn"}, "dataset must be one of mnist, cifar10, got 'svhn'"),
    "features": ({"features": "deep"}, "features must be one of pca, convolutions"),
    "partition": ({"partition": "equal"}, "partition must be one of iid, two_groups, uneven"),
    "size": ({"size": 0}, "size must be a whole number from 1 up"),
    "samples": ({"samples": 0}, "samples must be a whole number from 1 up"),
    "validation": ({"validation": 1.0}, "validation must be from 0 to less than 1, got 1.0"),
    "penalty": ({"penalty": -1.0}, "penalty must be at least 0"),
}


@pytest.mark.parametrize(("given", "sentence"), BAD.values(), ids=BAD)
def test_bad_input_raises_one_sentence(given, sentence):
    with pytest.raises(fs.InvalidInput, match=sentence):
        fs.problems.frozen_features(**given)
