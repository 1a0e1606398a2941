"""SCAFFOLD, FedDyn, MOON and F3AST: each against a transcription of its own paper."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from tests.support import examples

parts = fs.participation
PROBLEM = examples.least_squares(clients=6, constrained=False)
GRADS = [grad for grad, _, _ in examples.least_squares_clients(PROBLEM)]
DATA = PROBLEM.samples.values
BEST = np.linalg.lstsq(DATA["inputs"].reshape(-1, 5), DATA["targets"].reshape(-1), rcond=None)[0]


def scaffold(cohorts, steps, eta, eta_g):
    """Algorithm 1 of the paper, option II."""
    x, c, controls = np.zeros(5), np.zeros(5), np.zeros((6, 5))
    for cohort in cohorts:
        moves, changes = [], []
        for i in cohort:
            y = x
            for _ in range(steps):
                y = y - eta * (GRADS[i](y) - controls[i] + c)
            new = controls[i] - c + (x - y) / (steps * eta)
            moves.append(y - x)
            changes.append(new - controls[i])
            controls[i] = new
        x = x + eta_g * np.mean(moves, axis=0)
        c = c + len(cohort) / 6 * np.mean(changes, axis=0)
    return x, c, controls


def test_scaffold_follows_its_paper():
    algorithm = fs.SCAFFOLD(0.03, server_step_size=0.8, local_steps=4, participants=3)
    run = fs.solve(PROBLEM, algorithm, rounds=25, seed=2, precision="float64")
    x, c, controls = scaffold(run.history["cohort"], 4, 0.03, 0.8)
    np.testing.assert_allclose(run.params, x, atol=1e-11)
    np.testing.assert_allclose(run.state.server.control, c, atol=1e-11)
    np.testing.assert_allclose(run.state.clients.control, controls, atol=1e-11)
    # the server's control is the mean of all clients' controls, also of those that were absent
    np.testing.assert_allclose(c, controls.mean(axis=0), atol=1e-12)
    assert run.history["bytes_up"][0] == 3 * 2 * 5 * 8  # the control goes up, too


def feddyn(cohorts, steps, eta, alpha, outer):
    """Algorithm 1 of the paper, with gradient steps for the local problem; the server goes `outer`
    of the way to the mean."""
    w, h, duals = np.zeros(5), np.zeros(5), np.zeros((6, 5))
    for cohort in cohorts:
        ends = []
        for k in cohort:
            v = w
            for _ in range(steps):
                v = v - eta * (GRADS[k](v) - duals[k] + alpha * (v - w))
            duals[k] = duals[k] - alpha * (v - w)
            ends.append(v)
        h = h - alpha / 6 * np.sum(np.asarray(ends) - w, axis=0)
        w = w + outer * np.mean(np.asarray(ends) - w, axis=0) - h / alpha
    return w, h, duals


@pytest.mark.parametrize("outer", [None, 0.7])
def test_feddyn_follows_its_paper(outer):
    """With plain steps, and with an optimiser, where the step size is the server's."""
    step, optimizer = (0.03, None) if outer is None else (outer, fs.SGD(0.03))
    algorithm = fs.FedDyn(
        step, regularization=0.5, local_steps=4, participants=3, local_optimizer=optimizer
    )
    run = fs.solve(PROBLEM, algorithm, rounds=25, seed=2, precision="float64")
    w, h, duals = feddyn(run.history["cohort"], 4, 0.03, 0.5, outer or 1.0)
    np.testing.assert_allclose(run.params, w, atol=1e-11)
    np.testing.assert_allclose(run.state.server, h, atol=1e-11)
    np.testing.assert_allclose(run.state.clients.dual, duals, atol=1e-11)


def test_where_averaging_drifts_they_reach_the_optimum():
    """Strongly convex, heterogeneous, ten local steps: FedAvg stays away, the others do not."""
    options = {"local_steps": 10}
    drifting = fs.solve(PROBLEM, fs.FedAvg(0.05, **options), rounds=600, precision="float64")
    assert np.linalg.norm(drifting.params - BEST) > 0.02
    for algorithm in (
        fs.SCAFFOLD(0.05, participants=3, **options),
        fs.FedDyn(0.05, regularization=1.0, participants=3, **options),
    ):
        run = fs.solve(PROBLEM, algorithm, rounds=3000, evaluate_every=3000, precision="float64")
        assert np.linalg.norm(run.params - BEST) < 1e-6, type(algorithm).__name__


def test_scaffold_with_an_optimiser_is_the_same_where_that_is_gradient_descent():
    plain = fs.SCAFFOLD(0.03, local_steps=3, participants=4)
    other = fs.SCAFFOLD(1.0, local_steps=3, participants=4, local_optimizer=fs.SGD(0.03))
    one, two = (
        fs.solve(PROBLEM, a, rounds=10, seed=1, precision="float64") for a in (plain, other)
    )
    np.testing.assert_allclose(one.params, two.params, atol=1e-13)
    np.testing.assert_allclose(one.state.clients.control, two.state.clients.control, atol=1e-13)


def network(batch_size=None):
    """A two-layer network over clients of different sizes; its hidden layer is what MOON needs."""
    rng = np.random.default_rng(0)
    clients = []
    for count in (3, 5, 4):
        clients.append({"x": rng.standard_normal((count, 4)), "y": rng.standard_normal(count)})
    params = {"hidden": rng.standard_normal((4, 3)), "last": rng.standard_normal(3)}

    def represent(p, data):
        return jnp.tanh(data["x"] @ p["hidden"])

    def loss(p, data):
        return jnp.mean((represent(p, data) @ p["last"] - data["y"]) ** 2)

    problem = fs.Problem(
        loss, fs.stack_clients(clients), params, representation=represent, batch_size=batch_size
    )
    return problem, clients, represent, loss


