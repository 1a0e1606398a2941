"""PyTorch modules: the same numbers as the same network in Equinox, in both runtimes."""

import importlib
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from fedsolve.problem.client import Client
from fedsolve.runtimes.evaluation import evaluate

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional
importlib.import_module("fedsolve.torch")

SIZES = (3, 7, 1, 5)


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Many small operations on a busy machine: PyTorch's threads would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def perceptron(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def in_equinox(module):
    """The same network, with the same weights, in Equinox."""
    model = eqx.nn.MLP(4, 1, 6, 1, jnp.tanh, key=jax.random.key(0))
    layers = [module[0], module[2]]
    return eqx.tree_at(
        lambda m: [leaf for layer in m.layers for leaf in (layer.weight, layer.bias)],
        model,
        [p.detach().numpy() for layer in layers for p in (layer.weight, layer.bias)],
    )


def by_name(model):
    """An Equinox model's parameters by the names that they have in torch."""
    first, second = model.layers
    return {
        "0.weight": first.weight,
        "0.bias": first.bias,
        "2.weight": second.weight,
        "2.bias": second.bias,
    }


def torch_loss(model, data):
    return F.mse_loss(model(data["x"])[:, 0], data["y"])


def torch_constraint(model, data):
    return model(data["x"]).pow(2).mean() - 0.05


def jax_loss(model, data):
    return jnp.mean((jax.vmap(model)(data["x"])[:, 0] - data["y"]) ** 2)


def jax_constraint(model, data):
    return jnp.mean(jax.vmap(model)(data["x"]) ** 2) - 0.05


def ragged(seed=0):
    rng = np.random.default_rng(seed)
    return [{"x": rng.standard_normal((n, 4)), "y": rng.standard_normal(n)} for n in SIZES]


def equal_sized(clients=5, samples=8, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((clients, samples, 4)),
        "y": rng.standard_normal((clients, samples)),
    }


def pair(clients, **options):
    """The same problem in torch and in JAX."""
    module = perceptron()
    params, rest = eqx.partition(in_equinox(module), eqx.is_array_like)

    def with_rest(function):
        return lambda params, data: function(eqx.combine(params, rest), data)

    return (
        fs.torch.problem(module, torch_loss, clients, torch_constraint, **options),
        fs.Problem(with_rest(jax_loss), clients, params, with_rest(jax_constraint), **options),
    )


def client(problem, index):
    samples = jax.tree.map(lambda leaf: leaf[index], problem.samples)
    w, index = problem.start(), jnp.asarray(index, jnp.int32)
    return Client(problem, samples, w, jnp.int32(0), index, jax.random.key(0))


def assert_same(params, model, **tolerance):
    expected = by_name(model)
    assert params.keys() == expected.keys()
    for name, array in params.items():
        np.testing.assert_allclose(array, expected[name], err_msg=name, **tolerance)


@pytest.mark.parametrize("clients", [equal_sized(), fs.stack_clients(ragged())])
def test_values_and_gradients_are_those_of_the_same_network_in_equinox(clients):
    def look(problem):
        def one(index):
            own = client(problem, index)
            measured = [jax.value_and_grad(f)(own.w) for f in (own.objective, own.constraint)]
            return own.objective(own.w), measured

        alone, measured = jax.jit(jax.vmap(one))(jnp.arange(problem.n))
        values, slopes = zip(*measured, strict=True)
        np.testing.assert_allclose(alone, values[0], rtol=1e-12)
        return values, [jax.vmap(problem.layout.unravel)(slope) for slope in slopes]

    with jax.enable_x64(True):
        (values, slopes), (expected, expected_slopes) = (
            look(problem.on_device()) for problem in pair(clients)
        )
        np.testing.assert_allclose(values, expected, rtol=1e-10)
        for slope, expected_slope in zip(slopes, expected_slopes, strict=True):
            assert_same(slope, expected_slope, rtol=1e-10, atol=1e-12)


