"""FedADMM at the paper's largest sizes: seconds, rates, memory, and plain NumPy loops.

    python benchmarks/fedadmm_scale.py                    # n = 1000; m = 1000, 2000, 3000, 4000
    python benchmarks/fedadmm_scale.py sparse             # real-sim's shape (n = 20958), the same m
    python benchmarks/fedadmm_scale.py dense 1000 4000    # some of them
    python benchmarks/fedadmm_scale.py devices 2 1000     # clients shared out over two devices
    python benchmarks/fedadmm_scale.py blocks             # how many clients at once
    python benchmarks/fedadmm_scale.py dense 1000 --beside ../before/src  # another version, too
    python benchmarks/fedadmm_scale.py rounds sparse 4000 --beside ../before/src  # without NumPy

Example 5.1 (or 5.2 on generated sparse rows) with k_0 = 10, ρ = 0.5, float32. The peer is Algorithm
1 client by client in NumPy (SciPy for sparse rows), on unpadded data, with the gradient at w
computed once a round. The plain loop computes the residual (6) in every iteration, as the paper
writes it; the shortcut's loop skips it where our bound shows that it is small enough. All make the
same rounds with the same participants and must come to the same w. A round includes ∇f over all
clients at the new w, which the rule (30) asks for.

Seconds are the least of several, wall clock and processor time. FLOP and bytes are of the gradients
that a round needs: participants at w, everyone at the new w; FLOP on real samples, bytes of
the padded data, once each. Each m runs in a process of its own, since peak memory is a property of
the process.
"""

import itertools
import os
import resource
import subprocess
import sys
import time
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from tiny import tiny

LOCAL, ROUNDS, NUMPY_ROUNDS = 10, 10, 3
SIZES = tiny([1000, 2000, 3000, 4000], [8])
WIDTH, ROWS = tiny((1000, None), (10, 400))  # parameters; rows of the sparse data
MATRIX, COPIED, UNTIL = tiny((2000, 2**26, 500), (100, 2**10, 5))
DEVICES = int(os.environ.get("DEVICES", "1"))
if DEVICES > 1:
    os.environ["XLA_FLAGS"] = (
        f"--xla_force_host_platform_device_count={DEVICES} "
        "--xla_cpu_enable_concurrency_optimized_scheduler=false"
    )

import jax  # noqa: E402 (after its flags)

import fedsolve as fs  # noqa: E402
from fedsolve.problems.regression import deal  # noqa: E402


def best(function, times=3) -> np.ndarray:
    """The least wall clock and the least processor time."""
    found = []
    for _ in range(times):
        began, busy = time.perf_counter(), time.process_time()
        function()
        found.append((time.perf_counter() - began, time.process_time() - busy))
    return np.min(found, axis=0)


def machine():
    """GFLOP/s of a matrix product and GB/s of a copy (read and written), by NumPy."""
    a = np.random.default_rng(0).standard_normal((MATRIX, MATRIX), np.float32)
    source = np.ones(COPIED, np.float32)
    target = np.empty_like(source)
    product = 2 * MATRIX**3 / best(lambda: a @ a)[0] / 1e9
    return product, 2 * source.nbytes / best(lambda: np.copyto(target, source))[0] / 1e9


def dense(m):
    """The problem, ∇f_i in NumPy, and the FLOP of all clients' gradients."""
    problem = fs.problems.linear_regression(clients=m, size=WIDTH)
    data, counts = problem.samples.values, np.asarray(problem.samples.mask).sum(axis=1)
    inputs, targets = np.asarray(data["inputs"]), np.asarray(data["targets"])

    def gradient(i, w):
        a = inputs[i, : counts[i]]
        return a.T @ ((a @ w - targets[i, : counts[i]]) / np.float32(counts[i]))

    return problem, gradient, 4 * counts.sum() * problem.size


def sparse(m):
    rows, labels = fs.problems.like_real_sim()
    rows, labels = rows[:ROWS], labels[:ROWS]
    problem = fs.problems.sparse_regression(rows, labels, m)
    parts = deal(len(labels), m, 0)
    own = [(rows[part], rows[part].T.tocsr(), labels[part]) for part in parts]
    weight = np.float32(0.001)

    def gradient(i, w):
        a, transposed, y = own[i]
        slack = 1 / (1 + np.exp(-(a @ w))) - y
        return transposed @ (slack / np.float32(len(y))) + weight * w

    return problem, gradient, 4 * rows.nnz


