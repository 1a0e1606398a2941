"""Constraints by name: exact rates as fairlearn has them, and their surrogates."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fairlearn.metrics import (
    MetricFrame,
    demographic_parity_difference,
    equal_opportunity_difference,
    equalized_odds_difference,
    false_positive_rate,
    true_positive_rate,
)
from sklearn.metrics import recall_score

import fedsolve as fs
from fedsolve.federation.replies import Replies
from tests.support.clients import client

SIZES = (40, 7, 90)
GROUPS = ["a", "b", "c"]


def score(w, data):
    return data["x"] @ w


def loss(w, data):
    return (data["x"] @ w - data["y"]) ** 2


def people(size, seed):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((size, 3)).astype(np.float32),
        "y": rng.integers(0, 2, size).astype(np.int8),
        "race": rng.integers(0, 3, size).astype(np.int8),
    }


CLIENTS = [people(size, seed) for seed, size in enumerate(SIZES)]
EVERYONE = {k: np.concatenate([c[k] for c in CLIENTS]) for k in CLIENTS[0]}
W = np.asarray([0.5, -1.0, 0.3], np.float32)
CHOSEN = (EVERYONE["x"] @ W > 0).astype(int)


def problem_of(constraint, clients=CLIENTS, **options):
    return fs.Problem(
        lambda w, data: jnp.mean(loss(w, data), where=data["mask"]),
        fs.stack_clients(clients),
        np.zeros(3, np.float32),
        constraint=constraint,
        **options,
    )


def sums_over(constraint, clients=CLIENTS):
    each = [constraint.counts(jnp.asarray(W), jax.tree.map(jnp.asarray, c)) for c in clients]
    total = each[0]
    for other in each[1:]:
        total = jax.tree.map(operator.add, total, other)
    return total


def combined(problem, w: Any = W):
    placed = problem.on_device()
    measured = [client(problem, i).measure(jnp.asarray(w)) for i in range(problem.n)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *measured)
    return placed.constraint.combine(Replies(stacked, np.ones(problem.n, bool)))


EXPECTED = {
    "sensitivity": recall_score(EVERYONE["y"], CHOSEN),
    "specificity": recall_score(EVERYONE["y"], CHOSEN, pos_label=0),
    "false_positive_rate": false_positive_rate(EVERYONE["y"], CHOSEN),
    "demographic_parity": demographic_parity_difference(
        EVERYONE["y"], CHOSEN, sensitive_features=EVERYONE["race"]
    ),
    "equal_opportunity": equal_opportunity_difference(
        EVERYONE["y"], CHOSEN, sensitive_features=EVERYONE["race"]
    ),
    "equalized_odds": equalized_odds_difference(
        EVERYONE["y"], CHOSEN, sensitive_features=EVERYONE["race"]
    ),
}


def named(name, bound=0.25, **options: Any) -> fs.constraints.SampleMeans:
    make = getattr(fs.constraints, name)
    if name in ("sensitivity", "specificity"):
        return make(score, at_least=bound, **options)
    if name == "false_positive_rate":
        return make(score, at_most=bound, **options)
    if name in ("group_loss", "cvar"):
        return make(loss, at_most=bound, **options)
    return make(score, at_most=bound, group="race", groups=GROUPS, **options)


@pytest.mark.parametrize("name", EXPECTED)
def test_exact_rates_are_those_of_fairlearn_and_scikit_learn(name):
    """Counts add up over clients; the problem's g and the history say the same."""
    bound = named(name)
    sums = sums_over(bound)
    value = max(float(v) for v in bound.claimed(sums).values())
    assert value == pytest.approx(EXPECTED[name], abs=1e-6)
    sign = -1 if bound.kind == "at_least" else 1
    assert float(bound.exact(sums)) == pytest.approx(sign * (value - 0.25), abs=1e-6)
    problem = problem_of(bound)
    assert float(combined(problem)[0]) == pytest.approx(sign * (value - 0.25), abs=1e-6)
    run = fs.solve(problem, fs.FedSGM(0.05, local_steps=2), rounds=2)
    chosen = EVERYONE["x"] @ np.asarray(run.params) > 0
    again = sums_over_at(bound, run.params)
    assert run.history["constraint"][-1] == pytest.approx(float(bound.exact(again)), abs=1e-6)
    assert chosen.any()


def sums_over_at(constraint, w):
    data = jax.tree.map(jnp.asarray, EVERYONE)
    return constraint.counts(jnp.asarray(w), data)


def test_rates_of_groups_are_those_of_a_metric_frame():
    bound = fs.constraints.sensitivity(score, 0.9, group="race", groups=GROUPS)
    frame = MetricFrame(
        metrics=true_positive_rate,
        y_true=EVERYONE["y"],
        y_pred=CHOSEN,
        sensitive_features=EVERYONE["race"],
    ).by_group
    sums = sums_over(bound)
    rates = bound.rates(sums)
    np.testing.assert_allclose([float(rates[g]) for g in GROUPS], frame.to_numpy(), rtol=1e-6)
    assert [claim.name for claim in bound.claims] == [f"sensitivity.{g}" for g in GROUPS]
    assert float(bound.exact(sums)) == pytest.approx(0.9 - frame.min(), abs=1e-6)
    members = (EVERYONE["y"] == 1) & (EVERYONE["race"] == 1)
    assert int(sums["b"].count) == members.sum()
    assert int(sums["b"].total) == (CHOSEN & members).sum() == int(sums["b"].squares)