def test_forward_mode_and_mapping_over_parameters_and_clients():
    with jax.enable_x64(True):
        ours = fs.torch.problem(perceptron(), torch_loss, equal_sized()).on_device()
        points = ours.start() + 0.1 * jax.random.normal(jax.random.key(0), (3, ours.size))
        mapped = jax.vmap(jax.vmap(jax.grad(ours.value), (None, 0)), (0, None))
        gradients = jax.jit(mapped)(points, ours.samples)
        assert gradients.shape == (3, 5, ours.size)
        one = jax.tree.map(lambda leaf: leaf[4], ours.samples)
        expected = jax.grad(ours.value)(points[1], one)
        np.testing.assert_allclose(gradients[1, 4], expected, rtol=1e-12, atol=1e-15)
        _, along = jax.jvp(lambda w: ours.value(w, one), (points[1],), (points[0],))
        np.testing.assert_allclose(along, expected @ points[0], rtol=1e-12)


HARD = fs.FedSGM(0.1, 0.02, participants=3, local_steps=2, uplink=fs.TopK(0.3))
SOFT = fs.FedSGM(
    0.1, switching=fs.Soft(20), participants=2, uplink=fs.TopK(0.3), downlink=fs.TopK(0.5)
)


@pytest.mark.parametrize(
    ("clients", "algorithm", "options"),
    [
        (equal_sized(), HARD, {}),
        (fs.stack_clients(ragged()), SOFT, {"batch_size": 4}),
    ],
    ids=["hard", "soft-ragged-batches"],
)
def test_fedsgm_goes_the_same_way_as_in_equinox(clients, algorithm, options):
    ours, theirs = pair(clients, **options)
    run = fs.solve(ours, algorithm, rounds=20, precision="float64")
    expected = fs.solve(theirs, algorithm, rounds=20, precision="float64")
    assert_same(run.params, expected.params, atol=1e-8)
    for name in ("objective", "constraint", "switch"):
        np.testing.assert_allclose(run.history[name], expected.history[name], atol=1e-8)
    assert len(set(np.round(run.history["switch"], 3))) > 1  # both gradients were used


def test_debug_runtime_goes_the_same_way():
    ours = fs.torch.problem(perceptron(), torch_loss, equal_sized(), torch_constraint)
    algorithm = fs.FedSGM(0.1, 0.02, participants=2)
    options = {"rounds": 5, "precision": "float64", "evaluate_every": 5}
    compiled = fs.solve(ours, algorithm, **options)
    debug = fs.solve(ours, algorithm, **options, runtime="debug")
    for name, array in compiled.params.items():
        np.testing.assert_allclose(debug.params[name], array, atol=1e-8)


def test_sweeps_and_clients_at_once_give_single_runs():
    ours = fs.torch.problem(perceptron(), torch_loss, equal_sized())
    algorithm = fs.FedSGM(0.1, participants=3)
    swept = fs.sweep(ours, algorithm, rounds=5, seeds=[3], step_size=[0.1, 0.2])
    for run in swept.runs:
        single = fs.solve(ours, run.algorithm, rounds=5, seed=run.seed, clients_at_once=2)
        np.testing.assert_allclose(run.history["objective"], single.history["objective"], rtol=1e-5)


def test_nothing_is_traced_again():
    ours = fs.torch.problem(perceptron(), torch_loss, equal_sized(), mode="callback")
    algorithm = fs.FedSGM(0.1, participants=3)
    traces, calls = [], []
    objective = ours.objective.function
    traced, called = type(objective).__call__, objective.called.function
    with pytest.MonkeyPatch.context() as patch:
        counted = lambda self, *inputs: (traces.append(1), traced(self, *inputs))[1]  # noqa: E731
        patch.setattr(type(objective), "__call__", counted)
        seen = lambda *inputs: (calls.append(1), called(*inputs))[1]  # noqa: E731
        patch.setattr(objective.called, "function", seen)
        fs.solve(ours, algorithm, rounds=3)
        assert traces
        traces.clear()
        calls.clear()
        fs.solve(ours, algorithm, rounds=40, seed=1)
        assert not traces
        assert len(calls) >= 40 * 3


