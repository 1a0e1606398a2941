"""Private runs: what leaves a client is bounded, sums get noise, nothing else gets out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from fedsolve.compression.clipping import dense, limit, norm_of
from fedsolve.federation.exchange import Exchange
from tests.support import examples
from tests.support.conformance import ALGORITHMS

pytest.importorskip("dp_accounting")

DELTA = 0.01
COVERED = (
    "FedSGM soft, Top-K both ways",
    "FedSGM unbiased uplink",
    "FedSGM quantised",
    "SCAFFOLD",
    "FedADMM, Top-K",
    "FedAvgAll",
    "FedDyn",
    "LagrangianFedAvg",
    "IPPConEx",
)
FEW = ("SCAFFOLD",)
MANY = [pytest.param(name, marks=[] if name in FEW else [pytest.mark.slow]) for name in COVERED]
LOOKING = (
    "FedAvg",
    "F3AST",
    "PPBC+",
    "FedSGM, who is wanted, drawn and up",
    "IncentFedAvg",
    "FedSGM, strategic",
)


@pytest.fixture(scope="module")
def problem():
    return examples.least_squares()


def still(size=1000, clients=4):
    """Nothing to learn: every gradient is zero, and the constraint's value is 0.3."""
    return fs.Problem(
        lambda w, data: 0.0 * jnp.sum(w * data["x"]),
        {"x": np.ones((clients, 1))},
        params=np.zeros(size),
        constraint=lambda w, data: 0.3 + 0.0 * jnp.sum(w),
    )


# What leaves a client


@pytest.mark.parametrize("name", MANY)
def test_what_leaves_a_client_is_bounded_whatever_its_state_is(problem, name):
    algorithm, placed = ALGORITHMS[name], problem.on_device()
    bound, w = 0.37, problem.start()
    one = jax.tree.map(lambda leaf: leaf[0], placed.samples)
    fed = Questions(placed, algorithm)
    assert fed.asked
    for scale in (0.0, 1e3, 1e25):  # the square of the last one overflows
        start = algorithm.init_client(w)
        state = jax.tree.map(lambda x, s=scale: x + jnp.asarray(s, x.dtype), start)
        for number, (method, message) in enumerate(fed.asked):
            place = placed, jax.random.key(0), w + 3.0, jnp.int32(0), number
            exchange = Exchange(*place, method, message, bound)
            _, reply = exchange.answer(jnp.int32(0), one, (state, placed.init_memory()))
            assert float(norm_of(reply)) <= bound


class Questions(fs.Federation):
    """Notes the questions of one round; nobody answers."""

    def __init__(self, problem, algorithm):
        from fedsolve.federation.state import State

        super().__init__(problem, State.start(problem, algorithm, jax.random.key(0)))
        self.asked = []
        self.play(algorithm)

    def _deliver(self, exchange, cohort, asked):
        self.asked.append((exchange.method, exchange.message))
        shapes = self._reply_shapes(exchange)
        zeros = jax.tree.map(lambda x: jnp.zeros((len(cohort), *x.shape), x.dtype), shapes)
        return zeros, np.ones(len(cohort), bool)


@pytest.mark.parametrize("uplink", [fs.Identity(), fs.TopK(0.4), fs.Float8()])
def test_a_clipped_packet_is_the_packet_times_a_number(uplink):
    v = jax.random.normal(jax.random.key(0), (50,)) * 3
    packet = uplink(v, jax.random.key(1))
    clipped = limit(packet, 0.5)
    assert float(norm_of(clipped)) == pytest.approx(0.5, rel=1e-5)
    ratio = 0.5 / jnp.linalg.norm(packet.dense())
    np.testing.assert_allclose(clipped.dense(), ratio * packet.dense(), rtol=1e-5)
    loose = limit(packet, 1e6)
    np.testing.assert_allclose(loose.dense(), packet.dense())
    stack = jax.vmap(lambda v, key: limit(uplink(v, key), 0.5))(
        jnp.stack([v, 2 * v]), jax.random.split(jax.random.key(2))
    )
    rows = jax.vmap(dense)(stack)
    np.testing.assert_allclose(
        stack.weighted_sum(jnp.asarray([2.0, -1.0])), 2 * rows[0] - rows[1], atol=1e-5
    )


