"""Fedsolve, without evaluation between the rounds, as the others."""

import jax
import jax.numpy as jnp
from work import LONG, ROUNDS, WORK, Meter, data

import fedsolve as fs


def loss(w, data):
    scores, y = data["x"] @ w, data["y"]
    if w.ndim == 1:
        return jnp.mean(jax.nn.softplus(scores) - y * scores)
    shares = jax.nn.log_softmax(scores)
    return -jnp.mean(jnp.take_along_axis(shares, y[:, None], axis=1))


meter = Meter()
x, y = data()
problem = fs.Problem(loss, {"x": x, "y": y}, jnp.zeros(WORK.shape), batch_size=WORK.batch)
algorithm = fs.FedAvg(WORK.rate, local_steps=WORK.steps, participants=WORK.cohort)
run = fs.solve(problem, algorithm, ROUNDS, evaluate_every=ROUNDS)
meter.first_done()
for _ in range(3):
    fs.solve(problem, algorithm, LONG, seed=1, evaluate_every=LONG)
    meter.done(LONG)
meter.report(run.params)
