"""PPBC and PPBC+ against a transcription, their virtual sequence, and the effect of correction."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from fedsolve.federation.state import State
from fedsolve.problem.domains import project_capped
from fedsolve.runtimes.placement import numbers_on_device
from fedsolve.runtimes.simulation import Simulation
from tests.support import examples, oracles

parts = fs.participation
PROBLEM = examples.least_squares(clients=6, constrained=False)
GRADS = [grad for grad, _, _ in examples.least_squares_clients(PROBLEM)]


def largest(count, counting="retained", alpha=None):
    """π̂ of the `count` largest gradients, by their norms."""

    def choose(x):
        norms = np.asarray([np.linalg.norm(grad(x)) for grad in GRADS])
        return oracles.counted(norms, np.argsort(-norms)[:count], counting, alpha)

    return choose


def rounds_of(history):
    """The numbers of the rounds of every epoch that ended."""
    stops = np.flatnonzero(history["epoch_end"]) + 1
    return [range(a, b) for a, b in zip([0, *stops[:-1]], stops, strict=True)], stops


@pytest.mark.parametrize(("theta", "up"), [(0.3, None), (0.0, 0.6)])
def test_epoch_starts_follow_the_transcription(theta, up):
    algorithm = fs.PPBC(
        0.03,
        momentum=theta,
        weighting="GradientNorm" if up is None else None,
        select_epoch=parts.Top(3) if up is None else "Everyone",
        availability=up,
        epoch_length=4 if up is None else None,
    )
    problem = fs.Problem(
        examples.quadratic, PROBLEM.samples.values, np.zeros(5), metrics={"x": lambda w, _: w}
    )
    run = fs.solve(problem, algorithm, rounds=40, seed=1, precision="float64")
    epochs, stops = rounds_of(run.history)
    assert len(epochs) >= 5
    expected = oracles.ppbc(
        GRADS,
        np.zeros(5),
        epochs,
        0.03,
        theta,
        largest(3) if up is None else lambda x: np.full(6, 1 / 6),
        None if up is None else run.history["up"],
        q=up or 1.0,
    )
    path = run.history["x"][stops - 1]
    np.testing.assert_allclose(path, expected, atol=1e-12)


def tilde(state, gamma, theta):
    """x̃ = x − γ Σ g_m, from what clients and server keep."""
    kept, server = state.clients, state.server
    now = np.asarray(kept.epoch == server.epoch)[:, None]
    gathered = np.sum(np.where(now, kept.gathered, 0), axis=0) / 6
    return server.x - gamma * (1 - theta) * (gathered - server.sent)


@pytest.mark.parametrize("counting", ["retained", "renormalised", "uniform"])
@pytest.mark.parametrize(
    "weighting", [pytest.param("FOLB", marks=pytest.mark.slow), "PowerOfChoice"]
)
def test_the_virtual_sequence_moves_by_everyones_mean_gradient(weighting, counting):
    """Whatever is selected, x̃ ← x̃ − γ[(1 − θ)(1/M) Σ ∇f_m(x) + θ g_prev], exactly."""
    gamma, theta = 0.05, 0.01
    algorithm = fs.PPBC(
        gamma,
        theta,
        weighting=weighting,
        select_epoch=parts.Top(4),
        select_round=parts.Random(2),
        round_weighting="GradientNorm",
        cap=4.0,
        counting=counting,
    )
    with jax.enable_x64(True):
        placed, tuned = (
            PROBLEM.on_device(jnp.float64),
            numbers_on_device(algorithm, np.dtype("float64")),
        )
        step = eqx.filter_jit(lambda p, a, s: Simulation(p, s).play(a))
        state = State.start(placed, tuned, jax.random.key(3))
        ended = 0
        for _ in range(60):
            after, info = step(placed, tuned, state)
            x = np.asarray(state.server.x)
            mean = np.mean([grad(x) for grad in GRADS], axis=0)
            move = (1 - theta) * mean + theta * np.asarray(state.server.previous)
            expected = tilde(state, gamma, theta) - gamma * move
            np.testing.assert_allclose(tilde(after, gamma, theta), expected, atol=1e-13)
            total = np.sum(info["weights"])
            assert np.isclose(total, 1) if counting == "renormalised" else total < 1 - 1e-6
            assert np.sum(np.asarray(info["weights"]) > 0) <= 2
            ended += int(info["epoch_end"])
            state = after
        assert ended > 5


@pytest.mark.slow
def test_biased_selection_is_corrected_in_proportion_to_the_step():
    """Ten quadratics, the three largest gradients: with θ = 0 the distance to the optimum at epoch
    starts goes down with γ; without correction it stays where it is."""
    data = examples.least_squares(clients=10, constrained=False).samples.values
    inputs, targets = data["inputs"], data["targets"]
    best = np.linalg.lstsq(inputs.reshape(-1, 5), targets.reshape(-1), rcond=None)[0]
    problem = fs.Problem(
        examples.quadratic,
        data,
        np.zeros(5),
        metrics={"distance": lambda w, _: jnp.linalg.norm(w - best)},
    )

    def distances(correction):
        algorithm = fs.PPBC(
            0.02,
            weighting="GradientNorm",
            select_epoch=parts.Top(3),
            correction=correction,
        )
        swept = fs.sweep(
            problem, algorithm, 3000, seeds=[0], precision="float64", step_size=[0.02, 0.005]
        )
        found = []
        for run in swept.runs:
            starts = run.history["distance"][run.history["epoch_end"]]
            found.append(np.mean(starts[len(starts) // 2 :]))
        return found

    coarse, fine = distances(correction=True)
    away = distances(correction=False)
    assert 2.5 < coarse / fine < 6.5  # the step is four times as large
    assert fine < 0.1 * min(away)
    assert away[0] / away[1] < 1.5


def test_without_bias_it_is_gradient_descent():
    """α = 1 makes any weighting uniform; with everyone selected there is nothing to correct."""
    algorithm = fs.PPBC(0.05, weighting="GradientNorm", cap=1.0)
    run = fs.solve(PROBLEM, algorithm, rounds=50, precision="float64")
    x = np.zeros(5)
    for _ in range(50):
        x = x - 0.05 * np.mean([grad(x) for grad in GRADS], axis=0)
    np.testing.assert_allclose(run.params, x, atol=1e-13)
    np.testing.assert_allclose(run.history["weights"], 1 / 6)


class Scheduled(fs.PPBC):
    """PPBC in which an empty epoch follows every epoch that has an even number of rounds."""

    def ends(self, done, key):
        return jax.random.bernoulli(key, self.epoch_end), done % 2 == 0


COUNTED = [("retained", None), ("retained", 2.0), ("retained", 1.0), ("renormalised", None)]
COUNTED += [("renormalised", 2.5), ("uniform", None)]


@pytest.mark.filterwarnings("ignore:momentum")
@pytest.mark.parametrize(
    ("counting", "alpha", "twice"),
    [(*each, False) for each in COUNTED]
    + [("retained", None, True), ("renormalised", 2.5, True), ("uniform", None, True)],
)
def test_algorithm_1_with_empty_epochs_and_momentum(counting, alpha, twice):
    """Lines 4 to 22, H = 0 among them: then g^{k−1,H} is forgotten, and θ has nothing to weigh."""
    theta = 0.2
    algorithm = Scheduled(
        0.03,
        theta,
        epoch_end=0.4,
        weighting="GradientNorm",
        select_epoch=parts.Top(4),
        select_round=parts.Top(3) if twice else None,
        round_weighting="PowerOfChoice" if twice else None,
        cap=alpha,
        counting=counting,
    )
    problem = fs.Problem(
        examples.quadratic, PROBLEM.samples.values, np.zeros(5), metrics={"x": lambda w, _: w}
    )
    run = fs.solve(problem, algorithm, rounds=50, seed=4, precision="float64")
    nonempty, stops = rounds_of(run.history)
    epochs = [
        each for rounds in nonempty for each in ([rounds] if len(rounds) % 2 else [rounds, []])
    ]
    assert len(epochs) > len(nonempty) + 3

    def choose_round(x, pi):
        losses = [0.5 * np.mean((a @ x - y) ** 2) for a, y in zip(*data, strict=True)]
        order = np.argsort(-np.where(pi > 0, losses, -1))[:3]
        kept = np.where(np.isin(np.arange(6), order), pi, 0)
        if counting == "renormalised":
            kept = oracles.counted(kept, np.flatnonzero(kept), counting, None)
            if alpha is not None:
                kept[kept > 0] = oracles.capped(kept[kept > 0], alpha / 6)
        return kept

    data = PROBLEM.samples.values["inputs"], PROBLEM.samples.values["targets"]
    expected = oracles.ppbc(
        GRADS,
        np.zeros(5),
        epochs,
        0.03,
        theta,
        largest(4, counting, alpha),
        choose_round=choose_round if twice else None,
    )
    ends = np.flatnonzero([len(rounds) > 0 for rounds in epochs])
    np.testing.assert_allclose(run.history["x"][stops - 1], expected[ends], atol=1e-12)
    assert run.history["epochs"][-1] == len(nonempty)
    weights = run.history["weights"]
    assert weights.max() <= algorithm.largest_weight(6) / 6 + 1e-12  # the α of the theorems
    assert weights.sum(axis=1).max() <= 1 + 1e-12


def test_alpha_1_retains_uniform_weights():
    """Remark D.5: α = 1 with C < M. The weighting still decides who sends, in both selections."""
    problem = fs.Problem(
        examples.quadratic, PROBLEM.samples.values, np.zeros(5), metrics={"x": lambda w, _: w}
    )
    options = {"weighting": "GradientNorm", "select_epoch": parts.Top(3), "epoch_length": 1}
    options |= {"select_round": parts.Top(2)}
    capped = fs.solve(problem, fs.PPBC(0.05, cap=1.0, **options), rounds=30, precision="float64")
    uniform = fs.PPBC(0.05, counting="uniform", **options)
    other = fs.solve(problem, uniform, rounds=30, precision="float64")
    np.testing.assert_array_equal(capped.history["cohort"], other.history["cohort"])
    np.testing.assert_allclose(capped.params, other.params, atol=1e-13)
    np.testing.assert_allclose(capped.history["weights"], 1 / 6)
    for x, cohort in zip([np.zeros(5), *other.history["x"]], other.history["cohort"], strict=False):
        norms = [np.linalg.norm(grad(x)) for grad in GRADS]
        assert set(cohort) == set(np.argsort(norms)[-2:])


def test_a_selection_that_counts_equally_retains_one_share_each():
    algorithm = fs.PPBC(0.05, weighting="GradientNorm", select_epoch=parts.Proportional(3))
    weights = fs.solve(PROBLEM, algorithm, rounds=10, precision="float64").history["weights"]
    np.testing.assert_allclose(weights, 1 / 6)
    assert algorithm.largest_weight(6) == 1
    assert algorithm.senders(6) == 3


def test_the_alpha_of_each_counting():
    for options, alpha in (
        ({"counting": "uniform"}, 1),
        ({"weighting": "Uniform"}, 1),
        ({"select_round": parts.Top(2, equal=True)}, 1),
        ({"cap": 2.0}, 2),
        ({}, 6),
        ({"counting": "renormalised", "weighting": "Uniform"}, 6),
        ({"counting": "renormalised", "cap": 2.0}, 2),
    ):
        assert fs.PPBC(0.1, **{"weighting": "FOLB"} | options).largest_weight(6) == alpha


def test_the_old_name_of_a_counting():
    assert fs.PPBC(0.1, counting="weights").counting == "renormalised"
    assert fs.PPBC(0.1).counting == "retained"


def test_weights_of_a_user_s_rule_are_scaled_to_the_simplex():
    """π must sum to 1 for Σ(1/M − π_m) = 0, whatever a weighting returns."""

    class Plain(parts.Weighting):
        def weigh(self, fed, methods, memory, up, key):
            return jnp.arange(1.0, fed.clients + 1, dtype=fed.w.dtype), memory

    algorithm = fs.PPBC(0.05, weighting=Plain(), select_epoch=parts.Top(2))
    weights = fs.solve(PROBLEM, algorithm, rounds=3, precision="float64").history["weights"]
    np.testing.assert_allclose(np.sort(weights, axis=1), [[5 / 21, 6 / 21]] * 3)


def test_unavailable_clients_keep_expectations():
    """PPBC+ averaged over draws is PPBC, after a round that corrects."""
    options = {"weighting": "DataSize", "select_epoch": "Everyone", "epoch_length": 1}
    sure = fs.solve(PROBLEM, fs.PPBC(0.05, **options), rounds=1, precision="float64").params
    params = drawn_in(1, fs.PPBC(0.05, availability=OFTEN, **options))["x"][:, 0]
    error = params.std(axis=0) / np.sqrt(len(params))
    assert (error > 1e-4).all()
    assert (np.abs(params.mean(axis=0) - sure) < 4 * error).all()


OFTEN = np.asarray([0.3, 0.5, 0.9, 0.4, 1.0, 0.7])
SELECTED = {
    "by size": {"weighting": "DataSize", "select_epoch": parts.Random(4)},
    "GNS": {"weighting": "GradientNorm", "select_epoch": parts.Top(3)},
    "FOLB, then PoC": {
        "weighting": "FOLB",
        "select_epoch": parts.Top(4),
        "round_weighting": "PowerOfChoice",
        "select_round": parts.Top(1),
    },
}


def drawn_in(rounds, algorithm):
    """The histories of 300 runs, stacked, with x after every round."""
    problem = fs.Problem(
        examples.quadratic, PROBLEM.samples.values, np.zeros(5), metrics={"x": lambda w, _: w}
    )
    runs = fs.sweep(problem, algorithm, rounds, range(300), precision="float64").runs
    return {
        name: np.asarray([run.history[name] for run in runs])
        for name in ("x", "weights", "cohort", "up")
    }


@pytest.mark.parametrize("strategy", SELECTED.values(), ids=SELECTED.keys())
def test_availability_does_not_change_the_selection(strategy):
    """Within an epoch, before any correction: weights times η/q are 1 in all, on average, in every
    round, and line 17 moves x as with everyone up."""
    strategy = strategy | {"counting": "renormalised"}
    found = drawn_in(4, fs.PPBC(0.05, availability=OFTEN, epoch_length=10, **strategy))
    up = np.take_along_axis(found["up"], found["cohort"], axis=2) / OFTEN[found["cohort"]]
    heard = np.sum(found["weights"] * up, axis=2)
    error = heard.std(axis=0) / np.sqrt(len(heard))
    assert (np.abs(heard.mean(axis=0) - 1) < 4 * error).all()
    assert (error > 0.01).all()

    slopes = np.asarray([grad(np.zeros(5)) for grad in GRADS])
    expected = np.zeros_like(found["x"][:, 0])
    for column in range(found["cohort"].shape[2]):
        who, own = found["cohort"][:, 0, column], found["weights"][:, 0, column]
        expected -= 0.05 * own[:, None] * slopes[who]
    apart = found["x"][:, 0] - expected
    assert (np.abs(apart.mean(axis=0)) < 4 * apart.std(axis=0) / np.sqrt(len(apart))).all()


STRATEGIES = {
    "GNS": {"weighting": "GradientNorm", "selection": parts.Top(3)},
    "random, by size": {"weighting": "DataSize", "selection": parts.Random(2)},
    "uniform": {"selection": parts.Random(3)},
}


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES.keys())
def test_without_momentum_and_correction_it_is_fedavg_with_the_strategy(strategy):
    fedavg = fs.FedAvg(0.05, local_steps=2, **strategy)
    options = {"weighting": strategy.get("weighting"), "select_epoch": strategy["selection"]}
    options |= {"counting": "renormalised"}
    ppbc = fs.PPBC(0.05, local_steps=2, epoch_length=1, correction=False, **options)
    one = fs.solve(PROBLEM, fedavg, rounds=30, seed=2)
    other = fs.solve(PROBLEM, ppbc, rounds=30, seed=2)
    np.testing.assert_array_equal(one.history["cohort"], other.history["cohort"])
    np.testing.assert_array_equal(one.history["objective"], other.history["objective"])
    np.testing.assert_array_equal(one.params, other.params)
    np.testing.assert_array_equal(one.history["bytes_up"], other.history["bytes_up"])


def test_as_in_the_authors_code():
    """Fixed epochs, pseudo-gradients by an optimiser, outer step 1, and 1/M for whoever is
    selected: against a few lines of its own, with optax's SGD."""
    algorithm = fs.PPBC(
        1.0,
        momentum=0.2,
        weighting="GradientNorm",
        select_epoch=parts.Top(3),
        epoch_length=3,
        counting="uniform",
        local_steps=2,
        local_optimizer=fs.SGD(0.02, momentum=0.9),
    )
    run = fs.solve(PROBLEM, algorithm, rounds=12, precision="float64")

    def change(grad, x):
        v, speed = x, 0.0
        for _ in range(2):
            speed = grad(v) + 0.9 * speed
            v = v - 0.02 * speed
        return x - v

    x, previous = np.zeros(5), np.zeros(5)
    for _ in range(4):
        chosen = np.argsort([-np.linalg.norm(grad(x)) for grad in GRADS])[:3]
        left_out = np.zeros(5)
        for _ in range(3):
            changes = np.asarray([change(grad, x) for grad in GRADS])
            left_out += 0.8 * (changes.sum(axis=0) - changes[chosen].sum(axis=0)) / 6
            x = x - 0.8 * changes[chosen].sum(axis=0) / 6 - 0.2 * previous
        previous, x = left_out, x - left_out
    np.testing.assert_allclose(run.params, x, atol=1e-12)
    np.testing.assert_array_equal(run.history["vectors_up"], [3, 3, 3 + 6] * 4)
    assert run.history["vectors_up_total"][-1] == 4 * 15
    # a gradient up for each message, and the norms that the weighting asked for at epoch starts
    assert run.history["bytes_up_total"][-1] == 4 * (15 * 5 * 8 + 6 * 8)


