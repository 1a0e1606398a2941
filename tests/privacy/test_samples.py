"""Privacy of samples: what one of them moves is bounded, every query has noise and is counted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from fedsolve.privacy.sample_plan import count_queries
from fedsolve.privacy.samples import SampleProblem, Terms
from tests.support import examples

pytest.importorskip("dp_accounting")

DELTA = 1e-3
LOOSE = {"clip": 1e5, "noise": 1e-12, "delta": DELTA, "unit": "sample"}


def loss(w, data):
    return 0.5 * jnp.mean((data["x"] @ w - data["y"]) ** 2)


def above(w, data):
    """g_j: the mean prediction, bounded."""
    return jnp.mean(data["x"] @ w) - 0.1


def made(clients=3, samples=12, size=4, batch=None, constraint=above, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((clients, samples, size)) + 0.5
    data = {"x": x, "y": x @ np.arange(size) + rng.standard_normal((clients, samples))}
    return fs.Problem(loss, data, np.zeros(size), constraint, batch_size=batch)


def uneven():
    """Clients of different sizes, so with padding."""
    rng = np.random.default_rng(0)
    tables = [rng.standard_normal((count, 3)) for count in (4, 9, 6)]
    clients = fs.stack_clients([{"x": t, "y": t.sum(1)} for t in tables])
    return fs.Problem(loss, clients, np.zeros(3))


ALGORITHMS = {
    "FedAvg": fs.FedAvg(0.05, local_steps=2),
    "FedSGM hard": fs.FedSGM(0.05, 0.1, local_steps=2),
    "FedSGM soft": fs.FedSGM(0.05, 0.1, fs.Soft(5.0), participants=2, uplink=fs.TopK(0.5)),
    "PenaltyFedAvg": fs.PenaltyFedAvg(0.05, rho=2.0),
}


FEW = "FedSGM soft"
MANY = [pytest.param(n, marks=[] if n == FEW else [pytest.mark.slow]) for n in ALGORITHMS]


@pytest.mark.parametrize("name", MANY)
def test_with_hardly_any_noise_and_no_clipping_it_is_the_plain_run(name):
    problem = made()
    plain = fs.solve(problem, ALGORITHMS[name], rounds=3)
    private = fs.solve(problem, ALGORITHMS[name], rounds=3, privacy=fs.Private(**LOOSE))
    np.testing.assert_allclose(private.params, plain.params, rtol=1e-4, atol=1e-6)
    for column in ("objective", "constraint"):
        np.testing.assert_allclose(private.history[column], plain.history[column], rtol=1e-4)
    assert private.history["epsilon"][-1] > 0


@pytest.mark.slow
@pytest.mark.parametrize("make", [uneven, lambda: fs.problems.neyman_pearson(clients=5)])
def test_padding_and_separate_classes_are_no_samples(make):
    problem = make()
    algorithm = fs.FedSGM(0.1, 0.3)
    plain = fs.solve(problem, algorithm, rounds=3)
    private = fs.solve(problem, algorithm, rounds=3, privacy=fs.Private(**LOOSE))
    np.testing.assert_allclose(private.params, plain.params, rtol=1e-3, atol=1e-6)


def client_of(problem, terms, index=0):
    private = SampleProblem(problem, terms).on_device()
    own = jax.tree.map(lambda leaf: leaf[index], private.samples)
    start = jnp.ones(problem.dimension, jnp.float32)
    return private.client(own, start, jnp.int32(0), jnp.int32(index), jax.random.key(3))


def changed(problem, factor):
    """The same problem, but for the first sample of the first client."""
    data = {name: np.array(leaf) for name, leaf in problem.samples.values.items()}
    data["y"][0, 0] = factor
    data["x"][0, 0] *= max(abs(factor), 1.0)
    return fs.Problem(loss, data, np.zeros(problem.dimension), above)


def test_a_sample_moves_a_query_by_at_most_the_sensitivity():
    problem, clip = made(), 0.7
    clips = dict.fromkeys(("gradient", "measure", "evaluation"), clip)
    terms = Terms(clips, dict.fromkeys(clips, 2.0), (None, None), True)
    one = client_of(problem, terms)
    queries = {
        "grad": lambda client: client.grad(client.w),
        "direction": lambda client: client.direction(client.w, 0.5),
        "penalised": lambda client: client.penalised(client.w, 50.0),
        "constraint_grad": lambda client: client.constraint_grad(client.w),
        "measure": lambda client: client.measure(client.w),
    }
    most = 0.0
    for factor in (0.0, 1e3, -1e3, 1e30):
        other = client_of(changed(problem, factor), terms)
        for name, query in queries.items():
            apart = float(jnp.linalg.norm(jnp.atleast_1d(query(one) - query(other))))
            assert apart <= 2 * clip / 12 * (1 + 1e-4), (name, factor)
            most = max(most, apart)
    assert most > 1.5 * clip / 12  # it is not far below either


def test_noise_is_what_is_accounted_for():
    data = {"x": np.zeros((2, 20, 4000)), "y": np.zeros((2, 20))}
    problem = fs.Problem(loss, data, np.zeros(4000))
    privacy = fs.Private(clip=0.5, noise=3.0, delta=DELTA, unit="sample")
    run = fs.solve(problem, fs.FedAvg(1.0), rounds=1, privacy=privacy)
    # a client's mean of 20 samples has noise z·C/20, and there are two clients
    assert np.std(np.asarray(run.params)) == pytest.approx(3.0 * 0.5 / 20 / np.sqrt(2), rel=0.05)
    plan = privacy.plan(problem, fs.FedAvg(1.0), 1)
    assert plan.deviation("gradient") == pytest.approx(3.0 * 0.5 / 20)


def test_other_questions_with_the_same_key_get_other_noise():
    # Else their difference would tell the data without any noise.
    terms = Terms({"gradient": 1e-6}, {"gradient": 1e6}, (None, None), False)
    client = client_of(made(size=500), terms)
    same = client.grad(client.w), client.grad(client.w)
    np.testing.assert_array_equal(*same)
    for other in (client.grad(client.w * (1 + 1e-6)), client.direction(client.w, 0.5)):
        assert abs(np.corrcoef(same[0], other)[0, 1]) < 0.2


def test_batches_have_each_sample_with_its_probability():
    size = 40
    data = {"x": np.eye(size)[None] * np.ones((2, 1, 1)), "y": -np.ones((2, size))}
    problem = fs.Problem(loss, data, np.zeros(size), batch_size=10)
    terms = Terms({"gradient": 1.0}, {"gradient": 1e-9}, (None,), False)
    client = client_of(problem, terms)
    keys = jax.random.split(jax.random.key(0), 400)
    # at w = 0 the gradient of sample i is the unit vector of i, over the expected 10 samples
    found = 10 * jax.vmap(lambda key: client.grad(jnp.zeros(size), key))(keys)
    drawn = np.asarray(found) > 0.5
    np.testing.assert_allclose(drawn.mean(0), 0.25, atol=0.09)
    assert np.std(drawn.sum(1)) == pytest.approx(np.sqrt(40 * 0.25 * 0.75), rel=0.15)
    apart = np.corrcoef(drawn.T.astype(float)) - np.eye(size)
    assert np.abs(apart).max() < 0.25


# What is spent


def test_queries_are_counted_in_the_program():
    unit = dict.fromkeys(("gradient", "measure"), 1.0)
    problem = SampleProblem(made(), Terms(unit, unit, (None, None), False))
    assert count_queries(problem, fs.FedAvg(0.1, local_steps=7)) == {"gradient": 7}
    assert count_queries(problem, fs.FedSGM(0.1, local_steps=3)) == {"gradient": 3, "measure": 1}

    class Twice(fs.FedAvg):
        def improve(self, client, kept):
            slopes = jax.lax.map(lambda x: client.grad(client.w + x), jnp.arange(5.0))
            more = jax.lax.cond(kept is None, lambda: client.grad(client.w), lambda: client.w)
            return kept, fs.Identity()(jnp.sum(slopes, axis=0) + more)

    assert count_queries(problem, Twice(0.1)) == {"gradient": 6}

    class Unknown(fs.FedAvg):
        def improve(self, client, kept):
            def more(w):
                return w - client.grad(w)

            end = jax.lax.while_loop(lambda w: jnp.sum(w) > 0, more, client.w)
            return kept, fs.Identity()(end)

    class Spread(fs.FedAvg):
        def improve(self, client, kept):
            slopes = jax.vmap(lambda x: client.grad(client.w + x))(jnp.arange(5.0))
            return kept, fs.Identity()(jnp.sum(slopes, axis=0))

    for kind in (Unknown, Spread):
        with pytest.raises(fs.InvalidInput, match="How many queries a round has is not known"):
            count_queries(problem, kind(0.1))


@pytest.mark.parametrize(("noise", "epochs", "published"), [(1.3, 15, 1.19), (1.1, 60, 3.01)])
def test_epsilon_agrees_with_published_values(noise, epochs, published):
    # TensorFlow Privacy's tutorial on MNIST; see test_accounting for the conversion.
    data = {"x": np.ones((1, 60_000, 1), np.float32), "y": np.ones((1, 60_000), np.float32)}
    problem = fs.Problem(loss, data, np.zeros(1), batch_size=256)
    privacy = fs.Private(noise=noise, delta=1e-5, unit="sample", evaluation="outside")
    rounds = epochs * 60_000 // 256 // 5
    plan = privacy.plan(problem, fs.FedAvg(0.1, local_steps=5), rounds)
    assert 0.75 * published < plan.ledger.accountant.epsilon(rounds, 0) <= published


def test_a_budget_of_samples_is_used_up_and_not_exceeded():
    problem = made(samples=40, batch=10)
    privacy = fs.Private.for_budget(2.0, DELTA, unit="sample", shares={"gradient": 4.0})
    run = fs.solve(problem, fs.FedSGM(0.05, 0.1), 6, evaluate_every=3, privacy=privacy)
    assert 1.97 < run.history["epsilon"][-1] <= 2.0
    plan = privacy.plan(problem, fs.FedSGM(0.05, 0.1), 6, 3)
    assert plan.noise["measure"] == pytest.approx(2 * plan.noise["gradient"])
    assert run.history["objective_noise"][-1] == pytest.approx(
        plan.noise["evaluation"] / 40 / np.sqrt(3)
    )
    assert "fewest (40)" in plan.sentences()[0]


# What is refused


def gap(w, data):
    return jnp.sum(data["x"] @ w), jnp.float32(12)


REFUSED = {
    "statistics": (
        lambda: made(constraint=fs.Statistics(gap, lambda t: t[0] / t[1])),
        fs.FedSGM(0.1),
        "does not cover Statistics constraints",
    ),
    "no mean": (
        lambda: fs.Problem(lambda w, data: jnp.sum(data["x"] @ w), made().samples, np.zeros(4)),
        fs.FedAvg(0.1),
        "objective is not a mean over samples",
    ),
    "entries of clients": (examples.least_squares, fs.FedAvg(0.1), "entries of another form"),
    "epochs": (made, fs.FedAvg(0.1, local_epochs=1), "does not cover passes over the samples"),
    "losses": (
        made,
        fs.FedAvg(0.1, participants=2, weighting="PowerOfChoice"),
        "does not cover what needs all samples of a client",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_covered_is_refused(case):
    make, algorithm, sentence = REFUSED[case]
    with pytest.raises(fs.InvalidInput, match=sentence):
        fs.solve(make(), algorithm, 1, privacy=fs.Private(noise=1.0, delta=DELTA, unit="sample"))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"unit": "site"}, 'unit must be "client" or "sample"'),
        ({"unit": "sample", "participants": 3}, "leave out participants"),
        ({"unit": "sample", "delta": 0.1}, "delta must be below 1/n = 0.0278 for 36 samples"),
        ({"unit": "sample", "clip": {"improve": 1.0}}, "clip has 'improve'"),
    ],
)
def test_bad_values_are_refused(given, sentence):
    def attempt():
        privacy = fs.Private(**({"noise": 1.0, "delta": DELTA} | given))
        return fs.solve(made(), fs.FedSGM(0.1), 1, privacy=privacy)

    with pytest.raises(fs.InvalidInput, match=sentence):
        attempt()
