"""What a real exchange costs, beside the bare FLARE call in the same job.

    python benchmarks/deployment.py         # 3, 8 and 16 sites, each with 1 kB, 1 MB, 44 MB
    python benchmarks/deployment.py --sites 3 --sizes 1000
    python benchmarks/deployment.py --long 5000   # threads and memory over so many exchanges
    python benchmarks/deployment.py --rounds 100  # FedSGM on Neyman-Pearson, 4 sites: seconds

An exchange of ours sends w down and as much up, has every client's next state on the site's disk
before its answer is given (one number, or as many as w has) and the server's state on its own; the
bare call only echoes as many bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import psutil
from nvflare.collab import collab

import fedsolve as fs
from fedsolve.experiments import config
from fedsolve.flare import jobs
from fedsolve.flare import provisioning as kits
from fedsolve.flare.local_federation import local_federation, run_on
from tiny import tiny

NAMES = ("deployment.Echoing", "deployment.Timing")


class Echo(fs.Algorithm):
    """Every client sends w back and counts that in its state, one number or as many as w has, which
    the site keeps on disk; and the server publishes a change of the same size."""

    large: bool = False

    def init(self, w: Any) -> None:
        return None

    def init_client(self, w: Any) -> Any:
        return jnp.zeros_like(w) if self.large else jnp.zeros((), jnp.int32)

    def reply(self, client: fs.Client, state: Any) -> tuple[Any, Any]:
        return state + 1, client.w

    def round(self, fed: fs.Federation, server: Any, key: Any) -> tuple[Any, dict[str, Any]]:
        mean = fed.ask(self.reply, fed.everyone).mean()
        fed.publish(fs.Identity()(mean - fed.w + 1))
        return server, {}


def idle(clients: int = 3, size: int = 250) -> fs.Problem:
    """Nothing to compute, and w of that many numbers."""
    return fs.Problem(
        objective=lambda w, data: jnp.sum(data["x"]),
        clients={"x": np.zeros((clients, 1), np.float32)},
        params=np.zeros(size, np.float32),
    )


class Echoing(jobs.SiteJob):
    """A site that also answers bare calls."""

    @collab.publish
    def echo(self, data: bytes) -> bytes:
        return data


class Timing(jobs.Coordinator):
    """The same job, with bare calls before the run."""

    def _all_runs(self) -> None:
        experiment = jobs.built(self._text)
        ((problem, _),) = experiment.cells.values()
        data = bytes(4 * problem.size)
        calls = experiment.options["evaluate_every"]
        for _ in range(experiment.options["rounds"] // calls):
            began = time.perf_counter()
            for _ in range(calls):
                waiting: list[Any] = [
                    collab.get_clients([c.name])(blocking=False, timeout=60.0).echo(data)
                    for c in collab.clients
                ]
                for queue in waiting:
                    list(queue)
            self._tell({"bare": 1e3 * (time.perf_counter() - began) / calls})
        super()._all_runs()


def experiment(
    sites: int, size: int, rounds: int, spans: int, large: bool = False
) -> config.Experiment:
    table = {
        "problem": {"kind": "deployment:idle", "clients": sites, "size": size // 4},
        "algorithm": {"kind": "deployment:Echo", "large": large},
        "run": {"rounds": rounds, "evaluate_every": rounds // spans},
        "deploy": {"deadline": 60.0},
    }
    return config.resolve("deployment", table, ["deployment:idle", "deployment:Echo"])


def federation(sites: int):
    """As `local_federation` makes it, with this file's classes allowed."""
    folder = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, *sys.path])
    kits.ALLOWED = (*kits.ALLOWED[:2], NAMES[1], NAMES[0], *kits.ALLOWED[2:])
    own = ["deployment:idle", "deployment:Echo"]
    return local_federation(sites, sites, lambda news: None, own)


def compare(running: Any, sites: int, size: int) -> None:
    """Medians of spans of as many exchanges each: the first of ours has compiling in it."""
    cells = [f"{sites:3d} sites", f"{size:>12,} B"]
    rounds = tiny(20 if size > 10**7 else 100 if size > 10**5 else 300, 10)
    for large in (False, True):
        told: list[dict[str, Any]] = []
        run_on(
            running,
            experiment(sites, size, rounds, 10, large),
            f"timing-{size}-{large}",
            told.append,
        )
        bare, ours = (
            statistics.median(news[name] for news in told if name in news)
            for name in ("bare", "milliseconds")
        )
        state = "state as large as w" if large else "small state"
        cells.append(f"{state}: bare {bare:.1f} ms, ours {ours:.1f} ms, {ours / bare:.2f} ×")
    print("  ".join(cells), flush=True)


def endure(exchanges: int) -> None:
    """Threads and memory of the server's and the sites' job processes, all together."""
    with federation(3) as running:
        seen: list[tuple[int, list[int], float]] = []

        def look(news: dict[str, Any]) -> None:
            if "round" in news:
                family = [
                    member
                    for process in running.processes.values()
                    for member in psutil.Process(process.pid).children(recursive=True)
                ]
                memory = sum(member.memory_info().rss for member in family) / 2**20
                threads = [m.num_threads() for m in family if m.num_threads() > 1]
                seen.append((news["round"], threads, memory))

        run_on(running, experiment(3, 1000, exchanges, 10), "long", look)
    for done, threads, memory in seen:
        each = " + ".join(map(str, threads))
        print(f"after {done:6d} exchanges: {each} = {sum(threads)} threads, {memory:.0f} MiB")


def real(rounds: int) -> None:
    """The experiment `neyman-pearson` over four sites, an evaluation in every round; again in new
    processes, which find its programs compiled."""
    table = config.read("neyman-pearson")
    table["run"] |= {"rounds": rounds, "evaluate_every": 1}
    wanted = config.resolve("neyman-pearson", table)
    (problem, _), *_ = wanted.cells.values()
    with local_federation(problem.n, 4, lambda news: None) as running:
        for name in ("first", "again"):
            ((run,),) = run_on(running, wanted, name, lambda news: None).values()
            lines = (running.home(name) / "0/progress.jsonl").read_text().splitlines()
            times = [entry["at"] for entry in map(json.loads, lines) if "round" in entry]
            print(
                f"{name}: {run.seconds:.1f} s, of which {times[-1] - times[0]:.1f} s after round 1",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--sites", type=int, nargs="*", default=tiny([3, 8, 16], [2]))
    parser.add_argument(
        "--sizes", type=int, nargs="*", default=tiny([1000, 1_000_000, 44_000_000], [1000])
    )
    parser.add_argument("--long", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=0)
    chosen = parser.parse_args()
    if chosen.long:
        endure(chosen.long)
    elif chosen.rounds:
        real(chosen.rounds)
    else:
        for sites in chosen.sites:
            with federation(sites) as running:
                for size in chosen.sizes:
                    compare(running, sites, size)
    print(json.dumps({"cores": os.cpu_count(), "date": time.strftime("%Y-%m-%d")}))
    os._exit(0)
