"""Confidence bounds against SciPy, closed forms, and their coverage by simulation."""

import numpy as np
import pytest
from scipy import stats

import fedsolve as fs
from fedsolve.auditing import (
    clopper_pearson_lower,
    clopper_pearson_upper,
    empirical_bernstein,
    judge,
)
from fedsolve.auditing.counting import Claimed, Sum, Tally

RATE = Claimed("rate", "at_most", 0.1, ("0/all",), is_rate=True)


def tally(claim, *sums):
    """Counts of clients a, b, …, each given as (count, total, squares) by cell."""
    keyed = [
        dict(zip(claim.cells, [Sum(*one) for one in own], strict=True))
        for own in (s if isinstance(s[0], tuple) else (s,) for s in sums)
    ]
    return Tally((claim,), tuple("abcdefgh"[: len(keyed)]), tuple(keyed))


@pytest.mark.parametrize(("k", "n"), [(0, 7), (3, 50), (49, 50), (50, 50)])
@pytest.mark.parametrize("failure", [0.05, 0.001])
def test_clopper_pearson_is_that_of_scipy(k, n, failure):
    upper = stats.binomtest(k, n, alternative="less").proportion_ci(1 - failure, method="exact")
    lower = stats.binomtest(k, n, alternative="greater").proportion_ci(1 - failure, method="exact")
    np.testing.assert_allclose(clopper_pearson_upper(k, n, failure), upper.high)
    np.testing.assert_allclose(clopper_pearson_lower(k, n, failure), lower.low)


def test_clopper_pearson_in_closed_form():
    """k = 0: (1 − p)^n = δ; k = n: p^n = δ; no samples: nothing is known."""
    np.testing.assert_allclose(clopper_pearson_upper(0, 20, 0.05), 1 - 0.05 ** (1 / 20))
    np.testing.assert_allclose(clopper_pearson_lower(20, 20, 0.05), 0.05 ** (1 / 20))
    assert (clopper_pearson_lower(0, 0, 0.05), clopper_pearson_upper(0, 0, 0.05)) == (0, 1)


def test_clopper_pearson_covers_exactly_enough():
    """P(bound < p) ≤ δ for every p, by summing the binomial distribution, and nearly δ for some."""
    misses = []
    for p in np.linspace(0.01, 0.99, 60):
        k = np.arange(31)
        below = np.array([clopper_pearson_upper(int(j), 30, 0.05) < p for j in k])
        misses.append(stats.binom.pmf(k, 30, p)[below].sum())
    assert max(misses) <= 0.05
    assert max(misses) > 0.04


def test_clopper_pearson_covers_where_clients_differ():
    """Pooled decisions of clients with different rates: the bound is on their mean rate."""
    rng = np.random.default_rng(0)
    rates = np.repeat([0.02, 0.1, 0.5], 30)
    k = (rng.random((20_000, 90)) < rates).sum(axis=1)
    bounds = np.array([clopper_pearson_upper(int(j), 90, 0.05) for j in range(91)])
    assert np.mean(bounds[k] < rates.mean()) <= 0.05