def test_the_released_codes_surrogate():
    """θ times what this epoch left out so far, from the second epoch on, and no jump."""
    theta, q = 0.2, 0.7
    algorithm = fs.PPBC(
        0.1,
        momentum=theta,
        weighting="GradientNorm",
        select_epoch=parts.Top(2),
        epoch_length=3,
        counting="uniform",
        surrogate="current",
        availability=q,
    )
    run = fs.solve(PROBLEM, algorithm, rounds=12, precision="float64")
    x = np.zeros(5)
    for k in range(4):
        chosen = np.argsort([-np.linalg.norm(grad(x)) for grad in GRADS])[:2]
        left_out = np.zeros(5)
        for h in range(3):
            v = np.asarray([grad(x) for grad in GRADS]) * run.history["up"][3 * k + h, :, None] / q
            left_out += (1 - theta) * (v.sum(axis=0) - v[chosen].sum(axis=0)) / 6
            update = (1 - theta) * v[chosen].sum(axis=0) / 6 + (theta * left_out if k else 0)
            x = x - 0.1 * update
    np.testing.assert_allclose(run.params, x, atol=1e-12)
    np.testing.assert_array_equal(run.history["vectors_up"], run.history["up"].sum(axis=1))
    assert not run.state.server.previous.any()


def test_epochs_have_the_papers_distribution():
    algorithm = fs.PPBC(0.01, epoch_end=0.3)
    keys = jax.random.split(jax.random.key(0), 4000)
    ends, empty = jax.vmap(lambda key: algorithm.ends(jnp.int32(1), key))(keys)
    np.testing.assert_allclose(np.mean(ends), 0.3, atol=0.03)
    np.testing.assert_allclose(np.mean(empty), 0.3, atol=0.03)
    np.testing.assert_allclose(np.mean(ends & empty), 0.09, atol=0.02)


