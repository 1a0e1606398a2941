"""Selections with known probabilities, and Horvitz-Thompson weights: exact expectations."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from fedsolve.participation.selection import inclusion_of, systematic
from tests.support import examples

parts = fs.participation
PROBLEM = examples.least_squares(clients=6, constrained=False)
GRADS = [grad for grad, _, _ in examples.least_squares_clients(PROBLEM)]
W = jnp.asarray([0.5, 0.2, 0.1, 0.1, 0.05, 0.05])


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6])
def test_inclusion_probabilities_solve_their_equation(count):
    """π_j = min(1, c·size_j), Σ π = count: c by bisection."""
    sizes = np.array([0.4, 0.05, 0.3, 0.1, 0.05, 0.1])
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(1, middle * sizes).sum() < count else (low, middle)
    found = inclusion_of(jnp.asarray(sizes), count)
    np.testing.assert_allclose(found, np.minimum(1, low * sizes), rtol=1e-5)
    np.testing.assert_allclose(found.sum(), count, rtol=1e-5)


def frequencies(draw, clients=6, draws=20000):
    keys = jax.random.split(jax.random.key(0), draws)
    counts = jax.vmap(lambda key: jnp.zeros(clients).at[draw(key)].add(1))(keys)
    assert int(counts.max()) == 1  # without replacement
    return np.asarray(counts)


def test_systematic_draws_have_their_probabilities():
    chances = inclusion_of(W, 3)
    drawn = frequencies(lambda key: systematic(key, chances, 3))
    assert (drawn.sum(axis=1) == 3).all()
    np.testing.assert_allclose(drawn.mean(axis=0), chances, atol=0.015)
    both = np.mean(drawn[:, 3] * drawn[:, 4])  # a random order: every pair can occur
    assert both > 0.02


def test_probabilities_that_are_all_1_draw_everyone():
    drawn = systematic(jax.random.key(0), jnp.ones(5), 5)
    assert sorted(drawn.tolist()) == [0, 1, 2, 3, 4]


SELECTIONS = {
    "Importance": parts.Importance(3, floor=0.2),
    "Importance, uniform": parts.Importance(2, floor=1.0),
    "Random": parts.Random(2, unbiased=True),
    "Cyclic": parts.Cyclic(2, unbiased=True),
}


@pytest.mark.parametrize("selection", SELECTIONS.values(), ids=SELECTIONS)
def test_the_estimate_has_the_right_expectation(selection):
    """Σ_{j in S} v_j/(nπ_j) averages to the mean of v over draws."""
    chances = selection.inclusion(W, 6)
    values = np.arange(6.0) ** 2
    drawn = frequencies(lambda key: selection.select(W, 6, selection.init(6), key)[0])
    np.testing.assert_allclose(drawn.mean(axis=0), chances, atol=0.015)
    estimates = drawn @ (values / (6 * np.asarray(chances)))
    error = estimates.std() / np.sqrt(len(estimates))
    assert abs(estimates.mean() - values.mean()) < 4 * error + 1e-6
    assert (1 / (6 * chances)).max() <= 1 / (
        selection.count * getattr(selection, "floor", 1)
    ) + 1e-6


def one_round(algorithm, seed, **options):
    return fs.solve(PROBLEM, algorithm, 1, seed=seed, precision="float64", **options)


def test_a_round_moves_by_the_horvitz_thompson_sum():
    selection = parts.Importance(3, floor=0.2)
    algorithm = fs.FedAvg(0.05, weighting="GradientNorm", selection=selection)
    norms = np.array([np.linalg.norm(grad(np.zeros(5))) for grad in GRADS])
    with jax.enable_x64(True):
        chances = np.asarray(selection.inclusion(jnp.asarray(norms / norms.sum()), 6))
    for seed in range(3):
        run = one_round(algorithm, seed)
        cohort = run.history["cohort"][0]
        move = sum(GRADS[j](np.zeros(5)) / (6 * chances[j]) for j in cohort)
        np.testing.assert_allclose(run.params, -0.05 * move, atol=1e-12)


def test_weights_of_the_objective_stay_in_the_mean():
    """DataSize weights p_j: Σ_{j in S} (p_j/π_j) v_j, with π_j = 2/3 for two of three."""
    clients = [{"t": np.full(n, t)} for n, t in ((2, 1.0), (4, 3.0), (6, -2.0))]
    problem = fs.Problem(
        lambda w, data: 0.5 * (((w - data["t"]) ** 2) * data["mask"]).sum() / data["mask"].sum(),
        fs.stack_clients(clients),
        np.zeros(1),
    )
    algorithm = fs.FedAvg(1.0, weighting="DataSize", selection=parts.Random(2, unbiased=True))
    run = fs.solve(problem, algorithm, 1, precision="float64")
    share, target = np.array([2, 4, 6]) / 12, np.array([1.0, 3.0, -2.0])
    cohort = run.history["cohort"][0]
    np.testing.assert_allclose(run.params, (share * target / (2 / 3))[cohort].sum(), atol=1e-12)


def test_the_probability_to_be_up_counts_too():
    """E over draws and outages of one round's step is the full gradient step."""
    up = [0.9, 0.3, 0.6, 0.5, 0.8, 0.4]
    algorithm = fs.FedAvg(0.05, selection=parts.Random(3, unbiased=True), availability=up)
    steps = fs.sweep(PROBLEM, algorithm, 1, seeds=range(400)).runs
    moves = np.array([run.params for run in steps])
    full = -0.05 * np.mean([grad(np.zeros(5)) for grad in GRADS], axis=0)
    error = moves.std(axis=0) / np.sqrt(len(moves))
    assert (np.abs(moves.mean(axis=0) - full) < 4.5 * error).all()
    run = one_round(algorithm, 0)
    cohort, there = run.history["cohort"][0], run.history["available"][0]
    move = sum(GRADS[j](np.zeros(5)) / (6 * 0.5 * up[j]) for j in cohort[there])
    np.testing.assert_allclose(run.params, -0.05 * move, atol=1e-12)