@pytest.mark.slow
def test_the_residual_keeps_what_was_clipped(problem):
    # Over all rounds a client sends what it wanted to send, less its residual.
    algorithm = fs.FedAvg(0.01, uplink=fs.TopK(0.4))
    privacy = fs.Private(clip=0.2, noise=1e-12, delta=DELTA)
    run = fs.solve(problem, algorithm, rounds=1, privacy=privacy)
    plain = fs.solve(problem, fs.FedAvg(0.01), rounds=1)
    sent = -np.asarray(run.params) / 0.01
    wanted = -np.asarray(plain.params) / 0.01
    held = np.mean(np.asarray(run.state.clients), axis=0)
    np.testing.assert_allclose(sent + held, wanted, rtol=1e-5)
    assert np.linalg.norm(sent) <= 0.2 < np.linalg.norm(held)


def test_neighbours_differ_by_at_most_the_sensitivity(problem):
    # One client's data are replaced by anything; the noise is the same, so it cancels.
    algorithm, bound = fs.FedAvg(1.0, local_steps=2), 0.5
    privacy = fs.Private(clip=bound, noise=2.0, delta=DELTA)
    one = fs.solve(problem, algorithm, rounds=1, privacy=privacy)
    for factor in (0.0, 50.0, -1e4):
        data = {k: np.array(v) for k, v in problem.samples.values.items()}
        data["targets"][2] *= factor
        other = fs.Problem(
            problem.objective.function, data, np.zeros(5), constraint=examples.half_space
        )
        moved = fs.solve(other, algorithm, rounds=1, privacy=privacy)
        apart = np.linalg.norm(np.asarray(one.params) - np.asarray(moved.params))
        assert apart <= 2 * bound / problem.n * (1 + 1e-5)
    assert apart > 0.5 * bound / problem.n


def test_evaluations_of_neighbours_differ_by_at_most_the_sensitivity(problem):
    bound, privacy = 0.5, fs.Private(clip=0.5, noise=2.0, delta=DELTA)
    data = {k: np.array(v) for k, v in problem.samples.values.items()}
    data["targets"][2] *= 1e4
    data["offset"][2] *= -1e4
    other = fs.Problem(
        problem.objective.function, data, np.zeros(5), constraint=examples.half_space
    )
    one, moved = (  # hardly a step: else the values of all clients change
        fs.solve(p, fs.FedAvg(1e-20, local_steps=2), rounds=1, privacy=privacy)
        for p in (problem, other)
    )
    for column in ("objective", "constraint"):
        gap = abs(one.history[column] - moved.history[column])[0]
        assert gap <= 2 * bound / problem.n * (1 + 1e-4)
    assert gap > 0.5 * bound / problem.n


# The noise


def test_means_have_the_noise_that_is_accounted_for():
    clips = {"improve": 0.5, "measure": 2.0, "evaluation": 3.0}
    noises = {"improve": 4.0, "measure": 1.0, "evaluation": 2.0}
    problem, step = still(), 0.1
    privacy = fs.Private(clip=clips, noise=noises, delta=DELTA)
    run = fs.solve(problem, fs.FedSGM(step, tolerance=10.0), rounds=200, privacy=privacy)
    moves = np.asarray(run.params) / step / np.sqrt(200)
    assert np.std(moves) == pytest.approx(4.0 * 0.5 / 4, rel=0.07)
    estimates = run.history["constraint_estimate"]
    assert np.mean(estimates) == pytest.approx(0.3, abs=0.15)
    assert np.std(estimates) == pytest.approx(1.0 * 2.0 / 4, rel=0.15)
    assert np.std(run.history["objective"]) == pytest.approx(2.0 * 3.0 / 4, rel=0.15)
    assert np.std(run.history["constraint"]) == pytest.approx(2.0 * 3.0 / 4, rel=0.15)
    noise = run.history["objective"], run.history["constraint"] - 0.3, estimates - 0.3
    assert np.abs(np.corrcoef(noise) - np.eye(3)).max() < 0.25


