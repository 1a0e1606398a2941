"""Kill an algorithm's run again and again and check that it resumes to the same bits.

`python -m tests.support.survivor KILLS` does it for every algorithm.

A run is a process of its own that saves itself after every round. It is SIGKILLed at random moments
(while it starts, computes or saves) and started again, to go on from its file. In the end it is
left alone, and must have the very bits of a run that nobody killed.
"""

import multiprocessing as mp
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fedsolve as fs
import tests.support.environment  # noqa: F401  (the processes inherit it)
from fedsolve.solving.checkpoint import exists
from tests.support import examples
from tests.support.conformance import ALGORITHMS

EVERY = ALGORITHMS | {
    "FedAvg, Top-K": fs.FedAvg(0.05, participants=3, uplink=fs.TopK(0.6), downlink=fs.TopK(0.6)),
    "FedDyn": fs.FedDyn(0.05, participants=3, local_steps=2),
    "MOON, Top-K": fs.MOON(0.05, participants=3, local_steps=2, uplink=fs.TopK(0.6)),
}
STREAMED = "FedSGM, Top-K, streamed"
EVERY[STREAMED] = fs.FedSGM(0.05, 0.1, participants=3, uplink=fs.TopK(0.6))
ROUNDS = 3000
AFTERWARDS = 0.15  # seconds after its first checkpoint within which a run is killed
STARTING = 0.3  # so many of the kills come before that


def live(folder: Path, name: str, every: int) -> None:
    """A run, from its file on if there is one."""
    file, base = folder / "run", examples.least_squares()
    problem = fs.Problem(
        examples.quadratic,
        base.samples.values,
        base.params,
        examples.half_space,
        representation=lambda w, data: data["inputs"] * w,  # for MOON
    )
    run = fs.solve(
        problem,
        EVERY[name],
        ROUNDS,
        checkpoint=file,
        checkpoint_every=every,
        resume=file if exists(file) else None,
        **({"runtime": "streamed", "store": folder / "store"} if name == STREAMED else {}),
    )
    arrays = {f"leaf {k}": leaf for k, leaf in enumerate(jax.tree.leaves(run.state))}
    np.savez(folder / "beside.npz", **arrays, **run.history)
    os.replace(folder / "beside.npz", folder / "result.npz")


def survive(place: Path, name: str, kills: int, seed: int = 0) -> Counter:
    """Kills a run so many times and compares what comes of it with one that nobody killed: how many
    kills there were, by what the run was doing."""
    context = mp.get_context("forkserver")  # it has imported everything, and started nothing
    context.set_forkserver_preload(["tests.support.survivor"])

    def start(folder: Path, every: int) -> Any:
        process = context.Process(target=live, args=(folder, name, every))
        process.start()
        return process

    def to_the_end(folder: Path) -> dict[str, np.ndarray]:
        process = start(folder, ROUNDS)
        process.join(300)
        assert process.exitcode == 0, f"{name}: {process.exitcode}"
        with np.load(folder / "result.npz") as found:
            return dict(found)

    whole, cut = place / "whole", place / "cut"
    for folder in (whole, cut):
        folder.mkdir(parents=True)
    expected = to_the_end(whole)
    chance, counts = random.Random(seed), Counter()
    start_up = 0.0  # how long it took at last until the first checkpoint
    for _ in range(kills):
        before, half = _written(cut / "run"), _written(cut / "run.new")  # left by an earlier kill
        began = time.monotonic()
        process = start(cut, 1)
        early = start_up > 0 and chance.random() < STARTING
        moment = began + (chance.uniform(0, start_up) if early else 300)
        while time.monotonic() < moment:
            assert process.exitcode is None, f"{name} ended too early: {process.exitcode}"
            if not early and _written(cut / "run") != before:
                early, start_up = True, time.monotonic() - began
                moment = began + start_up + chance.uniform(0, AFTERWARDS)
            time.sleep(0.001)
        process.kill()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL, f"{name}: {process.exitcode}"
        doing = "computing" if _written(cut / "run") != before else "starting"
        counts["saving" if _written(cut / "run.new") not in (0, half) else doing] += 1
    found = to_the_end(cut)
    assert found.keys() == expected.keys(), name
    for key, values in expected.items():
        np.testing.assert_array_equal(found[key], values, err_msg=f"{name}: {key}")
    return counts


def _written(file: Path) -> int:
    """When, as the file system knows it."""
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:  # it is just being replaced
        return 0


if __name__ == "__main__":
    for algorithm in sys.argv[2:] or EVERY:
        with tempfile.TemporaryDirectory() as scratch:
            began = time.monotonic()
            survived = survive(Path(scratch), algorithm, int((sys.argv[1:] or ["30"])[0]))
        took = f"{time.monotonic() - began:.0f} s"
        print(
            f"{algorithm}: {survived.total()} kills survived {dict(survived)}, {took}", flush=True
        )
