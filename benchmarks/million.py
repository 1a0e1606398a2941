"""A million clients with states of their own, streamed from disk.

    python benchmarks/million.py [--clients 1000000] [--cohort 1000] [--rounds 30] [--size 10000]
    python benchmarks/million.py --everyone --cohort 10000 --size 32

With `--everyone` clients take part in turn until all of them did: then each of them has a state.
Sparse least squares with error feedback (FedSGM, Top-1 %): every client has 10 samples of 10
non-zero features and, once it was asked, a residual of the size of the model. Prints time and
memory; data and states are in a folder.
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

import fedsolve as fs
from fedsolve.participation import Cyclic, Random
from tiny import tiny

SAMPLES, FEATURES = 10, 10


def loss(w, data):
    predicted = (data["values"] * w[data["features"]]).sum(axis=1)
    return ((predicted - data["targets"]) ** 2).mean() / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = {"clients": 10**6, "cohort": 1000, "rounds": 30, "size": 10_000}
    for name, value in tiny(
        sizes, {"clients": 200, "cohort": 10, "rounds": 4, "size": 100}
    ).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--everyone", action="store_true")
    told = parser.parse_args()
    rounds = -(-told.clients // told.cohort) if told.everyone else told.rounds
    selection = Cyclic(told.cohort) if told.everyone else Random(told.cohort)
    algorithm = fs.FedSGM(0.003 * told.size, uplink=fs.TopK(0.01), selection=selection)
    with tempfile.TemporaryDirectory(dir=told.folder) as folder:
        run(Path(folder), algorithm, told.clients, told.cohort, rounds, told.size)


def run(
    folder: Path, algorithm: fs.Algorithm, clients: int, cohort: int, rounds: int, size: int
) -> None:
    rng = np.random.default_rng(0)
    truth = rng.standard_normal(size).astype(np.float32)
    kinds = {"features": np.int32, "values": np.float32, "targets": np.float32}
    data = {}
    for name, kind in kinds.items():
        shape = (clients, SAMPLES) if name == "targets" else (clients, SAMPLES, FEATURES)
        data[name] = np.lib.format.open_memmap(folder / f"{name}.npy", "w+", kind, shape)
    for first in range(0, clients, 10_000):
        part = slice(first, min(first + 10_000, clients))
        shape = (part.stop - first, SAMPLES, FEATURES)
        features = rng.integers(0, size, shape, np.int32)
        values = rng.standard_normal(shape, np.float32)
        data["features"][part], data["values"][part] = features, values
        data["targets"][part] = (values * truth[features]).sum(axis=2)
    began = time.perf_counter()
    problem = fs.Problem(loss, data, np.zeros(size, np.float32))
    ready = time.perf_counter()
    times = []
    result = fs.solve(
        problem,
        algorithm,
        rounds,
        evaluate_every=rounds,
        runtime="streamed",
        store=folder / "states",
        progress=lambda done, *_: times.append((done, time.perf_counter())),
    )
    (first, since), (last, until) = times[0], times[-2]
    rows = folder / "states" / "rows"
    megabytes = {
        "data": sum(values.nbytes for values in data.values()),
        "states of all, if held": clients * (4 * size + 8),
        "states on disk": rows.stat().st_blocks * 512,
        "peak, mapped files included": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "own memory at the end": own_memory(),
    }
    print(f"{clients} clients, {cohort} a round, {rounds} rounds, {size} parameters")
    print(f"  problem checked in {ready - began:.1f} s")
    print(f"  {(until - since) / max(last - first, 1):.4f} s a round")
    print(f"  whole run, one evaluation of all clients included: {result.seconds:.1f} s")
    print(f"  clients that have a state: {rows_used(rows, 4 * size + 8)}")
    print(f"  f = {result.history['objective'][-1]:.5f}")
    for name, count in megabytes.items():
        print(f"  {name}: {count / 2**20:.0f} MiB")


def rows_used(file: Path, each: int) -> int:
    """How many are not as they were made; piece by piece, for memory's sake."""
    rows, used = np.memmap(file, np.uint8, "r"), 0
    for first in range(0, len(rows) // each, 1000):
        part = rows[first * each : (first + 1000) * each]
        used += int(part[: len(part) // each * each].reshape(-1, each).any(axis=1).sum())
    return used


def own_memory() -> int:
    """What is not the pages of a file."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


if __name__ == "__main__":
    main()
