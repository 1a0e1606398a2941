"""Weighting, selection and availability of clients, and FedAvg with all three."""

import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsolve as fs
from fedsolve.experiments import config
from fedsolve.participation.weighting import draw_proportionally
from tests.support import examples
from tests.support.weights import ragged, weigh

parts = fs.participation


def test_weights_follow_their_papers():
    problem, clients, loss, grad = ragged()
    w = problem.params
    sizes = np.asarray([len(c["targets"]) for c in clients], float)
    weights, known, fed = weigh(problem, parts.DataSize())
    np.testing.assert_allclose(weights, sizes / sizes.sum())
    assert int(fed.bytes_up.exact()) == 6 * 4  # one whole number from each client, once
    again, _, fed = weigh(problem, parts.DataSize(), known)
    np.testing.assert_allclose(again, weights)
    assert int(fed.bytes_up.exact()) == int(fed.bytes_down.exact()) == 0

    losses = np.asarray([loss(w, c) for c in clients])
    weights, _, fed = weigh(problem, parts.PowerOfChoice())
    np.testing.assert_allclose(weights, losses / losses.sum())
    assert int(fed.bytes_up.exact()) == 6 * 8

    weights, _, fed = weigh(problem, parts.PowerOfChoice(candidates=3))
    asked = weights > 0
    assert asked.sum() == 3
    np.testing.assert_allclose(weights[asked], losses[asked] / losses[asked].sum())
    assert int(fed.bytes_up.exact()) == 6 * 4 + 3 * 8

    norms = np.asarray([np.linalg.norm(grad(w, c)) for c in clients])
    np.testing.assert_allclose(weigh(problem, parts.GradientNorm())[0], norms / norms.sum())

    direction = np.arange(4.0)
    along = np.asarray([abs(grad(w, c) @ direction) for c in clients])
    weights, _, fed = weigh(problem, parts.FOLB(), direction)
    np.testing.assert_allclose(weights, along / along.sum())
    assert int(fed.bytes_down.exact()) == 6 * 4 * 8  # the direction goes down to everyone
    np.testing.assert_allclose(weigh(problem, parts.FOLB())[0], 1 / 6)  # nothing to compare with


def test_trust_comes_from_the_servers_data_and_is_smoothed():
    rng = np.random.default_rng(3)
    held = {"inputs": rng.standard_normal((8, 4)), "targets": rng.standard_normal(8)}
    problem, clients, loss, grad = ragged(validation=held)
    trial = [problem.params - 0.2 * grad(problem.params, c) for c in clients]
    fresh = np.exp([-loss(v, held) for v in trial])
    weighting = parts.BANT(step_size=0.2, momentum=0.75)
    weights, _, fed = weigh(problem, weighting)
    np.testing.assert_allclose(weights, fresh / fresh.sum())
    assert int(fed.bytes_up.exact()) == 6 * 4 * 8
    before, known = np.full(6, 0.3), np.arange(6) != 2
    up = np.arange(6) != 5
    _, (trust, heard), _ = weigh(problem, weighting, (before, known), jnp.asarray(up))
    expected = np.where(known, 0.75 * before + 0.25 * fresh, fresh)
    np.testing.assert_allclose(trust, np.where(up, expected, before))
    assert heard.all()
    with pytest.raises(fs.InvalidInput, match="BANT needs data that the server holds"):
        fs.solve(ragged()[0], fs.FedAvg(0.1, weighting="BANT"), 2)


def test_a_client_that_is_down_has_no_weight():
    problem, clients, loss, _ = ragged()
    up = np.asarray([True, False, True, True, False, True])
    weights, _, fed = weigh(problem, parts.PowerOfChoice(), up=jnp.asarray(up))
    losses = np.asarray([loss(problem.params, c) for c in clients]) * up
    np.testing.assert_allclose(weights, losses / losses.sum())
    assert int(fed.bytes_up.exact()) == 4 * 8


