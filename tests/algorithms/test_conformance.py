"""What every algorithm of the conformance list must do."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from fedsolve.federation.state import State
from fedsolve.runtimes.simulation import Simulation
from fedsolve.solving.sweep import with_field
from tests.support import examples
from tests.support.conformance import (
    assert_equal,
    assert_same,
    every_algorithm,
    every_algorithm_costly,
    number,
)


@every_algorithm
def test_a_round_keeps_shapes_and_types(algorithm):
    problem = examples.least_squares().on_device()
    state = State.start(problem, algorithm, jax.random.key(0))
    after, info = jax.eval_shape(lambda state: Simulation(problem, state).play(algorithm), state)
    assert jax.tree.structure(state) == jax.tree.structure(after)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert all(leaf.shape[0] == problem.n for leaf in jax.tree.leaves(state.clients))
    assert after.w.dtype == jnp.float32
    assert isinstance(info, dict)


class Heard(eqx.Module):
    """Whose replies arrive: a table by round, exchange and client. All tables share a program."""

    table: jax.Array | np.ndarray

    def __call__(self, round, exchange, clients):
        table = jnp.asarray(self.table)
        return table[round, exchange % table.shape[1], jnp.asarray(clients)]


ROUND, EXCHANGE, CLIENT = np.indices((40, 6, 6))
ALL = Heard(ROUND >= 0)
SILENT = np.isin(np.arange(40), (0, 5, 6, 7))  # the first round, and some later ones
MOST = Heard(~SILENT[ROUND])
SOMETIMES = Heard((ROUND + 2 * EXCHANGE + CLIENT) % 3 != 0)


@every_algorithm
def test_same_seed_same_bits_and_another_seed_another_run(algorithm):
    problem = examples.least_squares()
    one = fs.solve(problem, algorithm, rounds=30, seed=3, arrivals=MOST)
    assert_same(one, fs.solve(problem, algorithm, rounds=30, seed=3, arrivals=MOST))
    other = fs.solve(problem, algorithm, rounds=30, seed=4, arrivals=MOST)
    if one.history["cohort"].shape[1] == problem.n:  # nothing is drawn
        return
    assert not np.array_equal(one.history["cohort"], other.history["cohort"])
    assert not np.array_equal(one.history["objective"], other.history["objective"])


def at_first_all(round, exchange, clients):
    some = (round + 2 * exchange + jnp.asarray(clients)) % 3 != 0
    return (round < 2) | ((round != 3) & some)


@every_algorithm_costly
def test_all_runtimes_agree(algorithm):
    """With all replies in the first rounds, then with missing ones, and none in one round."""
    problem = examples.least_squares()
    options = {"rounds": 5, "seed": 1, "precision": "float64", "arrivals": at_first_all}
    compiled = fs.solve(problem, algorithm, **options)
    assert_same(compiled, fs.solve(problem, algorithm, runtime="debug", **options), 1e-10)
    assert_same(compiled, fs.solve(problem, algorithm, clients_at_once=2, **options), 1e-10)


@every_algorithm
def test_rounds_and_runs_do_not_trace_again(algorithm):
    traces = []

    def counted(w, data):
        traces.append(1)
        return examples.quadratic(w, data)

    base = examples.least_squares()
    problem = fs.Problem(
        counted,
        base.samples.values,
        np.zeros(5),
        examples.half_space,
        representation=examples.products,
    )
    fs.solve(problem, algorithm, rounds=1)
    once = len(traces)
    assert 0 < once <= 12
    fs.solve(problem, algorithm, rounds=257, seed=5)
    fs.solve(problem, with_field(algorithm, [number(algorithm)], 0.011), rounds=3)
    assert len(traces) == once


@every_algorithm_costly
def test_works_with_one_client(algorithm):
    everyone = {"round_weighting": None, "select_round": None, "select_epoch": "Everyone"}
    everyone |= {"cap": None, "participants": None, "selection": None}
    alone = algorithm
    for name, value in everyone.items():
        if hasattr(alone, name):
            alone = with_field(alone, [name], value)
    for path in (["game"], ["weighting", "game"]):
        if isinstance(functools.reduce(lambda a, n: getattr(a, n, None), path, alone), fs.Game):
            alone = with_field(alone, path, examples.contribution_game(clients=1))
    run = fs.solve(examples.least_squares(clients=1), alone, rounds=20)
    assert np.isfinite(run.history["objective"]).all()


@every_algorithm
def test_survives_missing_replies(algorithm):
    problem = examples.least_squares()
    run = fs.solve(problem, algorithm, rounds=40, arrivals=SOMETIMES)
    assert np.isfinite(run.history["objective"]).all()
    everyone = fs.solve(problem, algorithm, rounds=40, arrivals=ALL)
    if isinstance(algorithm, fs.ProxAL):  # what is feasible has a larger f than the start
        last = [each.history["objective"][-1] for each in (run, everyone)]
        np.testing.assert_allclose(*last, rtol=0.02)
    else:
        assert run.history["objective"][-1] < run.history["objective"][0]
    assert run.history["bytes_up_total"][-1] < everyone.history["bytes_up_total"][-1]


@every_algorithm
@pytest.mark.parametrize("heard", [0, 3], ids=["never", "no longer"])
def test_rounds_in_which_nobody_is_heard_change_nothing(algorithm, heard):
    """Neither clients nor the server, from the first round on or later."""
    if isinstance(algorithm, fs.PPBC):  # momentum goes on, and may
        algorithm = with_field(algorithm, ["momentum"], 0.0)
    problem, arrivals = examples.least_squares(), Heard(heard > ROUND)
    state = State.start(problem.on_device(), algorithm, jax.random.key(0))
    if heard:
        state = fs.solve(problem, algorithm, rounds=heard, arrivals=arrivals).state
    run = fs.solve(problem, algorithm, rounds=heard + 4, arrivals=arrivals)
    after = run.state
    for name in ("bytes_up", "messages_up", "vectors_up"):
        assert not run.history[name][heard:].any(), name
    assert (run.history["bytes_up"][:heard] > 0).all()
    assert_equal(state.clients, after.clients)
    if isinstance(algorithm, fs.PPBC | fs.LagrangianFedAvg | fs.AFL):  # these count rounds, too
        assert_equal(state.server.x, after.server.x)
    elif isinstance(algorithm, fs.MIFA | fs.FedVARP):  # these go on along what they remember
        assert_equal(state.server.mean, after.server.mean)
        if heard:
            return
    else:
        assert_equal(state.server, after.server)
    if isinstance(getattr(algorithm, "downlink", fs.Identity()), fs.Identity):
        np.testing.assert_allclose(state.w, after.w, rtol=1e-6)
    else:  # the server sends the rest of what it owes
        x = [getattr(each.server, "x", each.server) for each in (state, after)]
        owed = [np.linalg.norm(x - each.w) for x, each in zip(x, (state, after), strict=True)]
        assert owed[1] < owed[0] or not heard


@every_algorithm
def test_history_is_finite_and_complete(algorithm):
    history = fs.solve(examples.least_squares(), algorithm, rounds=25, arrivals=MOST).history
    for name in ("objective", "constraint", "bytes_up", "bytes_down"):
        assert history[name].shape == (25,), name
    for name, values in history.items():
        assert isinstance(values, np.ndarray)
        assert len(values) == 25
        assert np.isfinite(values).all(), name
    assert not history["bytes_up"][SILENT[:25]].any()
    np.testing.assert_array_equal(history["round"], np.arange(1, 26))
    np.testing.assert_array_equal(np.cumsum(history["bytes_up"]), history["bytes_up_total"])
    np.testing.assert_array_equal(np.cumsum(history["bytes_down"]), history["bytes_down_total"])
    for name in ("messages_up", "messages_down", "vectors_up"):
        np.testing.assert_array_equal(np.cumsum(history[name]), history[f"{name}_total"])
    assert 0 < history["vectors_up_total"][-1] <= history["messages_up_total"][-1]
    assert history["messages_up_total"][-1] <= history["messages_down_total"][-1]


@every_algorithm_costly
def test_a_checkpoint_continues_to_the_same_bits(algorithm, tmp_path):
    problem, file = examples.least_squares(), tmp_path / "checkpoint"
    whole = fs.solve(problem, algorithm, rounds=20, seed=2)
    fs.solve(problem, algorithm, rounds=9, seed=2, checkpoint=file)
    rest = fs.solve(problem, algorithm, rounds=20, seed=2, resume=file)
    for name, values in whole.history.items():
        np.testing.assert_array_equal(rest.history[name], values, err_msg=name)
    for a, b in zip(jax.tree.leaves(whole.state), jax.tree.leaves(rest.state), strict=True):
        np.testing.assert_array_equal(a, b)


@every_algorithm_costly
def test_a_sweep_is_its_runs(algorithm):
    problem, name = examples.least_squares(), number(algorithm)
    swept = fs.sweep(
        problem, algorithm, rounds=8, seeds=[1, 2], precision="float64", **{name: [0.02, 0.01]}
    )
    assert len(swept) == 4
    for run in swept.runs:
        alone = with_field(algorithm, [name], run.settings[name])
        expected = fs.solve(problem, alone, rounds=8, seed=run.seed, precision="float64")
        assert_same(expected, run, 1e-10)
