"""Problems with a custom `Client` class that has a memory and draws its own data."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from tests.support import examples
from tests.support.conformance import assert_same
from tests.support.in_process import SITES, Wires, deploy, settled


class Forgetful(fs.Client):
    """Its gradient is at noise that it drew, and kept, when it was asked to measure."""

    def measure(self, w, key=None):
        noise = jax.random.normal(self.key, w.shape, w.dtype)
        self.remember({"noise": noise, "asked": self.memory["asked"] + 1})
        return super().measure(w, key) + noise[0]

    def direction(self, w, sigma, focus=None, key=None):
        return super().direction(w, sigma, focus, key) + 0.1 * self.memory["noise"]


class Drawn(fs.Problem):
    """Least squares with such clients, and an evaluation that draws, too."""

    def client(self, *args):
        return Forgetful(self, *args)

    def init_memory(self):
        return {"noise": jnp.zeros_like(self.start()), "asked": jnp.int32(0)}

    def values(self, w, samples, key):
        return super().values(w, samples, key) | {"draw": jax.random.normal(key, (), w.dtype)}


def problem():
    base = examples.least_squares()
    return Drawn(examples.quadratic, base.samples.values, np.zeros(5), examples.half_space)


ALGORITHM = fs.FedSGM(0.02, 0.1, fs.Soft(3.0), participants=3, local_steps=2, uplink=fs.TopK(0.4))


def sometimes(round, exchange, clients):
    return (round + 2 * exchange + jnp.asarray(clients)) % 3 != 0


@pytest.mark.slow
@pytest.mark.parametrize("arrivals", [None, sometimes])
def test_memory_is_the_same_in_every_runtime_and_follows_arrivals(arrivals):
    options = {"rounds": 6, "seed": 1, "precision": "float64", "arrivals": arrivals}
    run = fs.solve(problem(), ALGORITHM, **options)
    asked = np.zeros(6, int)
    for round, cohort in enumerate(run.history["cohort"]):
        asked[cohort] += 1 if arrivals is None else np.asarray(arrivals(round, 0, cohort))
    np.testing.assert_array_equal(run.state.memory["asked"], asked)
    np.testing.assert_array_equal(np.abs(run.state.memory["noise"]).max(axis=1) > 0, asked > 0)
    assert_same(run, fs.solve(problem(), ALGORITHM, runtime="debug", **options), 1e-10)
    assert_same(run, fs.solve(problem(), ALGORITHM, clients_at_once=2, **options), 1e-10)


def test_memory_is_part_of_the_state_that_a_run_resumes_from():
    whole = fs.solve(problem(), ALGORITHM, rounds=12, seed=2)
    half = fs.solve(problem(), ALGORITHM, rounds=5, seed=2)
    rest = fs.solve(problem(), ALGORITHM, rounds=12, seed=2, resume=half.state)
    # the best round is that of the rounds in a run's own history
    states = [dataclasses.replace(run.state, best=half.state.best) for run in (whole, rest)]
    for a, b in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(whole.history["draw"][5:], rest.history["draw"])


def test_evaluations_draw_anew_in_each_round_and_not_with_a_clients_key():
    run = fs.solve(problem(), ALGORITHM, rounds=8, seed=2)
    assert len(set(run.history["draw"].tolist())) == 8
    every_other = fs.solve(problem(), ALGORITHM, rounds=8, seed=2, evaluate_every=2)
    np.testing.assert_array_equal(every_other.history["draw"], run.history["draw"][1::2])


def test_sites_keep_their_clients_memories(tmp_path):
    wires = Wires(problem(), ALGORITHM, tmp_path)
    run, link = deploy(problem(), ALGORITHM, wires, tmp_path / "server", 10)
    expected = fs.solve(problem(), ALGORITHM, rounds=10, precision="float64")
    assert run.history.keys() == expected.history.keys() - {"uplink_error"}
    for name, values in run.history.items():
        np.testing.assert_allclose(values, expected.history[name], atol=1e-10, err_msg=name)
    kept = jax.tree.map(
        lambda *leaves: np.concatenate(leaves), *[settled(wires.shares[s], link, s) for s in SITES]
    )
    for a, b in zip(
        jax.tree.leaves(kept),
        jax.tree.leaves((expected.state.clients, expected.state.memory)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, atol=1e-10)