@pytest.mark.slow
def test_with_hardly_any_noise_and_no_clipping_it_is_the_plain_run(problem):
    algorithm = fs.FedSGM(0.05, 0.1, participants=3, local_steps=2)
    privacy = fs.Private(clip=1e5, noise=1e-12, delta=DELTA)
    private = fs.solve(problem, algorithm, rounds=5, privacy=privacy)
    plain = fs.solve(problem, algorithm, rounds=5)
    np.testing.assert_allclose(private.params, plain.params, rtol=1e-5)
    for column in ("objective", "constraint", "switch", "bytes_up"):
        np.testing.assert_allclose(private.history[column], plain.history[column], rtol=1e-4)


@pytest.mark.slow
def test_a_weighted_sum_has_the_noise_of_its_largest_weight():
    class Weighted(fs.FedAvg):
        def combine(self, answers, drawn):
            return answers.mean(jnp.asarray([1.0, 1.0, 1.0, 5.0]))

    privacy = fs.Private(clip=0.5, noise=4.0, delta=DELTA)
    run = fs.solve(still(4000), Weighted(1.0), rounds=1, privacy=privacy)
    assert np.std(np.asarray(run.params)) == pytest.approx(4.0 * 0.5 * 5 / 8, rel=0.05)


@pytest.mark.slow
def test_each_sum_that_is_computed_is_paid_for():
    class Twice(fs.FedAvg):
        def combine(self, answers, drawn):
            return 0.5 * (answers.mean() + answers.sum() / 4)

    class Three(fs.FedAvg):
        def combine(self, answers, drawn):
            return answers.mean(jnp.ones(4)) + answers.mean(jnp.arange(4.0)) + answers.mean()

    privacy = fs.Private(clip=1.0, noise=2.0, delta=DELTA)
    costs = [
        privacy.plan(still(3), kind(0.1), 1).ledger.accountant.round
        for kind in (fs.FedAvg, Twice, Three)
    ]
    np.testing.assert_allclose(costs, [2.0, 2.0, 2.0 / np.sqrt(3)])


@pytest.mark.slow
def test_runtimes_agree(problem, tmp_path):
    algorithm = fs.FedSGM(0.05, 0.1, participants=3, uplink=fs.RandK(0.4))
    privacy = fs.Private(clip=0.5, noise=0.5, delta=DELTA)
    runs = [
        fs.solve(problem, algorithm, rounds=4, privacy=privacy, runtime=runtime)
        for runtime in ("compiled", "debug", "streamed")
    ]
    for other in runs[1:]:
        np.testing.assert_allclose(runs[0].params, other.params, rtol=2e-5, atol=1e-6)
        for name in ("objective", "constraint", "epsilon", "bytes_up"):
            np.testing.assert_allclose(
                runs[0].history[name], other.history[name], rtol=2e-4, err_msg=name
            )


@pytest.mark.slow
def test_the_margin_is_exceeded_as_rarely_as_it_says():
    problem, algorithm = still(1), fs.FedSGM(0.1, tolerance=10.0)
    privacy = fs.Private(clip=1.0, noise=2.0, delta=DELTA, evaluation="outside")
    plan = privacy.plan(problem, algorithm, 30)
    noise = [
        np.max(run.history["constraint_estimate"]) - 0.3
        for seed in range(40)
        for run in [fs.solve(problem, algorithm, 30, seed, privacy=privacy)]
    ]
    # Of 40 runs, 2 and 20 on average; the bounds are wrong once in a thousand.
    assert np.sum(noise > plan.margin("measure", 0.95)) <= 8
    assert 10 <= np.sum(noise > plan.margin("measure", 0.5)) <= 28


