"""A bare JAX `lax.scan`: nothing but the mathematics."""

import jax
import jax.numpy as jnp
import numpy as np
from work import LONG, ROUNDS, WORK, Meter, data


def loss(w, x, y):
    scores = x @ w
    if w.ndim == 1:
        return jnp.mean(jax.nn.softplus(scores) - y * scores)
    shares = jax.nn.log_softmax(scores)
    return -jnp.mean(jnp.take_along_axis(shares, y[:, None], axis=1))


def local(w, x, y, key):
    if WORK.batch is None:
        return jax.lax.fori_loop(
            0, WORK.steps, lambda _, v: v - WORK.rate * jax.grad(loss)(v, x, y), w
        )
    order = jax.random.permutation(key, WORK.samples).reshape(WORK.steps, WORK.batch)

    def step(v, rows):
        return v - WORK.rate * jax.grad(loss)(v, x[rows], y[rows]), None

    return jax.lax.scan(step, w, order)[0]


@jax.jit
def run(x, y, keys):
    def one(w, key):
        cohort = jax.random.choice(key, WORK.clients, (WORK.cohort,), replace=False)
        keys = jax.random.split(jax.random.fold_in(key, 1), WORK.cohort)
        found = jax.vmap(local, (None, 0, 0, 0))(w, x[cohort], y[cohort], keys)
        return jnp.mean(found, axis=0), None

    return jax.lax.scan(one, jnp.zeros(WORK.shape), keys)[0]


meter = Meter()
x, y = map(jnp.asarray, data())
w = np.asarray(run(x, y, jax.random.split(jax.random.key(0), ROUNDS)))
many = jax.random.split(jax.random.key(1), LONG)
run(x, y, many).block_until_ready()
meter.first_done()
for _ in range(3):
    run(x, y, many).block_until_ready()
    meter.done(LONG)
meter.report(w)
