"""FedJAX's own federated averaging, with its example's shape."""

import jax

jax.tree_map = jax.tree.map  # FedJAX 0.0.17 is of a time when JAX had it

import fedjax
import jax.numpy as jnp
import numpy as np
from fedjax.algorithms import fed_avg
from work import ROUNDS, WORK, Meter, data


def loss(params, batch, rng):
    scores, y = batch["x"] @ params, batch["y"]
    if params.ndim == 1:
        return jnp.mean(jax.nn.softplus(scores) - y * scores)
    shares = jax.nn.log_softmax(scores)
    return -jnp.mean(jnp.take_along_axis(shares, y[:, None], axis=1))


def grads(params, batch, rng):
    return jax.grad(loss)(params, batch, rng)


meter = Meter()
x, y = data()
clients = fedjax.InMemoryFederatedData({str(i): {"x": x[i], "y": y[i]} for i in range(len(x))})
batch = WORK.batch or WORK.samples
algorithm = fed_avg.federated_averaging(
    grads,
    client_optimizer=fedjax.optimizers.sgd(WORK.rate),
    server_optimizer=fedjax.optimizers.sgd(1.0),
    client_batch_hparams=fedjax.ShuffleRepeatBatchHParams(batch, num_epochs=WORK.epochs),
)
sampler = fedjax.client_samplers.UniformGetClientSampler(clients, WORK.cohort, seed=0)
state = algorithm.init(jnp.zeros(WORK.shape))


def rounds(state, count):
    for _ in range(count):
        state, _ = algorithm.apply(state, sampler.sample())
    jax.block_until_ready(state.params)
    return state


state = rounds(state, 2)
meter.first_done()
state = rounds(state, ROUNDS)
meter.done(ROUNDS)
w = np.asarray(state.params)
for _ in range(2):
    state = rounds(state, ROUNDS)
    meter.done(ROUNDS)
meter.report(w)
