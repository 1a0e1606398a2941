"""Secure sums in a simulation: the plain run to the rounding, its bytes, what is refused."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from fedsolve.privacy.encoding import Encoding, costs
from fedsolve.privacy.secure import ring_sum
from tests.support import examples
from tests.support.conformance import ALGORITHMS


@pytest.fixture(scope="module")
def problem():
    return examples.least_squares()


def test_a_sum_is_what_the_encoding_gives():
    rows = np.random.default_rng(0).uniform(-1, 1, (5, 40)).astype(np.float32)
    encoding, heard = Encoding(1.0, 5), np.arange(5) != 3
    words = [encoding.encode(row) for row, here in zip(rows, heard, strict=True) if here]
    by_hand = encoding.decode(np.sum(words, axis=0, dtype=np.uint32))
    found = ring_sum(jnp.asarray(rows), jnp.ones(5), heard, jnp.float32(encoding.scale))
    np.testing.assert_allclose(found, by_hand, atol=5e-7)


@pytest.mark.slow
def test_the_largest_answers_do_not_overflow():
    class Largest(fs.FedAvg):
        def improve(self, client, kept):
            from fedsolve.compression.packets import Dense

            return kept, Dense(jnp.zeros(5).at[2].set(1e30))

    problem = examples.least_squares(clients=7, constrained=False)
    secure = fs.SecureSum(clip={"improve": 3.0, "evaluation": 1e6})
    run = fs.solve(problem, Largest(1.0), rounds=1, aggregation=secure)
    np.testing.assert_allclose(run.params, [0, 0, 0, 0, 0], atol=1e-6)  # 1e30 overflows: zero

    class Large(Largest):
        def improve(self, client, kept):
            kept, packet = super().improve(client, kept)
            return kept, type(packet)(packet.vector / 1e20)

    run = fs.solve(problem, Large(1.0), rounds=1, aggregation=secure)
    np.testing.assert_allclose(run.params, [0, 0, -3.0, 0, 0], rtol=1e-5)


@pytest.mark.parametrize(
    "algorithm",
    [
        fs.FedAvg(0.05, participants=4, uplink=fs.QSGD(16)),
        pytest.param(fs.SCAFFOLD(0.03, local_steps=2), marks=pytest.mark.slow),
        pytest.param(fs.FedDyn(0.03, regularization=1.0), marks=pytest.mark.slow),
        pytest.param(
            fs.FedADMM(participants=4, local_iterations=2, penalty=1.0, accuracy=1e-4),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_it_is_the_plain_run_to_the_rounding(problem, algorithm):
    plain = fs.solve(problem, algorithm, rounds=6)
    secure = fs.solve(problem, algorithm, rounds=6, aggregation=fs.SecureSum(clip=200.0))
    np.testing.assert_allclose(secure.params, plain.params, rtol=1e-4, atol=1e-5)
    for name in ("objective", "constraint"):
        np.testing.assert_allclose(secure.history[name], plain.history[name], rtol=1e-4, atol=1e-4)
    assert not np.array_equal(secure.params, plain.params)


def test_the_protocols_bytes_are_counted(problem):
    run = fs.solve(problem, fs.FedSGM(0.05), rounds=2, aggregation=fs.SecureSum(clip=200.0))
    plain = fs.solve(problem, fs.FedSGM(0.05), rounds=2)
    measure, improve = costs(6, 1), costs(6, 5)
    np.testing.assert_array_equal(run.history["bytes_up"], 6 * (measure[0] + improve[0]))
    more = run.history["bytes_down"] - plain.history["bytes_down"]
    np.testing.assert_array_equal(more, 6 * (measure[1] + improve[1]))


@pytest.mark.slow
def test_too_few_answers_give_no_sum(problem):
    # Of 6, 4 must answer; states of clients stay as they are where nothing came of an answer.
    def arrivals(round, exchange, clients):
        return jnp.arange(len(clients)) < jnp.where(round == 1, 3, 4)

    algorithm, secure = fs.SCAFFOLD(0.03), fs.SecureSum(clip=200.0)
    one = fs.solve(problem, algorithm, 1, arrivals=arrivals, aggregation=secure)
    two = fs.solve(problem, algorithm, 2, arrivals=arrivals, aggregation=secure)
    three = fs.solve(problem, algorithm, 3, arrivals=arrivals, aggregation=secure)
    np.testing.assert_array_equal(one.params, two.params)
    np.testing.assert_array_equal(one.state.clients.control, two.state.clients.control)
    assert not np.array_equal(two.params, three.params)


def test_with_privacy_the_noise_is_on_the_secure_sum(problem):
    pytest.importorskip("dp_accounting")
    given = {"privacy": fs.Private(clip=0.5, noise=2.0, delta=0.01)}
    plain = fs.solve(problem, fs.FedSGM(0.05), rounds=3, **given)
    secure = fs.solve(
        problem, fs.FedSGM(0.05), rounds=3, aggregation=fs.SecureSum(clip=1.0), **given
    )
    np.testing.assert_allclose(secure.params, plain.params, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(secure.history["epsilon"], plain.history["epsilon"])
    for name in ("objective", "constraint"):  # the evaluation has its noise as well
        np.testing.assert_allclose(secure.history[name], plain.history[name], rtol=1e-4, atol=1e-6)


def test_a_sum_has_at_least_three_members():
    needed = [fs.SecureSum().needed(size) for size in (3, 4, 5, 6, 9)]
    assert needed == [3, 3, 4, 4, 6]


def test_the_state_of_a_loss_is_in_no_secure_sum():
    def loss(w, data, state):
        return jnp.sum(w * data["x"]), {"steps": state["steps"] + 1.0}

    data, state = {"x": np.ones((4, 1, 1))}, {"steps": np.zeros(())}
    problem = fs.Problem(loss, data, np.zeros(1), state=state)
    with pytest.raises(fs.InvalidInput, match="is not part of a secure sum"):
        fs.solve(problem, fs.FedSGM(0.1), 1, aggregation=fs.SecureSum())


def test_rand_k_with_a_shared_key_is_summed_by_its_values(problem):
    shared = fs.RandK(0.4, unbiased=False, shared=True)
    algorithm, secure = fs.FedSGM(0.05, 0.1, uplink=shared), fs.SecureSum(clip=200.0)
    plain = fs.solve(problem, algorithm, rounds=6)
    summed = fs.solve(problem, algorithm, rounds=6, aggregation=secure)
    np.testing.assert_allclose(summed.params, plain.params, rtol=1e-4, atol=1e-5)
    whole = fs.solve(problem, fs.FedSGM(0.05, 0.1), rounds=1, aggregation=secure)
    saved = whole.history["bytes_up"][0] - summed.history["bytes_up"][0]
    assert saved == problem.n * 4 * (5 - 2)  # two of five numbers are in the sum


def test_shared_entries_are_the_same_at_all_clients_and_others_in_each_round():
    def loss(w, data):
        return jnp.sum(w * data["x"])

    problem = fs.Problem(
        loss, {"x": np.ones((4, 1, 40)) * np.arange(1, 5)[:, None, None]}, np.zeros(40)
    )
    algorithm = fs.FedAvg(1.0, uplink=fs.RandK(0.25, shared=True))
    moves = [np.zeros(40)]
    moves += [np.asarray(fs.solve(problem, algorithm, r).params) for r in (1, 2, 3)]
    steps = -np.diff(moves, axis=0)
    for step in steps:  # every entry that moved has all four clients in its mean, 2.5, times d/K
        np.testing.assert_allclose(step[step != 0], 2.5 * 4, rtol=1e-6)
        assert np.sum(step != 0) == 10
    assert not np.array_equal(steps[0] != 0, steps[1] != 0)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"downlink": fs.RandK(0.4, unbiased=False, shared=True)},
            "for the uplink of algorithms with local steps",
        ),
        ({"uplink": fs.Compose(fs.RandK(0.4, shared=True), fs.QSGD(4))}, "not for Compose"),
        ({"uplink": fs.RandK(0.4)}, "keeps the same ones at all clients"),
    ],
)
def test_shared_entries_are_refused_where_nothing_is_shared(problem, given, sentence):
    with pytest.raises(fs.InvalidInput, match=sentence):
        fs.solve(problem, fs.FedSGM(0.1, **given), 1, aggregation=fs.SecureSum())


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["debug", "streamed"])
def test_runtimes_agree(problem, runtime):
    algorithm, secure = fs.FedSGM(0.05, 0.1, participants=5), fs.SecureSum(clip=200.0)
    one, other = (
        fs.solve(problem, algorithm, rounds=3, aggregation=secure, runtime=each)
        for each in ("compiled", runtime)
    )
    np.testing.assert_allclose(one.params, other.params, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("algorithm", "secure", "sentence"),
    [
        (fs.FedSGM(0.1, uplink=fs.TopK(0.4)), {}, "say which entries they keep"),
        (ALGORITHMS["FedAvg"], {}, "looks at single answers of 'tell_size'"),
        (fs.FedAvg(0.1, participants=2), {}, "needs at least 3 members"),
        (fs.FedSGM(0.1), {"clip": {"improve": 1.0}}, "'measure' has no clip"),
    ],
)
def test_what_cannot_be_summed_is_refused(problem, algorithm, secure, sentence):
    with pytest.raises(fs.InvalidInput, match=sentence):
        fs.solve(problem, algorithm, 1, aggregation=fs.SecureSum(**({"clip": 1.0} | secure)))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"clip": None}, "needs a clip"),
        ({"clip": 0.0}, "clip must be positive"),
        ({"clip": {"improve": -1.0}}, "clip.improve must be positive"),
        ({"clip": 1.0, "threshold": 0.5}, "more than 1/2"),
        ({"clip": 1.0, "threshold": 1.1}, "at most 1"),
    ],
)
def test_bad_values_are_refused(given, sentence):
    with pytest.raises(fs.InvalidInput, match=sentence):
        fs.SecureSum(**given)
