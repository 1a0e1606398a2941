"""Training loops of the user's own as the local work of clients."""

import copy
import importlib
import random
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from tests.support.in_process import Wires, deploy

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional
importlib.import_module("fedsolve.torch")
from torch.utils.data import DataLoader, Dataset, TensorDataset  # noqa: E402

from fedsolve.torch import pool  # noqa: E402
from fedsolve.torch.datasets import as_datasets  # noqa: E402

N, S, D = 6, 8, 4
RATE, STEPS = 0.1, 5


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    return {"x": rng.standard_normal((N, S, D)), "y": rng.standard_normal((N, S))}


def perceptron(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 6), *layers, nn.Tanh(), nn.Linear(6, 1)).double()


def loss(model, data):
    return F.mse_loss(model(data["x"])[:, 0], data["y"])


def size_constraint(model, data):
    return model(data["x"]).pow(2).mean() - 0.02


def trained_on(function, make=lambda params: torch.optim.SGD(params, RATE)):
    """A loop of full-batch steps along a function's gradient."""

    def train(module, data, key):
        optimizer = make(module.parameters())
        for _ in range(STEPS):
            optimizer.zero_grad()
            function(module, data).backward()
            optimizer.step()

    return train


def assert_close(one, other, tolerance):
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_allclose(other[name], array, rtol=0, atol=tolerance, err_msg=name)


# The same numbers as local steps

