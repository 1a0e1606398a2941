"""What local steps are besides w: noise, passes over the data, a state, personal parameters.

Each rule is checked against a closed form or a transcription in NumPy, and on every runtime.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsolve as fs
from tests.support.in_process import Wires, deploy

RUNTIMES = ("compiled", "debug", "streamed", "deployed")
N, S, D = 6, 7, 3  # clients of the sites in `tests.support.in_process`, samples, features


def data(seed=0):
    rng = np.random.default_rng(seed)
    return {"x": rng.standard_normal((N, S, D)), "y": rng.standard_normal((N, S))}


def squares(w, data):
    return 0.5 * jnp.mean((data["x"] @ w - data["y"]) ** 2)


def run_on(runtime, problem, algorithm, tmp_path, rounds=3, seed=0):
    """Run on one of four runtimes, in float64."""
    if runtime == "deployed":
        wires = Wires(problem, algorithm, tmp_path / "sites", seed)
        return deploy(problem, algorithm, wires, tmp_path / "server", rounds, seed)[0]
    return fs.solve(
        problem, algorithm, rounds=rounds, seed=seed, runtime=runtime, precision="float64"
    )


def agree(problem, algorithm, tmp_path, rounds=3):
    """Run on every runtime; check that all agree, and return the compiled run."""
    runs = {r: run_on(r, problem, algorithm, tmp_path, rounds) for r in RUNTIMES}
    first = runs["compiled"]
    for name, run in runs.items():
        for a, b in zip(*map(jax.tree.leaves, (first.params, run.params)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14, err_msg=name)
        for column in ("objective", "constraint", "bytes_up", "bytes_down"):
            if column in first.history:
                np.testing.assert_allclose(
                    first.history[column], run.history[column], rtol=1e-11, err_msg=name
                )
    return first


# Random losses


def noisy(w, data, key):
    """The gradient of the noise is the noise itself, wherever w is."""
    value = squares(w, data)
    return value if key is None else value + w @ jax.random.normal(key, w.shape)


def test_a_random_loss_agrees_on_all_runtimes_and_is_evaluated_without_noise(tmp_path):
    problem = fs.Problem(noisy, data(), np.zeros(D), batch_size=2)
    algorithm = fs.FedAvg(0.1, local_steps=3, participants=3)
    run = agree(problem, algorithm, tmp_path)
    plain = fs.Problem(squares, data(), np.zeros(D)).on_device()
    values = jax.vmap(plain.value, (None, 0))(jnp.asarray(run.params), plain.samples)
    np.testing.assert_allclose(run.history["objective"][-1], np.mean(values), rtol=1e-6)
    again = fs.solve(problem, algorithm, rounds=3, precision="float64")
    assert np.array_equal(run.params, again.params)
    other = fs.solve(problem, algorithm, rounds=3, seed=1, precision="float64")
    assert not np.allclose(run.params, other.params)


def test_noise_differs_between_steps_clients_exchanges_and_rounds():
    def only_noise(w, data, key=None):
        return 0.0 * jnp.sum(w) if key is None else w @ jax.random.normal(key, w.shape)

    class Twice(fs.Algorithm):
        """Ask all clients twice, with one local step each, and keep the gradients."""

        def init(self, w):
            return w

        def round(self, fed, server, key):
            first = fed.ask(self.step, fed.everyone)
            second = fed.ask(self.step, fed.everyone)
            return server, {"slopes": jnp.stack([first.values, second.values])}

        def step(self, client, state):
            keys = jax.random.split(client.key)
            return state, jnp.stack([client.grad(client.w, key) for key in keys])

    problem = fs.Problem(only_noise, {"x": np.ones((N, S, D))}, np.zeros(D))
    slopes = fs.solve(problem, Twice(), rounds=2).history["slopes"].reshape(-1, D)
    assert len(slopes) == 2 * 2 * N * 2
    assert len(np.unique(np.round(slopes, 6), axis=0)) == len(slopes)
    for optimizer in (None, fs.SGD(1.0)):  # and so do the local steps of an algorithm
        one, two = (
            fs.solve(problem, fs.FedAvg(1.0, local_steps=E, local_optimizer=optimizer), rounds=1)
            for E in (1, 2)
        )
        assert np.all(one.params != 0)
        assert not np.any(np.isclose(two.params - one.params, one.params))


def test_noise_is_not_the_randomness_that_draws_the_minibatch():
    seen = {}

    def record(w, data, key=None):
        if key is not None:
            seen["key"] = key
        return jnp.mean(data["x"]) * w[0]

    problem = fs.Problem(record, {"x": np.ones((2, 8))}, np.zeros(1), batch_size=4).on_device()
    own = jax.tree.map(lambda leaf: leaf[0], problem.samples)
    key = jax.random.key(3)
    client = problem.client(own, problem.start(), jnp.int32(0), jnp.int32(0), key)
    client.grad(client.w, key)
    assert not np.array_equal(jax.random.key_data(seen["key"]), jax.random.key_data(key))


def test_on_padded_clients_each_sample_has_its_own_noise():
    def drop(w, data, key):
        if key is None:
            return jnp.mean(data["x"] @ w)
        kept = jax.random.bernoulli(key, 0.5, data["x"].shape)
        return jnp.mean(jnp.where(kept, 2 * data["x"], 0) @ w)

    clients = fs.stack_clients([{"x": np.ones((400, 1))}, {"x": np.ones((300, 1))}])
    run = fs.solve(fs.Problem(drop, clients, np.zeros(1)), fs.FedAvg(1.0), rounds=1)
    # One draw for all samples would give 0 or 2 for each client.
    assert 0.5 < -run.params[0] < 1.5
    assert abs(2 * run.params[0] - round(2 * float(run.params[0]))) > 1e-3


@pytest.mark.parametrize(
    ("function", "random"),
    [
        (lambda w, data: 0.0, False),
        (lambda w, data, key: 0.0, True),
        (lambda w, data, key=None: 0.0, True),
        (lambda w, data, noise: 0.0, True),
        (lambda w, data, strength=0.1: 0.0, False),
        (lambda w, data, state: 0.0, False),
        (lambda w, data, key, state: 0.0, True),
        (jnp.add, False),
    ],
)
def test_a_random_loss_is_known_by_its_third_argument(function, random):
    from fedsolve.problem.padding import is_random

    assert is_random(function) is random


def test_the_constraint_may_be_random_too_and_is_measured_without_noise(tmp_path):
    def limit(w, data, key=None):
        value = jnp.sum(w) - 0.5
        return value if key is None else value + w @ jax.random.normal(key, w.shape)

    problem = fs.Problem(squares, data(), np.ones(D), constraint=limit, batch_size=3)
    run = agree(problem, fs.FedSGM(0.05, 0.1, fs.Soft(5.0), local_steps=2), tmp_path)
    measured = run.history["constraint"]
    np.testing.assert_allclose(measured[-1], np.sum(run.params) - 0.5, rtol=1e-12)


# Passes over the data


def ones_of_each_sample(sizes):
    """Clients whose gradient says which samples a batch has: sample i is the i-th unit vector."""
    most = max(sizes)
    return fs.stack_clients([{"x": np.eye(most)[:size]} for size in sizes])


def which(w, data):
    return jnp.mean(data["x"] @ w)


@pytest.mark.parametrize("sizes", [(7, 4), (6, 3)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_pass_uses_every_sample_once(sizes, drop_last):
    batch, epochs = 3 if min(sizes) > 2 else 2, 4
    clients = ones_of_each_sample(sizes)
    if len(set(sizes)) == 1:
        clients.pop("mask")
    problem = fs.Problem(
        which, clients, np.zeros(max(sizes)), batch_size=batch, drop_last=drop_last
    )
    algorithm = fs.SCAFFOLD(1.0, local_epochs=epochs)
    run = fs.solve(problem, algorithm, rounds=1, precision="float64")
    for size, control in zip(sizes, run.state.clients.control, strict=True):
        rest = size % batch
        steps = epochs * (size // batch if drop_last else -(-size // batch))
        total = np.asarray(control) * steps  # SCAFFOLD keeps the mean of its gradients
        assert np.all(total[size:] == 0)
        # each pass gives 1/3 to a sample of a full batch, and 1/rest (or 0) to the others
        mass = epochs * ((size - rest) / batch + (rest > 0 and not drop_last))
        np.testing.assert_allclose(total.sum(), mass, rtol=1e-12)
        if rest == 0:
            np.testing.assert_allclose(total[:size], epochs / batch, rtol=1e-12)
        else:
            lasts = 0 if drop_last else 1 / rest
            share = (epochs / batch - total[:size]) / (1 / batch - lasts)
            np.testing.assert_allclose(share, np.round(share), atol=1e-9)  # times in a last batch
            np.testing.assert_allclose(share.sum(), epochs * rest, rtol=1e-9)
            assert not np.all(np.isin(np.round(share), [0, epochs]))  # each pass is shuffled anew


def test_a_pass_in_one_batch_is_a_full_gradient_step(tmp_path):
    problem = fs.Problem(squares, data(), np.zeros(D))
    passes = agree(problem, fs.FedAvg(0.1, local_epochs=3, participants=3), tmp_path)
    steps = fs.solve(problem, fs.FedAvg(0.1, local_steps=3, participants=3), 3, precision="float64")
    np.testing.assert_allclose(passes.params, steps.params, rtol=1e-12)


@pytest.mark.parametrize(
    "algorithm",
    [
        fs.FedSGM(0.05, 0.1, local_epochs=2, participants=3, uplink=fs.TopK(0.6)),
        *(
            pytest.param(algorithm, marks=pytest.mark.slow)
            for algorithm in (
                fs.SCAFFOLD(0.05, local_epochs=2, participants=3),
                fs.FedAvg(1.0, local_epochs=2, local_optimizer=fs.Adam(0.05), participants=3),
                fs.PPBC(0.05, local_epochs=2),
                fs.FedAlt(0.05, local_epochs=2, participants=3),
                fs.FedSim(0.05, local_epochs=2, participants=3),
            )
        ),
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_passes_of_ragged_clients_agree_on_all_runtimes(algorithm, tmp_path):
    whole = data()
    ragged = [{k: v[j][: 3 + j % 4] for k, v in whole.items()} for j in range(N)]
    problem = fs.Problem(squares, fs.stack_clients(ragged), np.zeros(D), batch_size=2,
                         constraint=lambda w, data: jnp.sum(w) - 1)  # fmt: skip
    agree(problem, algorithm, tmp_path, rounds=2)


def test_what_makes_no_sense_in_passes_is_refused():
    problem = fs.Problem(squares, data(), np.zeros(D), batch_size=2)
    with pytest.raises(fs.InvalidInput, match="not both"):
        fs.FedAvg(0.1, local_steps=2, local_epochs=1)
    with pytest.raises(fs.InvalidInput, match="local_epochs"):
        fs.FedAvg(0.1, local_epochs=0)
    with pytest.raises(fs.InvalidInput, match="give batch_size"):
        fs.Problem(squares, data(), np.zeros(D), drop_last=True)
    two = {"a": np.ones((2, 3)), "b": np.ones((2, 5))}
    several = fs.Problem(lambda w, d: w[0] * jnp.mean(d["a"]) * jnp.mean(d["b"]), two, np.ones(1))
    with pytest.raises(fs.InvalidInput, match="one set of samples"):
        fs.solve(several, fs.FedAvg(0.1, local_epochs=1), rounds=1)
    short = fs.stack_clients([{"x": np.ones((5, 1))}, {"x": np.ones((2, 1))}])
    dropping = fs.Problem(which, short, np.zeros(1), batch_size=3, drop_last=True)
    with pytest.raises(fs.InvalidInput, match="a client of 2 samples takes no step"):
        fs.solve(dropping, fs.FedAvg(0.1, local_epochs=1), rounds=1)
    assert problem.batch_size == 2


def test_weight_decay_clipping_and_schedules_within_a_round_are_those_of_optax(tmp_path):
    schedule = optax.linear_schedule(0.1, 0.02, 3)
    rule = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(schedule, weight_decay=0.1))
    problem = fs.Problem(squares, data(), np.ones(D))
    algorithm = fs.FedAvg(1.0, local_steps=4, local_optimizer=rule)
    run = agree(problem, algorithm, tmp_path, rounds=2)
    x, y, w = data()["x"], data()["y"], np.ones(D)
    with jax.enable_x64(True):
        for _ in range(2):
            ends = []
            for j in range(N):
                v, memory = jnp.asarray(w), rule.init(jnp.asarray(w))
                for _ in range(4):
                    slope = jnp.asarray(x[j].T @ (x[j] @ np.asarray(v) - y[j]) / S)
                    change, memory = rule.update(slope, memory, v)
                    v = v + change
                ends.append(np.asarray(v))
            w = np.mean(ends, axis=0)
    np.testing.assert_allclose(run.params, w, rtol=1e-10)


# A state besides parameters


def moving_mean(w, data, state):
    """Keep a running mean of the inputs, and add it to the objective so that it shows."""
    mean = 0.9 * state["mean"] + 0.1 * jnp.mean(data["x"], axis=0)
    return squares(w, data) + jnp.sum(state["mean"]), {"mean": mean, "steps": state["steps"] + 1}


START = {"mean": np.zeros(D), "steps": np.zeros((), np.int32)}


def after(start, clients, steps):
    """The running mean after that many full-batch steps of each of the clients."""
    own = data()["x"][clients].mean(axis=1)
    return 0.9**steps * start + (1 - 0.9**steps) * own


def test_the_server_averages_states_with_the_weights_of_the_replies(tmp_path):
    problem = fs.Problem(moving_mean, data(), np.zeros(D), state=START)
    run = agree(problem, fs.FedAvg(0.1, local_steps=2), tmp_path)
    mean = np.zeros(D)
    for _ in range(3):
        mean = after(mean, np.arange(N), 2).mean(axis=0)
    np.testing.assert_allclose(run.state.buffers["mean"], mean, rtol=1e-12)
    assert run.state.buffers["steps"] == 6
    assert run.state.buffers["steps"].dtype == np.int32
    # the objective is evaluated with the state that goes with w
    plain = fs.solve(
        fs.Problem(squares, data(), np.zeros(D)), fs.FedAvg(0.1, local_steps=2), 3,
        precision="float64",
    )  # fmt: skip
    np.testing.assert_allclose(run.params, plain.params, rtol=1e-12)
    added = run.history["objective"][-1] - plain.history["objective"][-1]
    np.testing.assert_allclose(added, mean.sum(), rtol=1e-9)
    # counted both ways: 3 numbers of 8 bytes, and one of 4
    for column in ("bytes_up", "bytes_down"):
        assert np.all(run.history[column] - plain.history[column] == N * (3 * 8 + 4))


def test_states_have_the_weights_of_a_weighted_sum_and_lost_replies_do_not_count(tmp_path):
    whole = data()
    ragged = [{k: v[j][: 2 + j] for k, v in whole.items()} for j in range(N)]
    clients = fs.stack_clients(ragged)

    def moving(w, data, state):
        m = data["mask"]
        mean = jnp.sum(jnp.where(m[:, None], data["x"], 0), axis=0) / jnp.sum(m)
        errors = jnp.where(m, (data["x"] @ w - data["y"]) ** 2, 0)
        return jnp.sum(errors) / jnp.sum(m), {"mean": 0.5 * state["mean"] + 0.5 * mean}

    problem = fs.Problem(moving, clients, np.zeros(D), state={"mean": np.zeros(D)})
    heard = np.array([True, False, True, True, False, True])
    run = fs.solve(
        problem,
        fs.FedAvg(0.1, weighting="DataSize"),
        rounds=2,
        precision="float64",
        arrivals=lambda round, exchange, clients: (round == 0) & jnp.asarray(heard)[clients],
    )
    means = np.stack([c["x"].mean(axis=0) for c in ragged])[heard]
    sizes = np.array([len(c["y"]) for c in ragged])[heard]
    wanted = 0.5 * sizes @ means / sizes.sum()
    np.testing.assert_allclose(run.state.buffers["mean"], wanted, rtol=1e-12)  # round 2: nobody


@pytest.mark.parametrize("buffers", ["local", "frozen"])
def test_states_stay_on_the_clients_or_as_they_are(buffers, tmp_path):
    problem = fs.Problem(moving_mean, data(), np.zeros(D), state=START, buffers=buffers)
    run = agree(problem, fs.FedAvg(0.1, local_steps=2), tmp_path)
    plain = fs.solve(
        fs.Problem(squares, data(), np.zeros(D)), fs.FedAvg(0.1, local_steps=2), 3,
        precision="float64",
    )  # fmt: skip
    assert np.array_equal(run.history["bytes_up"], plain.history["bytes_up"])
    added = run.history["objective"][-1] - plain.history["objective"][-1]
    if buffers == "frozen":
        assert abs(added) < 1e-12
        assert run.state.memory is None
        return
    own = after(np.zeros((N, D)), np.arange(N), 6)
    np.testing.assert_allclose(run.state.memory.state["mean"], own, rtol=1e-12)
    np.testing.assert_allclose(added, own.sum(axis=1).mean(), rtol=1e-9)


def test_a_local_state_moves_only_if_the_reply_arrived():
    problem = fs.Problem(moving_mean, data(), np.zeros(D), state=START, buffers="local")
    run = fs.solve(
        problem,
        fs.FedAvg(0.1),
        rounds=2,
        arrivals=lambda round, exchange, clients: jnp.asarray(clients) != 2,
    )
    assert run.state.memory.state["steps"].tolist() == [2, 2, 0, 2, 2, 2]


def test_steps_along_the_constraint_move_the_state_too(tmp_path):
    def violated(w, data, state):
        return jnp.sum(w) + 1.0 + 0 * jnp.sum(state["mean"])

    problem = fs.Problem(
        moving_mean, data(), np.zeros(D), constraint=violated, state=START, batch_size=S
    )
    for switching in (fs.Hard(), fs.Soft(1.0)):
        run = fs.solve(problem, fs.FedSGM(0.01, 0.1, switching, local_steps=2), rounds=2)
        assert run.state.buffers["steps"] == 4
    agree(problem, fs.FedSGM(0.01, 0.1, fs.Soft(1.0), local_steps=2), tmp_path, rounds=2)
    penalised = fs.solve(problem, fs.PenaltyFedAvg(0.01, 0.1, rho=1.0, local_steps=3), rounds=1)
    assert penalised.state.buffers["steps"] == 3


def test_metrics_see_the_state():
    problem = fs.Problem(
        moving_mean,
        data(),
        np.zeros(D),
        state=START,
        test=np.ones(1),
        metrics={"steps": lambda w, test, state: state["steps"] * test[0]},
    )
    run = fs.solve(problem, fs.FedAvg(0.1, local_steps=2), rounds=3)
    assert run.history["steps"].tolist() == [2.0, 4.0, 6.0]


def test_a_run_with_a_state_goes_on_from_a_checkpoint(tmp_path):
    for buffers in ("average", "local"):
        problem = fs.Problem(moving_mean, data(), np.zeros(D), state=START, buffers=buffers)
        algorithm = fs.FedAvg(0.1, local_steps=2, participants=3)
        whole = fs.solve(problem, algorithm, rounds=4)
        half = fs.solve(problem, algorithm, rounds=2)
        rest = fs.solve(problem, algorithm, rounds=4, resume=half.state)
        assert rest.best.round > half.rounds  # the best of the rounds that this run played
        states = [dataclasses.replace(run.state, best=half.state.best) for run in (whole, rest)]
        for a, b in zip(*map(jax.tree.leaves, states), strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_state_that_cannot_be_is_refused():
    with pytest.raises(fs.InvalidInput, match=r"\(value, next state\)"):
        fs.Problem(lambda w, data, state: squares(w, data), data(), np.zeros(D), state=START)
    with pytest.raises(fs.InvalidInput, match="differs from the given one"):
        fs.Problem(
            lambda w, data, state: (squares(w, data), {"mean": state["mean"]}),
            data(),
            np.zeros(D),
            state=START,
        )
    with pytest.raises(fs.InvalidInput, match="buffers must be one of"):
        fs.Problem(moving_mean, data(), np.zeros(D), state=START, buffers="mean")
    problem = fs.Problem(moving_mean, data(), np.zeros(D), state=START)
    with pytest.raises(fs.InvalidInput, match="FedADMM moves w alone"):
        fs.solve(problem, fs.FedADMM(local_iterations=2, penalty=1.0, accuracy=1e-4), rounds=1)
    limited = fs.Problem(
        moving_mean, data(), np.zeros(D), constraint=lambda w, data, state: w[0], state=START
    )
    with pytest.raises(fs.InvalidInput, match="Theory needs"):
        fs.theory.skewness(limited, np.zeros(D))
    ragged = fs.stack_clients(
        [{"x": np.ones((2, D)), "y": np.ones(2)}, {"x": np.ones((3, D)), "y": np.ones(3)}]
    )
    padded = fs.Problem(moving_mean, ragged, np.zeros(D), state=START)
    with pytest.raises(fs.InvalidInput, match="not an average over single samples"):
        fs.solve(padded, fs.FedAvg(0.1), rounds=1)
    batches = fs.Problem(moving_mean, ragged, np.zeros(D), state=START, batch_size=2)
    with pytest.raises(fs.InvalidInput, match="drop_last=True"):
        fs.solve(batches, fs.FedAvg(0.1, local_epochs=1), rounds=1)
    drawn = fs.solve(batches, fs.FedAvg(0.1, local_steps=2), rounds=1)  # drawn without padding
    assert drawn.state.buffers["steps"] == 2


# Parameters that are not trained, or not shared


def scaled(params, data):
    scores = data["x"] @ (params["body"] * params["scale"]) + params["head"]["bias"]
    return 0.5 * jnp.mean((scores - data["y"]) ** 2)


def model():
    scale = np.array([1.0, 2.0, 0.5])
    return {"body": np.zeros(D), "head": {"bias": np.zeros(1)}, "scale": scale}


def test_fixed_parameters_are_neither_trained_nor_sent(tmp_path):
    chosen = fs.Problem(scaled, data(), model(), trainable=["body", "head"])
    by_rule = fs.Problem(scaled, data(), model(), trainable=lambda name, leaf: name != "scale")
    algorithm = fs.FedAvg(0.1, local_steps=2, participants=3)
    run = agree(chosen, algorithm, tmp_path)
    same = fs.solve(by_rule, algorithm, rounds=3, precision="float64")
    assert chosen.dimension == 4
    assert np.all(run.history["bytes_up"] == 3 * 4 * 8)
    np.testing.assert_array_equal(run.params["scale"], model()["scale"])
    np.testing.assert_array_equal(run.params["body"], same.params["body"])
    inside = {"x": data()["x"] * model()["scale"], "y": data()["y"]}

    def smaller(params, data):
        return 0.5 * jnp.mean((data["x"] @ params["body"] + params["bias"] - data["y"]) ** 2)

    other = fs.Problem(smaller, inside, {"bias": np.zeros(1), "body": np.zeros(D)})
    want = fs.solve(other, algorithm, rounds=3, precision="float64")
    np.testing.assert_allclose(run.params["body"], want.params["body"], rtol=1e-12)
    np.testing.assert_allclose(run.params["head"]["bias"], want.params["bias"], rtol=1e-12)


def personal_steps(kind, rounds=3, steps=2, size=0.1):
    """FedAvg, FedSim and FedAlt with a personal bias, in NumPy."""
    x, y, scale = data()["x"], data()["y"], model()["scale"]
    w, bias = np.zeros(D), np.zeros(N)
    for _ in range(rounds):
        ends = np.zeros((N, D))
        for j in range(N):
            own, b = w.copy(), bias[j]

            def slopes(own, b, j=j):
                error = x[j] @ (own * scale) + b - y[j]
                return x[j].T @ error / S * scale, error.mean()

            if kind == "FedAlt":
                for _ in range(steps):
                    b = b - size * slopes(own, b)[1]
                for _ in range(steps):
                    own = own - size * slopes(own, b)[0]
            else:
                for _ in range(steps):
                    one, two = slopes(own, b)
                    own, b = own - size * one, b - size * two
            ends[j], bias[j] = own, b
        w = ends.mean(axis=0)
    return w, bias


@pytest.mark.parametrize(
    "algorithm",
    [
        fs.FedAlt(0.1, local_steps=2, mixing=None),
        fs.FedAvg(1.0, local_steps=2, local_optimizer=fs.SGD(0.1)),
        pytest.param(fs.FedAvg(0.1, local_steps=2), marks=pytest.mark.slow),
        pytest.param(fs.FedSim(0.1, local_steps=2, mixing=None), marks=pytest.mark.slow),
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_personal_parameters_stay_on_the_clients(algorithm, tmp_path):
    problem = fs.Problem(
        scaled, data(), model(), personal=["head"], trainable=["body", "head.bias"]
    )
    assert problem.dimension == D
    run = agree(problem, algorithm, tmp_path)
    w, bias = personal_steps(type(algorithm).__name__)
    np.testing.assert_allclose(run.params["body"], w, rtol=1e-10)
    np.testing.assert_allclose(run.state.memory.personal[:, 0], bias, rtol=1e-10)
    assert np.all(run.history["bytes_up"] == N * D * 8)
    x, y = data()["x"], data()["y"]
    scores = x @ (w * model()["scale"]) + bias[:, None]
    np.testing.assert_allclose(
        run.history["objective"][-1], 0.5 * np.mean((scores - y) ** 2), rtol=1e-10
    )


def test_a_run_gives_each_clients_own_parameters_and_state():
    def loss(params, data, state):
        return scaled(params, data), {"steps": state["steps"] + 1}

    options = {"personal": ["head"], "state": {"steps": np.zeros(())}, "buffers": "local"}
    problem = fs.Problem(loss, data(), model(), **options)
    algorithm = fs.FedAvg(0.1, local_steps=2)
    run = fs.solve(problem, algorithm, rounds=3, arrivals=lambda r, e, c: jnp.asarray(c) != 1)
    assert [float(run.client_buffers(j)["steps"]) for j in (0, 1)] == [6.0, 0.0]
    assert run.client_params(1)["head"]["bias"][0] == 0
    bias = run.state.memory.personal[0, 0]
    assert run.client_params(0)["head"]["bias"][0] == bias != 0
    assert run.buffers["steps"] == 0
    assert run.params["head"]["bias"] == 0
    with pytest.raises(fs.InvalidInput, match="client must be from 0 to 5"):
        run.client_params(6)
    streamed = fs.solve(problem, algorithm, rounds=1, runtime="streamed")
    with pytest.raises(fs.InvalidInput, match="are not here"):
        streamed.client_params(0)


def test_one_norm_is_clipped_for_shared_and_personal_parameters():
    rule = optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(1.0))
    problem = fs.Problem(scaled, data(), model(), personal=["head"], trainable=["body", "head"])
    run = fs.solve(problem, fs.FedAvg(1.0, local_optimizer=rule, participants=N), rounds=1)
    moved = np.asarray(run.state.memory.personal)[:, 0]
    assert np.all(np.abs(moved) < 0.01)
    assert np.all(moved != 0)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"trainable": ["boby"]}, "trainable names 'boby', but the parameters are body"),
        ({"trainable": "body"}, "must be a list of names"),
        ({"personal": ["body", "head", "scale"]}, "No parameter is trained on the server"),
        ({"personal": ["head"], "test": 1, "metrics": {"m": lambda p, t: 0.0}}, "Metrics on"),
    ],
)
def test_a_choice_of_parameters_that_cannot_be_is_refused(options, sentence):
    with pytest.raises(fs.InvalidInput, match=sentence):
        fs.Problem(scaled, data(), model(), **options)


def test_algorithms_that_do_not_fit_personal_parameters_are_refused():
    problem = fs.Problem(scaled, data(), model(), personal=["head"])
    with pytest.raises(fs.InvalidInput, match="mixing=None"):
        fs.solve(problem, fs.FedAlt(0.1), rounds=1)
    with pytest.raises(fs.InvalidInput, match="mixing=None"):
        fs.solve(fs.Problem(scaled, data(), model()), fs.FedSim(0.1, mixing=None), rounds=1)
    with pytest.raises(fs.InvalidInput, match="moves w alone"):
        fs.solve(problem, fs.FedADMM(local_iterations=2, penalty=1.0, accuracy=1e-4), rounds=1)