def test_weights_are_capped_by_an_exact_projection():
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        project = jax.jit(project_capped)
        for trial in range(60):
            weights = rng.dirichlet(np.full(7, 0.3)) if trial else np.full(7, 1 / 7)
            most = rng.choice([1.0, 7.0, rng.uniform(1, 7)]) / 7
            found = np.asarray(project(weights, most))
            assert found.min() >= 0
            assert found.max() <= most
            np.testing.assert_allclose(found.sum(), 1, atol=1e-12)
            low, high = -1.0, 1.0  # τ by bisection
            for _ in range(100):
                middle = (low + high) / 2
                above = np.clip(weights - middle, 0, most).sum() > 1
                low, high = (middle, high) if above else (low, middle)
            np.testing.assert_allclose(found, np.clip(weights - low, 0, most), atol=1e-10)


@pytest.mark.parametrize("select_round", [None, parts.Random(3)])
def test_the_cap_holds_after_selection(select_round):
    """Weights of those selected sum to 1 again, and none is above α/M for it."""
    algorithm = fs.PPBC(
        0.05,
        weighting="GradientNorm",
        select_epoch=parts.Top(4),
        select_round=select_round,
        cap=2.0,
        counting="renormalised",
    )
    weights = fs.solve(PROBLEM, algorithm, rounds=20, precision="float64").history["weights"]
    np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-12)
    assert weights.max() <= 2 / 6 + 1e-12
    assert weights.min() >= 0


