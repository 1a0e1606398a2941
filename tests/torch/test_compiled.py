"""Compiled PyTorch problems: dropout, buffers, modes, and what is refused."""

import random
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import fedsolve.torch  # noqa: E402
from fedsolve.torch.operators.random import drop  # noqa: E402
from tests.support.documents import blocks  # noqa: E402


def loss(model, data):
    return F.mse_loss(model(data["x"])[:, 0], data["y"])


def batch_norm(seed=0, momentum=0.1):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=momentum), nn.Tanh(), nn.Linear(6, 1)
    ).double()


def dropout(rate=0.5):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 50), nn.Dropout(rate), nn.Linear(50, 1))


def clients(count=3, samples=8, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((count, samples, 4)),
        "y": rng.standard_normal((count, samples)),
    }


def ragged(sizes=(3, 7, 2)):
    rng = np.random.default_rng(0)
    return fs.stack_clients(
        [{"x": rng.standard_normal((n, 4)), "y": rng.standard_normal(n)} for n in sizes]
    )


def compiled(module, data=None, function=loss, *given, **options):
    data = clients() if data is None else data
    return fs.torch.problem(module, function, data, *given, mode="compiled", **options)


# Buffers


def steps_in_torch(module, data, count, rate=0.1):
    """Gradient descent by PyTorch's own optimizer."""
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=rate)
    for _ in range(count):
        optimizer.zero_grad()
        loss(module, data).backward()
        optimizer.step()
    return module


def tensors(data, index):
    return {name: torch.from_numpy(array[index]) for name, array in data.items()}


@pytest.mark.parametrize("momentum", [0.1, 0.4])
def test_local_steps_move_parameters_and_running_statistics_as_in_pytorch(momentum):
    data, module = clients(1), batch_norm(momentum=momentum)
    problem = compiled(module, data)
    run = fs.solve(problem, fs.FedAvg(0.1, local_steps=3), rounds=2, precision="float64")
    expected = steps_in_torch(batch_norm(momentum=momentum), tensors(data, 0), 6).state_dict()
    found = fs.torch.state_dict(module, run)
    assert found.keys() == expected.keys()
    assert found["1.num_batches_tracked"] == 6
    assert found["1.num_batches_tracked"].dtype == torch.int64
    for name, tensor in expected.items():
        np.testing.assert_allclose(found[name], tensor, rtol=1e-10, atol=1e-12, err_msg=name)
    assert module[1].num_batches_tracked == 0  # the user's module stays as it is


def test_running_statistics_are_averaged_over_clients():
    data, module = clients(2), batch_norm()
    run = fs.solve(
        compiled(module, data), fs.FedAvg(0.1, local_steps=2), rounds=1, precision="float64"
    )
    each = [steps_in_torch(batch_norm(), tensors(data, i), 2).state_dict() for i in range(2)]
    for name, tensor in fs.torch.state_dict(module, run).items():
        mean = (each[0][name] + each[1][name]) / 2
        np.testing.assert_allclose(tensor, mean, rtol=1e-10, atol=1e-12, err_msg=name)


def test_evaluation_uses_the_running_statistics():
    data, module = clients(2), batch_norm()
    options = {"test": tensors(data, 0), "metrics": {"error": lambda m, test: loss(m, test)}}
    run = fs.solve(
        compiled(module, data, **options),
        fs.FedAvg(0.1, local_steps=2),
        rounds=2,
        precision="float64",
    )
    trained = fs.torch.load(batch_norm(), run).eval()
    with torch.no_grad():
        values = [float(loss(trained, tensors(data, i))) for i in range(2)]
    np.testing.assert_allclose(run.history["objective"][-1], np.mean(values), rtol=1e-10)
    np.testing.assert_allclose(run.history["error"][-1], values[0], rtol=1e-10)


def test_frozen_layers_and_frozen_parameters():
    """What the user set to evaluation stays so, and what needs no gradient is not trained."""
    module = batch_norm()
    module[1].eval()
    module[0].weight.requires_grad_(False)
    data = clients(1)
    problem = compiled(module, data)
    assert problem.state is None
    assert problem.dimension == 6 + 12 + 7
    run = fs.solve(problem, fs.FedAvg(0.1, local_steps=3), rounds=1, precision="float64")
    other = batch_norm()
    other[1].eval()
    other[0].weight.requires_grad_(False)
    expected = steps_in_torch(other, tensors(data, 0), 3).state_dict()
    for name, tensor in fs.torch.state_dict(module, run).items():
        np.testing.assert_allclose(tensor, expected[name], rtol=1e-10, atol=1e-12, err_msg=name)


