"""Stopping rules end a run at the same round in every runtime, without tracing again."""

import jax
import numpy as np
import pytest

import fedsolve as fs
from tests.support import examples

ALGORITHM = fs.FedSGM(0.05, participants=3)


@pytest.fixture(scope="module")
def problem():
    return examples.least_squares(constrained=False)


@pytest.fixture(scope="module")
def whole(problem):
    """A run that nothing stops, with ‖∇f‖² after every round by the rule that asks for it."""
    never = fs.Stationary(below=1e-30)
    return fs.solve(problem, ALGORITHM, rounds=160, precision="float64", stop=never)


def test_the_history_keeps_the_squared_gradient_over_all_clients(problem, whole):
    clients = examples.least_squares_clients(problem)
    slope = np.mean([gradient(whole.params) for gradient, _, _ in clients], axis=0)
    np.testing.assert_allclose(whole.history["squared_gradient"][-1], slope @ slope, rtol=1e-9)
    assert whole.rounds == 160


@pytest.mark.parametrize("position", [0, 40, 130])
def test_stops_after_the_first_round_that_is_good_enough(problem, whole, position):
    """Also beyond the slots of one call of the program."""
    norms = whole.history["squared_gradient"]
    below = norms[: position + 1].min() * (1 + 1e-9)
    expected = int(np.argmax(norms < below)) + 1
    run = fs.solve(
        problem, ALGORITHM, rounds=160, precision="float64", stop=fs.Stationary(below=below)
    )
    assert run.rounds == len(run.history["round"]) == expected
    for name, values in run.history.items():
        np.testing.assert_array_equal(values, whole.history[name][:expected], err_msg=name)
    assert "stopped" not in run.history


