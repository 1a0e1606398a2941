"""Weak and strong scaling over devices: the same program on 1, 2, 4, ... of them.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python benchmarks/scaling.py
    python benchmarks/scaling.py                       # on the GPUs of this machine

Strong: the same clients on more devices. Weak: as many clients a device. Every client does 20
gradient steps of least squares on its own samples in each round. Prints seconds a round (compiling
apart), the ratio to one device, and how far the parameters are from those of one device.
"""

import argparse
import time

import jax
import numpy as np

import fedsolve as fs


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
    options = {"evaluate_every": told.rounds, "devices": devices}
    fs.solve(given, algorithm, told.rounds, **options)  # compiles
    best, run = np.inf, None
    for _ in range(3):
        began = time.perf_counter()
        run = fs.solve(given, algorithm, told.rounds, **options)
        best = min(best, time.perf_counter() - began)
    assert run is not None
    return best / told.rounds, run.params


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {"clients": 64, "samples": 200, "size": 200, "rounds": 20}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    told = parser.parse_args()
    counts = [2**k for k in range(10) if 2**k <= jax.device_count()]
    print(f"{jax.device_count()} x {jax.devices()[0].device_kind}")
    print("devices  clients  s/round  against one  difference")
    for kind in ("strong", "weak"):
        print(kind)
        alone, reference = 0.0, np.zeros(0)
        for devices in counts:
            clients = told.clients * (devices if kind == "weak" else 1)
            seconds, params = measured(clients, devices, told)
            if devices == 1:
                alone, reference = seconds, params
            apart = "" if kind == "weak" else f"{np.abs(params - reference).max():11.1e}"
            print(f"{devices:7d}  {clients:7d}  {seconds:7.4f}  {seconds / alone:11.2f}  {apart}")


if __name__ == "__main__":
    main()
