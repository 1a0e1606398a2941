"""Images over clients with different classes, the game between these clients, and its plot."""

import jax
import numpy as np
import pytest

import fedsolve as fs
from tests.support import examples


def test_contributions_are_drawn_with_their_equilibrium():
    game = examples.contribution_game()
    problem = examples.least_squares(constrained=False)
    run = fs.solve(problem, fs.IncentFedAvg(game, 0.05, 2.0), rounds=20)
    losses, weighted, contributions = run.plot().axes
    assert contributions.get_title() == "Contributions $N_i$"
    solid = [line for line in contributions.lines if line.get_linestyle() == "-"]
    dashed = [line for line in contributions.lines if line.get_linestyle() == "--"]
    np.testing.assert_array_equal(
        [line.get_ydata() for line in solid], run.history["participation"].T
    )
    np.testing.assert_allclose([line.get_ydata()[0] for line in dashed], game.equilibrium())
    assert len(losses.lines) == len(weighted.lines) == 1
    np.testing.assert_array_equal(weighted.lines[0].get_ydata(), run.history["weighted_objective"])
    strategic = fs.FedAvg(0.05, weighting=fs.Strategic(game, 2.0))
    np.testing.assert_allclose(strategic.limits()["participation"], game.equilibrium())
    not_monotone = fs.Game(
        fs.games.RandomCoverage(game.payoff.distributions), None, np.ones(6), np.full(6, 8.0)
    )
    assert fs.IncentFedAvg(not_monotone, 0.05, 2.0).limits() == {}


@pytest.fixture
def folder(monkeypatch):
    monkeypatch.setenv("FEDSOLVE_DATA", str(examples.DATA))


@examples.needs_data("mnist")
def test_images_are_dealt_to_clients_of_one_size_and_their_game_knows_them(folder):
    options = {"dataset": "mnist", "clients": 4, "samples": 400, "seed": 2}
    problem = fs.problems.images(hidden=8, **options)
    assert problem.n == 4
    assert problem.size == 784 * 8 + 8 + 8 * 10 + 10
    assert problem.samples.values["x"].dtype == np.uint8
    game = fs.problems.discovery_game(regularization=1e-3, **options)
    labels = problem.samples.values["y"]
    Q = np.stack([np.bincount(row, minlength=10) / len(row) for row in labels])
    np.testing.assert_allclose(game.payoff.distributions, Q)
    assert (game.upper == labels.shape[1]).all()
    assert (game.cost.rate <= (Q**2).sum(axis=1)).all()
    best = np.clip(((Q**2).sum(axis=1) - game.cost.rate) / 1e-3, 1, game.upper)
    np.testing.assert_allclose(game.equilibrium(), best, rtol=1e-9)
    algorithm = fs.IncentFedAvg(game, 0.1, 300.0, local_steps=5)
    run = fs.solve(problem, algorithm, rounds=30, evaluate_every=30)
    assert run.history["objective"][-1] < 1.5
    assert run.history["test_accuracy"][-1] > 0.5


@examples.needs_data("mnist")
@examples.needs_data("cifar10")
def test_the_networks_are_those_of_the_paper(folder):
    few = {"clients": 2, "samples": 20}
    dense = fs.problems.images("cifar10", hidden=128, **few)
    assert dense.size == 3073 * 128 + 129 * 10
    convolution = fs.problems.images("mnist", "small_cnn", hidden=16, **few)
    weights = 25 * 16 + 16 + 25 * 16 * 32 + 32 + (7 * 7 * 32 + 1) * 16 + 17 * 10
    assert convolution.size == weights
    placed = convolution.on_device()
    first = jax.tree.map(lambda leaf: leaf[0], placed.samples)
    assert 2 < placed.value(placed.start(), first) < 3  # about log 10 before any learning


@examples.needs_data("mnist")
@examples.needs_data("cifar10")
def test_training_starts_from_a_file_with_a_new_last_layer(folder, tmp_path):
    few = {"clients": 2, "samples": 20, "hidden": 8}
    trained = fs.problems.images("cifar10", seed=1, **few).params
    fs.models.save(trained, tmp_path / "network.safetensors")
    fresh = fs.problems.images("cifar10", seed=2, **few).params
    tuned = fs.problems.images(
        "cifar10", seed=2, weights=str(tmp_path / "network.safetensors"), **few
    ).params
    for name in ("weight", "bias"):
        own, others, new = (
            [getattr(layer, name) for layer in (model.first, model.head)]
            for model in (tuned, trained, fresh)
        )
        np.testing.assert_array_equal(own[0], others[0])
        np.testing.assert_array_equal(own[1], new[1])
        assert (np.asarray(own[0]) != np.asarray(new[0])).any()
    with pytest.raises(fs.InvalidInput, match=r"network.safetensors"):
        fs.problems.images("mnist", weights=str(tmp_path / "network.safetensors"), **few)


def test_bad_images_raise():
    with pytest.raises(fs.InvalidInput, match="model must be one of"):
        fs.problems.images(model="transformer")
    with pytest.raises(fs.InvalidInput, match="dataset must be"):
        fs.problems.images(dataset="adult")