@pytest.mark.parametrize("draw", ["rare", "even", "constant", "mixed"])
def test_empirical_bernstein_covers(draw):
    rng, n, runs = np.random.default_rng(1), 40, 20_000
    values = {
        "rare": lambda: (rng.random((runs, n)) < 0.03).astype(float),
        "even": lambda: rng.random((runs, n)),
        "constant": lambda: np.full((runs, n), 0.3),
        "mixed": lambda: rng.random((runs, n)) * np.repeat([0.2, 1.0], n // 2),
    }[draw]()
    truth = {"rare": 0.03, "even": 0.5, "constant": 0.3, "mixed": 0.3}[draw]
    total, squares = values.sum(axis=1), (values**2).sum(axis=1)
    away = [empirical_bernstein(n, t, s, 1.0, 0.05) for t, s in zip(total, squares, strict=True)]
    assert np.mean(total / n + away < truth) <= 0.05
    assert np.mean(total / n - away > truth) <= 0.05


def test_empirical_bernstein_in_closed_form():
    values = np.array([0.1, 0.9, 0.4, 0.4])
    logarithm = np.log(2 / 0.1)
    expected = np.sqrt(2 * values.var(ddof=1) * logarithm / 4) + 7 * 3 * logarithm / (3 * 3)
    found = empirical_bernstein(4, values.sum(), (values**2).sum(), 3.0, 0.1)
    np.testing.assert_allclose(found, expected)
    assert empirical_bernstein(1, 0.5, 0.25, 1.0, 0.1) == np.inf


def test_all_verdicts_are_right_together():
    """Rates of three clients at, above and below their bound: wrong verdicts in at most 10 %."""
    rng, truth, wrong, told = np.random.default_rng(2), np.array([0.1, 0.13, 0.07]), 0, 0
    for _ in range(1000):
        k = rng.binomial(400, truth)
        found = judge(tally(RATE, *[(400, int(j), int(j)) for j in k]), confidence=0.9)
        right = {"all": "met", "a": "met", "b": "not met", "c": "met"}  # the mean rate is .1
        verdicts = [v for v in found.verdicts if v.verdict != "cannot be told"]
        wrong += any(v.verdict != right[v.site] for v in verdicts)
        told += len(verdicts)
    assert wrong <= 100
    assert told > 500


def test_more_claims_take_more_samples():
    alone = judge(tally(RATE, (300, 18, 18)), sites=False)["rate"]
    among = judge(tally(RATE, *[(300, 18, 18)] * 6)).verdicts[1]
    assert alone.upper < among.upper
    np.testing.assert_allclose(alone.upper, clopper_pearson_upper(18, 300, 0.05))
    np.testing.assert_allclose(among.upper, clopper_pearson_upper(18, 300, 0.05 / 7))


@pytest.mark.parametrize(
    ("kind", "bound", "count", "total", "verdict"),
    [
        ("at_most", 0.1, 1000, 60, "met"),
        ("at_most", 0.1, 1000, 150, "not met"),
        ("at_most", 0.1, 100, 9, "cannot be told"),
        ("at_least", 0.9, 1000, 950, "met"),
        ("at_least", 0.9, 1000, 800, "not met"),
        ("at_least", 0.9, 20, 20, "cannot be told"),
    ],
)
def test_verdicts_on_rates(kind, bound, count, total, verdict):
    claim = Claimed("rate", kind, bound, ("0/all",), is_rate=True)
    found = judge(tally(claim, (count, total, total)), sites=False)["rate"]
    assert found.verdict == verdict
    assert found.lower <= found.value <= found.upper
    assert (found.needed is not None) == (verdict == "cannot be told")


def test_the_number_of_samples_needed_is_right():
    """So many with the same rate are enough, and one fewer are not."""
    found = judge(tally(RATE, (100, 5, 5)), sites=False)["rate"]
    n = found.needed
    assert (
        clopper_pearson_upper(0.05 * n, n, 0.05)
        <= 0.1
        < clopper_pearson_upper(0.05 * (n - 1), n - 1, 0.05)
    )
    on_it = judge(tally(RATE, (100, 10, 10)), sites=False)["rate"]
    assert (on_it.verdict, on_it.needed) == ("cannot be told", None)  # no number will do


def test_gaps_between_groups():
    """max − min over three groups; each of six bounds has a sixth of δ."""
    claim = Claimed("gap", "gap", 0.2, ("0/a", "0/b", "0/c"), is_rate=True)
    found = judge(tally(claim, ((400, 40, 40), (500, 75, 75), (400, 80, 80))), sites=False)["gap"]
    np.testing.assert_allclose(found.value, 0.1)
    high = clopper_pearson_upper(80, 400, 0.05 / 6)
    low = clopper_pearson_lower(40, 400, 0.05 / 6)
    np.testing.assert_allclose(found.upper, high - low)
    assert found.verdict == "met"
    assert found.samples == 1300
    wide = judge(tally(claim, ((400, 40, 40), (500, 75, 75), (400, 200, 200))), sites=False)["gap"]
    assert wide.verdict == "not met"
    none = judge(tally(claim, ((400, 40, 40), (0, 0, 0), (400, 40, 40))), sites=False)["gap"]
    assert (none.verdict, none.needed, none.upper) == ("cannot be told", None, 1)


def test_tails():
    """CVaR_.9 of losses from 0 to 1: the least over two levels t, whose means have own ranges."""
    rng = np.random.default_rng(0)
    levels = ((0.5, 0.9), (0.8, 0.9))
    claim = Claimed("cvar", "tail", 0.99, ("0/t1", "0/t2"), is_rate=False, levels=levels)
    losses = rng.random(200_000)
    cells = [t + np.maximum(losses - t, 0) / (1 - a) for t, a in levels]
    sums = tuple((len(v), v.sum(), v @ v) for v in cells)
    found = judge(tally(claim, sums), sites=False, ranges=(0.0, 1.0))["cvar"]
    np.testing.assert_allclose(found.value, min(v.mean() for v in cells))
    away = [
        empirical_bernstein(len(v), (v - t).sum(), ((v - t) ** 2).sum(), (1 - t) / 0.1, 0.05 / 2)
        for v, (t, _) in zip(cells, levels, strict=True)
    ]
    uppers = [v.mean() + e for v, e in zip(cells, away, strict=True)]
    np.testing.assert_allclose(found.upper, min(uppers))


def test_a_mean_over_clients_counts_clients_equally():
    """(1/n) Σ of clients' means, whatever their sizes, and its bound covers."""
    claim = Claimed("g", "mean", None, ("0/all",), is_rate=False)
    rng, misses, runs = np.random.default_rng(0), 0, 400
    for _ in range(runs):
        small, large = 0.9 * rng.random(50), 0.2 * rng.random(400)
        sums = [(len(v), v.sum(), v @ v) for v in (small, large)]
        found = judge(tally(claim, *sums), 0.9, (0.0, 1.0), 0.4, sites=False)["g"]
        np.testing.assert_allclose(found.value, (small.mean() + large.mean()) / 2)
        misses += not found.lower <= (0.45 + 0.1) / 2 <= found.upper
    assert misses <= 0.2 * runs
    shifted = [(n, t - 2 * n, s - 4 * t + 4 * n) for n, t, s in sums]  # of v − 2
    moved = judge(tally(claim, *shifted), 0.9, (-2.0, -1.0), -1.6, sites=False)["g"]
    np.testing.assert_allclose((moved.lower, moved.upper), (found.lower - 2, found.upper - 2))
    weighted = np.concatenate([small * 450 / 100, large * 450 / 800])
    away = empirical_bernstein(450, weighted.sum(), weighted @ weighted, 4.5, 0.1)
    np.testing.assert_allclose(found.upper, min(found.value + away, 1))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: judge(tally(RATE, (9, 1, 1)), 0.0), "confidence must be between 0 and 1"),
        (lambda: judge(tally(RATE, (9, 1, 1)), 1), "confidence must be between 0 and 1"),
        (lambda: judge(tally(RATE, (9, 1, 1)), 1.5), "confidence must be between 0 and 1"),
        (lambda: clopper_pearson_upper(3, 2, 0.1), "3 successes among 2 samples"),
        (lambda: clopper_pearson_lower(1, 2, 0.0), "failure is a probability"),
        (lambda: empirical_bernstein(9, 1.0, 1.0, -1.0, 0.1), "width of a range"),
        (lambda: tally(RATE, (9, 1, 1)).plus(tally(RATE, (9, 1, 1))), "two counts of a"),
        (lambda: Tally.from_json({"claims": 3}), "no counts of an audit"),
        (lambda: fs.auditing.Audit.from_json([]), "This is no audit"),
    ],
)
def test_bad_arguments_raise(call, sentence):
    with pytest.raises(fs.InvalidInput, match=sentence):
        call()
