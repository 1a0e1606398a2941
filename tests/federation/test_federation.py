"""Exchanges: which clients are asked, byte counts, randomness, state updates."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import fedsolve as fs
from fedsolve.compression.packets import FEW
from fedsolve.federation.counters import Count
from fedsolve.federation.replies import Replies
from fedsolve.federation.state import State
from fedsolve.runtimes.simulation import Simulation
from tests.support import examples


@pytest.mark.parametrize("lost", [False, True])
def test_bytes_of_a_round_are_those_of_its_packets(lost):
    """d = 30, Top-K 0.1: three indices of one byte and three floats; g_j and σ are four bytes."""

    def arrivals(round, exchange, clients):
        return (round + 2 * exchange + jnp.asarray(clients)) % 3 != 0

    problem = fs.problems.neyman_pearson(clients=20)
    sparse = fs.TopK(0.1)
    options = {"participants": 10, "local_steps": 2, "uplink": sparse, "downlink": sparse}
    algorithm = fs.FedSGM(0.3, 0.05, **options)
    run = fs.solve(problem, algorithm, rounds=40, arrivals=arrivals if lost else None)
    packet = 3 * 1 + 3 * 4

    # Down: σ to everyone asked, and to each the publications since its last answer, or all of w.
    missed, down, up, messages = np.zeros(20, int), [], [], []
    for round, cohort in enumerate(run.history["cohort"]):
        down.append(10 * 4)
        heard = [cohort[np.asarray(arrivals(round, e, cohort)) | (not lost)] for e in (0, 1)]
        for arrived in heard:
            down[-1] += missed[cohort].sum()
            missed[arrived] = 0
        missed = np.minimum(missed + packet, 30 * 4)
        up.append(4 * len(heard[0]) + packet * len(heard[1]))
        messages.append(len(heard[0]) + len(heard[1]))
    np.testing.assert_array_equal(run.history["bytes_up"], up)
    np.testing.assert_array_equal(run.history["bytes_down"], down)
    np.testing.assert_array_equal(run.history["messages_up"], messages)
    np.testing.assert_array_equal(run.history["messages_down"], 20)
    assert max(down) > 10 * (4 + packet)  # someone had to catch up


def test_whole_vectors_without_compression():
    problem = examples.least_squares(constrained=False)
    history = fs.solve(problem, fs.FedSGM(0.05), rounds=5).history
    np.testing.assert_array_equal(history["bytes_up"], 6 * 5 * 4)
    # Everyone starts from the problem's own w_0; σ is sent in every round.
    np.testing.assert_array_equal(history["bytes_down"], [24, 144, 144, 144, 144])


def test_byte_counts_are_exact_beyond_32_bits():
    count = Count.zero()
    for _ in range(3):
        count = count.plus(jnp.int32(60_000), 44_000_001)
    count = count + count.plus_all(jnp.full(5000, 2**31 + 7, jnp.uint32))
    expected = 2 * 3 * 60_000 * 44_000_001 + 5000 * (2**31 + 7)
    assert int(count.exact()) == expected
    many = Count.zero().plus(jnp.int32(1_000_003), 70_001)
    many = many + Count.zero().plus_all(jnp.full(100_000, 2**16 - 1, jnp.uint32))
    assert int(many.exact()) == 1_000_003 * 70_001 + 100_000 * (2**16 - 1)


def counted(number):
    return Count(jnp.uint32(number >> 16), jnp.uint32(number & 0xFFFF))


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 2**46),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**31 - 1),
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40),
)
def test_counts_are_whole_numbers(begun, count, each, amounts):
    each = min(each, 2**46 // max(count, 1))
    total = counted(begun)
    assert int(total.exact()) == begun
    added = total.plus(jnp.uint32(count), each)
    assert int(added.exact()) == begun + count * each
    more = total.plus_all(jnp.asarray(amounts, jnp.uint32))
    assert int(more.exact()) == begun + sum(amounts)
    assert int((added + more).exact()) == 2 * begun + count * each + sum(amounts)
    for most in (0, 2**16, 2**31 - 1):
        assert int(added.minus(total, most)) == min(count * each, most)
        assert int(more.minus(total, most)) == min(sum(amounts), most)
    for part in (added, more):
        assert int(part.low) < 2**16


class Probe(fs.Algorithm):
    """Asks in one way and another, to see what happens."""

    flag: jax.Array
    mask: jax.Array

    def init(self, w):
        return None

    def init_client(self, w):
        return {"asked": jnp.int32(0), "never": jnp.float32(7)}

    def count(self, client, state, message):
        moved = {"asked": state["asked"] + 1, "never": state["never"]}
        return moved, {"draw": jax.random.normal(client.key), "echo": message * client.index}

    def look(self, client, state):
        return state, client.round.astype(jnp.float32)

    def round(self, fed, server, key):
        everyone = np.arange(fed.clients)
        some = fed.ask(self.count, jnp.asarray([4, 1, 2]), jnp.float32(10), when=self.flag)
        masked = fed.ask(self.count, everyone, jnp.float32(1), when=self.mask)
        looks = fed.ask(self.look, everyone)
        fed.publish(fs.Identity()(jnp.ones(5)), when=self.flag)
        return None, {
            "draws": masked.values["draw"],
            "echo": some.sum()["echo"],
            "masked": masked.mean()["echo"],
            "arrived": some.count,
            "looks": looks.mean(),
        }


@pytest.mark.parametrize("runtime", ["compiled", "debug"])
@pytest.mark.parametrize("flag", [True, False])
def test_exchanges_happen_only_when_they_should(flag, runtime):
    mask = jnp.asarray([True, False, True, True, False, False])
    problem = examples.least_squares()
    run = fs.solve(problem, Probe(jnp.asarray(flag), mask), rounds=3, runtime=runtime)
    asked = 3 * np.asarray(mask, int) + 3 * flag * np.isin(np.arange(6), [4, 1, 2])
    np.testing.assert_array_equal(run.state.clients["asked"], asked)
    np.testing.assert_array_equal(run.history["arrived"], 3 * flag)
    np.testing.assert_allclose(run.history["echo"], 10 * (4 + 1 + 2) * flag)
    np.testing.assert_allclose(run.history["masked"], (0 + 2 + 3) / 3)
    np.testing.assert_allclose(run.history["looks"], [0, 1, 2])
    np.testing.assert_allclose(run.params, 3.0 * flag)
    up = 3 * 8 * flag + 3 * 8 + 6 * 4
    np.testing.assert_array_equal(run.history["bytes_up"], up)
    first = 3 * 4 * flag + 3 * 4
    assert run.history["bytes_down"][0] == first
    assert run.history["bytes_down"][1] == first + 6 * 20 * flag  # everyone looks, so all catch up


def test_randomness_depends_on_seed_round_exchange_and_client_only():
    problem = examples.least_squares()
    everyone, few = jnp.ones(6, bool), jnp.asarray([True] + [False] * 5)
    with_all = fs.solve(problem, Probe(jnp.asarray(True), everyone), rounds=2).history["draws"]
    with_few = fs.solve(problem, Probe(jnp.asarray(False), few), rounds=2).history["draws"]
    np.testing.assert_array_equal(with_all, with_few)
    assert len(np.unique(with_all)) == 12
    double = fs.solve(
        problem, Probe(jnp.asarray(True), everyone), rounds=2, precision="float64"
    ).history
    assert double["draws"].dtype == np.float64


@pytest.mark.parametrize(("clients", "participants"), [(7, 3), (40, 2), (5, 4), (300, 150)])
def test_sampling_is_uniform_without_replacement(clients, participants):
    keys = jax.random.split(jax.random.key(0), 4000)
    cohorts = np.asarray(jax.vmap(lambda key: fs.sample(key, clients, participants))(keys))
    assert cohorts.shape == (4000, participants)
    assert (np.sort(cohorts) == np.sort(cohorts)).all()
    assert all(len(set(cohort)) == participants for cohort in cohorts)
    assert cohorts.min() >= 0
    assert cohorts.max() < clients
    counts = np.bincount(cohorts.ravel(), minlength=clients)
    expected = 4000 * participants / clients
    # each client's count is binomial; together nearly χ² with that spread
    chance = participants / clients
    statistic = np.sum((counts - expected) ** 2) / (expected * (1 - chance))
    assert 1e-4 < stats.chi2.sf(statistic * (clients - 1) / clients, clients - 1) < 1 - 1e-4


def test_pairs_are_sampled_uniformly():
    keys = jax.random.split(jax.random.key(1), 12_000)
    pairs = np.sort(jax.vmap(lambda key: fs.sample(key, 5, 2))(keys), axis=1)
    _, counts = np.unique(pairs, axis=0, return_counts=True)
    assert len(counts) == 10
    assert stats.chisquare(counts).pvalue > 1e-4


def test_everyone_is_known_before_the_program_runs():
    assert isinstance(fs.sample(jax.random.key(0), 4, None), np.ndarray)
    np.testing.assert_array_equal(fs.sample(jax.random.key(0), 4, 4), np.arange(4))


def test_replies_sum_what_arrived():
    values = {"a": jnp.asarray([1.0, jnp.nan, 3.0]), "b": jnp.arange(6.0).reshape(3, 2)}
    replies = Replies(values, jnp.asarray([True, False, True]))
    assert replies.count == 2
    assert replies.any()
    np.testing.assert_allclose(replies.sum()["a"], 4)
    np.testing.assert_allclose(replies.mean()["b"], [2, 3])
    np.testing.assert_allclose(replies.sum(jnp.asarray([2.0, 5.0, 1.0]))["b"], [4, 7])
    nobody = Replies(values, jnp.zeros(3, bool))
    np.testing.assert_allclose(nobody.mean()["a"], 0)
    assert not nobody.any()
    packets = jax.vmap(fs.TopK(0.5))(values["b"])
    np.testing.assert_allclose(
        Replies({"p": packets}, jnp.asarray([True, False, True])).mean()["p"], [0, 3]
    )


def test_data_are_arguments_of_the_program_not_constants():
    problem = examples.least_squares(clients=50, samples=200).on_device()
    algorithm = fs.FedSGM(jnp.asarray(0.1), jnp.asarray(0.1))
    state = State.start(problem, algorithm, jax.random.key(0))
    arrays, rest = eqx.partition((problem, algorithm, state), eqx.is_array)

    def step(arrays):
        problem, algorithm, state = eqx.combine(arrays, rest)
        return Simulation(problem, state).play(algorithm)

    constants = jax.make_jaxpr(step)(arrays).consts
    assert sum(np.size(constant) for constant in constants) < 2000  # the data are 50,000


def test_byte_differences_are_exact_and_limited():
    now = Count.zero().plus(1, 5_000_000_123)
    parts = np.asarray([divmod(n, 2**16) for n in (5_000_000_120, 4_999_000_000, 7)], np.uint32)
    seen = Count(jnp.asarray(parts[:, 0]), jnp.asarray(parts[:, 1]))
    np.testing.assert_array_equal(now.minus(seen, at_most=2_000_000), [3, 1_000_123, 2_000_000])


def test_messages_and_the_downlinks_compression_error_are_in_the_history():
    algorithm = fs.FedSGM(0.05, 0.1, participants=3, downlink=fs.TopK(0.5))
    run = fs.solve(examples.least_squares(), algorithm, rounds=4)
    np.testing.assert_array_equal(  # two questions a round to three clients, and their answers
        run.history["messages_up_total"] + run.history["messages_down_total"],
        2 * 2 * 3 * np.arange(1, 5),
    )
    x, w = np.asarray(run.state.server.x), np.asarray(run.state.w)
    error = np.linalg.norm(x - w) / np.linalg.norm(x)
    assert error > 0
    np.testing.assert_allclose(run.history["compression_error"][-1], error, rtol=1e-5)
    lost = fs.solve(
        examples.least_squares(), algorithm, rounds=1, arrivals=lambda r, e, who: who < 0
    )
    assert [lost.history[f"messages_{way}_total"].item() for way in ("up", "down")] == [
        0,
        3,
    ]  # nobody answers, nor is asked again
    assert (
        "compression_error"
        not in fs.solve(examples.least_squares(), fs.FedSGM(0.05, 0.1), rounds=1).history
    )


@pytest.mark.parametrize("runtime", ["compiled", "debug"])
def test_the_error_of_a_biased_uplink_is_in_the_history(runtime):
    algorithm = fs.SCAFFOLD(0.03, server_step_size=0.5, participants=3, uplink=fs.TopK(0.4))
    run = fs.solve(examples.least_squares(), algorithm, rounds=3, runtime=runtime)
    held = np.asarray(run.state.clients.residual)
    assert (held != 0).any(axis=1).sum() > 3  # also of clients that were not asked last
    error = 0.03 * 0.5 * np.linalg.norm(held.mean(axis=0)) / np.linalg.norm(run.params)
    np.testing.assert_allclose(run.history["uplink_error"][-1], error, rtol=1e-5)
    assert (run.history["uplink_error"] > 0).all()
    for uplink in (fs.Identity(), fs.RandK(0.4)):
        plain = fs.FedSGM(0.02, uplink=uplink, participants=3)
        assert "uplink_error" not in fs.solve(examples.least_squares(), plain, rounds=1).history


@pytest.mark.parametrize("clients", [1, FEW, FEW + 1])
def test_few_and_many_replies_are_added_alike(clients):
    """And what did not arrive may be anything."""
    rows = np.random.default_rng(0).standard_normal((clients, 5))
    arrived = np.arange(clients) % 2 == 0
    silent = jnp.where(arrived[:, None], rows, np.nan)
    weights = np.arange(1.0, clients + 1)
    total = jax.jit(lambda v, a, w: Replies(v, a).sum(w))(silent, jnp.asarray(arrived), weights)
    np.testing.assert_allclose(total, (weights * arrived) @ rows, rtol=1e-5)


class Breaks(fs.Algorithm):
    """Clients 1, 2 and 3 answer NaN in the second exchange of round 1, and w is NaN after it."""

    publishes: bool

    def init(self, w):
        return None

    def say(self, client, state, message):
        bad = message & (client.index >= 1) & (client.index <= 3)
        return state, (jnp.ones(3, jnp.int32), jnp.where(bad, jnp.nan, jnp.ones(2)))

    def round(self, fed, server, key):
        fed.ask(self.say, fed.everyone, jnp.asarray(False))
        if self.publishes:
            fed.publish(fs.Identity()(jnp.where(fed.round == 1, jnp.nan, jnp.ones(5))))
        else:
            asked = jnp.asarray([True, False, True, True])
            fed.ask(self.say, jnp.asarray([4, 1, 3, 2]), fed.round == 1, when=asked)
        return server, {}


@pytest.mark.parametrize(("publishes", "where"), [(False, [1, 1, 3]), (True, [1, -1, -1])])
def test_the_first_value_that_is_not_finite_is_remembered(publishes, where):
    """By round, exchange and client: the first of the cohort who was asked."""
    problem, algorithm = examples.least_squares(), Breaks(publishes)
    play = eqx.filter_jit(lambda state: Simulation(problem.on_device(), state).play(algorithm)[0])
    state, faults = State.start(problem.on_device(), algorithm, jax.random.key(0)), []
    for _ in range(3):
        state = play(state)
        faults.append(state.fault.tolist())
    assert faults == [[-1, -1, -1], where, where]
