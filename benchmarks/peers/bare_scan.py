"""A bare JAX `lax.scan`: nothing but the mathematics."""

import jax
import jax.numpy as jnp
import numpy as np
from work import CLIENTS, COHORT, FEATURES, LONG, RATE, ROUNDS, STEPS, Meter, data


def loss(w, x, y):
    margin = x @ w
    return jnp.mean(jax.nn.softplus(margin) - y * margin)


def local(w, x, y):
    return jax.lax.fori_loop(0, STEPS, lambda _, v: v - RATE * jax.grad(loss)(v, x, y), w)


@jax.jit
def run(x, y, keys):
    def one(w, key):
        cohort = jax.random.choice(key, CLIENTS, (COHORT,), replace=False)
        return jnp.mean(jax.vmap(local, (None, 0, 0))(w, x[cohort], y[cohort]), axis=0), None

    return jax.lax.scan(one, jnp.zeros(FEATURES), keys)[0]


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