def many(selection, weights, draws=4000):
    memory = selection.init(len(weights))
    keys = jax.random.split(jax.random.key(0), draws)
    draw = jax.vmap(lambda key: selection.select(weights, len(weights), memory, key)[0])
    return np.asarray(draw(keys))


def test_selections_draw_with_their_probabilities():
    weights = jnp.asarray([0.1, 0.4, 0.0, 0.2, 0.2, 0.1])
    top = many(parts.Top(2), weights)
    assert (top[:, 0] == 1).all()
    np.testing.assert_allclose(np.mean(top[:, 1] == 3), 0.5, atol=0.04)  # a tie, by lot
    assert set(top[:, 1]) == {3, 4}

    one = many(parts.Proportional(1), weights)[:, 0]
    np.testing.assert_allclose(np.bincount(one, minlength=6) / len(one), weights, atol=0.03)
    two = many(parts.Proportional(2), weights)  # without replacement: P(1 then 3) = .4 · .2/.6
    assert (two[:, 0] != two[:, 1]).all()
    np.testing.assert_allclose(np.mean((two == [1, 3]).all(axis=1)), 0.4 * 0.2 / 0.6, atol=0.03)

    some = many(parts.Random(3), weights)
    rates = np.bincount(some.ravel(), minlength=6) / len(some)
    np.testing.assert_allclose(rates, [0.6, 0.6, 0, 0.6, 0.6, 0.6], atol=0.03)
    everyone, _ = parts.Everyone().select(weights, 6, None, jax.random.key(0))
    assert everyone.tolist() == [*range(6)]
    for selection in (parts.Everyone(), parts.Top(2), parts.Random(2), parts.Proportional(2)):
        for given in (None, weights):  # on the wire, an index is four bytes
            assert selection.select(given, 6, None, jax.random.key(0))[0].dtype == np.int32