# Ragged clients


def test_a_loss_sees_its_clients_samples_and_no_padding():
    """So even what is no average over samples is exact."""
    seen = set()

    def loss(model, data):
        x, y = data
        seen.add(len(x))
        return ((model(x)[:, 0] - y) ** 2).sum().sqrt()

    clients = [(data["x"], data["y"]) for data in ragged()]
    module = perceptron()
    problem = fs.torch.problem(module, loss, fs.stack_clients(clients), mode="callback")
    with jax.enable_x64(True):
        placed = problem.on_device()
        got = [client(placed, i).objective(placed.start()) for i in range(4)]
        gradient = client(placed, 1).grad(placed.start())
    expected = [loss(module, tuple(map(torch.from_numpy, data))) for data in clients]
    np.testing.assert_allclose(got, [float(value.detach()) for value in expected], rtol=1e-12)
    parameters = dict(sorted(module.named_parameters())).values()
    slopes = torch.autograd.grad(expected[1], list(parameters))
    np.testing.assert_allclose(gradient, torch.cat([s.ravel() for s in slopes]), rtol=1e-10)
    assert seen == set(SIZES)


def test_sets_of_samples_that_are_ragged_separately_and_their_minibatches():
    rng = np.random.default_rng(0)
    clients = [
        {"a": rng.standard_normal((m, 4)), "b": rng.standard_normal((n, 4))}
        for m, n in [(2, 5), (4, 1), (3, 3)]
    ]
    module = perceptron()

    def loss(model, data):
        return F.softplus(model(data["a"])).mean() + model(data["b"]).pow(2).mean()

    stacked = fs.stack_clients(clients)
    problem = fs.torch.problem(module, loss, stacked, mode="callback").on_device()
    found = evaluate(problem, problem.start())["objective"]
    tensors = [{name: torch.from_numpy(array) for name, array in c.items()} for c in clients]
    expected = np.mean([float(loss(module, data).detach()) for data in tensors])
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    batches = fs.torch.problem(module, loss, stacked, batch_size=2, mode="callback")
    fs.solve(batches, fs.FedSGM(0.1), rounds=2)


def test_statistics_are_summed_over_clients_and_combined_in_jax():
    clients = [data | {"group": np.arange(len(data["y"])) % 2} for data in ragged()]
    module = perceptron()

    def sums(model, data):
        rate, group = torch.sigmoid(model(data["x"])[:, 0]), data["group"]
        assert group.dtype == torch.int64
        return {"in": rate[group == 1].sum(), "count": (group == 1).sum(), "all": rate.sum()}

    def gap(total):
        return jnp.abs(total["in"] / jnp.maximum(total["count"], 1) - total["all"] / 16)

    problem = fs.torch.problem(
        module, torch_loss, fs.stack_clients(clients), fs.Statistics(sums, gap), mode="callback"
    )
    rates = [torch.sigmoid(module(torch.from_numpy(c["x"]))).detach().numpy() for c in clients]
    group = np.concatenate([c["group"] for c in clients])
    rate = np.concatenate(rates)[:, 0]
    found = evaluate(problem.on_device(), problem.on_device().start())["constraint"]
    np.testing.assert_allclose(found, abs(rate[group == 1].mean() - rate.mean()), rtol=1e-5)
    with jax.enable_x64(True):
        placed = problem.on_device()
        own, step = client(placed, 1), 1e-6 * jnp.arange(placed.size)
        difference = own.constraint(own.w + step) - own.constraint(own.w - step)
        np.testing.assert_allclose(own.constraint_grad(own.w) @ (2 * step), difference, rtol=1e-5)


# Modules


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.filters = nn.Conv2d(1, 4, 3)
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, images):
        return self.head(F.relu(self.norm(self.filters(images))).mean(dim=(2, 3)))


def accuracy(model, test):
    return (model(test["images"]).argmax(dim=1) == test["labels"]).double().mean().item()