def test_too_much_momentum_raises():
    with pytest.warns(UserWarning, match=r"momentum 0.1 is out of proportion .* at most 0.02"):
        fs.PPBC(0.01, momentum=0.1)
    with pytest.warns(UserWarning, match="at most 0.0008"):
        fs.PPBC(0.01, momentum=0.001, smoothness=4.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fs.PPBC(0.01, momentum=0.0008, smoothness=4.0)
        fs.PPBC(1.0, momentum=0.15, epoch_length=5)
        theory = fs.PPBC(0.01, momentum="theory", smoothness=4.0)
    assert theory.theta(0) == pytest.approx(0.01 * 4 * 0.04 / 2)


BAD = {
    "no smoothness": (lambda: fs.PPBC(0.1, momentum="theory"), "needs the smoothness L"),
    "participants": (lambda: fs.PPBC(0.1, participants=3), "PPBC selects twice"),
    "no round": (
        lambda: fs.PPBC(0.1, round_weighting="FOLB"),
        "round_weighting is for select_round",
    ),
    "counting": (
        lambda: fs.PPBC(0.1, counting="twice"),
        "one of retained, renormalised, uniform, got 'twice'",
    ),
    "cap": (lambda: fs.solve(PROBLEM, fs.PPBC(0.1, cap=9.0), 2), "cap must be from 1 to the 6"),
    "no end": (lambda: fs.PPBC(0.1, epoch_end=0.0), "epoch_end must be above 0 and at most 1"),
    "more than sure": (lambda: fs.PPBC(0.1, epoch_end=1.5), "at most 1, got 1.5"),
    "momentum": (lambda: fs.PPBC(0.1, momentum=1.0), "momentum must be at least 0 and below 1"),
    "negative": (lambda: fs.PPBC(0.1, momentum=-0.1), "momentum must be at least 0 and below 1"),
    "surrogate": (lambda: fs.PPBC(0.1, surrogate="next"), 'must be "previous" or "current"'),
    "narrow": (
        lambda: fs.solve(
            PROBLEM,
            fs.PPBC(0.1, select_epoch=parts.Top(2), cap=2.0, counting="renormalised"),
            2,
        ),
        "2 clients of weight at most cap/6 cannot sum to 1: cap must be at least 3",
    ),
    "too many": (
        lambda: fs.solve(PROBLEM, fs.PPBC(0.1, select_round=parts.Top(9)), 2),
        "select_round.count is 9, but there are only 6 clients",
    ),
}


@pytest.mark.parametrize(("call", "sentence"), BAD.values(), ids=BAD.keys())
def test_bad_input_raises_one_sentence(call, sentence):
    with pytest.raises(fs.InvalidInput, match=sentence):
        call()
