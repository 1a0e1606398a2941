"""Flax NNX modules: the numbers of a training loop in Flax itself."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsolve as fs

nnx = pytest.importorskip("flax.nnx", reason="Flax is not installed (pip install flax)")

STEP, STEPS = 0.1, 3


class Net(nnx.Module):
    """A small network, with or without what makes training differ from evaluation."""

    def __init__(self, normalised=False, dropout=0.0, sown=False, seed=0):
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(4, 6, rngs=rngs)
        self.norm = nnx.BatchNorm(6, momentum=0.8, rngs=rngs) if normalised else None
        self.drop = nnx.Dropout(dropout, rngs=rngs) if dropout else None
        self.layers = nnx.List([nnx.Linear(6, 6, rngs=rngs)])
        self.out = nnx.Linear(6, 1, rngs=rngs)
        self.sown = sown

    def hidden(self, x):
        x = self.first(x)
        if self.norm is not None:
            x = self.norm(x)
        x = jnp.tanh(x)
        if self.drop is not None:
            x = self.drop(x)
        if self.sown:
            self.sow(nnx.Intermediate, "seen", x)
        return jnp.tanh(self.layers[0](x))

    def __call__(self, x):
        return self.out(self.hidden(x))[:, 0]


def loss(model, data):
    return jnp.mean((model(data["x"]) - data["y"]) ** 2)


def clients(n=3, samples=8):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, samples, 4)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(axis=2))}


def trained(module, data, steps=STEPS):
    """Plain gradient descent, as Flax's documentation has it."""
    model = nnx.clone(module)
    optimizer = nnx.Optimizer(model, optax.sgd(STEP), wrt=nnx.Param)
    for _ in range(steps):
        optimizer.update(model, nnx.grad(loss)(model, data))
    return model


def pure(module, kind):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(module, kind)))


def close(one, other, **tolerance):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), one, other)


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("runtime", ["compiled", "debug"])
def test_local_steps_are_those_of_flax(normalised, runtime):
    """FedAvg's round is the mean of what plain training makes of each client: parameters, and
    running statistics."""
    module, data = Net(normalised), clients()
    before = pure(module, nnx.Param)
    problem = fs.nnx.problem(module, loss, data)
    run = fs.solve(problem, fs.FedAvg(STEP, local_steps=STEPS), rounds=1, runtime=runtime)
    ended = [trained(module, jax.tree.map(lambda leaf, i=i: leaf[i], data)) for i in range(3)]

    def mean(kind):
        trees = [pure(each, kind) for each in ended]
        return jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *trees)

    close(run.params, mean(nnx.Param), rtol=1e-4, atol=1e-6)
    if normalised:
        close(run.buffers, mean(nnx.BatchStat), rtol=1e-4, atol=1e-6)
    close(pure(module, nnx.Param), before, rtol=0)

    loaded = fs.nnx.load(Net(normalised, seed=5), run.params, run.buffers)
    loaded.eval()
    own = [loss(loaded, jax.tree.map(lambda leaf, i=i: leaf[i], data)) for i in range(3)]
    np.testing.assert_allclose(run.history["objective"][-1], np.mean(own), rtol=1e-5)


def test_dropout_follows_the_key_and_rests_in_evaluation():
    module = Net(dropout=0.5)
    problem = fs.nnx.problem(module, loss, clients())
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), clients())
    function = problem.given[0]
    one, again, other = (function(problem.params, data, jax.random.key(seed)) for seed in (1, 1, 2))
    assert one == again != other

    by_hand = nnx.clone(module)
    by_hand.drop.rngs.key[...] = jax.random.fold_in(jax.random.key(1), 1)  # after its count
    np.testing.assert_allclose(one, loss(by_hand, data), rtol=1e-6)

    by_hand.eval()
    np.testing.assert_allclose(function(problem.params, data, None), loss(by_hand, data), rtol=1e-6)
    algorithm = fs.FedAvg(STEP, local_steps=STEPS)
    runs = [fs.solve(problem, algorithm, rounds=4, seed=seed) for seed in (0, 0, 1)]
    close(runs[0].params, runs[1].params, rtol=0)
    assert not np.allclose(runs[0].params["out"]["kernel"], runs[2].params["out"]["kernel"])


def test_nothing_of_a_traced_call_stays_in_the_problem():
    problem = fs.nnx.problem(Net(normalised=True, dropout=0.5), loss, clients())
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), clients())
    with jax.checking_leaks():
        jax.jit(problem.given[0])(problem.params, data, jax.random.key(0), problem.state)