def test_a_convolutional_network_learns_and_comes_back():
    torch.manual_seed(0)
    labels = torch.randint(0, 3, (4, 24))
    images = torch.randn(4, 24, 1, 8, 8) + 2 * labels[..., None, None, None]
    test = {"images": images[0], "labels": labels[0]}
    module = Convolutional()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    problem = fs.torch.problem(
        module,
        lambda model, data: F.cross_entropy(model(data["images"]), data["labels"]),
        {"images": images, "labels": labels},
        test=test,
        metrics={"accuracy": accuracy},
        batch_size=8,
    )
    with torch.no_grad():
        first = F.cross_entropy(module(images.flatten(0, 1)), labels.flatten()).item()
    run = fs.solve(problem, fs.FedSGM(0.3, local_steps=2), rounds=60, evaluate_every=10)
    assert run.history["objective"][-1] < 0.7 * first
    for name, tensor in module.state_dict().items():
        assert tensor.equal(before[name])
    assert fs.torch.load(module, run.params) is module
    for name, tensor in module.named_parameters():
        np.testing.assert_array_equal(tensor.detach().numpy(), run.params[name])
    np.testing.assert_allclose(accuracy(module, test), run.history["accuracy"][-1])
    assert run.history["accuracy"][-1] > 0.6


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_frozen_parameters_stay_and_everything_has_the_runs_precision(precision):
    types = set()

    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(4, 6).requires_grad_(False)
            self.register_buffer("scale", torch.full((6,), 2.0))
            self.head = nn.Linear(6, 1)

        def forward(self, x):
            types.update([x.dtype, self.base.weight.dtype, self.scale.dtype, self.head.bias.dtype])
            return self.head(torch.tanh(self.base(x)) * self.scale)

    module = Frozen()
    problem = fs.torch.problem(module, torch_loss, equal_sized(), mode="callback")
    assert problem.params.keys() == {"head.weight", "head.bias"}
    types.clear()  # what the module itself has
    run = fs.solve(problem, fs.FedSGM(0.1), rounds=3, precision=precision)
    assert types == {getattr(torch, precision)}
    assert run.params["head.bias"].dtype == precision
    assert run.history["objective"][-1] < run.history["objective"][0]


def test_a_module_is_copied_when_the_problem_is_made():
    module = perceptron()
    problem = fs.torch.problem(module, torch_loss, equal_sized()).on_device()
    before = problem.value(problem.start(), jax.tree.map(lambda leaf: leaf[0], problem.samples))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    after = problem.value(problem.start(), jax.tree.map(lambda leaf: leaf[0], problem.samples))
    assert before == after


def test_a_loss_may_use_parts_parameters_and_derivatives_of_the_module():
    def loss(model, data):
        x = data["x"].requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        weights = sum(parameter.pow(2).sum() for parameter in model.parameters())
        return slope.pow(2).mean() + 0.1 * weights + model[0].bias.sum()

    problem = fs.torch.problem(perceptron(), loss, equal_sized(), mode="callback")
    run = fs.solve(problem, fs.FedSGM(0.1), rounds=30)
    assert run.history["objective"][-1] < run.history["objective"][0]


