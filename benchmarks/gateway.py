"""Measure rounds with very many clients on two sites: `python benchmarks/gateway.py [--tiny]`.

Two gateways have all the clients. Each federation is a server and two sites in processes of their
own, over mutual TLS. Timed is a round without evaluation (which is over all clients), from one
record of the server's journal to the next: it is to cost what its participants cost, however many
clients there are. FedSGM on linear regression with 100 parameters, one or two samples a client,
Top-K with error feedback. `--tiny` is a run of seconds that checks that the script works.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import statistics
import threading
import time
from itertools import pairwise
from pathlib import Path

from fedsolve.experiments import config
from fedsolve.flare.local_federation import local_federation, run_on

SITES = 2
FIRST = 5  # rounds that are not timed: programs are compiled in them
CLIENTS, PARTICIPANTS = (20, 200, 2_000, 20_000, 100_000), (10, 1_000)


def experiment(clients: int, participants: int, rounds: int) -> config.Experiment:
    """Return an experiment that evaluates at its end only."""
    table = {
        "problem": {"kind": "linear_regression", "clients": clients, "smallest": 1, "largest": 2},
        "algorithm": {
            "kind": "FedSGM",
            "step_size": 0.01,
            "participants": min(participants, clients),
            "uplink": {"kind": "TopK", "fraction": 0.1},
        },
        "run": {"rounds": rounds, "evaluate_every": rounds},
    }
    return config.resolve(f"gateway-{clients}-{participants}", table)


class Watch:
    """Notes when the server's journal of a run grows: once a round."""

    def __init__(self, home: Path):
        self.times: list[float] = []
        self._home, self._over = home, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        before: list[tuple[str, int]] = []
        while not self._over.wait(0.001):
            with contextlib.suppress(OSError):  # a file was replaced meanwhile
                now = [(p.name, p.stat().st_size) for p in self._home.glob("records-*.log")]
                if now != before and sum(size for _, size in now):
                    self.times.append(time.perf_counter())
                before = now

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def main() -> None:
    """Print a line for each number of clients and of participants."""
    parser = argparse.ArgumentParser(description="Rounds with very many clients.")
    parser.add_argument("--tiny", action="store_true", help="one small federation")
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS)
    parser.add_argument("--participants", type=int, nargs="+", default=PARTICIPANTS)
    parser.add_argument("--rounds", type=int, default=100)
    words = parser.parse_args()
    if words.tiny:
        words.clients, words.participants, words.rounds = [200], [10], 12
    logging.disable(logging.ERROR)  # FLARE's own messages
    print("clients  participants  median ms a round  mean ms a round  s in all")
    for clients in words.clients:
        with local_federation(clients, SITES, lambda news: None) as federation:
            for participants in words.participants:
                wanted, run = experiment(clients, participants, words.rounds), f"of-{participants}"
                began = time.perf_counter()
                with Watch(federation.home(run) / "0" / "server") as watch:
                    run_on(federation, wanted, run, lambda news: None)
                total, times = time.perf_counter() - began, watch.times[FIRST:-1]
                each = [1e3 * (after - before) for before, after in pairwise(times)]
                print(
                    f"{clients:7d}  {participants:12d}  {statistics.median(each):17.1f}  "
                    f"{statistics.mean(each):15.1f}  {total:8.1f}",
                    flush=True,
                )
    os._exit(0)  # FLARE's threads would keep the process waiting


if __name__ == "__main__":
    main()