def test_every_random_layer_draws_its_own_numbers():
    class Twice(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.scale = nnx.Param(jnp.ones(()))
            self.one, self.two = nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def agreement(model, data):
        x = jnp.ones(200)
        return model.scale[...] * jnp.mean((model.one(x) == model.two(x)).astype(jnp.float32))

    problem = fs.nnx.problem(Twice(), agreement, clients())
    value = problem.given[0](problem.params, None, jax.random.key(0))
    assert 0.3 < value < 0.7


def test_a_module_in_evaluation_mode_trains_like_that():
    module = Net(normalised=True, dropout=0.5)
    module.eval()
    problem = fs.nnx.problem(module, loss, clients())
    run = fs.solve(problem, fs.FedAvg(STEP, local_steps=STEPS), rounds=2)
    close(run.buffers, problem.state, rtol=0)
    other = fs.solve(problem, fs.FedAvg(STEP, local_steps=STEPS), rounds=2, seed=1)
    close(run.params, other.params, rtol=1e-6)


def test_names_choose_what_is_trained_and_what_is_personal():
    module = Net(normalised=True)
    problem = fs.nnx.problem(module, loss, clients(), trainable=["out", "layers.0"])
    run = fs.solve(problem, fs.FedAvg(STEP), rounds=2)
    close(run.params["first"], problem.params["first"], rtol=0)
    assert problem.dimension == 6 * 6 + 6 + 6 + 1
    local = fs.nnx.problem(module, loss, clients(), personal=["norm"], buffers="local")
    assert local.dimension == problem.dimension + 4 * 6 + 6
    history = fs.solve(local, fs.FedAvg(STEP, local_steps=STEPS), rounds=5).history
    assert history["objective"][-1] < history["objective"][0]
    run = fs.solve(local, fs.FedAvg(STEP, local_steps=STEPS), rounds=2)
    own = fs.nnx.load(nnx.clone(module), run.client_params(2), run.client_buffers(2))
    close(pure(own, nnx.BatchStat), run.client_buffers(2), rtol=0)
    assert not np.allclose(run.client_buffers(2)["norm"]["mean"], local.state["norm"]["mean"])


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_constraints_metrics_and_representations():
    module, data = Net(normalised=True, dropout=0.2, sown=True), clients()
    test = {"x": data["x"][0], "y": data["y"][0]}
    constraint = fs.Maximum(
        lambda model, data: jnp.mean(model(data["x"])) - 0.1,
        lambda model, data: -jnp.mean(model(data["x"])) - 0.1,
    )
    problem = fs.nnx.problem(
        module,
        loss,
        data,
        constraint,
        test=test,
        metrics={"error": lambda model, test: loss(model, test)},
        representation=lambda model, data: model.hidden(data["x"]),
        batch_size=4,
    )
    run = fs.solve(problem, fs.FedSGM(STEP, 0.05, local_steps=2), rounds=6)
    loaded = fs.nnx.load(nnx.clone(module), run)
    loaded.eval()
    outputs = np.mean([loaded(x) for x in data["x"]], axis=1)
    np.testing.assert_allclose(run.history["error"][-1], loss(loaded, test), rtol=1e-5)
    expected = max(np.mean(outputs), -np.mean(outputs)) - 0.1
    np.testing.assert_allclose(run.history["constraint"][-1], expected, rtol=1e-4, atol=1e-6)
    fs.solve(problem, fs.MOON(STEP), rounds=2)


class Bare(nnx.Module):
    pass


def test_wrong_input_gets_a_sentence():
    with pytest.raises(fs.InvalidInput, match="has no parameters"):
        fs.nnx.problem(Bare(), loss, clients())
    with pytest.raises(fs.InvalidInput, match="module must be a Module"):
        fs.nnx.problem(loss, loss, clients())
    with pytest.raises(fs.InvalidInput, match=r"The loss must be a function of \(model, data\)"):
        fs.nnx.problem(Net(), 3, clients())
    with pytest.raises(fs.InvalidInput, match=r"params do not fit .* differ for \['out'\]"):
        fs.nnx.load(Net(), {**fs.nnx.problem(Net(), loss, clients()).params, "out": {}})
    with pytest.raises(fs.InvalidInput, match="state do not fit"):
        fs.nnx.load(Net(True), fs.nnx.problem(Net(True), loss, clients()).params, {"norm": {}})
