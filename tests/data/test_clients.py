"""Clients from datasets, loaders, tables and dicts: the same data as stacked arrays."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import fedsolve as fs
from fedsolve.problem.stacking import as_samples
from tests.support.clients import mean_loss, ragged

torch = pytest.importorskip("torch")
data = torch.utils.data


class Pairs(data.Dataset):
    """Samples (x, y) in a list, or what `made` makes of their index."""

    def __init__(self, samples):
        self.samples = samples
        self.read = 0

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        self.read += 1
        return self.samples[index]


class Stream(data.IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


class Bare:
    """Items and a length, as in packages whose datasets are not PyTorch's."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


def tensors(client):
    return torch.from_numpy(client["x"]), torch.from_numpy(client["y"])


def pairs(client):
    return list(zip(*tensors(client), strict=True))


def dicts(client):
    return [{"x": x, "y": float(y)} for x, y in zip(client["x"], client["y"], strict=True)]


def flipped(client, kind):
    """A subset whose rows come in another order, so that it is the client again."""
    back = np.arange(len(client["y"]))[::-1]
    return data.Subset(kind(tensors({k: v[back] for k, v in client.items()})), back.tolist())


FORMS = {
    "pairs": lambda client: Pairs(pairs(client)),
    "dicts": lambda client: Pairs(dicts(client)),
    "stream": lambda client: Stream(pairs(client)),
    "bare": lambda client: Bare(pairs(client)),
    "tensors": lambda client: data.TensorDataset(*tensors(client)),
    "subset of tensors": lambda client: flipped(client, lambda t: data.TensorDataset(*t)),
    "subset": lambda client: flipped(client, lambda t: Pairs(list(zip(*t, strict=True)))),
    "loader": lambda client: data.DataLoader(Pairs(pairs(client)), batch_size=2, shuffle=True),
    "loader of a stream": lambda client: data.DataLoader(Stream(pairs(client)), batch_size=2),
    "loader without batches": lambda client: data.DataLoader(Pairs(pairs(client)), batch_size=None),
    "loader of tensors": lambda client: data.DataLoader(
        data.TensorDataset(*tensors(client)), 3, shuffle=True, drop_last=True
    ),
    "loader that collates": lambda client: data.DataLoader(
        Pairs(dicts(client)),
        batch_size=2,
        collate_fn=lambda batch: (
            torch.tensor(np.stack([one["x"] for one in batch])),
            torch.tensor([one["y"] for one in batch], dtype=torch.float64),
        ),
    ),
    "table": lambda client: pd.DataFrame(
        {f"x{i}": client["x"][:, i] for i in range(4)} | {"y": client["y"]},
        index=np.arange(len(client["y"])) + 7,
    ),
    "arrays": lambda client: client,
    "tuple": lambda client: (client["x"], jnp.asarray(client["y"])),
    "dict of tensors": lambda client: dict(zip("xy", tensors(client), strict=True)),
}


def common(values):
    """Any form's data as a dict with x and y."""
    if isinstance(values, tuple | list):
        values = dict(zip("xy", values, strict=True))
    if "x0" in values:
        values = {"x": np.stack([values[f"x{i}"] for i in range(4)], axis=-1), "y": values["y"]}
    return {key: np.asarray(value) for key, value in values.items()}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_samples(form):
    clients = [
        {key: value.astype(np.float32).astype(np.float64) for key, value in client.items()}
        for client in ragged()
    ]
    expected = fs.stack_clients(clients)
    for own in ([FORMS[form](c) for c in clients], {f"c{i}": None for i in range(4)}):
        if isinstance(own, dict):
            if form in ("arrays", "tuple", "dict of tensors"):
                continue  # names and entries could not be told apart
            own = {name: FORMS[form](c) for name, c in zip(own, clients, strict=True)}
        found = as_samples(own)
        np.testing.assert_array_equal(found.mask, expected["mask"])
        for key, value in common(found.values).items():
            np.testing.assert_allclose(value, expected[key], rtol=1e-6)
    stacked = fs.stack_clients([FORMS[form](c) for c in clients])
    values = stacked if isinstance(stacked, dict) else stacked.values
    if isinstance(values, dict):
        np.testing.assert_array_equal(values.pop("mask"), expected["mask"])
    np.testing.assert_allclose(common(values)["y"], expected["y"], rtol=1e-6)


def test_clients_of_one_size_have_no_mask():
    clients = [{key: value[:1] for key, value in client.items()} for client in ragged()]
    found = as_samples(clients)
    assert found.mask is None
    assert found.values["x"].shape == (4, 1, 4)


def test_problems_take_lists():
    clients = ragged()
    expected = fs.Problem(mean_loss, fs.stack_clients(clients), np.zeros(4))
    run = fs.solve(expected, fs.FedAvg(0.05), rounds=3)
    for own in (clients, {str(i): Pairs(dicts(c)) for i, c in enumerate(clients)}):
        problem = fs.Problem(mean_loss, own, np.zeros(4))
        found = fs.solve(problem, fs.FedAvg(0.05), rounds=3)
        np.testing.assert_array_equal(found.params, run.params)