def test_a_user_s_rule_in_every_runtime(problem, whole):
    target = whole.history["objective"][5]

    def good_enough(entry):
        return entry["objective"] <= target

    options = {"rounds": 30, "precision": "float64", "stop": good_enough}
    run = fs.solve(problem, ALGORITHM, **options)
    expected = int(np.argmax(whole.history["objective"] <= target)) + 1
    assert run.rounds == expected
    seldom = fs.solve(problem, ALGORITHM, evaluate_every=4, **options)
    assert seldom.rounds == 4 * -(-expected // 4)
    debug = fs.solve(problem, ALGORITHM, runtime="debug", **options)
    assert debug.rounds == expected
    np.testing.assert_allclose(debug.params, run.params, rtol=1e-10)


def test_a_stopped_run_resumes_where_it_stopped(problem, whole):
    below = whole.history["squared_gradient"][3]
    options = {"precision": "float64", "stop": fs.Stationary(below=float(below) * 1.001)}
    run = fs.solve(problem, ALGORITHM, 160, **options)
    options["stop"] = fs.Stationary(below=1e-30)
    rest = fs.solve(problem, ALGORITHM, 160, resume=run.state, **options)
    np.testing.assert_array_equal(rest.params, whole.params)


def test_each_run_of_a_sweep_stops_by_itself(problem):
    target = fs.Reached(1.02 * fs.solve(problem, ALGORITHM, rounds=150).history["objective"].min())
    options = {"rounds": 150, "precision": "float64", "stop": target}
    swept = fs.sweep(problem, ALGORITHM, seeds=[0, 1], step_size=[0.05, 0.01], **options)
    found = [run.rounds for run in swept.runs]
    assert len(set(found)) > 2
    for run in swept.runs:
        alone = fs.FedSGM(run.settings["step_size"], participants=3)
        expected = fs.solve(problem, alone, seed=run.seed, **options)
        assert expected.rounds == run.rounds == len(run.history["round"])
        np.testing.assert_allclose(run.params, expected.params, rtol=1e-9)
        for a, b in zip(jax.tree.leaves(run.state), jax.tree.leaves(expected.state), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_rules_that_must_know_the_problem(problem):
    """f* is lstsq's, (30)'s tolerance is the problem's own; and the same in solve and sweep."""
    data = problem.samples.values
    rows = data["inputs"].reshape(-1, 5)
    best = np.linalg.lstsq(rows, data["targets"].ravel(), rcond=None)[0]
    f = 0.5 * np.mean((rows @ best - data["targets"].ravel()) ** 2)
    near = fs.NearOptimum(within=0.1)
    np.testing.assert_allclose(near.of(problem).objective, f + 0.1 * (1 + f), rtol=1e-9)
    below = fs.StationaryForSize(accuracy=1e-2, test="code").of(problem).below
    assert below == fs.theory.fedadmm.tolerance(problem, 1e-2, "code")
    one = fs.solve(problem, ALGORITHM, 160, stop=near)
    assert one.rounds < 160
    assert one.history["objective"][-1] <= f + 0.1 * (1 + f) < one.history["objective"][-2]
    swept = fs.sweep([problem, problem], ALGORITHM, 160, stop=near)
    assert [run.rounds for run in swept.runs] == [one.rounds] * 2
    assert list(swept.table["instance"]) == [0, 1]


def test_the_papers_rule_for_baselines_is_relative_to_fedadmm(problem):
    """FedADMM with half of the clients runs until (30), and says how low f must be."""
    method = fs.FedADMM(participants=3, local_iterations=10)
    run = fs.solve(problem, method, 500, stop=fs.StationaryForSize(accuracy=1e-2))
    assert 1 < run.rounds < 500
    f = float(run.history["objective"][-1])
    found = fs.NearFedADMM(accuracy=1e-2, within=0.1).of(problem).objective
    np.testing.assert_allclose(found, f + 0.1 * (1 + abs(f)), rtol=1e-6)
    best = fs.theory.reference.least(problem)
    assert found > fs.NearOptimum(within=0.1).of(problem).objective > best
    with pytest.raises(fs.InvalidInput, match=r"does not meet \(30\) within 1 averagings"):
        fs.NearFedADMM(accuracy=1e-2, rounds=1).of(problem)


def test_another_tolerance_does_not_trace_again(problem):
    traces = []

    def counted(w, data):
        traces.append(1)
        return examples.quadratic(w, data)

    same = fs.Problem(counted, problem.samples.values, np.zeros(5))
    fs.solve(same, ALGORITHM, rounds=3, stop=fs.Stationary(below=1e-3))
    once = len(traces)
    fs.solve(same, ALGORITHM, rounds=200, stop=fs.Stationary(below=1e-5))
    assert len(traces) == once


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: fs.Stationary(below=0.0), "below must be positive"),
        (lambda: fs.Reached("soon"), "objective must be a number"),
        (lambda: fs.NearOptimum(0.0), "within must be positive"),
        (lambda: fs.NearFedADMM(1e-3, share=1.5), "share must be at most 1"),
        (lambda: fs.NearFedADMM(1e-3)({}), "is a rule for a problem"),
        (lambda: fs.NearOptimum().of(examples.least_squares()), "only without a constraint"),
        (
            lambda: fs.solve(examples.least_squares(), ALGORITHM, 3, stop=fs.Stationary),
            "stop must be a rule",
        ),
    ],
)
def test_an_invalid_stopping_rule_raises(make, sentence):
    with pytest.raises(fs.InvalidInput, match=sentence):
        make()


def first_over(history, column, limit):
    return int(np.argmax(history[column] >= limit)) + 1


@pytest.mark.parametrize("over", [-1, 0, 1])
def test_a_budget_ends_a_run_after_the_round_that_uses_it_up(problem, whole, over):
    """In messages with vectors and in bytes, to the last one; whichever is used up first."""
    history = whole.history
    for given, column in (
        ("messages", "vectors_up_total"),
        ("bytes_up", "bytes_up_total"),
        ("bytes_down", "bytes_down_total"),
    ):
        limit = int(history[column][20]) + over
        run = fs.solve(
            problem, ALGORITHM, rounds=160, precision="float64", stop=fs.Spent(**{given: limit})
        )
        assert run.rounds == first_over(history, column, limit) == 21 + (over > 0)
        np.testing.assert_array_equal(run.history["objective"], history["objective"][: run.rounds])
    both = fs.Spent(messages=10**9, bytes_up=int(history["bytes_up_total"][4]))
    assert fs.solve(problem, ALGORITHM, 160, precision="float64", stop=both).rounds == 5