def test_runs_do_not_stop_for_ever():
    """Values of two functions, mapped, in a scan, from several threads, on arrays large enough that
    JAX hands them over asynchronously; in a process of its own, so that a time limit can end it."""
    program = """
import numpy as np, torch, fedsolve as fs, fedsolve.torch
module = torch.nn.Sequential(torch.nn.Linear(200, 300), torch.nn.Tanh(), torch.nn.Linear(300, 1))
problem = fs.torch.problem(
    module,
    lambda model, x: model(x).pow(2).mean(),
    np.ones((4, 300, 200)),
    constraint=lambda model, x: model(x).mean(),
)
algorithm = fs.FedSGM(0.01, participants=3, local_steps=2, switching=fs.Soft(5))
for first in range(0, 6, 2):
    fs.sweep(problem, algorithm, rounds=5, seeds=[first, first + 1])
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


# What is refused


def dropout():
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 1))


def batch_norm():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))


@pytest.mark.parametrize("mode", ["compiled", "callback"])
@pytest.mark.parametrize("make", [dropout, batch_norm])
def test_dropout_and_batch_norm_in_evaluation_mode(make, mode):
    module, generator = make().eval(), torch.get_rng_state()
    problem = fs.torch.problem(module, torch_loss, equal_sized(), mode=mode).on_device()
    assert generator.equal(torch.get_rng_state())
    one = jax.tree.map(lambda leaf: leaf[0], problem.samples)
    data = {name: torch.from_numpy(np.array(array)) for name, array in one.values.items()}
    expected = torch_loss(module, data).detach()
    np.testing.assert_allclose(problem.value(problem.start(), one), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m, data: m(data["y"]), "loss failed on client 0's data: RuntimeError: .*mat"),
        (lambda m, data: m(data["z"]), "loss failed on client 0's data: KeyError: 'z'"),
        (lambda m, data: m(data["x"])[:, 0], r"must return a scalar .* got shape \(8,\)"),
        (lambda m, data: torch_loss(m, data).item(), r"loss has no gradient.*without \.item\(\)"),
        (lambda m, data: None, "loss has no gradient"),
        (lambda m, data: torch_loss(m, data) + torch.rand(()), "draws random numbers"),
    ],
)
def test_a_wrong_loss_raises(loss, message):
    with pytest.raises(fs.InvalidInput, match=message) as caught:
        fs.torch.problem(perceptron(), loss, equal_sized())
    assert "\n" not in str(caught.value)


def test_other_wrong_input_raises():
    data = equal_sized()
    with pytest.raises(fs.InvalidInput, match="no parameters that require a gradient"):
        fs.torch.problem(nn.Tanh(), torch_loss, data)
    with pytest.raises(fs.InvalidInput, match="constraint failed on client 0's data: KeyError"):
        fs.torch.problem(perceptron(), torch_loss, data, lambda m, data: m(data["z"]))
    with pytest.raises(fs.InvalidInput, match=r"clients\['y'\] has 5"):
        fs.torch.problem(perceptron(), torch_loss, data | {"x": data["x"][:3]})
    labels = np.asarray([[0, 1], [1, 0], [1, 7]])
    with pytest.raises(fs.InvalidInput, match="loss failed on client 2's data: IndexError"):
        fs.torch.problem(
            nn.Linear(4, 2),
            lambda m, data: F.cross_entropy(m(data["x"]), data["label"]),
            {"x": np.ones((3, 2, 4)), "label": labels},
        )
    wrong = {"accuracy": lambda model, test: model(test["z"])}
    with pytest.raises(fs.InvalidInput, match="metric 'accuracy' failed on the test data: KeyEr"):
        fs.torch.problem(perceptron(), torch_loss, data, test={}, metrics=wrong)


def test_load_raises_for_parameters_that_do_not_fit():
    module = perceptron()
    params = fs.torch.problem(module, torch_loss, equal_sized()).params
    with pytest.raises(fs.InvalidInput, match=r"differ for 0\.bias, 2\.bias"):
        fs.torch.load(
            module, {k: v for k, v in params.items() if k != "0.bias"} | {"2.bias": np.ones((2, 1))}
        )


def test_wrong_types_and_a_missing_torch_raise():
    """Tests check types themselves, so this needs an ordinary interpreter."""
    program = """
import sys, fedsolve as fs, numpy
real, sys.modules["torch"] = sys.modules.get("torch"), None
try:
    import fedsolve.torch
except ImportError as error:
    print(error)
del sys.modules["torch"]
import torch, fedsolve.torch
for module, loss in [(3, 4), (torch.nn.Linear(2, 1), 4)]:
    try:
        fs.torch.problem(module, loss, numpy.ones((2, 2)))
    except fs.InvalidInput as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "fedsolve.torch needs PyTorch: install fedsolve[torch].",
        "module must be a Module, got 3.",
        "The loss must be a function of (model, data), got 4.",
    ], done.stderr
