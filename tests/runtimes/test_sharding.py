"""Clients over several devices and processes: the same numbers as on one."""

import os
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.solving import checkpoint as checkpoints
from tests.support import sharded
from tests.support.documents import ROOT
from tests.support.environment import QUICK

LIMIT = 240  # seconds: a run must never hang


def start(devices, *words, out=subprocess.PIPE):
    flags = f"{QUICK} --xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.sharded", *map(str, words)],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags},
        stdout=out,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_four_devices_give_the_numbers_of_one():
    process = start(4, "devices")
    told = process.communicate(timeout=LIMIT)[0]
    assert "all well" in told, told


@pytest.fixture
def two(tmp_path):
    """Starts two processes of a run; ends those that are left."""
    running = []

    def begin(rounds, patience=LIMIT):  # seconds until JAX calls a silent process lost
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        pair = [start(2, "process", i, port, tmp_path, rounds, patience) for i in (0, 1)]
        running.extend(pair)
        return pair

    yield begin
    for process in running:
        process.kill()
        process.communicate()


def test_two_processes_give_the_numbers_of_one(two, tmp_path):
    """And what they saved goes on in one."""
    for process in two(rounds=10):
        assert "all well" in (told := process.communicate(timeout=LIMIT)[0]), told
    agree_with_one(tmp_path, rounds=10)
    _, problem, algorithm, _ = next(sharded.cases())
    file = tmp_path / "checkpoint"
    rest = fs.solve(problem, algorithm, 12, resume=file, **sharded.EXACT)
    sharded.same(rest, fs.solve(problem, algorithm, 12, **sharded.EXACT))


def agree_with_one(folder, rounds):
    _, problem, algorithm, _ = next(sharded.cases())
    alone = fs.solve(problem, algorithm, rounds, **sharded.EXACT)
    for index in (0, 1):
        found = np.load(folder / f"{index}.npz")
        np.testing.assert_allclose(found["params"], alone.params, rtol=1e-6)
        for name, values in alone.history.items():
            np.testing.assert_allclose(found[name], values, rtol=1e-6, atol=1e-9)


@pytest.mark.slow  # where a collective hangs, it takes JAX its heartbeat's time to notice
def test_two_processes_survive_the_loss_of_one(two, tmp_path):
    file = tmp_path / "checkpoint"
    staying, lost = two(rounds=1_000_000, patience=10)
    patience = time.monotonic() + LIMIT
    while not (tmp_path / "checkpoint.before").exists() and time.monotonic() < patience:
        time.sleep(0.1)
    lost.kill()
    told = staying.communicate(timeout=LIMIT)[0]
    ours = "Another process of this run was lost; start all of them again with resume="
    jaxs = (
        "indicates that another task died"  # where a collective hangs, and JAX's heartbeat ends it
    )
    assert ours in told or jaxs in told, told
    assert staying.returncode != 0

    rounds = checkpoints.load(file).round + 4
    for process in two(rounds):
        assert "all well" in (told := process.communicate(timeout=LIMIT)[0]), told
    agree_with_one(tmp_path, rounds)