@pytest.mark.parametrize(("clients", "count"), [(6, 2), (7, 3), (5, 5), (10, 1), (11, 4)])
def test_in_turn_everyone_is_drawn_within_s_0_rounds(clients, count):
    selection, waits = parts.Cyclic(count), -(-clients // count)
    memory, cohorts = selection.init(clients), []
    for round in range(4 * waits):
        cohort, memory = selection.select(None, clients, memory, jax.random.key(round))
        assert len(set(cohort.tolist())) == count
        cohorts.append(set(cohort.tolist()))
    for first in range(3 * waits):
        assert set.union(*cohorts[first : first + waits]) == set(range(clients))


@pytest.mark.parametrize(
    ("clients", "count", "within"), [(6, 2, 3), (7, 3, 3), (7, 2, 5), (5, 5, 1), (11, 4, 6)]
)
def test_a_window_covers_everyone_and_is_random(clients, count, within):
    """Scheme 4.1; a client may wait 2s_0 − 1 rounds, and no longer."""
    selection, windows = parts.Covering(count, within), 400

    def step(memory, key):
        cohort, memory = selection.select(None, clients, memory, key)
        return memory, cohort

    keys = jax.random.split(jax.random.key(0), windows * within)
    cohorts = np.asarray(jax.lax.scan(step, selection.init(clients), keys)[1])
    assert all(len(set(cohort)) == count for cohort in cohorts)
    of_windows = cohorts.reshape(windows, within * count)
    assert all(set(window) == set(range(clients)) for window in of_windows)
    longest = fs.theory.fedadmm.waiting(cohorts, clients)
    assert longest <= 2 * within - 1
    shares = np.bincount(cohorts.ravel(), minlength=clients) / len(cohorts)
    np.testing.assert_allclose(shares, count / clients, atol=0.06)
    if count < clients < count * within - 1:  # else all draws but the first are forced
        assert longest > within
        first = {tuple(sorted(window[:count])) for window in of_windows}
        assert len(first) > clients


def test_a_window_too_short_raises():
    with pytest.raises(fs.InvalidInput, match="2 of 7 clients a round cannot be everyone within 3"):
        parts.Covering(2, 3).init(7)
    problem = examples.least_squares(constrained=False)
    run = fs.solve(problem, fs.FedADMM(selection=parts.Covering(2, 4)), rounds=12)
    for window in run.history["cohort"].reshape(3, 8):
        assert set(window) == set(range(6))


def watched(availability, clients, rounds):
    """Who is up, round by round."""
    memory, rows = availability.init(clients), []

    def step(memory, round):
        key = jax.random.fold_in(jax.random.key(1), round)
        up, memory = availability.draw(clients, round, memory, key)
        return memory, up

    _, rows = jax.lax.scan(step, memory, jnp.arange(rounds))
    return np.asarray(rows)


def test_availabilities_are_the_processes_they_say():
    q = np.asarray([0.2, 0.5, 1.0])
    np.testing.assert_allclose(watched(parts.Bernoulli(q), 3, 4000).mean(0), q, atol=0.03)

    rows = watched(parts.Markov(0.1, 0.3), 40, 4000)
    np.testing.assert_allclose(rows.mean(), 0.25, atol=0.02)
    np.testing.assert_allclose(rows[1:][~rows[:-1]].mean(), 0.1, atol=0.01)
    np.testing.assert_allclose(rows[1:][rows[:-1]].mean(), 0.7, atol=0.02)
    assert 0 < rows[0].mean() < 0.6  # begins in the long run, not with everyone down

    wave = parts.DayNight(day=0.9, night=0.1, period=10, phase=[0.0, 0.5])
    rows = watched(wave, 2, 5000).reshape(500, 10, 2).mean(0)
    np.testing.assert_allclose(rows[0], [0.9, 0.1], atol=0.06)
    np.testing.assert_allclose(rows[5], [0.1, 0.9], atol=0.06)
    np.testing.assert_allclose(rows.mean(0), 0.5, atol=0.03)
    around = parts.DayNight(1.0, 0.0, 8.0).rate(np.arange(1000), jnp.int32(2))
    np.testing.assert_allclose(np.mean(around), 0.5, atol=0.01)  # some always have their day


def test_a_trace_is_replayed(tmp_path):
    table = np.random.default_rng(0).random((5, 3)) < 0.5
    np.save(tmp_path / "up.npy", table)
    np.savetxt(tmp_path / "up.csv", table, fmt="%d", delimiter=",")
    for given in (table, table.tolist(), tmp_path / "up.npy", str(tmp_path / "up.csv")):
        np.testing.assert_array_equal(watched(parts.Trace(given), 3, 10), np.tile(table, (2, 1)))


def test_only_the_first_answers_are_waited_for():
    slow = parts.FirstAnswers(2, median=[1.0, 100.0, 1.0, 1.0, 1.0], spread=0.1)
    cohort, up = jnp.asarray([1, 3, 0, 4]), jnp.asarray([True, True, True, True])
    heard = np.asarray([slow.answering(cohort, up, 5, jax.random.key(i)) for i in range(50)])
    assert (heard.sum(axis=1) == 2).all()
    assert not heard[:, 0].any()
    assert heard[:, 1:].any(axis=0).all()
    down = jnp.asarray([True, True, False, False])
    assert slow.answering(cohort, down, 5, jax.random.key(0)).tolist() == [True, True, False, False]

    algorithm = fs.FedAvg(
        0.05, participants=4, availability=parts.FirstAnswers(2, availability=0.9)
    )
    history = fs.solve(examples.least_squares(constrained=False), algorithm, rounds=60).history
    assert set(history["available"].sum(axis=1)) <= {0, 1, 2}
    assert history["available"].sum(axis=1).mean() > 1.8


FEDAVG = {
    "everyone": {},
    "some, local steps": {"participants": 3, "local_steps": 4},
    "compressed both ways": {
        "participants": 4,
        "local_steps": 2,
        "uplink": fs.TopK(0.4),
        "downlink": fs.TopK(0.6),
    },
    "wanted, drawn and up": {
        "weighting": "GradientNorm",
        "selection": parts.Top(3),
        "availability": 0.7,
    },
}


@pytest.mark.parametrize("options", FEDAVG.values(), ids=FEDAVG.keys())
def test_fedavg_is_fedsgm_without_a_constraint(options):
    problem = examples.least_squares(constrained=False)
    one = fs.solve(problem, fs.FedAvg(0.05, **options), rounds=30, seed=3)
    other = fs.solve(problem, fs.FedSGM(0.05, **options), rounds=30, seed=3)
    np.testing.assert_array_equal(one.params, other.params)
    assert one.history.keys() == other.history.keys()
    for name, values in other.history.items():
        if "bytes_down" not in name:  # FedSGM sends σ down, too
            np.testing.assert_array_equal(one.history[name], values, err_msg=name)


def test_fedavg_with_weights_follows_a_transcription():
    """Sizes as weights, three of six drawn, some of them down: the mean over those heard."""
    problem, clients, _, grad = ragged()
    algorithm = fs.FedAvg(
        0.1, local_steps=2, weighting="DataSize", selection=parts.Random(3), availability=0.6
    )
    run = fs.solve(problem, algorithm, rounds=25, seed=1, precision="float64")
    sizes = np.asarray([len(c["targets"]) for c in clients])
    known = np.zeros(6, bool)
    w = problem.params
    for cohort, up in zip(run.history["cohort"], run.history["available"], strict=True):
        heard = cohort[up]
        moves = []
        for j in heard:
            v = w
            for _ in range(2):
                v = v - 0.1 * grad(v, clients[j])
            moves.append(v - w)
        known[heard] = True
        if len(heard):
            w = w + sizes[heard] @ np.asarray(moves) / sizes[heard].sum()
    np.testing.assert_allclose(run.params, w, atol=1e-12)
    assert 0.4 < run.history["available"].mean() < 0.8


def test_a_local_optimiser_is_the_one_of_optax():
    problem = examples.least_squares(constrained=False)
    clients = examples.least_squares_clients(problem)
    given = fs.FedAvg(1.0, local_steps=3, local_optimizer=fs.Adam(0.05))
    raw = fs.FedAvg(1.0, local_steps=3, local_optimizer=optax.adam(0.05))
    run = fs.solve(problem, given, rounds=4, precision="float64")
    np.testing.assert_allclose(
        run.params, fs.solve(problem, raw, rounds=4, precision="float64").params, atol=1e-12
    )
    w = np.zeros(5)
    for _ in range(4):
        ends = []
        for grad, _, _ in clients:
            v, m, s = w, 0.0, 0.0
            for t in (1, 2, 3):
                g = grad(v)
                m, s = 0.9 * m + 0.1 * g, 0.999 * s + 0.001 * g * g
                v = v - 0.05 * (m / (1 - 0.9**t)) / (np.sqrt(s / (1 - 0.999**t)) + 1e-8)
            ends.append(v)
        w = np.mean(ends, axis=0)
    np.testing.assert_allclose(run.params, w, atol=1e-9)
    plain = fs.FedAvg(1.0, local_steps=3, local_optimizer=fs.SGD(0.05))
    np.testing.assert_allclose(
        fs.solve(problem, plain, rounds=9, precision="float64").params,
        fs.solve(problem, fs.FedAvg(0.05, local_steps=3), rounds=9, precision="float64").params,
        atol=1e-12,
    )
    falling = fs.SGD(fs.Cosine(0.05, 9))  # the last round's step is 0.05 (1 + cos(8π/9))/2
    planned = fs.FedAvg(1.0, local_steps=3, local_optimizer=falling)
    same = fs.FedAvg(lambda r: 0.025 * (1 + jnp.cos(jnp.pi * r / 9)), local_steps=3)
    np.testing.assert_allclose(
        fs.solve(problem, planned, rounds=9, precision="float64").params,
        fs.solve(problem, same, rounds=9, precision="float64").params,
        atol=1e-12,
    )


def test_three_words_of_configuration():
    table = {
        "problem": {"kind": "neyman_pearson", "clients": 5},
        "algorithm": {"kind": "FedSGM", "step_size": 0.3, "tolerance": 0.05},
        "run": {"rounds": 12},
    }
    table["algorithm"] |= {
        "weighting": "FOLB",
        "selection": {"kind": "Top", "count": 3},
        "availability": 0.7,
    }
    ((problem, built),) = config.resolve("x", table).cells.values()
    written = fs.FedSGM(0.3, 0.05, weighting="FOLB", selection=parts.Top(3), availability=0.7)
    one, other = (fs.solve(problem, a, rounds=12, seed=2) for a in (built, written))
    np.testing.assert_array_equal(one.params, other.params)
    assert one.history["cohort"].shape == (12, 3)
    assert 0.4 < one.history["available"].mean() < 1
    table["algorithm"] = {"kind": "FedAvg", "step_size": 1.0, "availability": "Bernouli"}
    with pytest.raises(fs.InvalidInput, match="did you mean 'Bernoulli'"):
        config.resolve("x", table)


def test_parts_from_a_file_of_text(tmp_path):
    np.savetxt(tmp_path / "up.csv", np.eye(5), fmt="%d", delimiter=",")
    text = f"""
    problem = {{ kind = "neyman_pearson", clients = 5 }}
    run = {{ rounds = 3 }}
    [algorithm]
    kind = "PPBC"
    step_size = 1.0
    momentum = "theory"
    smoothness = 4.0
    weighting = {{ kind = "PowerOfChoice", candidates = 4 }}
    select_epoch = {{ kind = "Top", count = 3 }}
    select_round = {{ kind = "Random", count = 1 }}
    round_weighting = "GradientNorm"
    local_optimizer = {{ kind = "Adam", step_size = 3e-4 }}
    availability = {{ kind = "Trace", rounds = "{tmp_path / "up.csv"}" }}
    """
    experiment = config.resolve("x", tomllib.loads(text))
    ((_, built),) = experiment.cells.values()
    assert built.select_round == parts.Random(1)
    assert isinstance(built.local_optimizer, fs.Adam)
    np.testing.assert_array_equal(built.availability.rounds, np.eye(5, dtype=bool))
    ((_, again),) = config.resolve("x", experiment.resolved).cells.values()
    assert jax.tree.structure(again) == jax.tree.structure(built)


BAD = {
    "two ways": (
        lambda: fs.FedAvg(0.1, participants=3, selection=parts.Top(3)),
        "Give participants .* or a selection, not both",
    ),
    "a name": (lambda: fs.FedAvg(0.1, weighting="FLOB"), "weighting 'FLOB' is not known"),
    "no count": (
        lambda: fs.FedAvg(0.1, selection="Top"),
        r"Top needs arguments: give Top\(count\)",
    ),
    "another part": (
        lambda: fs.FedAvg(0.1, weighting=parts.Top(3)),
        "weighting must be a Weighting, got",
    ),
    "too many": (
        lambda: fs.solve(ragged()[0], fs.FedAvg(0.1, selection=parts.Top(9)), 2),
        "selection.count is 9, but there are only 6 clients",
    ),
    "no chance": (lambda: fs.FedAvg(0.1, availability=1.5), "between 0 and 1, got 1.5"),
    "never": (lambda: fs.FedAvg(0.1, availability=0.0), "never up takes no part"),
    "below no chance": (lambda: parts.Markov(0.5, -0.1), "down must be between 0 and 1, got -0.1"),
    "never back": (lambda: parts.Markov([0.5, 0.0], 0.1), "never comes back takes no part"),
    "chances to come back": (
        lambda: parts.Markov([0.5, 0.5], 0.1).check(6),
        r"up has shape \(2,\); for 6 clients",
    ),
    "chances to go": (
        lambda: parts.Markov(0.5, [0.1, 0.1]).check(6),
        r"down has shape \(2,\); for 6 clients",
    ),
    "no day": (lambda: parts.DayNight(0.9, 0.1, period=0), "period must be positive, got 0"),
    "late for others": (
        lambda: parts.DayNight(0.9, 0.1, phase=[0.0, 0.5]).check(6),
        r"phase has shape \(2,\); for 6 clients",
    ),
    "no answers": (lambda: parts.FirstAnswers(0), "count must be"),
    "answers before the question": (lambda: parts.FirstAnswers(2, median=0.0), "median must be"),
    "no spread": (lambda: parts.FirstAnswers(2, spread=-1.0), "spread must be"),
    "medians for others": (
        lambda: parts.FirstAnswers(2, median=[1.0, 2.0]).check(6),
        r"median has shape \(2,\); for 6 clients",
    ),
    "others up": (
        lambda: parts.FirstAnswers(2, availability=[0.5, 0.5]).check(6),
        r"probability has shape \(2,\); for 6 clients",
    ),
    "the rate of the first": (
        lambda: parts.FirstAnswers(2).rate(0, jnp.int32(0)),
        "among the first answers depends on the cohort",
    ),
    "a word": (lambda: fs.FedAvg(0.1, availability="often"), "availability must be a number"),
    "no candidates": (lambda: parts.PowerOfChoice(0), "candidates must be"),
    "more candidates than clients": (
        lambda: parts.PowerOfChoice(7).check(ragged()[0]),
        "candidates is 7, but there are only 6",
    ),
    "trust without a step": (lambda: parts.BANT(step_size=0.0), "step_size must be"),
    "less than no momentum": (lambda: parts.BANT(momentum=-0.1), "momentum must be at least 0"),
    "trust for ever": (lambda: parts.BANT(momentum=1.0), "below 1, got 1.0"),
    "no rates": (
        lambda: fs.F3AST(0.1, participants=2, smoothing=0.0),
        "smoothing must be above 0 and at most 1, got 0.0",
    ),
    "trust without data": (
        lambda: parts.BANT().check(ragged()[0]),
        "BANT needs data that the server holds",
    ),
    "chances for others": (
        lambda: fs.solve(ragged()[0], fs.FedAvg(0.1, availability=[0.5, 0.5]), 2),
        r"probability has shape \(2,\); for 6 clients",
    ),
    "no trace": (
        lambda: parts.Trace("nowhere.csv"),
        r"Cannot read the trace from nowhere.csv: .* found\.$",
    ),
    "not a trace": (lambda: parts.Trace([[2, 0]]), "A trace is a table of 0 and 1"),
    "a short trace": (
        lambda: fs.solve(ragged()[0], fs.FedAvg(0.1, availability=parts.Trace([[1, 1]])), 2),
        "The trace has 2 columns, but there are 6 clients",
    ),
    "an optimiser": (
        lambda: fs.FedAvg(0.1, local_optimizer="Adam"),
        "local_optimizer must be an Optimizer",
    ),
}


@pytest.mark.parametrize(("call", "sentence"), BAD.values(), ids=BAD.keys())
def test_bad_input_raises_one_sentence(call, sentence):
    with pytest.raises(fs.InvalidInput, match=sentence) as refused:
        call()
    assert "\n" not in str(refused.value)


def test_a_draw_in_proportion_never_takes_weight_zero_before_the_others():
    weights = jnp.asarray([0.0, 1e-30, 1.0])
    keys = jax.random.split(jax.random.key(0), 100)
    drawn = np.asarray(jax.vmap(lambda key: draw_proportionally(key, weights, 2))(keys))
    assert set(drawn.ravel()) == {1, 2}