def test_torch_problems_take_lists():
    net = torch.nn.Linear(4, 1)
    clients = [data.TensorDataset(*(t.float() for t in tensors(c))) for c in ragged()]

    def loss(model, batch):
        return torch.mean((model(batch[0])[:, 0] - batch[1]) ** 2)

    problem = fs.torch.problem(net, loss, clients)
    with torch.no_grad():
        expected = np.mean([loss(net, client.tensors).item() for client in clients])
    run = fs.solve(problem, fs.FedAvg(1e-9), rounds=1)
    np.testing.assert_allclose(run.history["objective"][-1], expected, rtol=1e-5)


def test_one_structure_is_what_it_was():
    x, y = np.ones((2, 3, 4)), np.zeros((2, 3))
    for own in ({"x": x, "y": y}, (x, y), x, {"both": {"x": x, "y": y}}, {"x": [x, y]}):
        found = as_samples(own)
        assert jax.tree.structure(found.values) == jax.tree.structure(own)
    given = {"x": torch.ones(2, 3), "mask": torch.ones(2, 3, dtype=torch.bool)}
    found = as_samples(given)
    assert isinstance(found.values["x"], np.ndarray)
    assert found.mask.shape == (2, 3)


def test_tensors_at_hand_are_not_read_sample_by_sample(monkeypatch):
    def forbidden(self, index):
        raise AssertionError

    whole = data.TensorDataset(torch.ones(100_000, 2), torch.zeros(100_000, dtype=torch.int32))
    monkeypatch.setattr(data.TensorDataset, "__getitem__", forbidden)
    parts = data.random_split(whole, [60_000, 40_000])
    nested = data.Subset(parts[1], range(10))
    loader = data.DataLoader(whole, sampler=data.SubsetRandomSampler([5, 3]))
    found = as_samples([*parts, nested])
    assert found.mask.sum(axis=1).tolist() == [60_000, 40_000, 10]
    assert [leaf.dtype for leaf in found.values] == [np.float32, np.int32]
    assert as_samples([loader]).values[0].shape == (1, 2, 2)


def test_a_subclass_of_tensors_is_read_by_its_own_items():
    class Doubled(data.TensorDataset):
        def __getitem__(self, index):
            (x,) = super().__getitem__(index)
            return (2 * x,)

    found = as_samples([Doubled(torch.ones(3))])
    np.testing.assert_array_equal(found.values[0], [[2, 2, 2]])


def test_a_loaders_subset_is_kept():
    rows = Pairs([(torch.tensor(float(i)), i) for i in range(9)])
    loader = data.DataLoader(rows, 2, sampler=data.SubsetRandomSampler([4, 1, 8]))
    found = as_samples([loader])
    np.testing.assert_array_equal(found.values[1], [[4, 1, 8]])
    batches = data.BatchSampler(data.SubsetRandomSampler([2, 7]), 2, drop_last=False)
    found = as_samples([data.DataLoader(rows, batch_sampler=batches)])
    np.testing.assert_array_equal(found.values[1], [[2, 7]])


def test_types_and_numbers():
    rows = [(1, 2.5, True, np.float32(3), torch.tensor(4, dtype=torch.uint8))]
    values = as_samples([Pairs(rows)]).values
    assert [leaf.dtype.name for leaf in values] == [
        "int64",
        "float64",
        "bool",
        "float32",
        "uint8",
    ]
    table = pd.DataFrame({"a": pd.array([1, 2], dtype="Int64"), "b": [True, False]})
    values = as_samples([table]).values
    assert {name: leaf.dtype.name for name, leaf in values.items()} == {"a": "int64", "b": "bool"}