def test_names_of_what_is_trained_join_those_that_need_a_gradient():
    module = batch_norm()
    module[3].bias.requires_grad_(False)
    problem = compiled(module, trainable=["3", "0"])
    assert problem.dimension == 6 + 24 + 6


def test_a_module_in_evaluation_mode_is_trained_like_that():
    problem = compiled(batch_norm().eval())
    assert problem.state is None
    plain = compiled(dropout().eval())
    values = [
        fs.solve(plain, fs.FedAvg(0.1), rounds=2, seed=s).history["objective"] for s in (0, 1)
    ]
    np.testing.assert_array_equal(*values)


@pytest.mark.parametrize("buffers", ["local", "frozen"])
def test_buffers_that_stay(buffers):
    problem = compiled(batch_norm(), buffers=buffers)
    run = fs.solve(problem, fs.FedAvg(0.1, local_steps=2), rounds=2)
    assert np.isfinite(run.history["objective"][-1])


def test_a_constraint_shares_dropout_and_statistics():
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 1))
    problem = compiled(module, None, loss, lambda m, d: m(d["x"]).pow(2).mean() - 0.1)
    run = fs.solve(problem, fs.FedSGM(0.1, 0.01, local_steps=2), rounds=4)
    assert np.isfinite(run.history["constraint"]).all()


# Dropout


def test_dropout_keeps_the_mean_and_the_share():
    for rate in (0.5, 0.25, 0.1):
        keys = jax.random.split(jax.random.key(0), 50)
        found = jax.vmap(lambda key, rate=rate: drop(key, jnp.ones((40, 50)), rate))(keys)
        kept = np.asarray(found) != 0
        deviation = (rate * (1 - rate) / kept.size) ** 0.5
        assert abs(kept.mean() - (1 - rate)) < 4 * deviation
        np.testing.assert_allclose(found[kept], 1 / (1 - rate), rtol=1e-6)
        assert abs(np.corrcoef(kept[:25].ravel(), kept[25:].ravel())[0, 1]) < 0.02


def test_dropout_follows_the_key_and_ends_in_evaluation():
    problem = compiled(dropout())
    params, data = problem.params, {k: v[0].astype(np.float32) for k, v in clients().items()}
    function = jax.jit(problem.objective.function)
    values = [float(function(params, data, jax.random.key(s))) for s in (0, 0, 1)]
    assert values[0] == values[1] != values[2]
    plain = float(function(params, data, None))
    module = dropout().eval()
    seen = {k: torch.from_numpy(v) for k, v in data.items()}
    np.testing.assert_allclose(plain, float(loss(module, seen).detach()), rtol=1e-5)
    many = jax.vmap(lambda key: problem.objective.function(params, data, key))
    spread = np.asarray(many(jax.random.split(jax.random.key(2), 200)))
    assert spread.std() > 0.01


def test_two_dropouts_of_a_step_differ():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return (
                F.dropout(x, 0.5, self.training) - F.dropout(x, 0.5, self.training)
            ) * self.weight

    def apart(model, data):
        return model(data["x"] * 0 + 1).abs().mean()

    problem = compiled(Twice(), clients(), apart)
    value = problem.objective.function(
        problem.params, {k: v[0] for k, v in clients().items()}, jax.random.key(0)
    )
    assert 0.5 < float(value) < 1.6  # 1 on average; 0 if both drop the same


def test_noise_differs_between_clients_steps_and_samples_and_follows_the_seed():
    torch.manual_seed(0)  # a network for which the step is not too large
    problem = compiled(dropout(), clients(), local_mean)
    histories = [
        fs.solve(problem, fs.FedAvg(0.02, local_steps=2), rounds=3, seed=seed).params["0.weight"]
        for seed in (0, 0, 1)
    ]
    np.testing.assert_array_equal(histories[0], histories[1])
    assert np.abs(histories[0] - histories[2]).max() > 1e-4
    padded = compiled(dropout(), ragged())
    run = fs.solve(padded, fs.FedAvg(0.1, local_steps=2), rounds=2)
    assert np.isfinite(run.history["objective"]).all()


def local_mean(model, data):
    return model(data["x"] * 0 + 1).pow(2).mean()


def test_a_loss_may_draw_in_training():
    def noisy(model, data):
        x = data["x"]
        if model.training:
            x = x + 0.1 * torch.randn_like(x)
        return loss(model, data | {"x": x})

    problem = compiled(nn.Linear(4, 1), clients(), noisy)
    runs = [fs.solve(problem, fs.FedAvg(0.1), rounds=3, seed=s).params["bias"] for s in (0, 1)]
    assert runs[0] != runs[1]


