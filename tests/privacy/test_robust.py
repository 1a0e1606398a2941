"""Robust aggregation: what it computes, what it withstands, what it refuses."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import trim_mean

import fedsolve as fs
from fedsolve.compression.packets import Dense
from fedsolve.federation.rules import Context
from fedsolve.privacy.robust import krum_scores
from tests.support import examples

CONTEXT = Context("improve", lambda shape: jnp.zeros(shape), lambda name: None)
ROWS = np.random.default_rng(0).standard_normal((11, 4)).astype(np.float32)
EVERYONE = np.ones(11, bool)
RULES = (fs.Trimmed(0.3), fs.Median(), fs.Clipped(2.0), fs.Krum(3, keep=3))


@pytest.fixture(scope="module")
def problem():
    return examples.least_squares(clients=8)


def mean(rule, rows, heard=EVERYONE, weights=None):
    return rule.receive(fs.Replies(jnp.asarray(rows), heard), CONTEXT).mean(weights)


def krum_by_hand(rows, liars, keep):
    """Blanchard et al. (2017), section 3, with loops."""
    return rows[np.argsort(scores_by_hand(rows, liars))[:keep]].mean(axis=0)


def scores_by_hand(rows, liars):
    m = len(rows)
    scores = []
    for i in range(m):
        apart = sorted(np.sum((rows[i] - rows[j]) ** 2) for j in range(m) if j != i)
        scores.append(sum(apart[: m - liars - 2]))
    return scores


@pytest.mark.parametrize("liars", [1, 3])
def test_krums_scores_are_sums_over_the_nearest(liars):
    found = krum_scores(jnp.asarray(ROWS), jnp.asarray(EVERYONE), liars)
    np.testing.assert_allclose(found, scores_by_hand(ROWS, liars), rtol=1e-4)


def test_they_compute_what_they_are_named_after():
    np.testing.assert_allclose(mean(fs.Trimmed(3 / 11), ROWS), trim_mean(ROWS, 3 / 11), rtol=1e-5)
    np.testing.assert_allclose(mean(fs.Median(), ROWS), np.median(ROWS, axis=0), rtol=1e-6)
    np.testing.assert_allclose(mean(fs.Median(), ROWS[:10], EVERYONE[:10]), np.median(ROWS[:10], 0))
    for keep in (1, 4):
        by_hand = krum_by_hand(ROWS, 3, keep)
        np.testing.assert_allclose(mean(fs.Krum(3, keep=keep), ROWS), by_hand, rtol=1e-5)
    cut = ROWS * np.minimum(1, 1.5 / np.linalg.norm(ROWS, axis=1, keepdims=True))
    weights = jnp.arange(1.0, 12.0)
    np.testing.assert_allclose(mean(fs.Clipped(1.5), ROWS), cut.mean(0), rtol=1e-4)
    np.testing.assert_allclose(
        mean(fs.Clipped(1.5), ROWS, EVERYONE, weights),
        np.average(cut, axis=0, weights=np.arange(1, 12)),
        rtol=1e-4,
    )


@pytest.mark.parametrize("rule", RULES)
def test_equal_answers_have_themselves_as_mean(rule):
    rows = np.tile(ROWS[:1], (11, 1))
    np.testing.assert_allclose(mean(rule, rows), ROWS[0], rtol=1e-5)
    total = rule.receive(fs.Replies(jnp.asarray(rows), EVERYONE), CONTEXT).sum()
    np.testing.assert_allclose(total, 11 * ROWS[0], rtol=1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_answers_that_did_not_arrive_do_not_count(rule):
    heard = np.arange(11) < 9
    rows = np.where(heard[:, None], ROWS, np.nan)
    alone = mean(rule, ROWS[:9], heard[:9])
    np.testing.assert_allclose(mean(rule, rows, jnp.asarray(heard)), alone, rtol=1e-5)
    nobody = mean(rule, np.full_like(ROWS, np.nan), jnp.zeros(11, bool))
    np.testing.assert_array_equal(nobody, 0)


@pytest.mark.parametrize("rule", [fs.Trimmed(3 / 11), fs.Median(), fs.Krum(3)])
@pytest.mark.parametrize("lie", [1e6, -1e6, np.inf])
def test_three_of_eleven_cannot_move_the_mean_out_of_the_others(rule, lie):
    rows = ROWS.copy()
    rows[[1, 4, 9]] = lie
    honest = np.delete(ROWS, [1, 4, 9], axis=0)
    found = np.asarray(mean(rule, rows))
    assert np.all(found >= honest.min(axis=0) - 1e-6)
    assert np.all(found <= honest.max(axis=0) + 1e-6)


def test_clipping_bounds_what_a_liar_can_move():
    rows = ROWS.copy()
    rows[4] = 1e9
    apart = np.linalg.norm(mean(fs.Clipped(0.5), rows) - mean(fs.Clipped(0.5), ROWS))
    assert 0 < apart <= 2 * 0.5 / 11 * (1 + 1e-5)


def test_parts_of_an_answer_are_protected_alike(problem):
    answers = fs.Replies((jnp.asarray(ROWS), jnp.asarray(ROWS[:, 0])), EVERYONE)
    received = fs.Median().receive(answers, CONTEXT)
    np.testing.assert_allclose(received.pick(1).mean(), np.median(ROWS[:, 0]), rtol=1e-6)


class Liars(fs.FedSGM):
    """Two clients send updates and constraint values of the opposite sign, ten times as large."""

    def measure(self, client, residual):
        residual, value = super().measure(client, residual)
        return residual, jnp.where(client.index < 2, -10 * value, value)

    def improve(self, client, residual, message):
        residual, packet = super().improve(client, residual, message)
        return residual, Dense(jnp.where(client.index < 2, -10 * packet.vector, packet.vector))


def test_a_run_goes_on_without_answers_that_are_not_finite(problem):
    class Broken(fs.FedSGM):
        def improve(self, client, residual, message):
            residual, packet = super().improve(client, residual, message)
            return residual, Dense(jnp.where(client.index < 2, jnp.nan, packet.vector))

    with pytest.raises(fs.Diverged):
        fs.solve(problem, Broken(0.05, 0.1), rounds=2)
    run = fs.solve(problem, Broken(0.05, 0.1), rounds=2, aggregation=fs.Median())
    assert np.all(np.isfinite(run.params))


def test_a_run_withstands_what_breaks_a_plain_one(problem):
    def ends(algorithm, rule=None):
        try:
            run = fs.solve(problem, algorithm(0.05, 0.1), 60, evaluate_every=60, aggregation=rule)
        except fs.Diverged:
            return np.inf
        return run.history["objective"][-1] + 10 * max(run.history["constraint"][-1], 0)

    honest = ends(fs.FedSGM)
    assert ends(Liars) > 10 * honest
    for rule in (fs.Trimmed(0.25), fs.Median()):
        assert ends(Liars, rule) < 3 * honest


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["debug", "streamed"])
def test_runtimes_agree(problem, runtime):
    algorithm = fs.FedSGM(0.05, 0.1, participants=5)
    one, other = (
        fs.solve(problem, algorithm, rounds=3, aggregation=fs.Median(), runtime=each)
        for each in ("compiled", runtime)
    )
    np.testing.assert_allclose(one.params, other.params, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: fs.Trimmed(0.5), "below 1/2, else nobody is left"),
        (lambda: fs.Trimmed(0.0), "must be above 0"),
        (lambda: fs.Clipped(0.0), "norm must be positive"),
        (lambda: fs.Clipped({"improve": -1.0}), "norm.improve must be positive"),
        (lambda: fs.Krum(0), "liars must be a whole number"),
        (lambda: mean(fs.Trimmed(0.4), ROWS[:2], EVERYONE[:2]), "leaves nobody of the 2 answers"),
        (lambda: mean(fs.Krum(5), ROWS), "needs at least 13 answers"),
        (lambda: mean(fs.Krum(3, keep=9), ROWS), "keeps more answers than are right"),
        (
            lambda: mean(fs.Median(), ROWS, EVERYONE, jnp.ones(11)),
            "gives all answers the same weight",
        ),
    ],
)
def test_what_cannot_be_is_refused(make, sentence):
    with pytest.raises(fs.InvalidInput, match=sentence):
        make()


def test_an_algorithm_that_looks_at_single_answers_is_refused(problem):
    with pytest.raises(fs.InvalidInput, match="looks at single answers of 'assess'"):
        fs.solve(
            problem,
            fs.FedAvg(0.1, weighting="FOLB"),
            rounds=1,
            aggregation=fs.Median(),
        )
