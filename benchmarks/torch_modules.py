"""Seconds of one gradient step of several clients: PyTorch, the same network in JAX, compiled.

    python benchmarks/torch_modules.py            # minutes
    python benchmarks/torch_modules.py --tiny     # seconds, to see that it runs
    python benchmarks/torch_modules.py --large    # with ResNet-18, one client

Every client has parameters of its own, as after the first local step. PyTorch computes one client
after the other. Each row is the median of interleaved tries; `difference` is the greatest one
between the compiled gradient and PyTorch's, relative to the greatest entry, without dropout.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fedsolve.models.convolution import convolve2d
from fedsolve.models.layers import halve
from fedsolve.problem.samples import Samples
from fedsolve.torch.compiled import Compiled
from fedsolve.torch.module import Network

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support
from tests.support.torch_modules import ResNet18


def binary(model, data):
    return F.binary_cross_entropy_with_logits(model(data["x"])[:, 0], data["y"])


def entropy(model, data):
    return F.cross_entropy(model(data["x"]), data["c"])


def perceptron():
    return nn.Sequential(nn.Linear(30, 16), nn.Tanh(), nn.Linear(16, 1))


def perceptron_in_jax(params, data, key):
    out = jnp.tanh(data["x"] @ params["0.weight"].T + params["0.bias"])
    out = (out @ params["2.weight"].T + params["2.bias"])[:, 0]
    return jnp.mean(jax.nn.softplus(out) - data["y"] * out)


def cnn():
    """pfl's network for CIFAR-10."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(14 * 14 * 64, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )


def dropped(rows, rate, key):
    kept = jax.random.bernoulli(key, 1 - rate, rows.shape)
    return jnp.where(kept, rows / (1 - rate), 0)


def cnn_in_jax(params, data, key):
    """The network of `peers/cifar_ours.py`; rows are in another order, which costs nothing."""
    first, second = jax.random.split(key)
    maps = data["x"].transpose(0, 2, 3, 1)
    for i in ("0", "2"):
        maps = convolve2d(maps, params[f"{i}.weight"]) + params[f"{i}.bias"]
        maps = jax.nn.relu(maps)
    rows = dropped(halve(maps).reshape(len(maps), -1), 0.25, first)
    rows = jax.nn.relu(rows @ params["7.weight"].T + params["7.bias"])
    rows = dropped(rows, 0.5, second) @ params["10.weight"].T + params["10.bias"]
    shares = jax.nn.log_softmax(rows)
    return -jnp.mean(jnp.take_along_axis(shares, data["c"][:, None], axis=1))


def with_batch_norm():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


class Text(nn.Module):
    """Embedding, two encoder layers, and a head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


class Memory(nn.Module):
    """A long short-term memory and a head."""

    def __init__(self):
        super().__init__()
        self.layers = nn.LSTM(8, 32, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.layers(x)[0][:, -1])


def rows(m, s, rng):
    return {"x": rng.standard_normal((m, s, 30)), "y": rng.integers(0, 2, (m, s)).astype(float)}


def images(m, s, rng):
    return {"x": rng.standard_normal((m, s, 3, 32, 32)), "c": rng.integers(0, 10, (m, s))}


def words(m, s, rng):
    return {"x": rng.integers(0, 100, (m, s, 20)), "c": rng.integers(0, 10, (m, s))}


def series(m, s, rng):
    return {"x": rng.standard_normal((m, s, 20, 8)), "c": rng.integers(0, 10, (m, s))}


WORK = {  # module, loss, data, the same in JAX, clients, samples
    "30-16-1": (perceptron, binary, rows, perceptron_in_jax, 10, 32),
    "pfl's CNN, dropout": (cnn, entropy, images, cnn_in_jax, 10, 10),
    "CNN, batch normalisation": (with_batch_norm, entropy, images, None, 10, 10),
    "LSTM": (Memory, entropy, series, None, 10, 16),
    "transformer": (Text, entropy, words, None, 10, 16),
}
LARGE = {"ResNet-18": (lambda: ResNet18(10), entropy, images, None, 1, 32)}


def measure(make, loss, make_data, by_hand, m, s, tries):
    torch.manual_seed(0)
    module = make()
    data = make_data(m, s, np.random.default_rng(0))
    data = {k: v.astype(np.float32) if v.dtype.kind == "f" else v for k, v in data.items()}
    network = Network(module)
    compiled = Compiled("loss", loss, network, Samples(data))
    params = {k: jnp.stack([jnp.asarray(v)] * m) for k, v in network.params.items()}
    seen = jax.tree.map(jnp.asarray, data)
    keys = jax.random.split(jax.random.key(0), m)

    def in_training(params, data, key):
        return compiled(params, data, key)[0]

    ours = jax.jit(jax.vmap(jax.value_and_grad(in_training)))
    works = {"ours": lambda: jax.block_until_ready(ours(params, seen, keys))}
    if by_hand is not None:
        theirs = jax.jit(jax.vmap(jax.value_and_grad(by_hand)))
        works["JAX"] = lambda: jax.block_until_ready(theirs(params, seen, keys))
    own = [{k: torch.from_numpy(v[i]) for k, v in data.items()} for i in range(m)]
    copy = network.fresh(torch.float32, training=True)

    def in_torch():
        for one in own:
            torch.autograd.grad(loss(copy, one), list(copy.parameters()))

    works["PyTorch"] = in_torch
    seconds = {name: [] for name in works}
    for trial in range(tries + 1):
        for name, work in works.items():
            began = time.perf_counter()
            work()
            if trial:  # the first one compiles
                seconds[name].append(time.perf_counter() - began)
    found = {name: statistics.median(times) for name, times in seconds.items()}
    return found | {"difference": difference(network, loss, compiled, params, seen, own[0])}


def difference(network, loss, compiled, params, data, own):
    """The greatest difference of gradients in evaluation mode, which has no dropout."""
    plain = jax.jit(jax.grad(lambda p, d: compiled(p, d)[0]))
    found = plain(*jax.tree.map(lambda leaf: leaf[0], (params, data)))
    module = network.fresh(torch.float32, training=False)
    named = dict(module.named_parameters())
    slopes = torch.autograd.grad(loss(module, own), list(named.values()))
    return max(
        float(np.abs(found[name] - slope.numpy()).max() / max(slope.abs().max(), 1e-9))
        for name, slope in zip(named, slopes, strict=True)
    )


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--tries", type=int, default=7)
    options = parser.parse_args()
    work = WORK | LARGE if options.large else WORK
    print(f"{'module':26}{'PyTorch':>10}{'JAX':>10}{'ours':>10}{'difference':>12}")
    for name, (make, loss, make_data, by_hand, m, s) in work.items():
        if options.tiny:
            if name not in ("30-16-1", "LSTM"):
                continue
            m, s = 2, 2
        found = measure(make, loss, make_data, by_hand, m, s, 1 if options.tiny else options.tries)
        times = [found.get(kind) for kind in ("PyTorch", "JAX", "ours")]
        cells = "".join(f"{'-' if t is None else f'{t:.5f}':>10}" for t in times)
        print(f"{name:26}{cells}{found['difference']:>12.1e}", flush=True)


if __name__ == "__main__":
    main()
