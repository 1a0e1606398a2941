"""Fedsolve on pfl's CIFAR-10 configuration, on whatever device JAX has.

    COMPUTE=bfloat16 python benchmarks/peers/run.py --work cifar10 Fedsolve

Clients' convolutions have weights of their own. As one grouped convolution that is slow on a GPU;
as products with every pixel's neighbourhood (`convolve2d`) they are one batched matrix product.
`CONVOLUTION=grouped` is for comparison.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
from rounds import timed
from work import ROUNDS, WORK, Meter, data

import fedsolve as fs
from fedsolve.models.convolution import convolve2d
from fedsolve.models.layers import halve

COMPUTE = os.environ.get("COMPUTE", "float32")
GROUPED = os.environ.get("CONVOLUTION") == "grouped"
NONE = ((0, 0), (0, 0))


def convolve(maps, weight):
    if not GROUPED:
        return convolve2d(maps, weight)
    names = ("NHWC", "OIHW", "NHWC")
    return jax.lax.conv_general_dilated(maps, weight, (1, 1), NONE, dimension_numbers=names)


def dropped(rows, rate, key):
    if key is None:
        return rows
    kept = jax.random.bernoulli(key, 1 - rate, rows.shape)
    return jnp.where(kept, rows / (1 - rate), 0)


def scores(params, images, key=None):
    first, second = (None, None) if key is None else jax.random.split(key)
    params = jax.tree.map(lambda leaf: leaf.astype(COMPUTE), params)
    maps = images.astype(COMPUTE) / 255
    for layer in params["convolutions"]:
        maps = jax.nn.relu(convolve(maps, layer["weight"]) + layer["bias"])
    rows = dropped(halve(maps).reshape(len(maps), -1), 0.25, first)
    rows = jax.nn.relu(rows @ params["hidden"]["weight"] + params["hidden"]["bias"])
    rows = dropped(rows, 0.5, second)
    return (rows @ params["head"]["weight"] + params["head"]["bias"]).astype(jnp.float32)


def loss(params, data, key=None):
    shares = jax.nn.log_softmax(scores(params, data["x"], key))
    return -jnp.mean(jnp.take_along_axis(shares, data["y"][:, None].astype(int), axis=1))


def accuracy(params, test):
    def right(pair):
        return jnp.argmax(scores(params, pair[0][None]), axis=1)[0] == pair[1]

    return jnp.mean(jax.lax.map(right, (test["x"], test["y"]), batch_size=500))


def start(key):
    """Glorot's uniform weights, as pfl's; a dense weight lies as (before, after)."""
    keys = jax.random.split(key, 4)
    conv = jax.nn.initializers.glorot_uniform(in_axis=1, out_axis=0)
    dense = jax.nn.initializers.glorot_uniform()
    shapes = (32, 3, 3, 3), (64, 32, 3, 3)
    layers = [
        {"weight": conv(k, shape), "bias": jnp.zeros(shape[0])}
        for k, shape in zip(keys, shapes, strict=False)
    ]
    return {
        "convolutions": layers,
        "hidden": {"weight": dense(keys[2], (14 * 14 * 64, 128)), "bias": jnp.zeros(128)},
        "head": {"weight": dense(keys[3], (128, 10)), "bias": jnp.zeros(10)},
    }


meter = Meter()
x, y = data()
test = np.load(os.environ["DATA"])
problem = fs.Problem(
    loss,
    {"x": x, "y": y},
    start(jax.random.key(0)),
    batch_size=WORK.batch,
    test={"x": test["test_x"], "y": test["test_y"]},
    metrics={"accuracy": accuracy},
)
algorithm = fs.FedAvg(WORK.rate, local_epochs=WORK.epochs, participants=WORK.cohort)
meter.report(**timed(problem, algorithm, meter, ROUNDS))