def test_losses_of_groups_and_tails():
    each = (EVERYONE["x"] @ W - EVERYONE["y"]) ** 2
    by_group = fs.constraints.group_loss(loss, 1.0, group="race", groups=GROUPS)
    sums = sums_over(by_group)
    means = [each[EVERYONE["race"] == g].mean() for g in range(3)]
    assert float(by_group.exact(sums)) == pytest.approx(max(means) - 1, rel=1e-5)
    one = each[EVERYONE["race"] == 2]
    assert float(sums["c"].squares) == pytest.approx((one**2).sum(), rel=1e-5)

    # Rockafellar and Uryasev: the minimum is at one of the losses
    worst = min(t + np.maximum(each - t, 0).mean() / 0.2 for t in each)
    for levels in (11, 401):
        tail = fs.constraints.cvar(loss, 1.0, tail=0.8, most=8.0, levels=levels)
        found = float(tail.claimed(sums_over(tail))["cvar"])
        assert worst - 1e-5 <= found <= worst + 8.0 / (levels - 1) * 4


def test_groups_are_found_in_the_data():
    bound = fs.constraints.demographic_parity(score, 0.1, group="race")
    with pytest.raises(fs.InvalidInput, match="name them with `groups`"):
        _ = bound.cells
    problem = problem_of(bound)
    one = {k: v[:1] for k, v in CLIENTS[0].items()}
    for each in (problem, problem.with_clients(fs.stack_clients([one, one]))):
        assert isinstance(each.constraint, fs.constraints.SampleMeans)
        assert [c.key for c in each.constraint.cells] == ["race=0", "race=1", "race=2"]


@pytest.mark.parametrize("name", [*EXPECTED, "group_loss", "cvar"])
def test_clients_descend_the_gradient_of_the_surrogate_over_all_clients(name):
    """The mean of what clients send is ∇g of the pooled surrogate, by finite differences."""
    options: dict[str, Any] = {"judged_by": "surrogate"} if name in EXPECTED else {}
    options |= {"group": "race", "groups": GROUPS} if name in ("group_loss",) else {}
    bound = named(name, **options)
    problem = problem_of(bound)
    with jax.enable_x64(True):
        placed = problem.on_device(jnp.float64)
        w = jnp.asarray([0.31, -0.87, 0.22])
        _, focus = combined(problem, w)
        sent = [client(problem, i).constraint_grad(w, focus=focus) for i in range(problem.n)]

        def g(w):
            return float(combined(problem, w)[0])

        step = 1e-3
        slope = [(g(w + step * e) - g(w - step * e)) / (2 * step) for e in np.eye(3)]
    assert placed.n == 3
    np.testing.assert_allclose(np.mean(sent, axis=0), slope, rtol=2e-2, atol=2e-3)


def test_a_minibatch_stands_for_all_samples_of_its_client():
    """The mean of minibatch gradients is the full one, whatever the sizes of the clients."""
    bound = named("sensitivity", judged_by="surrogate")
    whole, parts = problem_of(bound), problem_of(bound, batch_size=5)
    _, focus = combined(whole)
    own, full = client(parts, 2), client(whole, 2).constraint_grad(jnp.asarray(W), focus=focus)
    keys = jax.random.split(jax.random.key(0), 4000)
    drawn = jax.vmap(lambda key: own.constraint_grad(jnp.asarray(W), focus=focus, key=key))(keys)
    error = drawn.std(axis=0) / np.sqrt(len(keys))
    assert (np.abs(drawn.mean(axis=0) - full) < 5 * error).all()


@pytest.mark.parametrize("kind", ["sensitivity", "false_positive_rate"])
def test_a_surrogate_tends_to_its_rate_and_a_hinge_bounds_it(kind):
    def value(**options):
        bound = named(kind, judged_by="surrogate", **options)
        return float(combined(problem_of(bound))[0])

    exact = float(combined(problem_of(named(kind)))[0])
    errors = [abs(value(temperature=t) - exact) for t in (1.0, 0.1, 0.01, 0.001)]
    assert errors[3] < 5e-3
    assert errors[3] < errors[1] < errors[0]
    assert value(surrogate="hinge") >= exact
    assert value(surrogate="hinge", temperature=0.1) >= exact