PAIRS = {
    "FedAvg": (fs.FedAvg(RATE, local_steps=STEPS, participants=3), fs.FedAvg(1.0, participants=3)),
    "FedAvgAll": (
        fs.FedAvgAll(RATE, local_steps=STEPS, participants=3),
        fs.FedAvgAll(1.0, participants=3),
    ),
    "PPBC": (
        fs.PPBC(1.0, local_steps=STEPS, local_optimizer=fs.SGD(RATE)),
        fs.PPBC(1.0),
    ),
    "SCAFFOLD": (
        fs.SCAFFOLD(1.0, local_steps=STEPS, local_optimizer=fs.SGD(RATE), participants=3),
        fs.SCAFFOLD(1.0, participants=3),
    ),
    "FedProx": (
        fs.FedProx(1.0, local_steps=STEPS, local_optimizer=fs.SGD(RATE), proximity=0.3),
        fs.FedProx(1.0, proximity=0.3),
    ),
    "FedDyn": (
        fs.FedDyn(1.0, local_steps=STEPS, local_optimizer=fs.SGD(RATE), participants=4),
        fs.FedDyn(1.0, participants=4),
    ),
    "FedSGM": (
        fs.FedSGM(1.0, local_steps=STEPS, local_optimizer=fs.SGD(RATE), uplink=fs.TopK(0.5)),
        fs.FedSGM(1.0, uplink=fs.TopK(0.5)),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_loop_of_plain_steps_is_the_algorithms_local_steps(name):
    constraint = size_constraint if name == "FedSGM" else None
    plain = fs.torch.problem(perceptron(), loss, arrays(), constraint)
    extra = {"train_constraint": trained_on(size_constraint)} if constraint else {}
    mine = fs.torch.training(plain, trained_on(loss), **extra)
    steps, whole = PAIRS[name]
    expected = fs.solve(plain, steps, rounds=6, precision="float64")
    run = fs.solve(mine, whole, rounds=6, precision="float64")
    assert_close(expected.params, run.params, 1e-12)
    np.testing.assert_allclose(run.history["objective"], expected.history["objective"], rtol=1e-10)
    if constraint:
        assert len(set(run.history["switch"])) == 2  # both loops were used
    start = {name: np.asarray(p.detach()) for name, p in perceptron().named_parameters()}
    assert max(np.abs(run.params[k] - start[k]).max() for k in start) > 1e-2


def test_in_float32_to_1e_6():
    plain = fs.torch.problem(perceptron(), loss, arrays())
    steps, whole = PAIRS["FedAvg"]
    expected = fs.solve(plain, steps, rounds=6)
    run = fs.solve(fs.torch.training(plain, trained_on(loss)), whole, rounds=6)
    assert_close(expected.params, run.params, 1e-6)


@pytest.mark.parametrize("algorithm", [fs.FedAvg, fs.SCAFFOLD])
def test_adam_within_the_loop_is_adam_as_local_optimizer(algorithm):
    plain = fs.torch.problem(perceptron(), loss, arrays())
    train = trained_on(loss, lambda params: torch.optim.Adam(params, 0.01))
    steps = algorithm(1.0, local_steps=STEPS, local_optimizer=fs.Adam(0.01), participants=3)
    expected = fs.solve(plain, steps, rounds=6, precision="float64")
    mine = fs.torch.training(plain, train)
    run = fs.solve(mine, algorithm(1.0, participants=3), rounds=6, precision="float64")
    assert_close(expected.params, run.params, 1e-9)


def test_corrections_are_added_once_for_gradients_of_several_batches():
    def accumulated(module, data, key):
        optimizer = torch.optim.SGD(module.parameters(), RATE)
        for _ in range(STEPS):
            optimizer.zero_grad()
            for rows in (slice(0, 4), slice(4, 8)):
                half = {name: tensor[rows] for name, tensor in data.items()}
                (0.5 * loss(module, half)).backward()
            optimizer.step()

    plain = fs.torch.problem(perceptron(), loss, arrays())
    steps, whole = PAIRS["SCAFFOLD"]
    expected = fs.solve(plain, steps, rounds=4, precision="float64")
    run = fs.solve(fs.torch.training(plain, accumulated), whole, rounds=4, precision="float64")
    assert_close(expected.params, run.params, 1e-12)


def test_a_returned_module_counts_and_a_server_step_is_taken():
    def train(module, data, key):
        other = copy.deepcopy(module)
        with torch.no_grad():
            for mine, theirs in zip(other.parameters(), module.parameters(), strict=True):
                mine.copy_(theirs + 1)
        return other

    problem = fs.torch.training(perceptron(), train, arrays(), loss)
    run = fs.solve(problem, fs.FedAvg(0.5, participants=2), rounds=4, precision="float64")
    for name, tensor in perceptron().named_parameters():
        np.testing.assert_allclose(run.params[name], tensor.detach().numpy() + 2, rtol=1e-12)


def test_parameters_that_are_not_trained_stay_and_are_not_sent():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.base, self.head = nn.Linear(D, 6), nn.Linear(6, 1)

        def forward(self, x):
            return self.head(torch.tanh(self.base(x)))

    plain = fs.torch.problem(Head().double(), loss, arrays(), trainable=["head"])
    steps, whole = PAIRS["SCAFFOLD"]
    expected = fs.solve(plain, steps, rounds=4, precision="float64")
    mine = fs.torch.training(plain, trained_on(loss))
    assert mine.dimension == 7
    run = fs.solve(mine, whole, rounds=4, precision="float64")
    assert_close(expected.params, run.params, 1e-12)
    assert run.history["bytes_up"][0] == expected.history["bytes_up"][0]


@pytest.mark.parametrize("name", ["FedAvg", "SCAFFOLD"])
def test_personal_parameters_are_trained_with_the_others_and_stay(name):
    plain = fs.torch.problem(perceptron(), loss, arrays(), personal=["2"])
    steps, whole = PAIRS[name]
    expected = fs.solve(plain, steps, rounds=3, precision="float64")
    mine = fs.torch.training(plain, trained_on(loss))
    run = fs.solve(mine, whole, rounds=3, precision="float64")
    for client in range(N):
        assert_close(expected.client_params(client), run.client_params(client), 1e-12)
    heads = [run.client_params(client)["2.weight"] for client in range(N)]
    assert len({head.tobytes() for head in heads}) > 3
    assert (run.history["bytes_up"] == expected.history["bytes_up"]).all()
    np.testing.assert_allclose(run.history["objective"], expected.history["objective"], rtol=1e-10)


# Randomness


def shuffled(module, data, key):
    """A script as people have it: shuffled minibatches and dropout, seeds nowhere."""
    optimizer = torch.optim.SGD(module.parameters(), 0.05, momentum=0.9)
    loader = DataLoader(TensorDataset(data["x"], data["y"]), batch_size=3, shuffle=True)
    rng = np.random.default_rng(key)
    for x, y in loader:
        optimizer.zero_grad()
        noise = torch.from_numpy(rng.standard_normal(x.shape)).to(x)
        F.mse_loss(module(x + 0.1 * noise)[:, 0], y + 0.1 * torch.randn_like(y)).backward()
        optimizer.step()


def run_on(runtime, problem, algorithm, tmp_path, seed=0):
    if runtime == "deployed":
        wires = Wires(problem, algorithm, tmp_path / "sites", seed)
        return deploy(problem, algorithm, wires, tmp_path / "server", 4, seed)[0]
    return fs.solve(problem, algorithm, 4, seed=seed, runtime=runtime, precision="float64")


def test_random_loops_give_the_same_numbers_everywhere(tmp_path):
    problem = fs.torch.training(perceptron(nn.Dropout(0.3)), shuffled, arrays(), loss)
    algorithm = fs.FedAvg(1.0, participants=4)
    # Not Python's: the tests' type checks draw from it which items of a list they look at.
    common = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    first = run_on("compiled", problem, algorithm, tmp_path)
    for runtime in ("compiled", "debug", "streamed", "deployed"):
        again = run_on(runtime, problem, algorithm, tmp_path)
        assert_close(first.params, again.params, 1e-13)
    alone = fs.solve(problem, algorithm, 4, precision="float64", clients_at_once=1)
    assert_close(first.params, alone.params, 1e-13)
    other = run_on("compiled", problem, algorithm, tmp_path, seed=1)
    assert not np.allclose(other.params["0.weight"], first.params["0.weight"], atol=1e-4)
    assert torch.get_rng_state().equal(common[0])
    assert np.random.get_state()[1].tolist() == common[1]  # noqa: NPY002


def test_a_loop_that_draws_only_later_gives_the_same_numbers():
    """The first client, on which the loop is tried, draws nothing."""
    data = arrays()
    data["y"][0], data["y"][1:] = -1.0, 1.0

    def train(module, data, key):
        with torch.no_grad():
            module[0].bias += 1.0 if data["y"][0] < 0 else torch.rand(6)

    before, runs = torch.get_rng_state(), []
    for _ in range(2):
        problem = fs.torch.training(perceptron(), train, data, loss)
        runs.append(fs.solve(problem, fs.FedAvg(1.0), rounds=2, precision="float64"))
    assert_close(runs[0].params, runs[1].params, 0)
    assert torch.get_rng_state().equal(before)


def test_keys_differ_between_rounds_and_clients_and_follow_the_seed():
    seen = []

    def train(module, data, key):
        seen.append(key)
        with torch.no_grad():
            module[0].bias += torch.rand(6)

    problem = fs.torch.training(perceptron(), train, arrays(), loss)
    seen.clear()
    fs.solve(problem, fs.FedAvg(1.0), rounds=3)
    first = sorted(seen)
    assert len(set(first)) == 3 * N
    assert all(type(key) is int and 0 <= key < 2**63 for key in first)
    assert max(first) > 2**60
    seen.clear()
    fs.solve(problem, fs.FedAvg(1.0), rounds=3)
    assert sorted(seen) == first


def test_clients_in_threads_have_modules_of_their_own(monkeypatch):
    """Two clients wait for each other in the middle of their training."""
    monkeypatch.setattr(pool, "cores", lambda: 2)
    monkeypatch.setattr(pool.Clients, "_together", lambda self: True)
    pool._workers.cache_clear()
    barrier = threading.Barrier(2, timeout=20)
    modules = []

    def train(module, data, key):
        if waits:
            modules.append(id(module))
            barrier.wait()
        with torch.no_grad():
            module[0].bias += data["y"][0]
        if waits:
            barrier.wait()

    waits = False
    problem = fs.torch.training(perceptron(), train, arrays(), loss)
    waits = True
    run = fs.solve(problem, fs.FedAvg(1.0), rounds=1, precision="float64", evaluate_every=1)
    assert len(set(modules[:2])) == 2
    expected = perceptron()[0].bias.detach().numpy() + arrays()["y"][:, 0].mean()
    np.testing.assert_allclose(run.params["0.bias"], expected, rtol=1e-12)
    pool._workers.cache_clear()


# Buffers


def normed():
    return perceptron(nn.BatchNorm1d(6))


def by_hand(sizes, rounds, buffers):
    """FedAvg in PyTorch, written anew: models and running statistics weighted by sizes."""
    own = arrays()
    clients = [{k: torch.from_numpy(v[j, :n]) for k, v in own.items()} for j, n in enumerate(sizes)]
    net, shares = normed(), np.array(sizes) / sum(sizes)
    start = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    kept = [dict(net.named_buffers()) for _ in sizes]
    for _ in range(rounds):
        ends = []
        for j, data in enumerate(clients):
            mine = normed()
            mine.load_state_dict(net.state_dict() | (kept[j] if buffers == "local" else {}))
            trained_on(loss)(mine, data, 0)
            kept[j] = {name: tensor.clone() for name, tensor in mine.named_buffers()}
            ends.append(mine.state_dict())
        mean = {
            name: sum(share * end[name] for share, end in zip(shares, ends, strict=True))
            for name in start
        }
        if buffers != "average":
            mean |= {name: start[name] for name in kept[0]}
        net.load_state_dict(mean)
    return net, kept


SIZES = (3, 8, 5, 8, 4, 6)


@pytest.mark.parametrize("buffers", ["average", "local", "frozen"])
def test_running_statistics_are_averaged_kept_or_frozen(buffers):
    own = arrays()
    clients = fs.stack_clients(
        [{name: array[j, :n] for name, array in own.items()} for j, n in enumerate(SIZES)]
    )
    options = {"buffers": buffers, "mode": "callback"}  # compiled, it would not take ragged ones
    problem = fs.torch.training(normed(), trained_on(loss), clients, loss, **options)
    run = fs.solve(problem, fs.FedAvg(1.0, weighting="DataSize"), rounds=3, precision="float64")
    net, kept = by_hand(SIZES, 3, buffers)
    for name, tensor in net.named_parameters():
        np.testing.assert_allclose(run.params[name], tensor.detach().numpy(), atol=1e-12)
    if buffers == "average":
        np.testing.assert_allclose(run.state.buffers["1.running_var"], net[1].running_var, 1e-12)
        net.eval()
        values = [
            float(loss(net, {k: torch.from_numpy(v[j, :n]) for k, v in own.items()}).detach())
            for j, n in enumerate(SIZES)
        ]
        np.testing.assert_allclose(run.history["objective"][-1], np.mean(values), rtol=1e-10)
    if buffers == "local":
        found = run.state.memory.state["1.running_mean"]
        np.testing.assert_allclose(found, np.stack([k["1.running_mean"] for k in kept]), 1e-12)
        assert not np.allclose(found[0], found[1])


# Datasets


class Points(Dataset):
    """A Dataset that makes its samples when they are asked for."""

    def __init__(self, x, y):
        self.x, self.y = torch.from_numpy(x), torch.from_numpy(y)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def of_dataset(function):
    def on(module, data):
        x, y = next(iter(DataLoader(data, batch_size=len(data))))
        return function(module, {"x": x.to(module[0].bias), "y": y.to(module[0].bias)})

    return on


def datasets():
    own = arrays()
    return [Points(own["x"][j, :n], own["y"][j, :n]) for j, n in enumerate(SIZES)]


def test_datasets_stay_as_they_are_and_give_the_numbers_of_arrays(tmp_path):
    own = arrays()
    clients = fs.stack_clients(
        [{name: array[j, :n] for name, array in own.items()} for j, n in enumerate(SIZES)]
    )
    algorithm = fs.FedAvg(1.0, participants=3, weighting="DataSize")
    expected = fs.solve(
        fs.torch.training(perceptron(), trained_on(loss), clients, loss),
        algorithm,
        4,
        precision="float64",
    )
    seen = []

    def train(module, data, key):
        seen.append(type(data))
        trained_on(of_dataset(loss))(module, data, key)

    ours = fs.torch.training(perceptron(), train, datasets(), of_dataset(loss))
    run = run_on("compiled", ours, algorithm, tmp_path)
    assert_close(expected.params, run.params, 1e-12)
    np.testing.assert_allclose(run.history["objective"], expected.history["objective"], rtol=1e-10)
    plain = fs.FedAvg(1.0, participants=3)
    deployed = run_on("deployed", ours, plain, tmp_path)
    assert_close(run_on("compiled", ours, plain, tmp_path).params, deployed.params, 1e-12)
    assert set(seen) == {Points}


def test_data_loaders_are_handed_over_as_they_are():
    loaders = [DataLoader(data, batch_size=3, shuffle=True) for data in datasets()]
    sizes = []

    def train(module, loader, key):
        sizes.append(sum(len(x) for x, _ in loader))
        optimizer = torch.optim.SGD(module.parameters(), RATE)
        kind = module[0].weight.dtype
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(module(x.to(kind))[:, 0], y.to(kind)).backward()
            optimizer.step()

    def mean(module, loader):
        kind = module[0].weight.dtype
        return sum(F.mse_loss(module(x.to(kind))[:, 0], y.to(kind)) * len(x) for x, y in loader) / 8

    problem = fs.torch.training(perceptron(), train, loaders, mean)
    runs = [fs.solve(problem, fs.FedAvg(1.0), rounds=2, precision="float64") for _ in range(2)]
    assert_close(runs[0].params, runs[1].params, 0)
    assert set(sizes) == set(SIZES)


def test_a_restricted_client_trains_on_a_part_of_its_dataset():
    own = as_datasets(datasets())
    samples = jax.tree.map(lambda leaf: jnp.asarray(leaf[1]), own.samples())
    subset = jax.tree.map(np.asarray, samples.subset(jax.random.key(0), 3))
    part = own.of(subset.values, subset.mask, subset.order)
    assert len(part) == 3
    assert all(any(x.equal(other) for other in own.each[1].x) for x, _ in part)


def test_a_constraint_on_datasets():
    ours = fs.torch.training(
        perceptron(),
        trained_on(of_dataset(loss)),
        datasets(),
        of_dataset(loss),
        of_dataset(size_constraint),
        train_constraint=trained_on(of_dataset(size_constraint)),
    )
    run = fs.solve(ours, fs.FedSGM(1.0, tolerance=0.01), rounds=12)
    assert len(set(run.history["switch"])) == 2


# What is refused


def seeded_by_hand(module, data, key):
    torch.manual_seed(3)
    shuffled(module, data, key)


def numpys(module, data, key):
    np.random.rand()  # noqa: NPY002
    shuffled(module, data, key)


def numpys_seed(module, data, key):
    np.random.seed(3)  # noqa: NPY002
    shuffled(module, data, key)


def pythons(module, data, key):
    random.random()
    shuffled(module, data, key)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (3, r"train must be a function of \(module, data, key\)"),
        (lambda module, data, key: None, "left the module's parameters as they were"),
        (lambda module, data, key: data["z"], "train failed on client 0's data: KeyError: 'z'"),
        (lambda module, data, key: 3.0, "or return the trained one, got float"),
        (lambda module, data, key: nn.Linear(2, 2), "differ in name or shape"),
        (seeded_by_hand, "random state of PyTorch .*leave out torch.manual_seed"),
        (numpys, r"random state of NumPy .*default_rng\(key\)"),
        (numpys_seed, r"random state of NumPy .*default_rng\(key\)"),
        (pythons, r"random state of Python's random .*random\.Random\(key\)"),
    ],
)
def test_a_wrong_loop_raises(train, message):
    before = torch.get_rng_state()
    with pytest.raises(fs.InvalidInput, match=message) as caught:
        fs.torch.training(perceptron(), train, arrays(), loss)
    assert "\n" not in str(caught.value)
    torch.set_rng_state(before)


