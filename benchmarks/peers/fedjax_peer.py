"""FedJAX's own federated averaging, with its example's shape."""

import jax

jax.tree_map = jax.tree.map  # FedJAX 0.0.17 is of a time when JAX had it

import fedjax
import jax.numpy as jnp
import numpy as np
from fedjax.algorithms import fed_avg
from work import COHORT, FEATURES, RATE, ROUNDS, SAMPLES, STEPS, Meter, data


def loss(params, batch, rng):
    margin = batch["x"] @ params
    return jnp.mean(jax.nn.softplus(margin) - batch["y"] * margin)


def grads(params, batch, rng):
    return jax.grad(loss)(params, batch, rng)


meter = Meter()
x, y = data()
clients = fedjax.InMemoryFederatedData({str(i): {"x": x[i], "y": y[i]} for i in range(len(x))})
algorithm = fed_avg.federated_averaging(
    grads,
    client_optimizer=fedjax.optimizers.sgd(RATE),
    server_optimizer=fedjax.optimizers.sgd(1.0),
    client_batch_hparams=fedjax.ShuffleRepeatBatchHParams(batch_size=SAMPLES, num_epochs=STEPS),
)
sampler = fedjax.client_samplers.UniformGetClientSampler(clients, COHORT, seed=0)
state = algorithm.init(jnp.zeros(FEATURES))
for done in range(ROUNDS + 2):
    if done == 2:
        jax.block_until_ready(state.params)
        meter.first_done()
    state, _ = algorithm.apply(state, sampler.sample())
w = np.asarray(state.params)
meter.done(ROUNDS)
meter.report(w)