def test_neither_pytorch_nor_pandas_is_imported():
    code = (
        "import sys, numpy as np; from fedsolve.problem.stacking import as_samples; "
        "as_samples([{'x': np.ones(3)}]); assert 'torch' not in sys.modules; "
        "sys.modules.pop('pandas', None); as_samples([{'x': np.ones(3)}]); "
        "assert 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def table(**columns):
    return pd.DataFrame({"x": [1.0, 2.0], "y": [0.0, 1.0], **columns})


class Drawing(Bare):
    def __getitem__(self, index):
        return np.random.default_rng().random(3)


class Nameless(data.Dataset):
    def __getitem__(self, index):
        return torch.ones(2)


class Failing(Bare):
    def __getitem__(self, index):
        raise OSError("no such file")


def image(size=(4, 4)):
    from PIL import Image

    return Image.new("RGB", size)


ONES = torch.ones(3)
WRONG = {
    "shape": (lambda: [Pairs([ONES, torch.ones(2)])], r"Sample 1 of client 0 has the shape \(2,\)"),
    "shape of clients": (
        lambda: [Pairs([ONES]), Pairs([torch.ones(2)])],
        r"its data of client 0 has shape \(3,\), its data of client 1 has shape \(2,\)",
    ),
    "type": (
        lambda: [Pairs([(ONES, 1), (ONES, 2.0)])],
        r"Sample 1\[1\] of client 0 is of type float64",
    ),
    "structure": (
        lambda: [Pairs([(ONES, 1), {"x": ONES}])],
        "Sample 1 of client 0 has the structure",
    ),
    "empty": (lambda: {"a": Pairs([ONES]), "b": Pairs([])}, "dataset of client 'b' is empty"),
    "empty stream": (lambda: [Stream([])], "dataset of client 0 is empty"),
    "empty tensors": (
        lambda: [data.TensorDataset(torch.ones(0, 2))],
        "dataset of client 0 is empty",
    ),
    "picture": (lambda: [Pairs([(image(), 1)])], "a PIL image; give the dataset a transform"),
    "text": (lambda: [Pairs([{"text": "good"}])], r"Sample 0\['text'\] of client 0 is a str"),
    "nothing": (lambda: [Pairs([None])], "have no arrays or numbers"),
    "random": (lambda: [Drawing([1, 2])], "another sample 0 each time"),
    "unreadable": (
        lambda: [Failing([1])],
        "Sample 0 of client 0 cannot be read: OSError: no such file",
    ),
    "no length": (lambda: [Nameless()], "has no length"),
    "not a number": (
        lambda: [Pairs([torch.tensor(float("nan"))])],
        "client 0 has a NaN or infinity",
    ),
    "half precision": (
        lambda: [Pairs([torch.ones(2, dtype=torch.bfloat16)])],
        "cannot be read as an array",
    ),
    "sampler": (
        lambda: [data.DataLoader(Pairs([ONES]), sampler=data.WeightedRandomSampler([1.0], 1))],
        "WeightedRandomSampler, which chooses among the samples",
    ),
    "collate": (
        lambda: [data.DataLoader(Pairs([ONES]), collate_fn=lambda batch: batch[0])],
        "makes no batch of one sample",
    ),
    "mixed": (lambda: [Pairs([ONES]), table()], "client 0 has a Dataset, client 1 a DataFrame"),
    "mixed names": (lambda: {"a": table(), "b": {"x": ONES}}, "client 'b' a dict"),
    "generator": (lambda: ({"x": np.ones(2)} for _ in range(2)), "generator"),
    "no clients": (list, "There are no clients"),
    "one dataset": (lambda: Pairs([ONES]), "clients is one Dataset; give a list"),
    "one loader": (lambda: data.DataLoader(Pairs([ONES])), "clients is one DataLoader"),
    "one table": (table, "clients is one DataFrame"),
    "lacking": (
        lambda: [table(), table().drop(columns="y")],
        "table of client 1 has no column 'y', which that of client 0",
    ),
    "surplus": (
        lambda: {"a": table(), "b": table(z=[1, 2])},
        "table of client 'a' has no column 'z', which that of client 'b'",
    ),
    "object column": (lambda: [table(city=["A", "B"])], "Column 'city' of client 0 is of type"),
    "time column": (
        lambda: [table(t=pd.to_datetime(["2026-01-01", "2026-01-02"]))],
        "Column 't' of client 0 is of type datetime",
    ),
    "missing": (lambda: [table(z=[1.0, None])], "Column 'z' of client 0 has missing values"),
    "column type": (
        lambda: [table(z=[1, 2]), table(z=[1.0, 2.5])],
        "Column 'z' is int64 on client 0 and float64 on client 1",
    ),
    "no rows": (lambda: [table(), table()[:0]], "table of client 1 has no rows"),
    "column names": (lambda: [pd.DataFrame(np.ones((2, 2)))], "need names that are strings"),
    "mask": (lambda: [table(mask=[True, True])], 'an entry "mask"'),
    "list of arrays": (lambda: [np.ones((2, 3)), np.ones((2, 3))], "fs.stack_clients"),
    "objects": (
        lambda: [{"x": np.array(["a", "b"])}],
        r"\['x'\] of client 0 is of type <U1; data are numbers",
    ),
    "entries": (
        lambda: [{"x": np.ones(2)}, {"y": np.ones(2)}],
        r"client 0 has \['x'\], client 1 has \['y'\]",
    ),
    "numbers": (lambda: [1.0, 2.0], "data of client 0 are a float"),
    "texts": (lambda: ["a", "b"], "data of client 0 are a str"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_clients_get_a_sentence(case):
    make, said = WRONG[case]
    with pytest.raises(fs.InvalidInput, match=said) as caught:
        fs.Problem(lambda w, data: jnp.sum(w**2), make(), np.zeros(2))
    assert "\n" not in str(caught.value)