def test_other_wrong_input_raises():
    plain = fs.torch.problem(perceptron(), loss, arrays(), size_constraint)
    with pytest.raises(fs.InvalidInput, match="needs clients and a loss"):
        fs.torch.training(perceptron(), trained_on(loss), arrays())
    with pytest.raises(fs.InvalidInput, match="has its data and functions"):
        fs.torch.training(plain, trained_on(loss), arrays(), loss)
    numpy_problem = fs.Problem(lambda w, d: (w * d["x"]).sum(), arrays(), np.zeros(D))
    with pytest.raises(fs.InvalidInput, match=r"a problem of fs\.torch\.problem"):
        fs.torch.training(numpy_problem, trained_on(loss))
    with pytest.raises(fs.InvalidInput, match="leave batch_size out"):
        fs.torch.training(
            perceptron(), trained_on(loss), datasets(), of_dataset(loss), batch_size=3
        )
    empty = [datasets()[0], TensorDataset(torch.zeros(0, D))]
    with pytest.raises(fs.InvalidInput, match="Client 1's Dataset is empty"):
        fs.torch.training(perceptron(), trained_on(loss), empty, loss)
    unconstrained = fs.torch.problem(perceptron(), loss, arrays())
    with pytest.raises(fs.InvalidInput, match="train_constraint is for a constraint"):
        fs.torch.training(unconstrained, trained_on(loss), train_constraint=trained_on(loss))


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (fs.FedAvg(0.1, local_steps=2), "leave out local_steps"),
        (fs.FedAvg(0.1, local_epochs=2), "leave out local_steps, local_epochs"),
        (fs.FedAvg(0.1, local_optimizer=fs.SGD(0.1)), "and local_optimizer"),
        (fs.FedSGM(1.0), "give fs.torch.training a function train_constraint"),
        (fs.FedSGM(1.0, switching=fs.Soft(5)), "use hard switching"),
        (fs.PenaltyFedAvg(1.0, rho=1.0), "local steps follow something else"),
        (fs.FedDyn(0.5), r"needs step_size=1\.0"),
    ],
)
def test_algorithms_that_a_loop_cannot_serve_raise(algorithm, message):
    plain = fs.torch.problem(perceptron(), loss, arrays(), size_constraint)
    with pytest.raises(fs.InvalidInput, match=message):
        fs.solve(fs.torch.training(plain, trained_on(loss)), algorithm, rounds=1)


