"""What sums in any order cost, and what they are for: `python benchmarks/exact_sums.py [--tiny]`.

First a mean of m answers of length d, plain and by `fs.ExactSum`, in milliseconds. Then a run that
amplifies rounding (FedSGM, step 0.1, β = 40): how far apart the parameters are after some rounds if
the same clients are numbered in another order.
"""

import sys
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import fedsolve as fs
from fedsolve.federation.replies import Replies
from fedsolve.privacy.exact import ExactReplies

TINY = "--tiny" in sys.argv
SIZES = [(20, 100)] if TINY else [(20, 100), (20, 100_000), (1000, 100), (1000, 10_000)]
REPEATS = 3 if TINY else 20
ROUNDS = (2, 4) if TINY else (10, 40, 60, 80, 100)


def milliseconds(replies: type[Replies], clients: int, size: int) -> float:
    """Return the fastest of some means."""
    rows = jnp.asarray(np.random.default_rng(0).standard_normal((clients, size)), jnp.float32)
    arrived = np.ones(clients, bool)
    mean = jax.jit(lambda rows: replies(rows, arrived).mean())
    mean(rows).block_until_ready()
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        mean(rows).block_until_ready()
        times.append(time.perf_counter() - began)
    return 1e3 * min(times)


def steep(order: np.ndarray) -> fs.Problem:
    """Return a problem of six clients with two targets far apart, in some order of the clients."""
    rng = np.random.default_rng(0)
    x, way = rng.standard_normal((6, 40, 12)), rng.standard_normal(12)
    way *= 0.7 / np.linalg.norm(way)
    t, u = (x @ end + 0.1 * rng.standard_normal((6, 40)) for end in (way, -way))
    problem = fs.Problem(
        objective=lambda w, data: 0.5 * jnp.mean((data["x"] @ w - data["t"]) ** 2),
        constraint=lambda w, data: 0.5 * jnp.mean((data["x"] @ w - data["u"]) ** 2) - 0.5,
        params=jnp.zeros(12),
        clients={"x": x, "t": t, "u": u},
    )
    samples = jax.tree.map(lambda leaf: leaf[order], problem.samples)
    return eqx.tree_at(lambda p: p.samples, problem, samples)


print("| answers | length | plain ms | exact ms |\n|---|---|---|---|")
for clients, size in SIZES:
    plain, exact = (milliseconds(each, clients, size) for each in (Replies, ExactReplies))
    print(f"| {clients} | {size} | {plain:.3f} | {exact:.3f} |", flush=True)
print("\n| rounds | plain | exact |\n|---|---|---|")
algorithm = fs.FedSGM(0.1, 0.05, switching=fs.Soft(40.0))
orders = np.arange(6), np.array([3, 1, 5, 0, 2, 4])
for rounds in ROUNDS:
    apart = []
    for rule in (None, fs.ExactSum()):
        ends = [
            fs.solve(steep(order), algorithm, rounds, precision="float64", aggregation=rule).params
            for order in orders
        ]
        apart.append(float(np.abs(np.asarray(ends[0]) - np.asarray(ends[1])).max()))
    print(f"| {rounds} | {apart[0]:.0e} | {apart[1]:.0e} |", flush=True)