def test_a_margin_certifies_the_constraint(problem):
    tolerance, rounds = 0.1, 30
    algorithm = fs.FedSGM(0.05, tolerance)
    privacy = fs.Private(clip=50.0, noise=0.02, delta=DELTA, evaluation="outside")
    plan = privacy.plan(problem, algorithm, rounds)
    run = fs.solve(problem, algorithm, rounds, privacy=privacy)
    before = np.asarray(run.history["constraint"])[:-1]  # exact g where a round begins
    objective = np.asarray(run.history["switch"])[1:] == 0
    assert objective.any()
    assert not objective.all()
    assert np.all(before[objective] <= tolerance + plan.margin("measure", 0.999))
    assert plan.margin("measure", 0.5) > plan.deviation("measure")  # of 30 rounds together
    with pytest.raises(fs.InvalidInput, match="confidence must lie between 0 and 1"):
        plan.margin("measure", 1.0)


# Sampling


def test_uniform_draws_count_only_where_clients_keep_nothing(problem):
    privacy = fs.Private(clip=1.0, noise=1.0, delta=DELTA)

    def kind(algorithm):
        return privacy.plan(problem, algorithm, 1).sampling.kind

    assert kind(fs.FedSGM(0.1)) == "none"
    assert kind(fs.FedSGM(0.1, participants=3)) == "fixed"
    assert kind(fs.FedSGM(0.1, selection=fs.participation.Poisson(0.5))) == "poisson"
    assert kind(fs.FedSGM(0.1, participants=3, uplink=fs.TopK(0.4))) == "none"
    assert kind(fs.FedSGM(0.1, selection=fs.participation.Cyclic(3))) == "none"
    assert kind(fs.SCAFFOLD(0.1, participants=3)) == "none"


def test_who_takes_part_is_not_told_where_it_counts(problem):
    privacy = fs.Private(clip=1.0, noise=1.0, delta=DELTA)
    drawn = fs.solve(problem, fs.FedAvg(0.1, participants=3), rounds=2, privacy=privacy)
    kept = fs.FedAvg(0.1, participants=3, uplink=fs.TopK(0.4))
    assert "cohort" not in drawn.history
    assert "cohort" in fs.solve(problem, kept, rounds=2, privacy=privacy).history


@pytest.mark.slow
def test_lost_answers_do_not_change_what_a_mean_is_taken_over():
    # Else the noise, or the mean, would tell who took part.
    privacy = fs.Private(clip=0.5, noise=4.0, delta=DELTA)
    algorithm = fs.FedAvg(1.0, participants=2)
    lost = fs.solve(
        still(4000),
        algorithm,
        rounds=1,
        privacy=privacy,
        arrivals=lambda round, exchange, clients: jnp.arange(len(clients)) < 1,
    )
    assert np.std(np.asarray(lost.params)) == pytest.approx(4.0 * 0.5 / 2, rel=0.05)
    nobody = fs.solve(
        still(4000),
        algorithm,
        rounds=1,
        privacy=privacy,
        arrivals=lambda round, exchange, clients: jnp.zeros(len(clients), bool),
    )
    assert np.std(np.asarray(nobody.params)) == pytest.approx(4.0 * 0.5 / 2, rel=0.05)


@pytest.mark.slow
def test_poisson_draws_each_client_at_its_rate(problem):
    algorithm = fs.FedAvg(0.01, selection=fs.participation.Poisson(0.3))
    run = fs.solve(problem, algorithm, rounds=300)
    assert np.mean(run.history["available"]) == pytest.approx(0.3, abs=0.04)
    together = np.corrcoef(np.asarray(run.history["available"], float).T)
    assert np.abs(together - np.eye(problem.n)).max() < 0.25
    with pytest.raises(fs.InvalidInput, match="rate must be a probability"):
        fs.participation.Poisson(0.0)


