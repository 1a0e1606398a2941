"""Oort and DivFL, against their papers' rules by hand."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from fedsolve.participation.divfl import representatives
from tests.support import examples

parts = fs.participation
PROBLEM = examples.least_squares(clients=6, constrained=False)
GRADS = [grad for grad, _, _ in examples.least_squares_clients(PROBLEM)]


def greedy(gradients, count):
    """The facility location of DivFL's (5), one client after the other."""
    distances = np.linalg.norm(gradients[:, None] - gradients[None], axis=2)
    chosen = []
    for _ in range(count):
        left = [j for j in range(len(gradients)) if j not in chosen]
        cost = [distances[:, [*chosen, j]].min(axis=1).sum() for j in left]
        chosen.append(left[int(np.argmin(cost))])
    closest = np.argmin(distances[:, chosen], axis=1)
    shares = np.zeros(len(gradients))
    for k in closest:
        shares[chosen[k]] += 1 / len(gradients)
    return shares


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_representatives_are_chosen_greedily(count):
    gradients = np.random.default_rng(count).standard_normal((7, 3))
    found = representatives(jnp.asarray(gradients), jnp.ones(7, bool), count)
    np.testing.assert_allclose(found, greedy(gradients, count), atol=1e-6)


def test_two_groups_get_one_representative_each():
    gradients = np.array([[0.0], [0.1], [-0.1], [9.0], [9.2]])
    found = np.asarray(representatives(jnp.asarray(gradients), jnp.ones(5, bool), 2))
    (one,), (other,) = np.flatnonzero(found[:3]), np.flatnonzero(found[3:])
    assert one in (0, 1)
    assert other in (0, 1)
    np.testing.assert_allclose(sorted(found[found > 0]), [0.4, 0.6], atol=1e-6)


def test_clients_that_are_away_are_neither_chosen_nor_represented():
    gradients = np.array([[0.0], [0.1], [5.0], [9.0]])
    there = np.array([True, True, False, True])
    found = np.asarray(representatives(jnp.asarray(gradients), jnp.asarray(there), 2))
    np.testing.assert_allclose(sorted(found), [0, 0, 1 / 3, 2 / 3], atol=1e-6)
    assert found[2] == 0
    few = representatives(jnp.asarray(gradients), jnp.asarray([False, True, False, False]), 3)
    np.testing.assert_allclose(few, [0, 1, 0, 0])
    nobody = representatives(jnp.asarray(gradients), jnp.zeros(4, bool), 2)
    np.testing.assert_allclose(nobody, 0.25)


@pytest.mark.parametrize("equal", [False, True])
def test_divfl_averages_as_its_paper(equal):
    algorithm = fs.FedAvg(
        0.05, weighting=parts.DivFL(3), selection=parts.Top(3, equal=equal), local_steps=1
    )
    run = fs.solve(PROBLEM, algorithm, rounds=8, precision="float64")
    w = np.zeros(5)
    for cohort in run.history["cohort"]:
        gradients = np.array([grad(w) for grad in GRADS])
        shares = greedy(gradients, 3)
        assert set(cohort) >= set(np.flatnonzero(shares))
        if equal:
            shares = (shares > 0) / (shares > 0).sum()
        w = w - 0.05 * shares @ gradients
    np.testing.assert_allclose(run.params, w, atol=1e-11)
    assert run.history["vectors_up"][0] == 6 + 3


def chosen_by(oort, memory, round=9, seeds=400):
    """How often each client is chosen, and how many are."""
    there = jnp.ones(6, bool)
    draws = jax.vmap(lambda key: oort.choose(memory, jnp.int32(round), there, key))
    chosen = np.asarray(draws(jax.random.split(jax.random.key(1), seeds)))
    return chosen.mean(axis=0), chosen.sum(axis=1)


def memory(utility, heard):
    from fedsolve.participation.oort import Memory

    return Memory(jnp.asarray(utility, float), jnp.asarray(heard, jnp.int32))


ALL_HEARD = [9] * 6


def test_oort_exploits_the_largest_utilities_above_the_cutoff():
    """ε has nobody to explore; the bar is 0.95 times the second largest."""
    chosen, sizes = chosen_by(parts.Oort(2), memory([10, 9, 8.8, 5, 1, 1], ALL_HEARD))
    assert (sizes == 2).all()
    assert (chosen[3:] == 0).all()
    assert (chosen[:3] > 0.5).all()
    sharp, _ = chosen_by(parts.Oort(2, cutoff=1.0), memory([10, 9, 8.8, 5, 1, 1], ALL_HEARD))
    np.testing.assert_allclose(sharp, [1, 1, 0, 0, 0, 0])


def test_oort_explores_clients_that_were_never_heard():
    utility, heard = [10, 9, 8, 0, 0, 0], [9, 9, 9, 0, 0, 0]
    half = parts.Oort(2, exploration=0.5, decay=1.0, least=0.0, cutoff=1.0)
    chosen, sizes = chosen_by(half, memory(utility, heard))
    assert (sizes == 2).all()
    np.testing.assert_allclose(chosen[:3], [1, 0, 0])
    np.testing.assert_allclose(chosen[3:].sum(), 1.0, atol=1e-6)
    assert (chosen[3:] > 0.2).all()
    never = parts.Oort(2, exploration=0.0, least=0.0, cutoff=1.0)
    np.testing.assert_allclose(chosen_by(never, memory(utility, heard))[0], [1, 1, 0, 0, 0, 0])
    first, sizes = chosen_by(parts.Oort(2), memory([0] * 6, [0] * 6), round=0)
    assert (sizes == 2).all()
    assert (first > 0.2).all()


