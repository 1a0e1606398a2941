"""Functions that PyTorch computes: local steps in one call, dropout, running statistics."""

import importlib
import threading

import numpy as np
import pytest

import fedsolve as fs
from tests.support.examples import contribution_game
from tests.support.in_process import Wires, deploy

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional
importlib.import_module("fedsolve.torch")
from fedsolve.problem.stacking import as_samples  # noqa: E402
from fedsolve.torch import pool  # noqa: E402
from fedsolve.torch.descent import Objective, callback_problem  # noqa: E402

N, S, D = 6, 7, 4
SIZES = (3, 7, 1, 5, 2, 4)


def module(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 5), *layers, nn.Tanh(), nn.Linear(5, 1)).double()


def loss(model, data):
    return F.mse_loss(model(data["x"])[:, 0], data["y"])


def clients(ragged=False):
    rng = np.random.default_rng(0)
    own = {"x": rng.standard_normal((N, S, D)), "y": rng.standard_normal((N, S))}
    if not ragged:
        return own
    return fs.stack_clients(
        [{name: array[j, :n] for name, array in own.items()} for j, n in enumerate(SIZES)]
    )


def solved(problem, algorithm, rounds=3, **options):
    return fs.solve(problem, algorithm, rounds=rounds, precision="float64", **options)


def assert_close(one, other, tolerance=1e-12):
    for name, array in one.items():
        np.testing.assert_allclose(other[name], array, rtol=0, atol=tolerance, err_msg=name)


# Local steps in one call

STEPS = {
    "all samples": (fs.FedAvg(0.1, local_steps=4, participants=3), False, {}),
    "ragged": (fs.FedAvg(0.1, local_steps=4), True, {}),
    "minibatches": (fs.FedAvg(0.1, local_steps=4), True, {"batch_size": 3}),
    "epochs": (fs.FedAvg(0.1, local_epochs=2), False, {"batch_size": 4}),
    "ragged epochs": (fs.FedAvg(0.1, local_epochs=2), True, {"batch_size": 3}),
    "full batches": (
        fs.FedAvg(0.1, local_epochs=2),
        False,
        {"batch_size": 3, "drop_last": True},
    ),
    "epochs of all": (fs.FedAvg(0.1, local_epochs=3), True, {}),
    "SCAFFOLD": (fs.SCAFFOLD(0.1, local_steps=3, participants=4), False, {"batch_size": 2}),
    "FedProx": (fs.FedProx(0.1, local_steps=3, proximity=0.5), True, {}),
    "FedDyn": (fs.FedDyn(0.1, local_steps=3), False, {}),
    "PPBC": (fs.PPBC(0.1, local_steps=3), True, {"batch_size": 2}),
    "schedule": (fs.FedAvg(lambda round: 0.1 / (1 + round), local_steps=3), False, {}),
    "contributions": (
        fs.IncentFedAvg(contribution_game(most=S), 0.1, 0.1, local_steps=2),
        False,
        {"batch_size": 2},
    ),
}


LAYERS = {"plain": (), "dropout": (nn.Dropout(0.4),), "norm": (nn.BatchNorm1d(5),)}
CASES = [(name, "plain") for name in STEPS]
CASES += [("minibatches", "dropout"), ("ragged epochs", "dropout")]
CASES += [("epochs", "norm"), ("SCAFFOLD", "norm")]


@pytest.mark.parametrize(("name", "layers"), CASES)
def test_one_call_takes_the_steps_that_are_taken_one_by_one(name, layers, monkeypatch):
    algorithm, ragged, options = STEPS[name]
    calls, one_call = [], Objective.local_pass

    def counted(self, work):
        calls.append(1)
        return one_call(self, work)

    runs = []
    for local_pass in (lambda self, work: None, counted):
        monkeypatch.setattr(Objective, "local_pass", local_pass)
        net = module(*LAYERS[layers])
        made = fs.torch.problem(net, loss, clients(ragged), mode="callback", **options)
        runs.append(solved(made, algorithm, rounds=2))
    assert calls
    assert_close(runs[0].params, runs[1].params)
    if layers == "norm":
        for key, array in runs[0].state.buffers.items():
            np.testing.assert_allclose(runs[1].state.buffers[key], array, rtol=1e-12)


def test_other_steps_are_taken_one_by_one():
    problem = fs.torch.problem(module(), loss, clients(), mode="callback")
    run = solved(problem, fs.FedAvg(1.0, local_steps=3, local_optimizer=fs.SGD(0.1)))
    expected = solved(problem, fs.FedAvg(0.1, local_steps=3))
    assert_close(expected.params, run.params)


# Dropout and running statistics