# Clients of different sizes


def test_sums_over_clients_that_differ_in_size():
    def sums(model, data):
        out = model(data["x"])[:, 0]
        return {"total": out.sum(), "count": len(out) * torch.ones(())}

    def gap(totals):
        return totals["total"] / totals["count"] - 0.2

    module = nn.Linear(4, 1)
    found = []
    for mode in ("compiled", "callback"):
        problem = fs.torch.problem(module, loss, ragged(), fs.Statistics(sums, gap), mode=mode)
        run = fs.solve(problem, fs.FedSGM(0.1, 0.05), rounds=3, precision="float64")
        found.append([run.history["objective"], run.history["constraint"]])
    np.testing.assert_allclose(*found, rtol=1e-9)


def test_batch_normalisation_of_clients_that_differ_in_size_needs_batches():
    with pytest.raises(fs.InvalidInput, match="clients differ in size: give batch_size"):
        compiled(batch_norm(), ragged())
    problem = compiled(batch_norm(), ragged(), batch_size=4)
    run = fs.solve(problem, fs.FedAvg(0.1, local_steps=2), rounds=2)
    assert np.isfinite(run.history["objective"]).all()
    without = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False))
    with pytest.raises(fs.InvalidInput, match=r"normalises over the batch|more than 1 value"):
        compiled(without, ragged())


def test_a_loss_that_is_no_average_needs_the_callback():
    def root(model, data):
        return (model(data["x"])[:, 0] - data["y"]).pow(2).sum().sqrt()

    with pytest.raises(fs.InvalidInput, match=r'no average over .*mode="callback" can do it'):
        compiled(nn.Linear(4, 1), ragged(), root)
    with pytest.warns(UserWarning, match=r"no average over samples.* PyTorch computes it"):
        fs.torch.problem(nn.Linear(4, 1), root, ragged())


# Modes


def branching(model, data):
    value = loss(model, data)
    return value if value > 0 else -value


def by_mask(model, data):
    return model(data["x"][data["y"] > 0]).pow(2).mean()


def by_item(model, data):
    return loss(model, data) * data["y"].abs().max().item()


def by_gradient(model, data):
    x = data["x"].requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return slope.pow(2).mean() + loss(model, data)


def by_missing(model, data):
    return loss(model, data) + torch.special.bessel_j0(model(data["x"]).detach()).mean()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (branching, "branches on values of tensors"),
        (by_mask, r"the shape of a tensor depends on values \(as in x\[mask\]\)"),
        (by_item, r"it calls \.item\(\)"),
        (by_gradient, "cannot trace torch.autograd.grad"),
        (by_missing, r"operators are missing here: aten\.special_bessel_j0"),
    ],
)
def test_what_cannot_be_compiled_is_computed_by_callback(function, message, capfd):
    with pytest.raises(fs.InvalidInput, match=f"The loss cannot be compiled: .*{message}") as found:
        compiled(nn.Linear(4, 1), None, function)
    assert str(found.value).endswith('mode="callback" can do it.')
    with pytest.warns(UserWarning, match=message) as warned:
        problem = fs.torch.problem(nn.Linear(4, 1), function, clients())
    assert len(warned) == 1
    run = fs.solve(problem, fs.FedAvg(0.1), rounds=1)
    assert np.isfinite(run.history["objective"]).all()
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "")


def test_a_metric_may_use_python():
    metrics = {"error": lambda model, test: loss(model, test).item()}
    test = {k: v[0] for k, v in clients().items()}
    problem = fs.torch.problem(nn.Linear(4, 1), loss, clients(), test=test, metrics=metrics)
    run = fs.solve(problem, fs.FedAvg(0.1), rounds=1)
    assert np.isfinite(run.history["error"]).all()
    with pytest.raises(fs.InvalidInput, match=r"metric 'error' cannot be compiled.*item"):
        compiled(nn.Linear(4, 1), test=test, metrics=metrics)


def test_a_shape_is_traced_once_and_no_shape_that_is_not_needed(monkeypatch):
    from fedsolve.torch import compiled as module

    traced, real = [], module.trace
    monkeypatch.setattr(
        module,
        "trace",
        lambda *given, **options: (traced.append(given[2]), real(*given, **options))[1],
    )
    problem = compiled(dropout(), batch_size=4)
    fs.solve(problem, fs.FedAvg(0.1), rounds=2)
    fs.solve(problem, fs.FedAvg(0.1, local_steps=3), rounds=2)
    shapes = sorted(tuple(leaf["x"].shape) for leaf in traced)
    assert shapes == [(4, 4), (8, 4)]  # training, evaluation