def test_exploration_decays_to_its_least():
    utility, heard = [10, 9, 8, 0, 0, 0], [9, 9, 9, 0, 0, 0]
    oort = parts.Oort(2, exploration=0.9, decay=0.9, least=0.25, cutoff=1.0)
    for round, share in ((0, 0.9), (5, 0.9 * 0.9**5), (80, 0.25)):
        chosen, _ = chosen_by(oort, memory(utility, heard), round, seeds=3000)
        assert abs(chosen[3:].sum() / 2 - share) < 0.03


def test_utilities_are_those_of_the_paper():
    durations = [1.0, 1.0, 4.0, 1.0, 1.0, 1.0]
    oort = parts.Oort(2, clip=1.0, durations=durations, deadline=2.0, penalty=2.0)
    heard = np.array([9, 4, 9, 1, 9, 0])
    found = oort.utilities(
        memory([10, 9, 8, 1, 2, 5], heard), jnp.int32(10), jnp.asarray(heard > 0)
    )
    waited = np.sqrt(0.1 * np.log(10) / np.maximum(heard, 1))
    expected = (np.array([10, 9, 8, 1, 2, 5]) + waited) * [1, 1, 0.25, 1, 1, 0]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    clipped = parts.Oort(2, clip=0.5).utilities(
        memory([10, 9, 8, 1, 2, 5], ALL_HEARD), jnp.int32(10), jnp.ones(6, bool)
    )
    waited = np.sqrt(0.1 * np.log(10) / 9)
    np.testing.assert_allclose(clipped[:3], np.median([10, 9, 8, 1, 2, 5]) + waited, rtol=1e-5)


def test_fast_clients_are_explored_first():
    durations = [1.0, 1.0, 1.0, 1e6, 1.0, 1e6]
    oort = parts.Oort(1, exploration=1.0, decay=1.0, durations=durations)
    chosen, _ = chosen_by(oort, memory([1, 1, 1, 0, 0, 0], [9, 9, 9, 0, 0, 0]))
    np.testing.assert_allclose(chosen, [0, 0, 0, 0, 1, 0])


def test_oort_learns_from_the_participants_only():
    algorithm = fs.FedAvg(0.05, weighting=parts.Oort(2), selection=parts.Top(2))
    run = fs.solve(PROBLEM, algorithm, rounds=6, precision="float64")
    known = run.state.participation.weighting
    w, heard, utility = np.zeros(5), np.zeros(6), np.zeros(6)
    for number, cohort in enumerate(run.history["cohort"]):
        for j in cohort:
            a, y = DATA["inputs"][j], DATA["targets"][j]
            utility[j] = 8 * 0.5 * np.mean((a @ w - y) ** 2)
            heard[j] = number + 1
        w = w - 0.05 * np.mean([GRADS[j](w) for j in cohort], axis=0)
    np.testing.assert_allclose(known.utility, utility, rtol=1e-6)
    np.testing.assert_array_equal(known.heard, heard)
    assert run.history["messages_up"][0] == 4  # two numbers, two vectors
    assert run.history["vectors_up"][0] == 2


DATA = PROBLEM.samples.values


def test_oort_never_asks_those_who_are_down():
    up = np.array(
        list(itertools.islice(itertools.cycle([[1, 1, 1, 0, 0, 1], [0, 1, 1, 1, 1, 0]]), 6))
    )
    algorithm = fs.FedAvg(
        0.05, weighting=parts.Oort(3), selection=parts.Top(3), availability=parts.Trace(up)
    )
    history = fs.solve(PROBLEM, algorithm, rounds=6).history
    for cohort, there, row in zip(history["cohort"], history["available"], up, strict=True):
        assert row[cohort[there]].all()
        assert there.sum() == 3


BAD = {
    "too many": (
        lambda: fs.solve(
            PROBLEM, fs.FedAvg(0.1, weighting=parts.Oort(7), selection=parts.Top(3)), 1
        ),
        "count is 7, but there are only 6 clients",
    ),
    "DivFL too many": (
        lambda: fs.solve(
            PROBLEM, fs.FedAvg(0.1, weighting=parts.DivFL(7), selection=parts.Top(3)), 1
        ),
        "count is 7, but there are only 6 clients",
    ),
    "share": (lambda: parts.Oort(3, cutoff=1.5), "cutoff must be from 0 to 1, got 1.5"),
    "deadline": (lambda: parts.Oort(3, deadline=2.0), "deadline needs durations"),
    "look": (lambda: parts.Oort(3, look="some"), 'look must be "all" or "minibatch"'),
    "look of DivFL": (lambda: parts.DivFL(3, look="some"), 'look must be "all" or "minibatch"'),
    "durations": (
        lambda: fs.solve(
            PROBLEM,
            fs.FedAvg(0.1, weighting=parts.Oort(3, durations=[1.0]), selection=parts.Top(3)),
            1,
        ),
        "for 6 clients it must be 6 numbers",
    ),
    "PPBC": (
        lambda: fs.solve(
            PROBLEM, fs.PPBC(0.1, weighting=parts.Oort(3), select_epoch=parts.Top(3)), 1
        ),
        "Oort must be told who takes part, which PPBC does not do",
    ),
    "PPBC's rounds": (
        lambda: fs.solve(
            PROBLEM, fs.PPBC(0.1, round_weighting=parts.Oort(3), select_round=parts.Top(3)), 1
        ),
        "Oort must be told who takes part: not a round_weighting",
    ),
}


@pytest.mark.parametrize(("call", "sentence"), BAD.values(), ids=BAD)
def test_bad_input_raises_one_sentence(call, sentence):
    with pytest.raises(fs.InvalidInput, match=sentence):
        call()
