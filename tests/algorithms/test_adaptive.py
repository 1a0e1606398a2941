"""A tolerance that allows for the sampling error of the constraint."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import t

import fedsolve as fs
from fedsolve.federation.replies import Replies
from fedsolve.problem.constraints import Mean, Statistics
from tests.support.examples import least_squares

VALUES = np.asarray([0.3, -1.0, 2.0, 0.7, 0.1, -0.4], np.float32)


def deviation(constraint, cohort, clients=6):
    values = jnp.asarray(VALUES)[np.asarray(cohort)]
    return float(constraint.deviation(Replies(values, np.ones(len(cohort), bool)), clients))


def test_the_variance_is_right_on_average_over_all_cohorts():
    """Draws without replacement: the mean of s² over all cohorts is the variance of their means."""
    mean = Mean(lambda w, data: w)
    for size in (2, 3, 5):
        cohorts = list(itertools.combinations(range(6), size))
        truth = np.var([VALUES[list(c)].mean() for c in cohorts])
        found = np.mean([deviation(mean, c) ** 2 for c in cohorts])
        assert found == pytest.approx(truth, rel=1e-5)
    assert deviation(mean, range(6)) == 0
    assert deviation(mean, [2]) == np.inf


def test_the_jackknife_of_a_mean_is_the_formula_for_means():
    ratio = Statistics(lambda w, data: w, lambda sums: sums["v"] / sums["n"])
    cohort = [0, 2, 3, 5]
    measured = {"v": jnp.asarray(VALUES)[np.asarray(cohort)], "n": jnp.ones(4)}
    found = ratio.deviation(Replies(measured, np.ones(4, bool)), 6)
    assert float(found) == pytest.approx(deviation(Mean(lambda w, data: w), cohort), rel=1e-5)


def test_clients_that_did_not_answer_do_not_count():
    replies = Replies(jnp.asarray(VALUES), np.asarray([1, 0, 1, 1, 0, 1], bool))
    found = float(Mean(lambda w, data: w).deviation(replies, 6))
    assert found == pytest.approx(deviation(Mean(lambda w, data: w), [0, 2, 3, 5]), rel=1e-6)


def test_with_everyone_it_is_the_plain_rule_and_otherwise_more_careful():
    problem = least_squares()
    plain = fs.solve(problem, fs.FedSGM(0.1, 0.1), rounds=20)
    same = fs.solve(problem, fs.FedSGM(0.1, fs.Adaptive(0.1)), rounds=20)
    np.testing.assert_array_equal(plain.params, same.params)
    assert (same.history["margin"] == 0).all()
    sampled = fs.solve(problem, fs.FedSGM(0.1, fs.Adaptive(0.1), participants=2), rounds=20)
    estimate, margin = (sampled.history[k] for k in ("constraint_estimate", "margin"))
    np.testing.assert_array_equal(sampled.history["switch"], estimate + margin > 0.1)
    assert (margin > 0).any()
    assert sampled.best.feasible == (sampled.history["constraint"] <= 0.1).any()


def test_it_holds_the_constraint_where_the_plain_rule_does_not():
    problem = fs.problems.neyman_pearson(clients=20)

    def share_over(tolerance, switching):
        algorithm = fs.FedSGM(0.3, tolerance, switching, participants=10, local_steps=5)
        g = fs.solve(problem, algorithm, rounds=300).history["constraint"][100:]
        return (g > 0.05).mean()

    for switching, confidence in ((fs.Hard(), 0.999), (fs.Soft(40.0), 0.99)):
        careful = share_over(fs.Adaptive(0.05, confidence), switching)
        assert careful < 0.1
        assert share_over(0.05, switching) > careful + 0.5


def test_several_constraints_have_a_margin_each():
    rng = np.random.default_rng(0)
    data = {"a": rng.standard_normal(6), "b": 3 * rng.standard_normal(6)}
    both = {"a": lambda w, d: w[0] + d["a"], "b": lambda w, d: w[0] + d["b"]}
    problem = fs.Problem(lambda w, d: -w[0] + 0 * d["a"], data, np.zeros(1), both)
    run = fs.solve(problem, fs.FedSGM(0.1, fs.Adaptive(0.1, 0.9), participants=3), rounds=3)
    cohort = run.history["cohort"][0]
    own = [data[k][cohort].std(ddof=1) / np.sqrt(3) * np.sqrt(0.5) for k in "ab"]
    assert run.history["margin"][0] == pytest.approx(t.ppf(0.9, 2) * max(own), rel=1e-4)


BAD = {
    "the problem has none": lambda: solve(least_squares(constrained=False)),
    "sampling error of EachClient": lambda: solve(
        fs.Problem(
            lambda w, d: w[0] + d["x"],
            {"x": np.ones(3)},
            np.zeros(1),
            fs.EachClient(lambda w, d: w[0] - d["x"]),
        )
    ),
    "drawn uniformly": lambda: solve(least_squares(), weighting="DataSize"),
    "takes two at least": lambda: solve(least_squares(), participants=1),
    "confidence must be above 0.5": lambda: fs.Adaptive(0.1, 1.0),
    "tolerance must be at least 0": lambda: fs.Adaptive(-0.1),
}


def solve(problem, **options):
    return fs.solve(problem, fs.FedSGM(0.1, fs.Adaptive(0.1), **options), rounds=1)


@pytest.mark.parametrize("sentence", BAD)
def test_bad_input_gets_a_sentence(sentence):
    with pytest.raises(fs.InvalidInput, match=sentence):
        BAD[sentence]()