# What is spent


def test_the_history_has_epsilon_so_far(problem):
    privacy = fs.Private(clip=1.0, noise=6.0, delta=DELTA)
    run = fs.solve(problem, fs.FedSGM(0.1), rounds=6, evaluate_every=4, privacy=privacy)
    plan = privacy.plan(problem, fs.FedSGM(0.1), 6, 4)
    found = plan.ledger.accountant
    assert found.round == pytest.approx(6 / np.sqrt(2))  # measure and improve
    assert found.evaluation == pytest.approx(6 / np.sqrt(2))  # objective and constraint
    np.testing.assert_allclose(
        run.history["epsilon"], [found.epsilon(4, 1), found.epsilon(6, 2)], rtol=1e-6
    )


def test_sums_of_fixed_cohorts_have_twice_the_sensitivity(problem):
    privacy = fs.Private(clip=1.0, noise=6.0, delta=DELTA)
    found = privacy.plan(problem, fs.FedAvg(0.1, participants=3), 1).ledger.accountant
    assert found.round == pytest.approx(3.0)
    assert found.evaluation == pytest.approx(3 / np.sqrt(2))


@pytest.mark.parametrize("accountant", ["rdp", pytest.param("pld", marks=pytest.mark.slow)])
def test_a_budget_is_used_up_and_not_exceeded(problem, accountant):
    privacy = fs.Private.for_budget(3.0, DELTA, clip=0.5, accountant=accountant)
    run = fs.solve(problem, fs.FedSGM(0.1), rounds=10, evaluate_every=5, privacy=privacy)
    assert run.rounds == 10
    assert 2.97 < run.history["epsilon"][-1] <= 3.0


def test_a_plan_warns_of_noise_that_hides_the_answers(problem):
    def plan(noise):
        return fs.Private(noise=noise, delta=DELTA).plan(problem, fs.FedSGM(0.1), 1)

    loud, quiet = plan(100.0), plan(1.0)
    assert loud.length("improve") == pytest.approx(100 / 6 * np.sqrt(5))
    assert "'improve' is 37 times as long as an answer may be" in loud.warning()
    assert not quiet.warning()
    assert "Private for each of 6 clients: ε = " in quiet.sentences()[0]


def test_shares_divide_the_budget(problem):
    shares = {"improve": 4.0, "measure": 1.0}
    privacy = fs.Private.for_budget(3.0, DELTA, shares=shares, evaluation="outside")
    noise = privacy.plan(problem, fs.FedSGM(0.1), 10).noise
    assert noise["measure"] == pytest.approx(2 * noise["improve"])


def test_a_run_stops_when_its_budget_is_spent(problem):
    privacy = fs.Private(clip=0.5, noise=8.0, epsilon=3.0, delta=DELTA)
    run = fs.solve(problem, fs.FedSGM(0.1), rounds=1000, privacy=privacy)
    found = privacy.plan(problem, fs.FedSGM(0.1), 1000).ledger.accountant
    assert run.history["epsilon"][-1] <= 3.0 < found.epsilon(run.rounds + 1, run.rounds + 1)


def test_a_resumed_run_goes_on_from_what_was_spent(problem, tmp_path):
    algorithm = fs.FedSGM(0.1, participants=3)
    privacy = fs.Private(clip=0.5, noise=8.0, delta=DELTA)
    whole = fs.solve(problem, algorithm, rounds=6, privacy=privacy)
    half = fs.solve(problem, algorithm, rounds=3, privacy=privacy, checkpoint=tmp_path / "run")
    by_state = fs.solve(problem, algorithm, rounds=6, privacy=privacy, resume=half.state)
    by_file = fs.solve(problem, algorithm, rounds=6, privacy=privacy, resume=tmp_path / "run")
    np.testing.assert_array_equal(whole.params, by_state.params)
    np.testing.assert_array_equal(whole.params, by_file.params)
    np.testing.assert_array_equal(whole.history["epsilon"], by_file.history["epsilon"])
    np.testing.assert_array_equal(whole.history["epsilon"][3:], by_state.history["epsilon"])


