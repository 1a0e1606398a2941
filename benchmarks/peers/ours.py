"""Fedsolve, without evaluation between the rounds, as the others."""

import jax
import jax.numpy as jnp
from work import COHORT, FEATURES, LONG, RATE, ROUNDS, STEPS, Meter, data

import fedsolve as fs


def loss(w, data):
    margin = data["x"] @ w
    return jnp.mean(jax.nn.softplus(margin) - data["y"] * margin)


meter = Meter()
x, y = data()
problem = fs.Problem(loss, {"x": x, "y": y}, jnp.zeros(FEATURES))
algorithm = fs.FedAvg(RATE, local_steps=STEPS, participants=COHORT)
run = fs.solve(problem, algorithm, ROUNDS, evaluate_every=ROUNDS)
meter.first_done()
for _ in range(3):
    fs.solve(problem, algorithm, LONG, seed=1, evaluate_every=LONG)
    meter.done(LONG)
meter.report(run.params)