def test_dropout_follows_the_seed_on_all_runtimes(tmp_path):
    problem = fs.torch.problem(
        module(nn.Dropout(0.5)), loss, clients(), batch_size=3, mode="callback"
    )
    algorithm, before = fs.FedAvg(0.1, local_steps=3, participants=4), torch.get_rng_state()
    first = solved(problem, algorithm)
    for runtime in ("compiled", "debug", "streamed"):
        assert_close(first.params, solved(problem, algorithm, runtime=runtime).params)
    wires = Wires(problem, algorithm, tmp_path / "sites")
    deployed = deploy(problem, algorithm, wires, tmp_path / "server", 3)[0]
    assert_close(first.params, deployed.params)
    other = solved(problem, algorithm, seed=1)
    assert not np.allclose(other.params["0.weight"], first.params["0.weight"])
    assert torch.get_rng_state().equal(before)
    # evaluation has no dropout
    net = fs.torch.load(module(nn.Dropout(0.5)), first.params).eval()
    own = clients()
    values = [loss(net, {k: torch.from_numpy(v[j]) for k, v in own.items()}) for j in range(N)]
    expected = np.mean([float(value.detach()) for value in values])
    np.testing.assert_allclose(first.history["objective"][-1], expected, rtol=1e-10)


def test_running_statistics_are_those_of_pytorch():
    problem = fs.torch.problem(module(nn.BatchNorm1d(5)), loss, clients(), mode="callback")
    run = solved(problem, fs.FedAvg(0.1, local_steps=3), rounds=1)
    ends, statistics = [], []
    for j in range(N):
        net = module(nn.BatchNorm1d(5))
        data = {name: torch.from_numpy(array[j]) for name, array in clients().items()}
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss(net, data).backward()
            optimizer.step()
        ends.append(net[0].weight.detach().numpy())
        statistics.append(net[1].running_var.numpy())
    np.testing.assert_allclose(run.params["0.weight"], np.mean(ends, axis=0), atol=1e-12)
    found = run.state.buffers
    np.testing.assert_allclose(found["1.running_var"], np.mean(statistics, axis=0), rtol=1e-12)
    assert found["1.num_batches_tracked"] == 3


def test_a_function_without_a_gradient_raises_where_one_is_needed():

    def rounded(model, data):
        with torch.no_grad():
            return loss(model, data)

    made = callback_problem(
        module(), rounded, None, as_samples(clients()), None, None, None, {}, smooth=False
    )
    with pytest.raises(Exception, match="has no gradient, and the algorithm needs one"):
        fs.solve(made, fs.FedAvg(0.1, local_optimizer=fs.SGD(0.1)), rounds=1)


def test_clients_in_threads_have_modules_of_their_own(monkeypatch):
    """Two clients wait for each other between setting the parameters and using them."""
    monkeypatch.setattr(pool, "cores", lambda: 2)
    monkeypatch.setattr(pool.Clients, "_together", lambda self: True)
    pool._workers.cache_clear()
    barrier, waits = threading.Barrier(2, timeout=20), []

    def meeting(model, data):
        if waits:
            barrier.wait()
        return loss(model, data)

    problem = fs.torch.problem(module(), meeting, clients(), mode="callback")
    expected = solved(fs.torch.problem(module(), loss, clients()), fs.FedAvg(0.1, local_steps=2))
    waits.append(1)
    run = solved(problem, fs.FedAvg(0.1, local_steps=2))
    assert_close(expected.params, run.params)
    pool._workers.cache_clear()


def test_buffers_that_are_no_state_do_not_pass_from_one_call_to_the_next():
    class Sometimes(nn.Module):
        """A buffer that training changes for some clients alone, and not for the first."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.drop = nn.Linear(D, 1), nn.Dropout(0.3)
            self.register_buffer("shift", torch.zeros(()))

        def forward(self, x):
            if self.training and float(x[0, 0]) < 0:
                self.shift += 1
            return self.drop(self.layer(x)) + self.shift

    data = clients()
    data["x"][0, 0, 0], data["x"][1:, 0, 0] = 1.0, -1.0
    problem = fs.torch.problem(Sometimes().double(), loss, data, mode="callback")
    once = solved(problem, fs.FedAvg(0.1), rounds=2)
    again = solved(problem, fs.FedAvg(0.1), rounds=2)
    assert_close(once.params, again.params, 0)


def test_common_random_numbers_in_evaluation_raise():
    def noisy(model, data):
        return loss(model, data) * (1 + np.random.rand())  # noqa: NPY002

    with pytest.raises(fs.InvalidInput, match="another value in every call"):
        fs.torch.problem(nn.Linear(4, 1), noisy, clients(), mode="callback")
