"""What weightings look at, who is selected and how often, and clients that are seldom up."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from fedsolve.participation.availability import SELDOM as RARE
from fedsolve.participation.availability import SLOW
from fedsolve.participation.picks import selection_skew
from tests.support import examples
from tests.support.weights import ragged, weigh

parts = fs.participation
SIZES = np.asarray([2, 5, 3, 9, 4, 7])


def test_folb_compares_with_the_servers_previous_step():
    """Four rounds of averaging by |⟨∇f_m, d⟩|, d what w moved along one round before."""
    problem, clients, _, grad = ragged()
    algorithm = fs.FedAvg(0.05, weighting="FOLB", selection=parts.Top(2))
    run = fs.solve(problem, algorithm, rounds=5, precision="float64")
    w, direction = problem.params, None
    for cohort in run.history["cohort"]:
        slopes = np.asarray([grad(w, c) for c in clients])
        along = np.ones(6) if direction is None else np.abs(slopes @ direction)
        if direction is not None:
            np.testing.assert_array_equal(cohort, np.argsort(-along)[:2])
        direction = along[cohort] @ slopes[cohort] / along[cohort].sum()
        w = w - 0.05 * direction
    np.testing.assert_allclose(run.params, w, atol=1e-12)
    np.testing.assert_allclose(run.state.participation.weighting, direction, atol=1e-12)


def test_candidates_are_drawn_by_data_size():
    problem = ragged()[0]
    algorithm = fs.FedAvg(1e-3, weighting=parts.PowerOfChoice(1), selection=parts.Top(1))
    runs = fs.sweep(problem, algorithm, rounds=1, seeds=range(800)).runs
    picked = np.bincount([run.history["cohort"][0, 0] for run in runs], minlength=6) / 800
    np.testing.assert_allclose(picked, SIZES / SIZES.sum(), atol=0.06)
    assert picked[3] > 2 * picked[0]


@pytest.mark.parametrize("kind", [fs.SCAFFOLD, fs.FedDyn], ids=["SCAFFOLD", "FedDyn"])
def test_they_average_by_the_weights(kind):
    """One round with everyone: x moves along Σ p_m ∇f_m, and the correction stays a plain mean."""
    problem, clients, _, grad = ragged()
    algorithm = kind(0.05, weighting="DataSize")
    run = fs.solve(problem, algorithm, rounds=1, precision="float64")
    slopes = np.asarray([grad(problem.params, c) for c in clients])
    x = problem.params - 0.05 * SIZES @ slopes / SIZES.sum()
    if kind is fs.FedDyn:  # h = −α(1/n) Σ (v_k − w), and w ← mean of v_k − h/α
        x = x - 0.05 * slopes.mean(axis=0)
    np.testing.assert_allclose(run.params, x, atol=1e-12)


def test_f3ast_prefers_and_weights_clients_by_their_size():
    """p_k²/r_k² selects, p_k/r_k weights, with p_k the share of the samples."""
    problem, clients, _, grad = ragged()
    algorithm = fs.F3AST(0.02, participants=2, smoothing=0.1, weighting="DataSize")
    run = fs.solve(problem, algorithm, rounds=12, precision="float64")
    p, rates, w = SIZES / SIZES.sum(), np.full(6, 2 / 6), problem.params
    for cohort in run.history["cohort"]:
        assert set(cohort) == set(np.argsort(-p / rates, kind="stable")[:2])
        rates = rates + 0.1 * (np.isin(np.arange(6), cohort) - rates)
        slopes = np.asarray([grad(w, clients[k]) for k in cohort])
        w = w - 0.02 * (p / rates)[cohort] @ slopes
    np.testing.assert_allclose(run.params, w, atol=1e-12)


def test_the_rate_of_a_trace_is_its_share_of_rounds():
    table = np.asarray([[1, 0, 1], [1, 1, 0], [1, 0, 0], [1, 0, 1]])
    trace = parts.Trace(table)
    np.testing.assert_allclose(trace.rate(np.arange(3), 7), [1, 0.25, 0.5])
    # PPBC+ divides by it: with everyone selected, whole turns of the trace give plain sums
    problem = fs.Problem(
        lambda w, data: jnp.sum(w * data["slope"]), {"slope": np.eye(3)}, np.zeros(3)
    )
    algorithm = fs.PPBC(0.1, availability=trace, epoch_length=4)
    run = fs.solve(problem, algorithm, rounds=8, precision="float64")
    np.testing.assert_allclose(run.params, np.full(3, -0.1 * 8 / 3), atol=1e-12)


LOOKING = {
    "PowerOfChoice": parts.PowerOfChoice,
    "GradientNorm": parts.GradientNorm,
    "FOLB": parts.FOLB,
    "BANT": lambda look: parts.BANT(look=look),
}


def looked(name, look, seed=0):
    problem, clients, *_ = ragged(validation={"inputs": np.eye(4), "targets": np.ones(4)})
    held = fs.Problem(
        problem.given[0],
        fs.stack_clients(clients),
        problem.params,
        batch_size=2,
        validation=problem.validation,
    )
    direction = np.arange(1.0, 5.0) if name == "FOLB" else None
    whole, batch = (
        weigh(each, LOOKING[name](look=look), direction, seed=seed)[0] for each in (problem, held)
    )
    return whole, batch


@pytest.mark.parametrize("name", LOOKING)
def test_weightings_look_at_all_samples_or_at_a_minibatch(name):
    """With `look="all"` a batch size changes nothing; a minibatch differs from draw to draw."""
    whole, batch = looked(name, "all")
    np.testing.assert_allclose(batch, whole, atol=1e-12)
    whole, one = looked(name, "minibatch")
    other = looked(name, "minibatch", seed=1)[1]
    assert np.max(np.abs(one - whole)) > 1e-3
    assert np.max(np.abs(one - other)) > 1e-3
    with pytest.raises(fs.InvalidInput, match='look must be "all" or "minibatch", got'):
        LOOKING[name](look="some")


def test_the_defaults_are_the_papers():
    """Appendix B: losses are of whole data sets, gradients of samples ξ."""
    assert parts.PowerOfChoice().look == "all"
    assert {parts.FOLB().look, parts.GradientNorm().look, parts.BANT().look} == {"minibatch"}


def test_a_client_with_all_samples_ignores_the_batch_size_everywhere():
    """Values and gradients of f and g, and what a constraint on sums measures."""
    data = {"x": np.arange(12.0).reshape(2, 6)}

    def of(w, data):
        return jnp.mean((data["x"] - w[0]) ** 2)

    for batch in (None, 2):
        problem = fs.Problem(of, data, np.ones(1), constraint=of, batch_size=batch)
        placed = problem.on_device()
        own = jax.tree.map(lambda leaf: leaf[1], placed.samples)
        client = placed.client(own, placed.start(), jnp.int32(0), jnp.int32(1), jax.random.key(0))
        found = client.with_all_samples()
        expected = np.mean((data["x"][1] - 1) ** 2)
        np.testing.assert_allclose(found.objective(found.w), expected, rtol=1e-6)
        np.testing.assert_allclose(found.constraint(found.w), expected, rtol=1e-6)
        slope = found.grad(found.w)
        np.testing.assert_allclose(slope, [-2 * np.mean(data["x"][1] - 1)], rtol=1e-6)
        np.testing.assert_allclose(client.objective(client.w) == expected, batch is None)


def test_negative_losses_keep_their_order():
    problem = fs.Problem(
        lambda w, data: data["level"][0] + 0 * jnp.sum(w),
        {"level": np.asarray([[-3.0], [1.0], [-1.0], [-2.0]])},
        np.zeros(2),
    )
    weights, _, _ = weigh(problem, parts.PowerOfChoice())
    np.testing.assert_allclose(weights, np.asarray([0, 4, 2, 1]) / 7)


# How often clients are selected


def counted(cohorts, took=True):
    picks = np.zeros((len(cohorts), 6), int)
    for row, cohort, flags in zip(
        picks, cohorts, np.broadcast_to(took, cohorts.shape), strict=True
    ):
        row[cohort[flags]] = 1
    return np.cumsum(picks, axis=0)


PICKED = {
    "FedAvg": fs.FedAvg(
        0.05, weighting="DataSize", selection=parts.Random(3), availability=[0.5] * 5 + [1.0]
    ),
    "F3AST": fs.F3AST(0.02, participants=2, weighting="DataSize"),
    "PPBC": fs.PPBC(
        0.03,
        weighting="GradientNorm",
        select_epoch=parts.Top(4),
        round_weighting="PowerOfChoice",
        select_round=parts.Top(2),
    ),
}


@pytest.mark.parametrize("algorithm", PICKED.values(), ids=PICKED)
def test_picks_are_counted_in_every_round(algorithm):
    problem = examples.least_squares(constrained=False)
    run = fs.solve(problem, algorithm, rounds=21)
    history = run.history
    took = history.get("available", True)
    assert algorithm.availability is None or not np.all(took)
    picks = counted(history["cohort"], took)
    np.testing.assert_array_equal(history["picks"], picks)
    seldom = fs.solve(problem, algorithm, rounds=21, evaluate_every=7).history
    np.testing.assert_array_equal(seldom["picks"], picks[6::7])
    rounds = np.arange(1, 22)
    share = picks.mean(axis=1) / rounds
    skew = picks.std(axis=1) / np.sqrt(rounds * share * (1 - share))
    np.testing.assert_allclose(history["selection_skew"], skew, rtol=1e-5)
    np.testing.assert_allclose(seldom["selection_skew"], skew[6::7], rtol=1e-5)


def test_the_skew_is_1_for_uniform_draws_and_the_root_of_the_rounds_for_the_same_ones():
    rng = np.random.default_rng(0)
    skews = []
    for _ in range(200):
        picks = sum(np.isin(np.arange(8), rng.permutation(8)[:3]) for _ in range(50))
        skews.append(float(selection_skew(jnp.asarray(picks), 50)))
    assert np.mean(np.square(skews)) == pytest.approx(1, abs=0.1)
    same = jnp.asarray([50, 50, 0, 0])
    assert float(selection_skew(same, 50)) == pytest.approx(np.sqrt(50))
    assert float(selection_skew(jnp.asarray([25, 25, 25, 25]), 50)) == 0
    assert float(selection_skew(jnp.asarray([50, 50]), 50)) == 0  # everyone, always


def test_where_all_are_alike_nothing_is_counted():
    problem = examples.least_squares(constrained=False)
    for algorithm in (
        fs.FedAvg(0.05, participants=2),
        fs.FedAvg(0.05, weighting="GradientNorm"),
        fs.PPBC(0.05, weighting="GradientNorm"),
        fs.PPBC(0.05, select_epoch=parts.Random(2)),
    ):
        history = fs.solve(problem, algorithm, rounds=2).history
        assert "picks" not in history
        assert "selection_skew" not in history


# Availability that a weight of 1/q cannot repair


def test_a_client_that_is_never_up_raises():
    with pytest.raises(fs.InvalidInput, match="Client 1 is never up in the trace"):
        parts.Trace([[1, 0, 1], [0, 0, 1]])
    with pytest.raises(fs.InvalidInput, match="Client 2 is never up"):
        parts.Trace(jnp.asarray([[True, True, False]]))
    with pytest.raises(fs.InvalidInput, match="never up takes no part; day must be > 0"):
        parts.DayNight(day=[0.5, 0.0], night=0.0)


SELDOM = np.ones((30, 6))
SELDOM[1:, 0] = 0
RISKY = {
    "seldom": (0.01, "client 0 is up with probability 0.01 at times, .* count 100 times"),
    "one": ([0.9, 0.9, 0.04, 0.9, 0.9, 0.9], "client 2 is up with probability 0.04"),
    "slow": (parts.Markov(0.01, 0.01), "client 0 stays up or down 50 times as long"),
    "seldom up": (parts.Markov(0.01, 0.9), "client 0 is up with probability 0.011"),
    "night": (parts.DayNight(0.9, 0.0), "client 0 .* any number of times"),
    "long outages": (
        parts.Trace(np.repeat([[1] * 6, [0] * 6], 50, axis=0)),
        "client 0 stays up or down",
    ),
    "a seldom client": (parts.Trace(SELDOM), "client 0 is up with probability 0.033"),
}


@pytest.mark.parametrize(("availability", "sentence"), RISKY.values(), ids=RISKY)
def test_ppbc_plus_warns_where_weights_explode(availability, sentence):
    problem = examples.least_squares(constrained=False)
    with pytest.warns(UserWarning, match=f"PPBC\\+ weights gradients by 1/q_m, and {sentence}"):
        fs.PPBC(0.001, availability=availability).check(problem)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fs.FedAvg(0.1, availability=availability).check(problem)  # divides by nothing


def test_usual_availabilities_do_not_warn():
    problem = examples.least_squares(constrained=False)
    rng = np.random.default_rng(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for availability in (
            0.3,
            parts.Markov(0.2, 0.3),
            parts.Markov(0.02, 0.0),  # once up, always up
            RARE,
            parts.Markov(SLOW / 2, SLOW / 2),
            parts.DayNight(0.9, 0.2),
            parts.Trace(rng.random((60, 6)) < 0.4),
            parts.Trace(np.ones((9, 6))),
        ):
            fs.PPBC(0.01, availability=availability).check(problem)