def test_moon_follows_its_paper():
    problem, clients, represent, loss = network()
    algorithm = fs.MOON(0.05, contrast=2.0, temperature=0.4, local_steps=3)
    run = fs.solve(problem, algorithm, rounds=4, precision="float64")

    def cosine(a, b):
        return jnp.sum(a * b, 1) / (jnp.linalg.norm(a, axis=1) * jnp.linalg.norm(b, axis=1))

    def local(v, w, previous, data):
        z = represent(v, data)
        near = jnp.exp(cosine(z, represent(w, data)) / 0.4)
        far = jnp.exp(cosine(z, represent(previous, data)) / 0.4)
        return loss(v, data) + 2.0 * jnp.mean(-jnp.log(near / (near + far)))

    with jax.enable_x64(True):
        w = jax.tree.map(jnp.asarray, problem.params)
        previous = [w, w, w]
        slope = jax.jit(jax.grad(local))
        for _ in range(4):
            for i, data in enumerate(clients):
                v = w
                for _ in range(3):
                    steps = slope(v, w, previous[i], data)
                    v = jax.tree.map(lambda a, b: a - 0.05 * b, v, steps)
                previous[i] = v
            w = jax.tree.map(lambda *ends: sum(ends) / 3, *previous)
        for name in ("hidden", "last"):
            np.testing.assert_allclose(run.params[name], w[name], atol=1e-11)
    apart = fs.solve(problem, fs.FedAvg(0.05, local_steps=3), rounds=4, precision="float64")
    assert np.abs(apart.params["hidden"] - run.params["hidden"]).max() > 1e-3
    without = fs.MOON(0.05, contrast=0.0, local_steps=3)
    same = fs.solve(problem, without, rounds=4, precision="float64")
    np.testing.assert_allclose(same.params["hidden"], apart.params["hidden"], atol=1e-12)
    plain = fs.Problem(examples.quadratic, DATA, np.zeros(5))
    with pytest.raises(fs.InvalidInput, match="MOON compares representations"):
        fs.solve(plain, algorithm, 2)


def test_moon_works_on_minibatches():
    problem, *_ = network(batch_size=2)
    run = fs.solve(problem, fs.MOON(0.02, local_steps=2, participants=2), rounds=60)
    assert run.history["objective"][-1] < run.history["objective"][0]


def test_f3ast_follows_its_rule():
    """Two of six, by p²/r² among those up: scores, rates and weights by hand."""
    up = np.random.default_rng(0).random((40, 6)) < [0.9, 0.2, 0.6, 0.6, 0.3, 0.9]
    algorithm = fs.F3AST(0.02, participants=2, smoothing=0.1, availability=parts.Trace(up))
    run = fs.solve(PROBLEM, algorithm, rounds=40, precision="float64")
    rates, w = np.full(6, 2 / 6), np.zeros(5)
    for t in range(40):
        cohort = run.history["cohort"][t][run.history["available"][t]]
        assert len(cohort) == min(2, up[t].sum())
        assert up[t][cohort].all()
        scores = np.where(up[t], 1 / rates**2, 0)
        rest = np.setdiff1d(np.flatnonzero(up[t]), cohort)
        if len(rest):
            assert scores[cohort].min() >= scores[rest].max() - 1e-9
        rates = 0.9 * rates + 0.1 * np.isin(np.arange(6), cohort)
        w = w - 0.02 * sum((np.asarray(GRADS[k](w)) / 6 / rates[k] for k in cohort), np.zeros(5))
    np.testing.assert_allclose(run.state.participation.rates, rates, atol=1e-12)
    np.testing.assert_allclose(run.params, w, atol=1e-10)


def test_f3ast_is_less_biased_than_averaging_available_clients():
    """Availability that goes with the data: FedAvg finds the optimum of those who are there."""
    q = [0.95, 0.1, 0.95, 0.1, 0.95, 0.1]
    ends = {}
    for name, algorithm in {
        "averaging": fs.FedAvg(0.01, availability=q),
        "F3AST": fs.F3AST(0.01, availability=q, participants=2, smoothing=0.005),
    }.items():
        problem = fs.Problem(examples.quadratic, DATA, np.zeros(5), metrics={"w": lambda w, _: w})
        history = fs.solve(problem, algorithm, rounds=4000, seed=0).history
        ends[name] = np.linalg.norm(history["w"][1500:].mean(axis=0) - BEST)
    assert ends["F3AST"] < 0.5 * ends["averaging"]


COMPRESSED = {
    "SCAFFOLD": fs.SCAFFOLD(
        0.03, participants=3, local_steps=2, uplink=fs.TopK(0.6), downlink=fs.TopK(0.8)
    ),
    "FedDyn": fs.FedDyn(
        0.03,
        regularization=1.0,
        local_steps=2,
        uplink=fs.Float16(),
        weighting="GradientNorm",
        selection=parts.Top(4),
    ),
    "F3AST": fs.F3AST(0.01, participants=3, uplink=fs.TopK(0.6), availability=0.7),
}


@pytest.mark.parametrize("algorithm", COMPRESSED.values(), ids=COMPRESSED.keys())
def test_they_take_the_same_parts(algorithm):
    history = fs.solve(PROBLEM, algorithm, rounds=150).history
    assert history["objective"][-1] < 0.7 * history["objective"][0]