def test_a_resumed_run_cannot_spend_its_budget_twice(problem, tmp_path):
    algorithm = fs.FedSGM(0.1)
    privacy = fs.Private(clip=0.5, noise=8.0, epsilon=3.0, delta=DELTA)
    spent = fs.solve(problem, algorithm, rounds=100, privacy=privacy, checkpoint=tmp_path / "run")

    def again(resume, privacy):
        return fs.solve(problem, algorithm, rounds=200, privacy=privacy, resume=resume)

    with pytest.raises(fs.InvalidInput, match="budget is spent after round"):
        again(spent.state, privacy)
    assert again(tmp_path / "run", privacy).rounds == spent.rounds
    with pytest.raises(fs.InvalidInput, match="spend its budget twice"):
        again(spent.state, fs.Private.for_budget(3.0, DELTA, clip=0.5))
    with pytest.raises(fs.InvalidInput, match="privacy differ"):
        again(tmp_path / "run", dataclasses.replace(privacy, epsilon=6.0))
    with pytest.raises(fs.InvalidInput, match="state to resume from is of a private run"):
        again(spent.state, None)
    plain = fs.solve(problem, algorithm, rounds=2)
    with pytest.raises(fs.InvalidInput, match="played without privacy"):
        again(plain.state, privacy)


@pytest.mark.slow
def test_evaluations_that_a_state_paid_for_stay_paid(problem):
    privacy = fs.Private(clip=0.5, noise=8.0, delta=DELTA)
    often = fs.solve(problem, fs.FedSGM(0.1), rounds=4, privacy=privacy)
    rest = fs.solve(
        problem, fs.FedSGM(0.1), 8, evaluate_every=4, privacy=privacy, resume=often.state
    )
    found = privacy.plan(problem, fs.FedSGM(0.1), 8).ledger.accountant
    np.testing.assert_allclose(rest.history["epsilon"], [found.epsilon(8, 5)], rtol=1e-6)


# What an attacker can tell


@pytest.mark.slow
def test_membership_can_be_told_without_noise_and_hardly_with_it():
    # A client whose data stand out takes part, or answers zeros: the attacker looks along it.
    size, rounds, trials, epsilon = 20, 5, 60, 1.0

    def federation(present):
        points = np.zeros((8, size))
        points[0, 0] = 50.0 * present
        return fs.Problem(
            lambda w, data: -jnp.sum(w * data["x"]), {"x": points}, params=np.zeros(size)
        )

    def told(privacy):
        algorithm = fs.FedAvg(0.1)
        scores = [
            [
                float(fs.solve(p, algorithm, rounds, seed, privacy=privacy).params[0])
                for seed in range(trials)
            ]
            for p in (federation(0), federation(1))
        ]
        out, inside = map(np.asarray, scores)
        cuts = np.unique(np.concatenate([out, inside]))
        return max(np.mean(inside > cut) - np.mean(out > cut) for cut in cuts)

    assert told(None) == 1.0
    budget = fs.Private.for_budget(epsilon, DELTA, clip=1.0, evaluation="outside")
    noise = budget.plan(federation(0), fs.FedAvg(0.1), rounds).noise["improve"]
    private = fs.Private(clip=1.0, noise=noise, delta=DELTA, evaluation="outside")
    # An (ε, δ) run gives an attacker an advantage of at most (e^ε − 1 + 2δ)/(e^ε + 1) = 0.47;
    # 0.25 more is for 60 trials.
    bound = (np.exp(epsilon) - 1 + 2 * DELTA) / (np.exp(epsilon) + 1)
    assert told(private) < bound + 0.25
    loud = fs.Private(clip=1.0, noise=0.05, delta=DELTA, evaluation="outside")
    assert told(loud) > 0.95


# What is refused