def test_importance_has_the_least_variance_for_its_own_vectors():
    """p_j ∝ ‖v_j‖ has less variance than uniform draws, in exact numbers for one client drawn."""
    values = np.array([10.0, 1.0, 1.0, 0.5])
    own = np.asarray(parts.Importance(1, floor=1e-6).inclusion(jnp.asarray(values / 12.5), 4))

    def variance(chances):
        return sum(c * (v / (4 * c)) ** 2 for c, v in zip(chances, values, strict=True))

    assert variance(own) < 0.5 * variance(np.full(4, 0.25))
    for a, b in itertools.permutations(range(4), 2):  # moving probability around makes it worse
        other = own.copy()
        other[a] += 0.02
        other[b] -= 0.02
        assert variance(other) > variance(own)


def test_scaffold_feddyn_and_fedvarp_take_it():
    selection = parts.Importance(3)
    for algorithm in (
        fs.SCAFFOLD(0.02, weighting="GradientNorm", selection=selection),
        fs.FedDyn(0.02, regularization=1.0, weighting="GradientNorm", selection=selection),
        fs.FedVARP(0.02, weighting="GradientNorm", selection=selection),
    ):
        history = fs.solve(PROBLEM, algorithm, rounds=60).history
        assert history["objective"][-1] < 0.7 * history["objective"][0]


BAD = {
    "Top": (
        lambda: parts.Top(3, unbiased=True),  # pyright: ignore[reportCallIssue]
        TypeError,
        "unbiased",
    ),
    "both": (
        lambda: parts.Random(3, equal=True, unbiased=True),
        fs.InvalidInput,
        "Give equal or unbiased weights, not both",
    ),
    "floor 0": (
        lambda: parts.Importance(3, floor=0.0),
        fs.InvalidInput,
        "floor must be above 0 and at most 1, got 0.0",
    ),
    "floor 2": (lambda: parts.Importance(3, floor=2), fs.InvalidInput, "floor must be above 0"),
    "equal": (
        lambda: parts.Importance(3, equal=True),
        fs.InvalidInput,
        "Importance weights clients by",
    ),
    "FedSGM": (
        lambda: one_round(fs.FedSGM(0.1, 0.1, selection=parts.Importance(3)), 0),
        fs.InvalidInput,
        "FedSGM cannot use Horvitz-Thompson weights",
    ),
    "PPBC": (
        lambda: one_round(fs.PPBC(0.1, select_epoch=parts.Importance(3)), 0),
        fs.InvalidInput,
        "PPBC cannot use Horvitz-Thompson weights",
    ),
    "PPBC, rounds": (
        lambda: one_round(fs.PPBC(0.1, select_round=parts.Importance(3)), 0),
        fs.InvalidInput,
        "PPBC cannot use Horvitz-Thompson weights",
    ),
    "who is up decides": (
        lambda: one_round(
            fs.FedAvg(
                0.1, weighting="GradientNorm", selection=parts.Importance(3), availability=0.5
            ),
            0,
        ),
        fs.InvalidInput,
        "GradientNorm weights only clients that are up",
    ),
    "first answers": (
        lambda: one_round(
            fs.FedAvg(
                0.1,
                selection=parts.Random(3, unbiased=True),
                availability=parts.FirstAnswers(2),
            ),
            0,
        ),
        fs.InvalidInput,
        "depends on the cohort",
    ),
}


@pytest.mark.parametrize(("call", "kind", "sentence"), BAD.values(), ids=BAD)
def test_bad_input_raises_one_sentence(call, kind, sentence):
    with pytest.raises(kind, match=sentence):
        call()
