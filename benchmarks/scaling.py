"""Weak and strong scaling over devices: the same program on 1, 2, 4, ... of them.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python benchmarks/scaling.py
    python benchmarks/scaling.py                       # on the GPUs of this machine

Strong: the same clients on more devices. Weak: as many clients a device. Every client does 20
gradient steps of least squares on its own samples in each round. Prints seconds a round (compiling
and placing data apart: what more rounds take more), the part of the ideal that is reached, and how
far the parameters are from those of one device. Where one device has all cores already (a CPU), the
ideal cannot be reached: it is as if the cores were doubled.
"""

import argparse
import time

import jax
import numpy as np

import fedsolve as fs
from tiny import tiny


def loss(w, data):
    return ((data["inputs"] @ w - data["targets"]) ** 2).mean() / 2


def problem(clients: int, samples: int, size: int) -> fs.Problem:
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((clients, samples, size), np.float32)
    targets = inputs @ rng.standard_normal(size).astype(np.float32)
    return fs.Problem(loss, {"inputs": inputs, "targets": targets}, np.zeros(size, np.float32))


def measured(clients: int, devices: int, told: argparse.Namespace) -> tuple[float, np.ndarray]:
    """Seconds a round, and the parameters at the end."""
    given = problem(clients, told.samples, told.size)
    algorithm = fs.FedAvg(0.01, local_steps=20)

    def timed(rounds: int) -> tuple[float, np.ndarray]:
        began = time.perf_counter()
        run = fs.solve(given, algorithm, rounds, evaluate_every=3 * told.rounds, devices=devices)
        return time.perf_counter() - began, run.params

    timed(told.rounds)  # compiles
    few = min(timed(told.rounds)[0] for _ in range(3))
    many, params = min((timed(3 * told.rounds) for _ in range(3)), key=lambda found: found[0])
    return (many - few) / (2 * told.rounds), params


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = {"clients": 64, "samples": 200, "size": 200, "rounds": 20}
    for name, value in tiny(sizes, dict.fromkeys(sizes, 4)).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    told = parser.parse_args()
    counts = [2**k for k in range(10) if 2**k <= jax.device_count()]
    print(f"{jax.device_count()} x {jax.devices()[0].device_kind}")
    print("| scaling | devices | clients | s/round | of the ideal | difference |")
    print("|---|---|---|---|---|---|")
    alone, reference = measured(told.clients, 1, told)
    for kind in ("strong", "weak"):
        print(f"| {kind} | 1 | {told.clients} | {alone:.4f} | 100 % | |")
        for devices in counts[1:]:
            clients = told.clients * (devices if kind == "weak" else 1)
            seconds, params = measured(clients, devices, told)
            ideal = alone / devices if kind == "strong" else alone
            apart = f"{np.abs(params - reference).max():.1e}" if kind == "strong" else ""
            share = f"{100 * ideal / seconds:.0f} %"
            print(f"| {kind} | {devices} | {clients} | {seconds:.4f} | {share} | {apart} |")


if __name__ == "__main__":
    main()