# What is refused in every mode


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return self.layer(x)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda m, d: loss(m, d).item(), r"has no gradient.*without \.item\(\)"),
        (lambda m, d: m(d["x"])[:, 0], r"must return a scalar .* got shape \(8,\)"),
        (lambda m, d: loss(m, d) + np.random.rand(), "another value in every call.*torch.rand"),  # noqa: NPY002
        (lambda m, d: loss(m, d) + random.random(), "another value in every call"),
        (lambda m, d: loss(m, d) + torch.rand(()), "draws random numbers in evaluation"),
        (lambda m, d: loss(m, d).to("meta"), "on the device meta.*leave them where they are"),
        (lambda m, d: m(d["x"].to("cuda")).mean(), "failed.*leave them where they are"),
        (lambda m, d: m(d["z"]).mean(), "failed on client 0's data: KeyError: 'z'"),
    ],
)
def test_a_wrong_loss_raises(function, message):
    module, state = nn.Linear(4, 1), torch.get_rng_state()
    with pytest.raises(fs.InvalidInput, match=message) as caught:
        fs.torch.problem(module, function, clients())
    assert "\n" not in str(caught.value)
    assert state.equal(torch.get_rng_state())


def test_a_buffer_that_changes_in_evaluation_raises():
    with pytest.raises(fs.InvalidInput, match="changes the module's buffer 'count' in evaluation"):
        fs.torch.problem(Counting(), loss, clients())


def test_labels_out_of_range_raise_whichever_client_has_them():
    labels = np.zeros((40, 2), np.int64)
    labels[33, 1] = 7
    with pytest.raises(fs.InvalidInput, match="failed on client 33's data: IndexError"):
        fs.torch.problem(
            nn.Linear(4, 2),
            lambda m, data: F.cross_entropy(m(data["x"]), data["c"]),
            {"x": np.ones((40, 2, 4)), "c": labels},
        )


def test_randomness_outside_of_torch_in_training_alone_cannot_be_compiled():
    def noisy(model, data):
        return loss(model, data) * (np.random.rand() if model.training else 1.0)  # noqa: NPY002

    with pytest.raises(fs.InvalidInput, match="another program in every call"):
        compiled(nn.Linear(4, 1), None, noisy)


def test_a_wrong_mode_raises():
    with pytest.raises(fs.InvalidInput, match="mode must be one of auto, compiled, callback, got"):
        fs.torch.problem(nn.Linear(4, 1), loss, clients(), mode=3)


def test_a_wrong_operator_is_found_by_the_comparison_with_pytorch(monkeypatch):
    from fedsolve.torch.operators import NAMED, Operator

    for name, wrong in {
        "value": lambda x: jnp.tanh(x) * 1.02,
        "derivative": lambda x: jnp.tanh(x) + 0.05 * (x - jax.lax.stop_gradient(x)),
    }.items():
        monkeypatch.setitem(NAMED, "aten.tanh", Operator(wrong, "any"))
        net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        with pytest.raises(fs.InvalidInput, match=f"its compiled {name} differs from PyTorch's"):
            compiled(net)


# Results


def test_load_takes_runs_parameters_and_buffers():
    module = batch_norm()
    run = fs.solve(compiled(module), fs.FedAvg(0.1), rounds=1)
    loaded = fs.torch.load(batch_norm(), run)
    assert loaded[1].num_batches_tracked == 1
    only = fs.torch.load(batch_norm(), run.params)
    assert only[1].num_batches_tracked == 0
    np.testing.assert_allclose(only[0].weight.detach(), loaded[0].weight.detach())
    with pytest.raises(fs.InvalidInput, match=r"differ for 1\.running_mean"):
        fs.torch.load(module, run.params | {"1.running_mean": np.zeros(5)})
    with pytest.raises(fs.InvalidInput, match=r"differ for 4\.weight"):
        fs.torch.load(module, run.params | {"4.weight": np.zeros(5)})


def test_the_page_on_modules_works():
    names = {}
    for block in blocks("docs/torch.md"):
        exec(block, names)
    assert np.isfinite(names["run"].history["objective"]).all()
    assert names["tensors"]["1.num_batches_tracked"] == 10


@pytest.mark.slow
def test_the_benchmark_runs():
    script = Path(__file__).parents[2] / "benchmarks" / "torch_modules.py"
    done = subprocess.run(
        [sys.executable, script, "--tiny"], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].startswith("30-16-1")
