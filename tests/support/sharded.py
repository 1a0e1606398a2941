"""Runs over devices and processes; started by `runtimes/test_sharding.py` with the devices forced.

python -m tests.support.sharded devices          all checks on this process's devices
python -m tests.support.sharded process I PORT FOLDER ROUNDS PATIENCE    process I of two
"""

import os
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest

import fedsolve as fs
from fedsolve.participation import DataSize, FirstAnswers, Top
from fedsolve.solving import checkpoint as checkpoints
from tests.support import examples

EXACT = {"precision": "float64", "seed": 3}


def same(one, other, tolerance=1e-9):
    for name, values in other.history.items():
        np.testing.assert_allclose(one.history[name], values, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(one.params, other.params, rtol=tolerance, atol=tolerance)
    for a, b in zip(
        jax.tree.leaves(one.state.clients), jax.tree.leaves(other.state.clients), strict=True
    ):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


def cases():
    feedback = fs.FedSGM(0.02, uplink=fs.TopK(0.4), downlink=fs.TopK(0.6), local_steps=2)
    some = fs.FedSGM(0.02, uplink=fs.TopK(0.4), participants=3)
    yield "everyone, evenly", examples.least_squares(clients=8), feedback, {}
    yield (
        "three of six, not in equal parts",
        examples.least_squares(),
        some,
        {},
    )
    late = fs.FedAvg(0.05, weighting=DataSize(), selection=Top(5), availability=FirstAnswers(4))
    yield "late and weighted", examples.least_squares(clients=8), late, {"clients_at_once": 1}


def on_devices():
    assert jax.device_count() == 4, jax.devices()
    for name, problem, algorithm, options in cases():
        options = {"rounds": 5} | EXACT | options
        shared = fs.solve(problem, algorithm, devices="all", **options)
        same(shared, fs.solve(problem, algorithm, **options))
        for leaf in jax.tree.leaves(shared.state.clients):
            parts = 4 if problem.n % 4 == 0 else 1
            assert leaf.addressable_shards[0].data.shape[0] == problem.n // parts, name
        print(name, "agrees", flush=True)
    half = fs.solve(problem, algorithm, **(options | {"rounds": 2})).state
    rest = fs.solve(problem, algorithm, devices=4, resume=half, **options)
    same(rest, fs.solve(problem, algorithm, resume=half, **options))
    with tempfile.TemporaryDirectory() as folder:  # from a file, on more and on fewer
        for before, after in [({}, {"devices": 4}), ({"devices": 4}, {})]:
            file = f"{folder}/from {len(before)}"
            fs.solve(problem, algorithm, checkpoint=file, **(options | {"rounds": 2}), **before)
            same(fs.solve(problem, algorithm, resume=file, **options, **after), shared)
    for devices, sentence in [(9, "JAX sees 4"), ("some", "must be a number"), (0, "JAX sees 4")]:
        with pytest.raises(fs.InvalidInput, match=sentence):
            fs.solve(problem, algorithm, 1, devices=devices)
    print("all well", flush=True)


def in_process(index, port, folder, rounds, patience):
    """One of two processes of a run that keeps a checkpoint."""
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(address, 2, index, heartbeat_timeout_seconds=patience)
    _, problem, algorithm, _ = next(cases())
    file = f"{folder}/checkpoint"
    resume = file if checkpoints.exists(Path(file)) else None

    def progress(done, rounds, newest):
        print(done, flush=True)

    options = {"checkpoint": file, "checkpoint_every": 5, "resume": resume, "progress": progress}
    try:
        run = fs.solve(problem, algorithm, rounds, devices="all", **options, **EXACT)
    except fs.ProcessLost as lost:
        print(lost, flush=True)
        os._exit(1)  # the others cannot be told: nothing is left to wait for
    np.savez(f"{folder}/{index}.npz", params=run.params, **run.history)
    print("all well", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "devices":
        on_devices()
    else:
        index, port, folder, *numbers = sys.argv[2:]
        in_process(int(index), int(port), folder, *map(int, numbers))