def numpy_rounds(gradient, m, size, cohorts, lipschitz, shortcut):
    """Algorithm 1 in a plain loop; w at the end. Evaluates f's gradient, as we do."""
    w = np.zeros(size, np.float32)
    alpha, curve = np.float32(1 / m), (lipschitz / m).astype(np.float32)
    sigma = np.float32(0.2) * curve
    pi, z = np.zeros((2, m, size), np.float32)
    eps, total = np.full(m, float(LOCAL**2)), np.zeros(size, np.float32)
    for cohort in cohorts:
        for i in cohort:
            v, at_w = w, alpha * gradient(i, w)
            for _ in range(LOCAL):
                eps[i] *= 0.95
                v, slope = w, at_w
                for _ in range(3):
                    step = (slope + pi[i] + sigma[i] * (v - w)) / (curve[i] + sigma[i])
                    if shortcut and v is w and 4 * curve[i] ** 2 * (step @ step) <= eps[i]:
                        v = w - step
                        break
                    v = v - step
                    slope = alpha * gradient(i, v)
                    residual = slope + pi[i] + sigma[i] * (v - w)
                    if residual @ residual <= eps[i]:
                        break
                pi[i] += sigma[i] * (v - w)
            new = sigma[i] * v + pi[i]
            total += new - z[i]
            z[i] = new
        w = total / sigma.sum()
        slope = np.zeros(size, np.float32)
        for i in range(m):
            slope += gradient(i, w)
        assert slope @ slope > 0
    return w