@pytest.mark.parametrize("name", LOOKING)
def test_an_algorithm_that_looks_at_single_replies_is_refused(problem, name):
    with pytest.raises(fs.InvalidInput, match="looks at single answers"):
        fs.solve(problem, ALGORITHMS[name], rounds=1, privacy=fs.Private(noise=1.0, delta=DELTA))


@pytest.mark.parametrize("name", MANY)
def test_an_algorithm_that_uses_sums_runs(problem, name):
    privacy = fs.Private(clip=0.5, noise=0.1, delta=DELTA)
    run = fs.solve(problem, ALGORITHMS[name], rounds=2, privacy=privacy)
    assert np.all(np.isfinite(run.params))
    assert run.history["epsilon"][-1] > 0


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: fs.Private(noise=1.0, epsilon=0.0), "epsilon must be positive"),
        (lambda: fs.Private(noise=1.0, epsilon=-1.0), "epsilon must be positive"),
        (lambda: fs.Private(), "needs noise, or an epsilon"),
        (lambda: fs.Private(clip=None, noise=1.0), "needs a clip"),
        (lambda: fs.Private(clip=0.0, noise=1.0), "clip must be positive"),
        (lambda: fs.Private(noise=0.0), "noise must be positive"),
        (lambda: fs.Private(noise={"improve": -1.0}), "noise.improve must be positive"),
        (lambda: fs.Private(noise=1.0, delta=1.0), "delta must be below 1/n"),
        (lambda: fs.Private(noise=1.0, evaluation="no"), "evaluation must be"),
        (lambda: fs.Private(noise=1.0, accountant="no"), "accountant must be"),
        (lambda: fs.Private(noise=1.0, rounds=0), "rounds must be a whole number"),
    ],
)
def test_bad_values_are_refused(make, sentence):
    with pytest.raises(fs.InvalidInput, match=sentence):
        make()


@pytest.mark.parametrize(
    ("privacy", "options", "sentence"),
    [
        (fs.Private(noise=1.0, delta=0.5), {}, "delta must be below 1/n = 0.167"),
        (fs.Private(clip={"improve": 1.0}, noise=1.0), {}, "'measure' has no clip"),
        (
            fs.Private(clip={"improve": 1.0, "measure": 1.0}, noise=1.0),
            {},
            "'evaluation' has no clip",
        ),
        (fs.Private(noise={"improve": 1.0, "measure": 1.0}), {}, "'evaluation' has no noise"),
        (
            fs.Private(noise=1.0, shares={"improv": 1.0}),
            {},
            "shares has 'improv', and the exchanges are evaluation, improve, measure",
        ),
        (fs.Private(noise=0.1, epsilon=0.1), {}, "One round costs ε"),
        (fs.Private(noise=1.0), {"aggregation": fs.Median()}, "Median is no sum"),
        (fs.Private(noise=1.0, participants=3), {}, "planned for 3 participants"),
        (fs.Private(noise=1.0), {"stop": fs.Stationary(1e-3)}, "sees every client's gradient"),
        (fs.Private(noise=1.0), {"follow": {"x": lambda p, w: 0.0}}, "follow computes sees"),
        (
            fs.Private(noise=1.0, evaluation="outside"),
            {"stop": fs.Reached(0.1)},
            "stop the run by exact values",
        ),
    ],
)
def test_what_does_not_fit_the_run_is_refused(problem, privacy, options, sentence):
    with pytest.raises(fs.InvalidInput, match=sentence):
        fs.solve(problem, fs.FedSGM(0.1), rounds=2, privacy=privacy, **options)


def test_weights_under_random_draws_are_refused(problem):
    class Weighted(fs.FedAvg):
        def combine(self, answers, drawn):
            return answers.mean(jnp.ones(3))

    with pytest.raises(fs.InvalidInput, match="equal weights only"):
        fs.solve(
            problem,
            Weighted(0.1, participants=3),
            rounds=1,
            privacy=fs.Private(noise=1.0, delta=DELTA),
        )
