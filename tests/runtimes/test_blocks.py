"""Clients in blocks and shared out over cores: the same answers in the same order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from fedsolve.federation.options import RoundOptions
from fedsolve.runtimes import blocks
from fedsolve.solving import solve
from tests.support import examples

N = 11
DATA = np.arange(N * 3.0).reshape(N, 3)


def answer(index, row):
    return {"who": index, "sum": jnp.sum(row) + index}


@pytest.mark.parametrize("cores", [1, 2, 3, 20])
@pytest.mark.parametrize("size", [None, 1, 2, 5])
@pytest.mark.parametrize("cohort", [[4, 0, 9, 2, 2], list(range(N))])
def test_answers_are_joined_in_order(cores, size, cohort, monkeypatch):
    monkeypatch.setattr(blocks, "SHARED_OUT", 0)
    options = RoundOptions(clients_at_once=size, cores=cores)
    cohort = np.asarray(cohort)
    expected = {"who": cohort, "sum": DATA.sum(axis=1)[cohort] + cohort}
    for who, rows in ((cohort, False), (jnp.asarray(cohort), False), (cohort, True)):
        data = DATA[cohort] if rows else DATA
        found = blocks.map_clients(jax.vmap(answer), who, (jnp.asarray(data),), options, rows)
        for name, values in expected.items():
            np.testing.assert_array_equal(found[name], values, err_msg=name)


def parts_of(cores, clients, size):
    """How many parts of a program compute clients."""
    calls = []

    def function(who, data):
        calls.append(len(who))
        return data

    data = (jnp.zeros((clients, size), jnp.float32),)
    blocks.map_clients(function, np.arange(clients), data, RoundOptions(cores=cores))
    return calls


def test_only_large_cohorts_are_shared_out():
    assert parts_of(2, 8, 2**15 - 1) == [8]
    assert parts_of(2, 8, 2**15) == [4, 4]
    assert parts_of(3, 8, 2**15) == [2, 3, 3]
    assert parts_of(1, 8, 2**15) == [8]


@pytest.mark.parametrize(
    "algorithm",
    [
        fs.FedSGM(0.05, 0.1, participants=5, local_steps=2, uplink=fs.TopK(0.4)),
        fs.SCAFFOLD(0.03, participants=3, local_steps=2),
        fs.FedADMM(participants=3, local_iterations=2, penalty=1.0, accuracy=1e-4),
    ],
)
def test_runs_are_those_of_one_core(algorithm, monkeypatch):
    problem, runs = examples.least_squares(), []
    monkeypatch.setattr(blocks, "SHARED_OUT", 0)
    for cores in (1, 2):
        monkeypatch.setattr(solve, "cores_here", lambda cores=cores: cores)
        runs.append(fs.solve(problem, algorithm, rounds=5, precision="float64"))
    one, two = runs
    for a, b in zip(*map(jax.tree.leaves, (one.params, two.params)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)
    for name, column in one.history.items():
        if not name.startswith("seconds"):
            np.testing.assert_allclose(
                two.history[name], column, rtol=1e-10, atol=1e-12, err_msg=name
            )