def one_size(kind, m):
    problem, gradient, flops = {"dense": dense, "sparse": sparse}[kind](m)
    data = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(problem.samples))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    never = fs.Stationary(below=1e-30)
    algorithm = fs.FedADMM(participants=m // 2, local_iterations=LOCAL)
    devices = DEVICES if DEVICES > 1 else None

    def ours(rounds, stop=never):
        return fs.solve(problem, algorithm, rounds, stop=stop, devices=devices)

    ours(1)  # compiles
    short = best(lambda: ours(1), 5)
    each = (best(lambda: ours(ROUNDS + 1), 5) - short) / ROUNDS
    run = ours(NUMPY_ROUNDS)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    lipschitz = m * np.asarray(run.state.clients.smoothness)
    peers = []
    for shortcut in (False, True):
        found = {}

        def loop(shortcut=shortcut, found=found):
            cohorts = run.history["cohort"]
            found["w"] = numpy_rounds(gradient, m, problem.size, cohorts, lipschitz, shortcut)

        peers.extend(best(loop, 2) / NUMPY_ROUNDS)
        error = np.abs(found["w"] - run.params).max() / np.abs(found["w"]).max()
        assert error < 1e-3, f"the two must be the same run: {error}"
    product, copy = machine()
    accuracy: dict[str, Any] = {} if kind == "dense" else {"accuracy": 1e-7}
    below = fs.theory.fedadmm.tolerance(problem, **accuracy, test="code")
    whole = ours(UNTIL, fs.Stationary(below))
    print(
        m, data / 1e9, peak / 1e9, short[0], *each, *peers, 1.5 * flops / 1e9, 1.5 * data / 1e9,
        product, copy, whole.rounds, whole.seconds,
    )  # fmt: skip


def rounds_only(kind, m):
    """The seconds of a round, wall clock and processor, and those of the first."""
    problem = {"dense": dense, "sparse": sparse}[kind](m)[0]
    algorithm = fs.FedADMM(participants=m // 2, local_iterations=LOCAL)

    def ours(rounds):
        return fs.solve(problem, algorithm, rounds, stop=fs.Stationary(below=1e-30))

    ours(1)  # compiles
    short = best(lambda: ours(1), 3)
    each = np.subtract(best(lambda: ours(ROUNDS + 1), 3), short) / ROUNDS
    print(m, *short, *each)


def compare_rounds(kind, sizes, beside):
    """Rounds of both versions in turn, twice."""
    columns = ("m", "version", "first round", "CPU", "one more", "CPU")
    table = Table(*columns, box=box.SIMPLE_HEAD)
    versions = list(versions_of(beside).items())
    for m, (version, path) in itertools.product(sizes, 2 * versions):
        _, *seconds = run_one("only", kind, m, path).split()
        table.add_row(str(m), version, *(f"{float(x):.3f} s" for x in seconds))
        print(m, version, *seconds, flush=True)
    Console().print(table)


def versions_of(beside):
    return {"this": None, "other": beside} if beside else {"this": None}


def run_one(what, kind, m, path):
    """The output of one size in a process of its own; empty if that failed."""
    env = os.environ | ({"PYTHONPATH": path} if path else {})
    words = [sys.executable, __file__, what, kind, str(m)]
    return subprocess.run(words, stdout=subprocess.PIPE, text=True, env=env).stdout


def blocks(m):
    """A round's seconds by how many clients are computed at once."""
    problem = dense(m)[0]
    algorithm = fs.FedADMM(participants=m // 2, local_iterations=LOCAL)
    table = Table("clients at once", "one more round", "processor", box=box.SIMPLE_HEAD)
    for at_once in (None, 1, 2, 4, 8, 16, 32, m):

        def run(rounds, at_once=at_once):
            stop = fs.Stationary(below=1e-30)
            return fs.solve(problem, algorithm, rounds, clients_at_once=at_once, stop=stop)

        run(1)
        wall, busy = (best(lambda: run(6)) - best(lambda: run(1))) / 5
        name = "as chosen" if at_once is None else str(at_once)
        table.add_row(name, f"{wall:.3f} s", f"{busy:.3f} s")
    Console().print(table)


def main(kind, sizes, beside):
    table = Table(box=box.SIMPLE_HEAD)
    for column in (
        "m", "version", "data", "run's memory", "first round", "one more", "CPU", "plain", "CPU",
        "ratio", "CPU", "shortcut", "CPU", "ratio", "CPU", "GFLOP/s", "of product", "GB/s",
        "of copy", "until the code's rule",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for m, (version, path) in itertools.product(sizes, versions_of(beside).items()):
        told = run_one("one", kind, m, path)
        if not told:
            continue
        print(told, flush=True)
        (
            _, data, peak, short, each, busy, plain, plain_busy, cut, cut_busy, flops, read,
            product, copy, rounds, whole,
        ) = map(float, told.split())  # fmt: skip
        table.add_row(
            f"{m}", version, f"{data:.2f} GB", f"{peak:.2f} GB", f"{short:.2f} s", f"{each:.3f} s",
            f"{busy:.3f} s", f"{plain:.3f} s", f"{plain_busy:.3f} s", f"{plain / each:.1f}",
            f"{plain_busy / busy:.1f}", f"{cut:.3f} s", f"{cut_busy:.3f} s", f"{cut / each:.1f}",
            f"{cut_busy / busy:.1f}", f"{flops / each:.1f}",
            f"{100 * flops / each / product:.0f} %", f"{read / each:.1f}",
            f"{100 * read / each / copy:.0f} %", f"{rounds:.0f} rounds, {whole:.1f} s",
        )  # fmt: skip
    Console(width=200).print(table)


if __name__ == "__main__":
    words = sys.argv[1:]
    if words[:1] == ["one"]:
        one_size(words[1], int(words[2]))
    elif words[:1] == ["only"]:
        rounds_only(words[1], int(words[2]))
    elif words == ["blocks"]:
        blocks(tiny(1000, 8))
    else:
        if words[:1] == ["devices"]:
            os.environ["DEVICES"], words = words[1], words[2:]
        show = compare_rounds if words[:1] == ["rounds"] else main
        words = words[show is compare_rounds :]
        kind = words.pop(0) if words[:1] in (["dense"], ["sparse"]) else "dense"
        beside = words.pop(words.index("--beside") + 1) if "--beside" in words else ""
        words = [word for word in words if word.isdigit()]
        show(kind, list(map(int, words)) or SIZES, beside)