def test_fedsgm_holds_a_sensitivity_that_the_loss_alone_misses():
    rng = np.random.default_rng(1)
    y = (rng.random((5, 80)) < 0.25).astype(np.int8)
    x = rng.standard_normal((5, 80, 2)) + 1.2 * y[..., None]
    data = {"x": np.concatenate([x, np.ones((5, 80, 1))], axis=2), "y": y}

    def logistic_loss(w, data):
        z = score(w, data)
        return jnp.mean(jax.nn.softplus(jnp.where(data["y"] == 1, -z, z)))

    bound = fs.constraints.sensitivity(score, at_least=0.9)
    free = fs.solve(fs.Problem(logistic_loss, data, np.zeros(3), bound), fs.FedAvg(0.5), 200)
    held = fs.solve(fs.Problem(logistic_loss, data, np.zeros(3), bound), fs.FedSGM(0.5), 200)
    assert free.history["sensitivity"][-1] < 0.8
    assert held.history["sensitivity"][-50:].mean() > 0.88


BAD = {
    "at_least is a rate": lambda: fs.constraints.sensitivity(score, at_least=1.2),
    "at_most is a rate": lambda: fs.constraints.demographic_parity(score, -0.1, group="race"),
    "no group 'sex'": lambda: problem_of(fs.constraints.equal_opportunity(score, 0.1, group="sex")),
    "no label 'z'": lambda: problem_of(fs.constraints.sensitivity(score, 0.9, label="z")),
    "has the group 2": lambda: problem_of(
        fs.constraints.demographic_parity(score, 0.1, group="race", groups=["a", "b"])
    ),
    "has the label 2": lambda: problem_of(fs.constraints.sensitivity(score, 0.9, label="race")),
    "Client 1 has no samples for sensitivity of y = 1 and group": lambda: problem_of(
        fs.EachClient(fs.constraints.sensitivity(score, 0.9, group="race", groups=GROUPS)),
        [CLIENTS[0], {k: v[:2] for k, v in CLIENTS[1].items()}],
    ),
    "it falls near a score": lambda: named("sensitivity", surrogate=lambda z: jax.nn.sigmoid(-z)),
    "near 1 or above": lambda: named("sensitivity", surrogate=lambda z: 0.1 * jax.nn.sigmoid(z)),
    "φ\\(z\\) \\+ φ\\(−z\\) = 1": lambda: named("demographic_parity", surrogate="hinge"),
    'must be "sigmoid", "hinge"': lambda: named("sensitivity", surrogate="step"),
    "finite number for each score": lambda: named("sensitivity", surrogate=lambda z: z / 0 * 0),
    "needs two groups": lambda: fs.constraints.demographic_parity(
        score, 0.1, group="race", groups=["a"]
    ),
    "different names and codes": lambda: fs.constraints.sensitivity(
        score, 0.1, group="race", groups={"a": 1, "b": 1}
    ),
    "one number for each of": lambda: problem_of(
        fs.constraints.sensitivity(lambda w, data: jnp.sum(data["x"]), 0.9)
    ),
    'per must be "all" or "client"': lambda: fs.constraints.from_table(
        {"kind": "sensitivity", "at_least": 0.9, "per": "site"}, score=score
    ),
    'judged_by must be "rate"': lambda: named("sensitivity", judged_by="loss"),
    "tail must be": lambda: named("cvar", tail=1.0),
    "least must be below most": lambda: named("cvar", least=3.0, most=2.0),
    "temperature must be positive": lambda: named("sensitivity", temperature=0.0),
    "did you mean 'sensitivity'": lambda: fs.constraints.from_table({"kind": "sensitivities"}),
    "needs at_least": lambda: fs.constraints.from_table({"kind": "sensitivity"}, score=score),
    "not a known field of sensitivity": lambda: fs.constraints.from_table(
        {"kind": "sensitivity", "at_most": 0.1}, score=score
    ),
}


@pytest.mark.parametrize("sentence", BAD)
def test_bad_input_gets_a_sentence(sentence):
    with pytest.raises(fs.InvalidInput, match=sentence):
        BAD[sentence]()


def test_every_client_holds_its_own_rate():
    """EachClient over a rate: the worst client's sensitivity is what is bounded."""
    rng = np.random.default_rng(2)
    y = (rng.random((4, 60)) < 0.4).astype(np.int8)
    x = rng.standard_normal((4, 60, 2)) + y[..., None] * np.linspace(0.4, 1.6, 4)[:, None, None]
    data = {"x": np.concatenate([x, np.ones((4, 60, 1))], axis=2), "y": y}
    bound = fs.EachClient(fs.constraints.sensitivity(score, at_least=0.8))
    problem = fs.Problem(lambda w, d: jnp.mean(loss(w, d)), data, np.zeros(3), bound)
    run = fs.solve(problem, fs.FedSGM(0.1), rounds=150)
    w = np.asarray(run.params)
    own = [recall_score(y[j], data["x"][j] @ w > 0) for j in range(4)]
    assert run.history["constraint"][-1] == pytest.approx(0.8 - min(own), abs=1e-6)
    assert own[run.history["worst_client"][-1]] == pytest.approx(min(own))
    assert run.history["violators"][-1] == sum(rate < 0.8 for rate in own)
    assert (run.history["constraint"][-40:] <= 0.05).mean() > 0.5
