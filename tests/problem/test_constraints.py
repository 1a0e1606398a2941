"""Constraints on statistics of all clients, and the maximum of several constraints."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from fedsolve.federation.replies import Replies
from tests.support.clients import client


def replies_of(constraint, problem, w):
    placed = problem.on_device()
    measured = [client(problem, i).measure(w) for i in range(problem.n)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *measured)
    return placed.constraint.combine(Replies(stacked, jnp.ones(problem.n, bool)))


def gap_statistics(w, data):
    """Counts and sums of a rate in two groups, as demographic parity needs them."""
    rate, group = jax.nn.sigmoid(data["x"] @ w), data["group"]
    real = data["mask"]
    return {
        "in": jnp.sum(rate * group * real),
        "in_count": jnp.sum(group * real),
        "out": jnp.sum(rate * (1 - group) * real),
        "out_count": jnp.sum((1 - group) * real),
    }


def gap(sums):
    return jnp.abs(
        sums["in"] / jnp.maximum(sums["in_count"], 1)
        - sums["out"] / jnp.maximum(sums["out_count"], 1)
    )


def fair_problem(**options):
    rng = np.random.default_rng(3)
    clients = [
        {
            "x": rng.standard_normal((n, 3)),
            "y": rng.standard_normal(n),
            "group": rng.integers(0, 2, n).astype(float),
        }
        for n in (6, 9, 4)
    ]
    problem = fs.Problem(
        lambda w, data: jnp.mean((data["x"] @ w - data["y"]) ** 2, where=data["mask"]),
        fs.stack_clients(clients),
        np.ones(3),
        constraint=fs.Statistics(gap_statistics, gap),
        **options,
    )
    return problem, clients


def test_statistics_constraint_is_the_gap_over_everybody():
    problem, clients = fair_problem()
    w = jnp.asarray([0.5, -1.0, 2.0])
    value, focus = replies_of(problem.constraint, problem, w)
    x = np.concatenate([c["x"] for c in clients])
    group = np.concatenate([c["group"] for c in clients])
    rate = 1 / (1 + np.exp(-(x @ np.asarray(w))))
    np.testing.assert_allclose(value, abs(rate[group == 1].mean() - rate[group == 0].mean()), 1e-5)
    assert focus is None
    own = clients[1]
    rate = 1 / (1 + np.exp(-(own["x"] @ np.asarray(w))))
    local = abs(rate[own["group"] == 1].mean() - rate[own["group"] == 0].mean())
    np.testing.assert_allclose(client(problem, 1).constraint(w), local, rtol=1e-5)


def test_statistics_of_a_minibatch_stand_for_the_whole_client():
    problem, clients = fair_problem(batch_size=3)
    own = client(problem, 1)
    keys = jax.random.split(jax.random.key(0), 4000)
    counts = jax.vmap(lambda key: own.measure(own.w, key)["in_count"])(keys)
    error = counts.std() / np.sqrt(len(keys))
    assert abs(counts.mean() - clients[1]["group"].sum()) < 5 * error


def test_fedsgm_holds_a_statistics_constraint():
    """The group is visible in the data and in the target, so the best model has a wide gap."""
    rng = np.random.default_rng(0)
    group = rng.integers(0, 2, (6, 40)).astype(float)
    x = rng.standard_normal((6, 40, 3)) + 2 * group[..., None] * np.asarray([1, 0, 0])
    data = {"x": x, "y": x[..., 0], "group": group, "mask": np.ones((6, 40), bool)}

    def problem(constraint):
        return fs.Problem(
            lambda w, data: jnp.mean((data["x"] @ w - data["y"]) ** 2),
            data,
            np.zeros(3),
            constraint,
        )

    held = fs.solve(
        problem(fs.Statistics(gap_statistics, gap)), fs.FedSGM(0.02, 0.1, participants=3), 500
    )
    free = fs.solve(problem(None), fs.FedSGM(0.02, participants=3), 500)
    stats = gap_statistics(
        jnp.asarray(free.params), {k: v.reshape(240, *v.shape[2:]) for k, v in data.items()}
    )
    assert gap(stats) > 0.25
    assert held.history["constraint"][-100:].mean() < 0.15
    assert held.history["objective"][-1] > free.history["objective"][-1] + 0.1


def first_part(w, data):
    return data["x"][0] @ w - 1.0


def second_part(w, data):
    return 2.0 - data["x"][0] @ w


def test_maximum_is_the_largest_of_the_global_constraints_and_clients_descend_that_one():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 1, 3))
    problem = fs.Problem(
        lambda w, data: jnp.sum(w**2),
        {"x": x},
        np.ones(3),
        constraint=fs.Maximum(first_part, fs.Mean(second_part)),
    )
    for w in (np.asarray([1.0, 2.0, 3.0]), -np.asarray([1.0, 2.0, 3.0])):
        value, focus = replies_of(problem.constraint, problem, jnp.asarray(w))
        parts = [np.mean(x[:, 0] @ w - 1.0), np.mean(2.0 - x[:, 0] @ w)]
        np.testing.assert_allclose(value, max(parts), rtol=1e-5)
        gradient = client(problem, 2).constraint_grad(jnp.asarray(w), focus=focus)
        sign = 1 if np.argmax(parts) == 0 else -1
        np.testing.assert_allclose(gradient, sign * x[2, 0], rtol=1e-5)
    # a key in the second place is not taken for the focus
    with pytest.raises(TypeError, match="positional"):
        client(problem, 2).constraint_grad(jnp.ones(3), jax.random.key(0))


def test_fedsgm_satisfies_a_maximum_of_constraints():
    """minimise ‖w − c‖² with w_0 ≤ 1 and w_1 ≤ −1: the optimum is the corner."""
    problem = fs.Problem(
        lambda w, data: jnp.sum((w - data["c"]) ** 2),
        {"c": np.tile([3.0, 2.0, 1.0], (4, 1))},
        np.zeros(3),
        constraint=fs.Maximum(lambda w, data: w[0] - 1, lambda w, data: w[1] + 1),
    )
    run = fs.solve(problem, fs.FedSGM(fs.Diminishing(0.5)), rounds=3000, evaluate_every=3000)
    np.testing.assert_allclose(run.average, [1, -1, 1], atol=0.1)
