"""Simulated time equals a computation by hand; without a clock nothing changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from fedsolve.experiments import config
from fedsolve.federation.clock import Seconds
from fedsolve.participation import FirstAnswers
from tests.support import examples

N, D = 6, 5
W = 4 * D  # bytes of the whole vector


@pytest.fixture(scope="module")
def problem():
    return examples.least_squares(clients=N, size=D)


def test_a_round_costs_its_slowest_participant(problem):
    rng = np.random.default_rng(0)
    up, down = rng.uniform(1e3, 1e5, N), rng.uniform(1e4, 1e6, N)
    latency, speed = rng.uniform(0.01, 0.1, N), rng.uniform(0.5, 2, N)
    clock = fs.Clock({"improve": 0.3, "measure": 0.05}, speed, up, down, latency)
    algorithm = fs.FedSGM(0.05, uplink=fs.TopK(0.4), participants=3)
    run = fs.solve(problem, algorithm, 8, clock=clock)
    history, seen, total = run.history, np.zeros(N), 0.0
    for r, cohort in enumerate(history["cohort"]):
        # measure: what they missed of w (at most all of it) down, one number up
        missed = np.minimum(r * W - seen, W)[cohort]
        first = 2 * latency + 0.05 / speed + 8 * 4 / up
        first = first[cohort] + 8 * missed / down[cohort]
        # improve: σ down (the focus of a mean is empty), two indices of a byte and values up
        second = 2 * latency + 0.3 / speed + 8 * 4 / down + 8 * (2 * 1 + 2 * 4) / up
        assert history["bytes_up"][r] == 3 * (4 + 10)
        assert history["bytes_down"][r] == missed.sum() + 3 * 4
        expected = first.max() + second[cohort].max()
        np.testing.assert_allclose(history["seconds"][r], expected, rtol=1e-5)
        seen[cohort] = r * W
        total += expected
        np.testing.assert_allclose(history["seconds_total"][r], total, rtol=1e-5)


def test_the_first_answers_are_taken_and_the_late_ones_lost(problem):
    latency = np.asarray([0.3, 0.1, 0.2, 0.6, 0.5, 0.4])
    run = fs.solve(
        problem, fs.FedAvg(0.05), 3, clock=fs.Clock(latency=latency, first=2), precision="float64"
    )
    np.testing.assert_allclose(run.history["seconds"], 0.4)
    heard = fs.solve(
        problem,
        fs.FedAvg(0.05),
        3,
        arrivals=lambda round, exchange, who: (who == 1) | (who == 2),
        precision="float64",
    )
    np.testing.assert_array_equal(run.params, heard.params)
    assert (run.history["bytes_up"] == heard.history["bytes_up"]).all()
    # Who is lost anyway is not waited for.
    lossy = fs.solve(
        problem,
        fs.FedAvg(0.05),
        1,
        clock=fs.Clock(latency=latency, first=2),
        arrivals=lambda round, exchange, who: who != 1,
    )
    np.testing.assert_allclose(lossy.history["seconds"], 0.6, rtol=1e-6)


def test_stragglers_of_an_availability_take_their_time(problem):
    median = np.asarray([3.0, 1.0, 2.0, 6.0, 5.0, 4.0])
    late = FirstAnswers(4, median=median, spread=0.0)
    algorithm = fs.FedAvg(0.05, availability=late)
    run = fs.solve(problem, algorithm, 2, clock=fs.Clock(latency=0.25))
    np.testing.assert_allclose(run.history["seconds"], 4.5, rtol=1e-6)


def test_a_clock_changes_only_the_time_and_agrees_in_every_runtime(problem):
    clock = fs.Clock(0.1, fs.LogNormal(1, 0.5), fs.LogNormal(1e4, 1, every_round=True), 1e5)
    algorithm = fs.FedAvg(0.05, participants=3)
    plain = fs.solve(problem, algorithm, 4)
    run = fs.solve(problem, algorithm, 4, clock=clock)
    assert "seconds" not in plain.history
    assert plain.state.seconds is None
    np.testing.assert_array_equal(run.params, plain.params)
    assert set(run.history) - set(plain.history) == {"seconds", "seconds_total"}
    debug = fs.solve(problem, algorithm, 1, clock=clock, runtime="debug")
    np.testing.assert_allclose(debug.history["seconds"], run.history["seconds"][:1], rtol=1e-5)
    swept = fs.sweep(problem, algorithm, 4, seeds=[0, 1], clock=clock)
    np.testing.assert_allclose(swept[0].history["seconds"], run.history["seconds"], rtol=1e-5)
    assert (swept[1].history["seconds"] != run.history["seconds"]).all()
    half = fs.solve(problem, algorithm, 2, clock=clock)
    rest = fs.solve(problem, algorithm, 4, clock=clock, resume=half.state)
    np.testing.assert_array_equal(rest.history["seconds_total"], run.history["seconds_total"][2:])
    with pytest.raises(fs.InvalidInput, match="algorithm or clock"):
        fs.solve(problem, algorithm, 4, resume=half.state)


def test_clients_values_are_drawn_once_or_in_every_round():
    def drawn(trait, round, clients=2000):
        clock, who = fs.Clock(latency=trait), np.arange(clients, dtype=np.int32)
        return np.asarray(clock.times("", who, 0.0, 0, jnp.int32(round), jax.random.key(0))) / 2

    def speeds(trait, clients=2000):
        clock, who = fs.Clock(work=1.0, speed=trait), np.arange(clients, dtype=np.int32)
        return 1 / np.asarray(clock.times("", who, 0.0, 0, jnp.int32(0), jax.random.key(0)))

    own = drawn(fs.LogNormal(0.2, 0.5), 0)
    assert abs(np.corrcoef(own, speeds(fs.LogNormal(0.2, 0.5)))[0, 1]) < 0.1
    np.testing.assert_allclose(drawn(fs.LogNormal(0.2, 0.0), 0), 0.2, rtol=1e-6)
    np.testing.assert_array_equal(own, drawn(fs.LogNormal(0.2, 0.5), 7))
    assert np.median(own) == pytest.approx(0.2, rel=0.05)
    assert np.log(own).std() == pytest.approx(0.5, rel=0.05)
    anew = fs.LogNormal(0.2, 0.5, every_round=True)
    assert np.corrcoef(drawn(anew, 0), drawn(anew, 1))[0, 1] < 0.1
    some = drawn(fs.Mixture([1.0, 3.0], [0.25, 0.75]), 0)
    assert set(some) == {1.0, 3.0}
    assert some.mean() == pytest.approx(2.5, rel=0.02)
    table = np.asarray([[0.1, 0.2], [0.3, 0.4]])
    np.testing.assert_allclose(drawn(table, 3, 2), [0.3, 0.4], rtol=1e-6)


def test_a_trace_file_is_read(problem, tmp_path):
    np.savetxt(tmp_path / "links.csv", np.full((2, N), [[0.1], [0.2]]), delimiter=",")
    clock = fs.Clock(latency=str(tmp_path / "links.csv"))
    history = fs.solve(problem, fs.FedAvg(0.05), 3, clock=clock).history
    np.testing.assert_allclose(history["seconds"], [0.2, 0.4, 0.2], rtol=1e-6)


def test_a_long_sum_loses_nothing():
    def add(_, total):
        return total.plus(jnp.float32(0.1))

    total = jax.jit(lambda: jax.lax.fori_loop(0, 10**5, add, Seconds.zero()))()
    np.testing.assert_allclose(total.exact(), 10**5 * np.float64(np.float32(0.1)), rtol=1e-10)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"up": 0}, "clock.up must be positive"),
        ({"latency": -1}, "clock.latency must be at least 0"),
        ({"work": {"improve": -1}}, "clock.work.improve must be at least 0"),
        ({"speed": [1.0, 2.0]}, "clock.speed is for 2 clients, but there are 6"),
        ({"first": 0}, "first must be a whole number"),
        ({"up": "nowhere.csv"}, "Cannot read clock.up from nowhere.csv"),
        ({"up": "fast"}, "Cannot read clock.up from fast"),
    ],
)
def test_bad_clocks_raise(options, sentence, problem):
    with pytest.raises(fs.InvalidInput, match=sentence):
        fs.solve(problem, fs.FedAvg(0.1), 1, clock=fs.Clock(**options))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: fs.LogNormal(0.0, 1.0), "median must be positive"),
        (lambda: fs.LogNormal(1.0, -1.0), "spread must be at least 0"),
        (lambda: fs.Mixture([0.0], [1.0]), "values must be positive"),
        (lambda: fs.Mixture([1.0, 2.0], [2.0, -1.0]), "shares must be at least 0"),
        (lambda: fs.Mixture([1.0, 2.0], [1.0]), "one share for each value"),
        (lambda: fs.Mixture([1.0], [0.0]), "not all of them 0"),
        (lambda: fs.Mixture([], []), "values must be a list of numbers"),
        (lambda: fs.Mixture([1.0], [[1.0]]), "shares must be a list of numbers"),
        (lambda: fs.Clock(latency=np.ones((1, 2, 3))), "clock.latency must be at least 0"),
        (lambda: fs.Clock(speed=[1.0, 0.0]), "clock.speed must be positive"),
    ],
)
def test_bad_distributions_raise(make, sentence):
    with pytest.raises(fs.InvalidInput, match=sentence):
        make()


def test_an_experiment_has_a_clock_that_variants_may_change(tmp_path):
    table = config.read("neyman-pearson")
    table["clock"] = {"work": {"improve": 1}, "up": {"kind": "Mixture", "values": [1e3, 2e3]}}
    table["clock"]["up"]["shares"] = [1, 0]
    table["variants"] = {"as it is": {}, "fast": {"clock.up": 1e9}}
    experiment = config.resolve("x", table)
    slow, fast = experiment.clocks["as it is"], experiment.clocks["fast"]
    assert isinstance(slow.up, fs.Mixture)
    assert fast.up == 1e9
    assert fast.work == {"improve": 1.0}
    assert experiment.resolved["clock"]["down"] == np.inf
    assert config.resolve("x", experiment.resolved).clocks["fast"].up == 1e9
    shown = config.settings_of(experiment.resolved, "fast")  # as reports and trackers have it
    assert (shown["clock.up"], shown["clock.work.improve"]) == (1e9, 1.0)
    table["clock"]["upp"] = 1
    with pytest.raises(fs.InvalidInput, match=r"clock\.'upp' is not a known field of Clock"):
        config.resolve("x", table)
    assert config.resolve("x", config.read("neyman-pearson")).clocks == {"": None}


def test_pictures_can_be_against_time(problem):
    clock = fs.Clock(latency=fs.LogNormal(1, 1))
    swept = fs.sweep(problem, fs.FedAvg(0.05), 3, seeds=[0, 1], clock=clock)
    axis = swept.plot(against="seconds_total").axes[0]
    assert axis.get_xlabel() == "Simulated time (s)"
    ends = [run.history["seconds_total"][-1] for run in swept.runs]
    assert axis.lines[0].get_xdata()[-1] == min(ends)
    with pytest.raises(fs.InvalidInput, match="against round, seconds_total, bytes_up_total"):
        swept.plot(against="days")
