"""FedSGM on Neyman-Pearson: against a NumPy transcription, as a sweep, as clients grow, and as a
command from its start to its end.

    python benchmarks/neyman_pearson.py
    python benchmarks/neyman_pearson.py start      # only the last

The paper's run: n = 20, m = 10, E = 5, Top-K 0.1 both ways, T = 500. Times are the best of several
in this process, and ratios to what was measured beside them.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import fedsolve as fs
from fedsolve.problems.neyman_pearson import majority_loss, minority_loss
from tiny import tiny

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support import oracles

ROUNDS, FRACTION = tiny(500, 5), 0.1
TIMES = tiny(None, 1)  # how often something is measured
MANY = tiny(2000, 3)  # rounds, to find the seconds of one
CLIENTS = tiny((20, 200, 2000, 20_000), (20, 40))
STEPS = [1.0, 0.3, 0.1, 0.03, 0.01]
ALGORITHM = fs.FedSGM(
    step_size=0.3,
    tolerance=0.05,
    switching=fs.Soft(40.0),
    participants=10,
    local_steps=5,
    uplink=fs.TopK(FRACTION),
    downlink=fs.TopK(FRACTION),
)


def timed(function, times=5):
    """Seconds of the first call, and of the best of some more."""
    found: list[float] = []
    result: Any = None
    for _ in range((TIMES or times) + 1):
        began = time.perf_counter()
        result = function()
        found.append(time.perf_counter() - began)
    return found[0], min(found[1:]), result


def against_numpy(table):
    problem = fs.problems.neyman_pearson(clients=20)
    first, ours, run = timed(lambda: fs.solve(problem, ALGORITHM, ROUNDS), 10)
    data = problem.samples.values
    clients = oracles.neyman_pearson_clients(data["majority"], data["minority"])

    def transcription():
        path, _, _ = oracles.fedsgm(
            clients,
            np.zeros(30),
            run.history["cohort"],
            step_size=0.3,
            tolerance=0.05,
            switch=oracles.soft(40.0),
            local_steps=5,
            uplink=lambda v: oracles.top_k(v, FRACTION),
            downlink=lambda v: oracles.top_k(v, FRACTION),
        )
        return path

    _, numpy, path = timed(transcription, 2)
    assert np.abs(path[-1] - run.params).max() < 1e-2, "the two must be the same run"
    sweep_first, sweep, _ = timed(
        lambda: fs.sweep(problem, ALGORITHM, ROUNDS, seeds=[0, 1, 2], step_size=STEPS), 5
    )
    table.add_row("NumPy transcription", f"{numpy:.3f} s", "1", "")
    table.add_row("fedsolve", f"{ours:.3f} s", f"1/{numpy / ours:.0f}", f"{first - ours:.1f} s")
    table.add_row(
        "sweep, 3 seeds × 5 step sizes",
        f"{sweep:.3f} s",
        f"{sweep / ours:.1f} × one run",
        f"{sweep_first - sweep:.1f} s",
    )


def grown(clients):
    """The task with more clients: its 20 clients' data again and again."""
    base = fs.problems.neyman_pearson(clients=20)
    index = np.arange(clients) % 20
    return fs.Problem(
        objective=majority_loss,
        constraint=minority_loss,
        clients={name: rows[index] for name, rows in base.samples.values.items()},
        params=np.zeros(30),
    )


def one_size(clients):
    """In a process of its own, since peak memory is a property of the process."""
    problem = grown(clients)
    data = sum(leaf.nbytes // 2 for leaf in problem.samples.values.values())  # float32 on device
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    times = {}
    for rounds in (1, MANY):
        _, times[rounds], _ = timed(
            lambda n=rounds: fs.solve(problem, ALGORITHM, n, evaluate_every=n), 4
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before
    micros = (times[MANY] - times[1]) / (MANY - 1) * 1e6
    print(f"{clients} {micros:.0f} {times[1] * 1e3:.0f} {data / 2**20:.1f} {peak:.0f}")


def as_clients_grow(table):
    for clients in CLIENTS:
        done = subprocess.run(
            [sys.executable, __file__, str(clients)], capture_output=True, text=True, check=True
        )
        n, micros, start, data, peak = done.stdout.split()
        table.add_row(f"{int(n):,}", f"{micros} µs", f"{start} ms", f"{data} MiB", f"{peak} MiB")


def as_a_command(table):
    """Processes from start to end, with a cache of compiled programs that is empty, then warm."""
    command = [sys.executable, "-m", "fedsolve", "run", "neyman-pearson"]
    with tempfile.TemporaryDirectory() as folder:
        place = os.environ | {"XDG_CACHE_HOME": folder}

        def process(*words):
            """Seconds, and those of the processor."""
            began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(words, check=True, capture_output=True, env=place, cwd=folder)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            return time.perf_counter() - began, busy

        def best(*words, times=5):
            return [
                f"{value:.2f} s"
                for value in np.min([process(*words) for _ in range(TIMES or times)], axis=0)
            ]

        first = best(*command, "--rounds", str(ROUNDS), times=1)
        table.add_row("import fedsolve", *best(sys.executable, "-c", "import fedsolve"))
        table.add_row("1 round", *best(*command, "--rounds", "1"))
        command += ["--rounds", str(ROUNDS)]
        table.add_row(f"{ROUNDS} rounds", *best(*command))
        table.add_row(f"{ROUNDS} rounds, the very first time", *first)


def main():
    console = Console()
    if sys.argv[1:] != ["start"]:
        table = Table("run of 500 rounds", "time", "ratio", "to compile", box=box.SIMPLE_HEAD)
        against_numpy(table)
        console.print(table)
        title = "clients (10 take part)", "one more round", "one round", "data", "memory of the run"
        table = Table(*title, box=box.SIMPLE_HEAD)
        as_clients_grow(table)
        console.print(table)
    title = "fedsolve run neyman-pearson, best of 5 processes", "time", "processor time"
    table = Table(*title, box=box.SIMPLE_HEAD)
    as_a_command(table)
    console.print(table)


if __name__ == "__main__":
    one_size(int(sys.argv[1])) if sys.argv[1:] not in ([], ["start"]) else main()