def test_a_budget_beyond_16_bits_and_in_every_runtime(problem, whole):
    """A `Count` has two parts."""
    wide = fs.Problem(
        lambda w, data: 0.5 * ((w - data["c"][0]) ** 2).sum(),
        {"c": np.ones((4, 1, 500))},
        np.zeros(500),
    )
    history = fs.solve(wide, fs.FedAvg(0.1), rounds=30).history
    for limit in (2**16 - 1, 2**16, 2**16 + 1234, 3 * 2**16 + 5):
        run = fs.solve(wide, fs.FedAvg(0.1), rounds=30, stop=fs.Spent(bytes_up=limit))
        assert run.rounds == first_over(history, "bytes_up_total", limit)
    debug = fs.solve(wide, fs.FedAvg(0.1), 30, stop=fs.Spent(bytes_up=2**16), runtime="debug")
    streamed = fs.solve(wide, fs.FedAvg(0.1), 30, stop=fs.Spent(bytes_up=2**16), runtime="streamed")
    assert debug.rounds == streamed.rounds == first_over(history, "bytes_up_total", 2**16)


def test_a_budget_of_simulated_seconds(problem):
    clock = fs.Clock(work=0.5)
    history = fs.solve(problem, ALGORITHM, rounds=20, clock=clock).history
    run = fs.solve(problem, ALGORITHM, rounds=20, clock=clock, stop=fs.Spent(seconds=3.0))
    assert run.rounds == first_over(history, "seconds_total", 3.0)
    with pytest.raises(fs.InvalidInput, match="counts simulated time: give a clock"):
        fs.solve(problem, ALGORITHM, rounds=20, stop=fs.Spent(seconds=3.0))


def test_another_budget_does_not_trace_again(problem):
    traces = []

    def watched(problem, params):
        traces.append(1)
        return 0.0 * params.sum()

    options = {"rounds": 9, "follow": {"watched": watched}}
    fs.solve(problem, ALGORITHM, stop=fs.Spent(messages=6), **options)
    once = len(traces)
    run = fs.solve(problem, ALGORITHM, stop=fs.Spent(messages=12), **options)
    assert len(traces) == once
    assert run.rounds == 4


def test_sweeps_compare_at_equal_budgets(problem):
    swept = fs.sweep(
        problem,
        ALGORITHM,
        rounds=50,
        seeds=[0, 1],
        stop=fs.Spent(messages=30),
        step_size=[0.05, 0.1],
    )
    assert [run.rounds for run in swept.runs] == [10] * 4
    assert set(swept.table["vectors_up_total"]) == {30}


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: fs.Spent(), "Spent needs a budget"),
        (lambda: fs.Spent(messages=0), "messages must be a whole number from 1 up, got 0"),
        (lambda: fs.Spent(messages=2.5), "messages must be a whole number from 1 up, got 2.5"),
        (lambda: fs.Spent(bytes_up=True), "bytes_up must be a whole number"),
        (lambda: fs.Spent(bytes_down=2**48), r"bytes_down must be below 2\^48"),
        (lambda: fs.Spent(seconds=0.0), "seconds must be positive"),
    ],
)
def test_a_budget_that_is_none_raises(make, sentence):
    with pytest.raises(fs.InvalidInput, match=sentence):
        make()


# Evaluations by messages or bytes


UNITS = {"messages": "vectors_up", "bytes_up": "bytes_up", "bytes_down": "bytes_down"}


def reached(history, unit, each):
    """The rounds in which the total of a history of every round reaches a multiple."""
    counts = history[f"{UNITS[unit]}_total"] // each
    return np.flatnonzero(counts > np.append(0, counts[:-1]))


