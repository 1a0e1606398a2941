"""The weighting `Strategic` in every algorithm that takes weights."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from tests.support import examples
from tests.support.strategic import mean_problem, settling_game

WANTED = np.asarray([6.0, 2.0, 1.0])  # N*

CENTRES = np.asarray([0.0, 1.0, 4.0])

MEANS = {"weighted": WANTED @ CENTRES / 9, "plain": CENTRES.mean()}


def one_number(constraint=None):
    """f_i = ½(w − CENTRES_i)², the same at all of a client's samples."""
    return fs.Problem(
        lambda w, data: 0.5 * jnp.mean((data["x"] - w[0]) ** 2),
        {"x": np.repeat(CENTRES[:, None], 8, axis=1)},
        np.asarray([3.0]),
        constraint,
    )


FIXED = fs.Strategic(fs.Game(None, None, WANTED, WANTED), 1.0)

MOVING = fs.Strategic(settling_game(WANTED), 1.0, start=[1.0, 4.0, 8.0])


@pytest.mark.parametrize(
    "algorithm",
    [
        fs.FedAvg(0.2, weighting=MOVING),
        fs.FedSGM(0.2, weighting=MOVING),
        fs.FedAlt(0.2, weighting=MOVING),
        fs.FedSim(0.2, weighting=FIXED),
        fs.FedADMM(penalty="theory", weighting=MOVING),
        fs.FedADMM(penalty="theory", weighting=MOVING, participants=2, uplink=fs.Float16()),
        fs.FedADMM(penalty="theory", weighting=FIXED, dual_start="gradient", availability=0.6),
        fs.PPBC(0.2, weighting=FIXED),
        fs.PPBC(fs.Diminishing(0.3, 0.8), weighting=MOVING, select_round=fs.participation.Top(1)),
    ],
    ids=lambda a: f"{type(a).__name__} {'moving' if a.weighting is MOVING else 'fixed'}",
)
def test_strategic_clients_are_minimised_for_by_their_weights(algorithm):
    """Σ p_i(N*) f_i has its minimum at 2/3, the plain mean at 5/3."""
    rounds = 4000 if isinstance(algorithm, fs.PPBC) else 400
    run = fs.solve(one_number(), algorithm, rounds, evaluate_every=rounds)
    close = 0.03 if isinstance(algorithm, fs.PPBC) else 1e-4
    np.testing.assert_allclose(run.params, MEANS["weighted"], atol=close)
    assert abs(run.params[0] - MEANS["plain"]) > 0.9
    np.testing.assert_allclose(run.history["participation"][-1], WANTED, rtol=1e-4)
    each = 0.5 * (CENTRES - run.params) ** 2
    np.testing.assert_allclose(run.history["objective"][-1], each.mean(), rtol=1e-5)
    np.testing.assert_allclose(run.history["weighted_objective"][-1], WANTED @ each / 9, rtol=1e-4)


def test_strategic_clients_are_constrained_by_their_weights():
    """g_i = w − CENTRES_i/2 ≤ 0 on average is w ≤ 1/3 by weights, where Σ p_i f_i is least on the
    boundary, and w ≤ 5/6 plainly, where it is least inside."""
    problem = one_number(lambda w, data: w[0] - jnp.mean(data["x"]) / 2)
    for algorithm in (
        fs.FedSGM(fs.Diminishing(0.3, 0.7), weighting=FIXED),
        fs.IPPConEx(0.2, weighting=FIXED),
    ):
        run = fs.solve(problem, algorithm, 3000, evaluate_every=3000)
        np.testing.assert_allclose(run.params, MEANS["weighted"] / 2, atol=5e-3)
        np.testing.assert_allclose(run.history["weighted_constraint"][-1], 0, atol=5e-3)
        np.testing.assert_allclose(run.history["constraint"][-1], -0.5, atol=5e-3)


@pytest.mark.parametrize("kind", [fs.SCAFFOLD, fs.FedDyn, fs.FedAvgAll])
def test_algorithms_for_the_plain_mean_raise_with_strategic_clients(kind):
    with pytest.raises(fs.InvalidInput, match="minimises the plain mean over clients"):
        fs.solve(one_number(), kind(0.1, weighting=FIXED), 1)


def test_strategic_gives_any_algorithm_weights_and_subsets():
    game = examples.contribution_game(5, most=6)
    problem = mean_problem()
    options = {"rounds": 300, "precision": "float64"}
    incent = fs.solve(problem, fs.IncentFedAvg(game, 0.05, 0.7), **options)
    for algorithm in (
        fs.FedAvg(0.05, weighting=fs.Strategic(game, 0.7)),
        fs.FedSGM(0.05, weighting=fs.Strategic(game, 0.7)),
    ):
        run = fs.solve(problem, algorithm, **options)
        np.testing.assert_array_equal(run.history["participation"], incent.history["participation"])
        assert not np.array_equal(run.params, fs.solve(problem, fs.FedAvg(0.05), **options).params)
    whole = fs.Game(None, None, np.full(5, 6.0), 6.0)
    same = fs.solve(problem, fs.FedAvg(0.05, weighting=fs.Strategic(whole, 1.0)), **options)
    plain = fs.solve(problem, fs.FedAvg(0.05), **options)
    np.testing.assert_allclose(same.params, plain.params, rtol=1e-12)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: fs.Strategic(FIXED.game, 0.0), "step_size must be positive"),
        (lambda: fs.Strategic(FIXED.game, 1.0, start=np.ones((1, 3))), "too many axes"),
        (lambda: fs.Strategic(FIXED.game, 1.0, start=[1.0, 2.0]), "start must be one number for"),
        (lambda: fs.Strategic(fs.Game(None, None, [2, 3], 4.0), 1.0), "2 players, the problem 3"),
        (lambda: fs.Strategic(fs.Game(None, None, [2, 0.5, 3], 8.0), 1.0), "at least one sample;"),
        (lambda: fs.Strategic(fs.Game(None, None, 1.0, [8, 8.5, 8]), 1.0), "Client 1 has 8 samp"),
    ],
)
def test_players_that_are_not_the_clients_raise(make, sentence):
    with pytest.raises(fs.InvalidInput, match=sentence):
        make().check(one_number())
