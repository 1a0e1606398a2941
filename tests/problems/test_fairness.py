"""Fair classification on Adult: the data as they are, and gaps as fairlearn counts them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fairlearn.metrics import (
    MetricFrame,
    demographic_parity_difference,
    equal_opportunity_difference,
)
from sklearn.metrics import accuracy_score, log_loss

import fedsolve as fs
from fedsolve.federation.replies import Replies
from fedsolve.problems import fairness
from fedsolve.runtimes.evaluation import evaluate
from tests.support.examples import DATA, needs_data


def some_people(count, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((count, 3)).astype(np.float32),
        "y": (rng.random(count) < 0.3).astype(np.int8),
        "protected": (rng.random(count) < 0.4).astype(np.int8),
    }


def some_model(seed=0):
    return eqx.nn.MLP(3, "scalar", 4, 1, key=jax.random.key(seed))


def fairlearns(model, people):
    """Gaps in π (everyone, and those who earn more), by fairlearn."""
    pi = np.asarray(jax.nn.sigmoid(fairness.logits(model, people)))

    def gap(rows):
        frame = MetricFrame(
            metrics=lambda _, share: np.mean(share),
            y_true=people["y"][rows],
            y_pred=pi[rows],
            sensitive_features=people["protected"][rows],
        )
        return frame.difference(method="between_groups")

    return gap(np.full(len(pi), True)), gap(people["y"] == 1)


@pytest.mark.parametrize("kind", ["demographic_parity", "equal_opportunity"])
def test_the_constraint_is_the_gap_over_all_clients(kind):
    """Sums cross the wire, so clients of any size give what fairlearn gives on all people."""
    clients = [some_people(n, seed=n) for n in (40, 7, 90)]
    model = some_model()
    constraint = fs.Statistics(fairness.CONSTRAINTS[kind], fairness.gap)
    problem = fs.Problem(fairness.cross_entropy, fs.stack_clients(clients), model, constraint)
    found = evaluate(problem.on_device(), problem.start())
    everyone = {k: np.concatenate([c[k] for c in clients]) for k in clients[0]}
    expected = fairlearns(model, everyone)[kind == "equal_opportunity"]
    assert float(found["constraint"]) == pytest.approx(expected, abs=1e-6)
    own = [fairlearns(model, c)[kind == "equal_opportunity"] for c in clients]
    assert abs(np.mean(own) - expected) > 1e-3  # the clients' mean gap would be another number
    losses = [
        log_loss(c["y"], np.asarray(jax.nn.sigmoid(fairness.logits(model, c))), labels=[0, 1])
        for c in clients
    ]
    assert float(found["objective"]) == pytest.approx(np.mean(losses), rel=1e-5)


def test_clients_send_four_numbers():
    problem = fs.Problem(
        fairness.cross_entropy,
        fs.stack_clients([some_people(20, seed) for seed in range(3)]),
        some_model(),
        fs.Statistics(fairness.parity_sums, fairness.gap),
    )
    algorithm = fs.FedSGM(0.1)
    history = fs.solve(problem, algorithm, rounds=1).history
    assert history["bytes_up"][0] == 3 * 4 * (4 + problem.size)


def test_a_client_descends_its_own_gap():
    """The gradient's sign is that of the client's own difference between the groups."""
    people, model = some_people(50), some_model()
    data = {k: jnp.asarray(v) for k, v in people.items()} | {"mask": jnp.ones(50, bool)}
    slope = eqx.filter_grad(lambda m: fairness.gap(fairness.parity_sums(m, data)))(model)
    flat = jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(slope)])
    moved = eqx.apply_updates(model, jax.tree.map(lambda leaf: -0.03 * leaf, slope))
    fall = fairness.parity_gap(model, data) - fairness.parity_gap(moved, data)
    assert float(fall) == pytest.approx(0.03 * float(flat @ flat), rel=0.1)


def test_an_empty_group_has_no_gap():
    people = some_people(10) | {"protected": np.zeros(10, np.int8)}
    data = {k: jnp.asarray(v) for k, v in people.items()} | {"mask": jnp.ones(10, bool)}
    value, slope = eqx.filter_value_and_grad(lambda m: fairness.gap(fairness.parity_sums(m, data)))(
        some_model()
    )
    assert float(value) == 0
    assert all(bool(jnp.all(leaf == 0)) for leaf in jax.tree.leaves(slope))


def test_the_server_adds_sums_before_it_divides():
    sums = {"protected": (jnp.asarray([1.0, 2.0]), jnp.asarray([4.0, 4.0]))}
    sums["unprotected"] = (jnp.asarray([3.0, 3.0]), jnp.asarray([4.0, 8.0]))
    constraint = fs.Statistics(fairness.parity_sums, fairness.gap)
    value, _ = constraint.combine(Replies(sums, np.ones(2, bool)))
    assert float(value) == pytest.approx(abs(3 / 8 - 6 / 12))


def test_an_unknown_constraint_raises():
    with pytest.raises(fs.InvalidInput, match='must be "demographic_parity" or "equal_opp'):
        fs.problems.adult(constraint="parity")


@pytest.fixture(scope="module")
def adult():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDSOLVE_DATA", str(DATA))
        yield fs.problems.adult(clients=10, width=8, depth=1, batch_size=64, seed=0)


@needs_data("adult")
def test_adult_is_whole(adult):
    sizes = adult.samples.mask.sum(axis=1)
    assert sizes.sum() == 32_561
    assert len(adult.test["y"]) == 16_281
    assert len(set(sizes)) == 10
    x, mask = adult.samples.values["x"], adult.samples.mask
    assert x.shape[2] == 108  # 6 numbers and 102 categories, missing ones among them
    numbers, categories = np.split(x[mask].astype(np.float64), [6], axis=1)
    np.testing.assert_allclose(numbers.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(numbers.std(axis=0), 1, atol=1e-6)
    np.testing.assert_array_equal(categories.sum(axis=1), 8)
    assert adult.samples.values["y"][mask].sum() == 7841
    assert adult.samples.values["protected"][mask].sum() == 10_771


@needs_data("adult")
def test_reports_are_fairlearns(adult):
    """Loss, accuracy and gaps on train and test, on the same predictions."""
    algorithm = fs.FedSGM(0.2, 0.05, fs.Soft(40.0), participants=5, local_steps=2)
    run = fs.solve(adult, algorithm, rounds=60, evaluate_every=60)
    report = fs.problems.fairness_report(adult, run.params)
    mask = adult.samples.mask
    train = {k: v[mask] for k, v in adult.samples.values.items()}
    for part, people in {"train": train, "test": adult.test}.items():
        z = np.asarray(fairness.logits(run.params, people), np.float64)
        pi, decision = 1 / (1 + np.exp(-z)), z > 0
        who = {"sensitive_features": people["protected"]}
        expected = {
            "loss": log_loss(people["y"], pi),
            "accuracy": accuracy_score(people["y"], decision),
            "parity_gap": fairlearns(run.params, people)[0],
            "decision_gap": demographic_parity_difference(people["y"], decision, **who),
            "opportunity_gap": equal_opportunity_difference(people["y"], decision, **who),
        }
        for name, value in expected.items():
            assert report.loc[part, name] == pytest.approx(value, abs=2e-5), (part, name)
    assert run.history["test_accuracy"][-1] == pytest.approx(report.loc["test", "accuracy"])
    assert run.history["constraint"][-1] == pytest.approx(
        report.loc["train", "parity_gap"], abs=1e-5
    )
    assert report.loc["test", "accuracy"] > 0.78
    assert report.loc["train", "parity_gap"] < 0.08


@needs_data("adult")
def test_constraints_by_name_are_of_decisions_and_of_race_and_sex():
    """As fairlearn counts them on the test part, where the history has them, too."""
    tables = [
        {"kind": "equalized_odds", "at_most": 0.05, "group": "race and sex"},
        {"kind": "false_positive_rate", "at_most": 0.1, "tolerance": 0.01},
    ]
    problem = fs.problems.adult(clients=4, constraint=tables, width=4, depth=1, seed=3)
    assert isinstance(problem.constraint, fs.Several)
    assert problem.constraint.tolerances == (0.0, 0.01)
    people = {name: np.asarray(values) for name, values in problem.test.items()}
    chosen = np.asarray(fairness.logits(problem.params, people)) > 0
    rich, groups = people["y"] == 1, people["race_and_sex"]
    assert len(np.unique(groups)) == 10
    np.testing.assert_array_equal(groups % 2, people["protected"])
    metrics = dict(problem.metrics)

    def found(name):
        return float(metrics[name](problem.params, problem.test))

    expected = equal_opportunity_difference(rich, chosen, sensitive_features=groups)
    assert found("test_equalized_odds.y=1") == pytest.approx(expected, abs=1e-6)
    assert found("test_false_positive_rate") == pytest.approx(chosen[~rich].mean(), abs=1e-6)
    with pytest.raises(fs.InvalidInput, match="'age' is not a group of the data"):
        fs.problems.adult(constraint={"kind": "equal_opportunity", "at_most": 0.1, "group": "age"})