@pytest.mark.parametrize(
    ("unit", "each", "runtime"),
    [
        ("messages", 20, "compiled"),
        ("bytes_up", 150, "compiled"),
        ("bytes_down", 400, "streamed"),
        ("messages", 7, "debug"),
    ],
)
def test_evaluations_are_where_a_multiple_is_reached(problem, unit, each, runtime):
    """PPBC's rounds cost 3 messages, or 9 where an epoch ends: also two multiples in a round."""
    options = {"select_epoch": fs.participation.Top(3), "epoch_end": 0.5}
    algorithm = fs.PPBC(0.02, weighting="GradientNorm", **options)
    count = 6 if runtime == "debug" else 30
    whole = fs.solve(problem, algorithm, count, runtime=runtime).history
    found = fs.solve(
        problem, algorithm, count, runtime=runtime, evaluate_at=unit, evaluate_every=each
    ).history
    rounds = reached(whole, unit, each)
    assert 2 < len(rounds) < count - 1
    kept = np.union1d(rounds, [count - 1])
    assert set(found) == set(whole)
    for name, values in found.items():
        np.testing.assert_array_equal(values, whole[name][kept], err_msg=name)


def test_multiples_beyond_16_bits():
    wide = fs.Problem(
        lambda w, data: 0.5 * ((w - data["c"][0]) ** 2).sum(),
        {"c": np.ones((4, 1, 501))},
        np.zeros(501),
    )
    whole = fs.solve(wide, fs.FedAvg(0.1), rounds=60).history
    for each in (2**16 - 1, 2**16, 2**16 + 12345, 3 * 2**16 + 7):
        found = fs.solve(
            wide, fs.FedAvg(0.1), rounds=60, evaluate_at="bytes_up", evaluate_every=each
        )
        kept = np.union1d(reached(whole, "bytes_up", each), [59])
        np.testing.assert_array_equal(found.history["round"], kept + 1)


def test_a_run_stopped_by_its_budget_is_evaluated_there(problem):
    budget, options = fs.Spent(messages=60), {"evaluate_at": "messages", "evaluate_every": 15}
    run = fs.solve(problem, ALGORITHM, rounds=900, stop=budget, **options)
    assert run.history["vectors_up_total"].tolist() == [15, 30, 45, 60]
    assert run.rounds == 20
    assert int(run.state.best.round) in run.history["round"]


def test_a_resumed_run_is_evaluated_at_the_same_messages(problem, tmp_path):
    """The last entry of the shorter run, which no multiple asked for, is not in the longer one."""
    options = {"evaluate_at": "messages", "evaluate_every": 10, "checkpoint": tmp_path / "run"}
    whole = fs.solve(problem, ALGORITHM, 30, evaluate_at="messages", evaluate_every=10)
    first = fs.solve(problem, ALGORITHM, 11, **options)
    assert first.history["vectors_up_total"].tolist() == [12, 21, 30, 33]
    run = fs.solve(problem, ALGORITHM, 30, resume=tmp_path / "run", **options)
    for name, values in run.history.items():
        np.testing.assert_array_equal(values, whole.history[name], err_msg=name)
    with pytest.raises(fs.InvalidInput, match="evaluate_every differ"):
        fs.solve(problem, ALGORITHM, 40, evaluate_every=10, resume=tmp_path / "run")


def test_a_run_that_diverges_between_two_evaluations_has_its_last_good_round():
    problem = fs.Problem(
        lambda w, data: jax.numpy.sum(data["a"] * w**4), {"a": np.ones((3, 1))}, np.ones(1)
    )
    with pytest.raises(fs.Diverged) as caught:
        fs.solve(problem, fs.FedAvg(9.0), 50, evaluate_at="messages", evaluate_every=1000)
    assert len(caught.value.run.history["objective"]) == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"evaluate_at": "days"}, "one of rounds, messages, bytes_up, bytes_down, got 'days'"),
        ({"evaluate_at": "messages", "evaluate_every": 0}, "evaluate_every must be a whole number"),
        ({"evaluate_at": "bytes_up", "evaluate_every": 2**31}, r"below 2\^31 bytes_up"),
        (
            {"evaluate_at": "messages", "privacy": fs.Private(clip=1.0, noise=1.0)},
            "plans its evaluations by rounds",
        ),
    ],
)
def test_milestones_that_are_none_raise(problem, options, sentence):
    with pytest.raises(fs.InvalidInput, match=sentence):
        fs.solve(problem, ALGORITHM, 3, **options)
