"""FedADMM at the paper's largest sizes: seconds, rates, memory, and a plain NumPy loop.

    python benchmarks/fedadmm_scale.py                    # m = 1000, 2000, 3000, 4000; n = 1000
    python benchmarks/fedadmm_scale.py 1000 4000          # some of them
    python benchmarks/fedadmm_scale.py blocks             # how many clients at once

Example 5.1 with k_0 = 10, ρ = 0.5, float32. The NumPy loop is Algorithm 1 client by client on
unpadded data, with the gradient at w computed once a round and the residual (6) computed in every
iteration; it makes the same rounds with the same participants, and must come to the same w. Rates
are of one more round: FLOP of the gradients that it needs on real samples (participants at w,
everyone at the new w for the rule), and bytes of clients' padded data that they read. Each m runs
in a process of its own, since peak memory is a property of the process.
"""

import resource
import subprocess
import sys
import time

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import fedsolve as fs

SIZE, LOCAL, ROUNDS = 1000, 10, 10
NUMPY_ROUNDS = 3


def best(function, times=3):
    found = []
    for _ in range(times):
        began = time.perf_counter()
        function()
        found.append(time.perf_counter() - began)
    return min(found)


def machine():
    """GFLOP/s of a matrix product and GB/s of a copy (read and written), by NumPy."""
    a = np.random.default_rng(0).standard_normal((2000, 2000), np.float32)
    source = np.ones(2**26, np.float32)
    target = np.empty_like(source)
    product = 2 * 2000**3 / best(lambda: a @ a) / 1e9
    return product, 2 * source.nbytes / best(lambda: np.copyto(target, source)) / 1e9


def numpy_rounds(problem, cohorts, lipschitz):
    """Algorithm 1 in a plain loop; the w after each round. Evaluates f's gradient, as we do."""
    m, data, mask = problem.n, problem.samples.values, np.asarray(problem.samples.mask)
    counts, inputs, targets = mask.sum(axis=1), np.asarray(data["inputs"]), data["targets"]

    def gradient(i, w):
        a = inputs[i, : counts[i]]
        return a.T @ ((a @ w - targets[i, : counts[i]]) / np.float32(counts[i]))

    w = np.zeros(SIZE, np.float32)
    alpha, curve = np.float32(1 / m), (lipschitz / m).astype(np.float32)
    sigma = np.float32(0.2) * curve
    pi, z = np.zeros((2, m, SIZE), np.float32)
    eps, total = np.full(m, float(LOCAL**2)), np.zeros(SIZE, np.float32)
    for cohort in cohorts:
        for i in cohort:
            v, at_w = w, alpha * gradient(i, w)
            for _ in range(LOCAL):
                eps[i] *= 0.95
                v, slope = w, at_w
                for _ in range(3):
                    v = v - (slope + pi[i] + sigma[i] * (v - w)) / (curve[i] + sigma[i])
                    slope = alpha * gradient(i, v)
                    residual = slope + pi[i] + sigma[i] * (v - w)
                    if residual @ residual <= eps[i]:
                        break
                pi[i] += sigma[i] * (v - w)
            total += sigma[i] * v + pi[i] - z[i]
            z[i] = sigma[i] * v + pi[i]
        w = total / sigma.sum()
        slope = sum(gradient(i, w) for i in range(m)) / m
        assert slope @ slope > 0
    return w


def one_size(m):
    began = time.perf_counter()
    problem = fs.problems.linear_regression(clients=m, size=SIZE)
    made = time.perf_counter() - began
    data = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(problem.samples))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    never = fs.Stationary(below=1e-30)
    algorithm = fs.FedADMM(participants=m // 2, local_iterations=LOCAL)

    def ours(rounds, stop=never):
        return fs.solve(problem, algorithm, rounds, stop=stop)

    ours(1)  # compiles
    short = best(lambda: ours(1))
    each = (best(lambda: ours(ROUNDS + 1)) - short) / ROUNDS
    run = ours(NUMPY_ROUNDS)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    lipschitz = m * np.asarray(run.state.clients.smoothness)
    began = time.perf_counter()
    w = numpy_rounds(problem, run.history["cohort"], lipschitz)
    numpy = (time.perf_counter() - began) / NUMPY_ROUNDS
    error = np.abs(w - run.params).max() / np.abs(w).max()
    assert error < 1e-3, f"the two must be the same run: {error}"

    real = int(np.asarray(problem.samples.mask).sum())
    flops, read = 1.5 * 4 * real * SIZE, 1.5 * data
    product, copy = machine()
    below = fs.theory.fedadmm.tolerance(problem, test="code")
    whole = ours(500, fs.Stationary(below))
    print(
        m, real, made, data / 1e9, peak / 1e9, short, each, numpy, flops / each / 1e9,
        read / each / 1e9, product, copy, whole.rounds, whole.seconds,
    )  # fmt: skip


def blocks(m=1000):
    """A round's seconds by how many clients are computed at once."""
    problem = fs.problems.linear_regression(clients=m, size=SIZE)
    algorithm = fs.FedADMM(participants=m // 2, local_iterations=LOCAL)
    table = Table("clients at once", "one more round", box=box.SIMPLE_HEAD)
    for at_once in (None, 1, 2, 4, 8, 16, 32, m):

        def run(rounds, at_once=at_once):
            stop = fs.Stationary(below=1e-30)
            return fs.solve(problem, algorithm, rounds, clients_at_once=at_once, stop=stop)

        run(1)
        each = (best(lambda: run(6), 2) - best(lambda: run(1), 2)) / 5
        table.add_row("as chosen" if at_once is None else str(at_once), f"{each:.3f} s")
    Console().print(table)


def main(sizes):
    table = Table(box=box.SIMPLE_HEAD)
    for column in (
        "m", "samples", "data", "memory of the run", "start and first round", "one more round",
        "NumPy", "ratio", "GFLOP/s", "of a product", "GB/s", "of a copy", "until the code's rule",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for m in sizes:
        done = subprocess.run(
            [sys.executable, __file__, "one", str(m)], stdout=subprocess.PIPE, text=True, check=True
        )
        found = list(map(float, done.stdout.split()))
        _, real, _, data, peak, short, each, numpy, flops, read, product, copy, cr, whole = found
        table.add_row(
            f"{m}", f"{real:.0f}", f"{data:.2f} GB", f"{peak:.2f} GB", f"{short:.2f} s",
            f"{each:.3f} s", f"{numpy:.3f} s", f"{numpy / each:.1f}", f"{flops:.1f}",
            f"{100 * flops / product:.0f} %", f"{read:.1f}", f"{100 * read / copy:.0f} %",
            f"{cr:.0f} rounds, {whole:.1f} s",
        )  # fmt: skip
        print(done.stdout, flush=True)
    Console(width=180).print(table)


if __name__ == "__main__":
    if sys.argv[1:2] == ["one"]:
        one_size(int(sys.argv[2]))
    elif sys.argv[1:] == ["blocks"]:
        blocks()
    else:
        main(list(map(int, sys.argv[1:])) or [1000, 2000, 3000, 4000])