@pytest.mark.parametrize("algorithm", [fs.FedSim, fs.FedAlt])
def test_steps_of_another_kind_raise(algorithm):
    problem = fs.torch.training(perceptron(), trained_on(loss), arrays(), loss, personal=["2"])
    with pytest.raises(fs.InvalidInput, match=r"a training loop cannot|A training loop trains"):
        fs.solve(problem, algorithm(1.0, mixing=None), rounds=1)
    problem = fs.torch.training(perceptron(), trained_on(loss), arrays(), loss)
    with pytest.raises(fs.InvalidInput, match=r"training loop (cannot replace|follows)"):
        fs.solve(problem, algorithm(1.0), rounds=1)


class Growing(Dataset):
    """A Dataset whose samples differ in shape."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.ones(D + index), torch.ones(())


def test_samples_of_different_shapes_raise_with_what_to_do():
    with pytest.raises(fs.InvalidInput, match="crop, resize or pad them"):
        fs.torch.problem(perceptron(), loss, [Growing(), Growing()])
    with pytest.raises(fs.InvalidInput, match=r"loss failed on client 0's.*crop, resize or pad"):
        fs.torch.training(
            perceptron(), trained_on(of_dataset(loss)), [Growing()] * 2, of_dataset(loss)
        )


def test_an_algorithm_without_local_steps_raises():
    problem = fs.torch.training(perceptron(), trained_on(loss), arrays(), loss)
    with pytest.raises(fs.InvalidInput, match="no local steps that a training loop can replace"):
        fs.solve(problem, fs.FedADMM(local_iterations=5), rounds=1)


def without_an_optimizer(module, data, key):
    loss(module, data).backward()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter -= RATE * parameter.grad


def with_closures(module, data, key):
    optimizer = torch.optim.LBFGS(module.parameters())

    def closure():
        optimizer.zero_grad()
        value = loss(module, data)
        value.backward()
        return value

    optimizer.step(closure)


@pytest.mark.parametrize(
    ("train", "message"),
    [(without_an_optimizer, "took no step of a torch.optim"), (with_closures, "a closure")],
)
def test_corrections_need_steps_of_an_optimizer(train, message):
    problem = fs.torch.training(perceptron(), train, arrays(), loss)
    fs.solve(problem, fs.FedAvg(1.0), rounds=1)
    with pytest.raises(Exception, match=message):
        fs.solve(problem, fs.SCAFFOLD(1.0), rounds=1)


def test_a_buffer_that_only_training_changes_raises():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(D, 1)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            return self.layer(x)

    def train(module, data, key):
        module.calls += 1
        trained_on(loss)(module, data, key)

    with pytest.raises(fs.InvalidInput, match="changes the buffers calls"):
        fs.torch.training(Counting(), train, arrays(), loss)
    frozen = fs.torch.training(Counting(), train, arrays(), loss, buffers="frozen")
    fs.solve(frozen, fs.FedAvg(1.0), rounds=1)
