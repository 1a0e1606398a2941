"""Bad input raises an error of one sentence."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from fedsolve.fields import check_seed
from tests.support import examples

DATA = examples.least_squares().samples.values


def problem(**changes):
    given = {
        "objective": examples.quadratic,
        "clients": DATA,
        "params": np.zeros(5),
        "constraint": examples.half_space,
    }
    return fs.Problem(**(given | changes))


def with_nan():
    inputs = DATA["inputs"].copy()
    inputs[3, 1, 2] = np.nan
    return DATA | {"inputs": inputs}


BAD = {
    "no clients": (
        lambda: problem(clients={}),
        "There are no clients",
    ),
    "no clients to stack": (
        lambda: fs.stack_clients([]),
        "There are no clients",
    ),
    "empty clients": (
        lambda: problem(clients={"inputs": np.zeros((6, 0, 5)), "targets": np.zeros((6, 0))}),
        r"clients\['inputs'\] is empty",
    ),
    "a client without samples": (
        lambda: fs.stack_clients([{"x": np.ones((2, 3))}, {"x": np.ones((0, 3))}]),
        r"Client 1 has no samples in \['x'\]",
    ),
    "a client without samples of one class": (
        lambda: fs.stack_clients(
            [
                {"a": np.ones((2, 3)), "b": np.ones((1, 3))},
                {"a": np.ones((2, 3)), "b": np.ones((0, 3))},
            ]
        ),
        r"Client 1 has no samples in \['b'\]",
    ),
    "a mask with nothing behind it": (
        lambda: problem(
            clients=DATA | {"mask": np.eye(6, 8, dtype=bool) & (np.arange(6) != 2)[:, None]}
        ),
        "Client 2 has no samples",
    ),
    "too many clients for a class": (
        lambda: fs.problems.neyman_pearson(clients=171),
        "171 clients cannot each have a malignant sample: there are 170",
    ),
    "clients of different structure": (
        lambda: fs.stack_clients([{"x": np.ones(3)}, {"y": np.ones(3)}]),
        "the same structure",
    ),
    "samples of different shape": (
        lambda: fs.stack_clients([{"x": np.ones((3, 2))}, {"x": np.ones((3, 4))}]),
        "the same shape",
    ),
    "NaN in the data": (
        lambda: problem(clients=with_nan()),
        r"clients\['inputs'\] of client 3 has a NaN",
    ),
    "different leading axes": (
        lambda: problem(clients=DATA | {"offset": np.ones(5)}),
        "leading axes differ: .* has 6 clients, .*'offset'.* has 5",
    ),
    "a scalar among the data": (
        lambda: problem(clients=DATA | {"offset": np.float64(1)}),
        "needs a leading client axis",
    ),
    "texts as labels": (
        lambda: problem(clients=DATA | {"targets": DATA["targets"].astype(str)}),
        r"clients\['targets'\] is of type <U\d+; data are numbers: encode it",
    ),
    "samples of different type": (
        lambda: fs.stack_clients([{"x": np.ones(3)}, {"x": np.ones(3, int)}]),
        r"\['x'\] of client 0 has type float64, \['x'\] of client 1 has type int64",
    ),
    "labels as a column": (
        lambda: problem(clients=DATA | {"targets": DATA["targets"][..., None]}),
        r"objective combines .* every pair of samples. clients\['targets'\] has a last axis",
    ),
    "labels as a column, of clients of different size": (
        lambda: fs.Problem(
            examples.quadratic,
            fs.stack_clients(
                [
                    {"inputs": DATA["inputs"][0][:n], "targets": DATA["targets"][0][:n, None]}
                    for n in (8, 5)
                ]
            ),
            np.zeros(5),
        ),
        r"objective combines .* every pair of samples. clients\['targets'\] has a last axis",
    ),
    "a seed that is a word": (lambda: check_seed("a"), "seed must be a whole number, got 'a'"),
    "a seed that is a fraction": (lambda: check_seed(0.5), "seed must be a whole number, got 0.5"),
    "a vector objective": (
        lambda: problem(objective=lambda w, data: data["inputs"] @ w),
        r"objective must return a scalar for one client, got shape \(8,\)",
    ),
    "a vector constraint": (
        lambda: problem(constraint=lambda w, data: w),
        r"constraint must return a scalar for one client, got shape \(5,\)",
    ),
    "an objective that fails": (
        lambda: problem(objective=lambda w, data: data["no such entry"] @ w),
        "objective failed on one client's data: KeyError: 'no such entry'",
    ),
    "no parameters": (lambda: problem(params={}), "params is empty"),
    "whole-number parameters": (
        lambda: problem(params=np.zeros(5, int)),
        "params are integers; parameters are floating-point numbers",
    ),
    "whole numbers among the parameters": (
        lambda: problem(params={"a": np.zeros(5), "b": np.zeros(2, int)}),
        r"params\['b'\] is int64; parameters are floating-point",
    ),
    "parameters that are not finite": (
        lambda: problem(params=np.full(5, np.inf)),
        "params has a value that is not finite",
    ),
    "a batch of nothing": (lambda: problem(batch_size=0), "batch_size must be a whole number"),
    "a negative step": (lambda: fs.FedSGM(-0.1), "step_size must be positive, got -0.1"),
    "a step that is a word": (lambda: fs.FedSGM("fast"), "step_size must be a number, got 'fast'"),
    "a negative tolerance": (lambda: fs.FedSGM(0.1, -1.0), "tolerance must be at least 0"),
    "no participants": (
        lambda: fs.FedSGM(0.1, participants=0),
        "participants must be a whole number from 1 up, got 0",
    ),
    "too many participants": (
        lambda: fs.solve(problem(), fs.FedSGM(0.1, participants=7), 3),
        "participants is 7, but there are only 6 clients",
    ),
    "a fraction above one": (lambda: fs.TopK(1.5), r"fraction in \(0, 1\], got 1.5"),
    "a fraction of zero": (lambda: fs.RandK(0.0), r"fraction in \(0, 1\], got 0.0"),
    "a negative beta": (lambda: fs.Soft(-1.0), "beta must be positive"),
    "a box inside out": (lambda: fs.Box(1.0, 0.0), "lower ≤ upper"),
    "a radius of zero": (lambda: fs.Ball(0.0), "radius must be positive"),
    "no rounds": (
        lambda: fs.solve(problem(), fs.FedSGM(0.1), 0),
        "rounds must be a whole number from 1 up",
    ),
    "a runtime of fancy": (
        lambda: fs.solve(problem(), fs.FedSGM(0.1), 1, runtime="fancy"),
        "runtime must be",
    ),
    "a precision of fancy": (
        lambda: fs.solve(problem(), fs.FedSGM(0.1), 1, precision="float8"),
        "precision must be",
    ),
    "a state of another algorithm": (
        lambda: fs.solve(
            problem(),
            fs.FedSGM(0.1, uplink=fs.TopK(0.5)),
            5,
            resume=fs.solve(problem(), fs.FedSGM(0.1), 2).state,
        ),
        "another problem, algorithm or clock",
    ),
    "a state that is already there": (
        lambda: fs.solve(
            problem(), fs.FedSGM(0.1), 2, resume=fs.solve(problem(), fs.FedSGM(0.1), 2).state
        ),
        "has done 2 of 2 rounds",
    ),
    "a sweep over a field that is none": (
        lambda: fs.sweep(problem(), fs.FedSGM(0.1), 2, stepsize=[0.1]),
        "FedSGM has no field 'stepsize'; it has step_size",
    ),
    "a sweep over nothing": (
        lambda: fs.sweep(problem(), fs.FedSGM(0.1), 2, step_size=[]),
        "needs a problem, a seed",
    ),
    "an empty maximum": (lambda: fs.Maximum(), "at least one constraint"),
}


@pytest.mark.parametrize(("call", "sentence"), BAD.values(), ids=BAD.keys())
def test_bad_input_raises_one_sentence(call, sentence):
    with pytest.raises(fs.InvalidInput, match=sentence) as refused:
        call()
    assert "\n" not in str(refused.value)


WRONG_TYPES = {  # tests check types themselves, so these need an ordinary interpreter
    "fs.solve(fs.problems.linear_regression(clients=2, size=2), fs.FedAvg(0.1), 1, seed='a')": (
        "seed must be a whole number, got 'a'."
    ),
    "fs.sweep(fs.problems.linear_regression(clients=2, size=2), fs.FedAvg(0.1), 1, seeds=['a'])": (
        "seed must be a whole number, got 'a'."
    ),
    "fs.FedSGM(0.1, local_steps=0.5)": "local_steps must be a whole number from 1 up, got 0.5.",
    "fs.FedSGM(0.1, uplink='TopK')": "uplink must be a Compressor, got 'TopK'.",
    "fs.FedSGM(0.1, switching=fs.Soft)": "switching must be a Switching, got <class",
    "fs.Problem(3, {'x': numpy.ones((1, 1))}, 1.0)": "The objective must be a function",
    "fs.solve(3, fs.FedSGM(0.1), 5)": "problem must be a Problem, got 3.",
    "fs.solve(fs.problems.neyman_pearson(), 'FedSGM', 5)": "algorithm must be an Algorithm, got",
    "fs.solve(fs.problems.neyman_pearson(), fs.FedSGM(0.1), 2, follow={'x': 1.0})": (
        "follow['x'] must be a function"
    ),
}


def test_wrong_types_raise():
    lines = ["import fedsolve as fs, numpy"]
    for call in WRONG_TYPES:
        lines += ["try:", f"    {call}", "except fs.InvalidInput as error:", "    print(error)"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True
    )
    told = done.stdout.splitlines()
    assert len(told) == len(WRONG_TYPES)
    for sentence, expected in zip(told, WRONG_TYPES.values(), strict=True):
        assert sentence.startswith(expected)


@jax.custom_vjp
def trap(x):
    """Zero, with a gradient that is NaN beyond 3."""
    return 0.0 * x


trap.defvjp(lambda x: (trap(x), x), lambda x, g: (jnp.where(x > 3, jnp.nan, 0.0) * g,))


def trapped():
    """w moves by +0.5 a round, is beyond 3 after round 7; then client 2's gradient is NaN."""

    def loss(w, data):
        return -jnp.sum(w) + trap(w[0] * data["is_bad"])

    return fs.Problem(loss, {"is_bad": np.float64(np.arange(6) == 2)}, np.zeros(5))


def test_divergence_names_round_client_and_quantity_and_keeps_the_rest():
    with pytest.raises(fs.Diverged, match="Round 8: client 2's reply to 'improve' is not") as stop:
        fs.solve(trapped(), fs.FedSGM(0.5), rounds=50)
    run = stop.value.run
    assert run.rounds == 7
    np.testing.assert_allclose(run.params, 3.5)
    np.testing.assert_array_equal(run.history["round"], np.arange(1, 8))
    with pytest.raises(fs.Diverged, match="Round 8: client 2") as stop:
        fs.solve(trapped(), fs.FedSGM(0.5), rounds=50, evaluate_every=5)
    np.testing.assert_array_equal(stop.value.run.history["round"], [5, 7])


def test_divergence_of_the_objective_is_noticed_too():
    def loss(w, data):  # its gradient is finite where its value is not
        return -jnp.sum(w) + jnp.where((w[0] > 3) & (data["index"] == 4), jnp.inf, 0.0)

    problem = fs.Problem(loss, {"index": np.arange(6)}, np.zeros(2))
    with pytest.raises(fs.Diverged, match="Round 7: client 4's objective is not finite") as stop:
        fs.solve(problem, fs.FedSGM(0.5), rounds=50)
    assert stop.value.run.rounds == 6
    assert np.isfinite(stop.value.run.history["objective"]).all()


def test_divergence_in_the_first_round_leaves_the_start():
    problem = fs.Problem(
        lambda w, data: jnp.sum(data["c"] * w**3), {"c": np.ones((2, 3))}, np.full(3, 1e30)
    )
    with pytest.raises(fs.Diverged, match="Round 1: client 0's reply to 'improve'") as stop:
        fs.solve(problem, fs.FedSGM(1.0), rounds=5)
    assert stop.value.run.rounds == 0
    assert stop.value.run.history == {}
    np.testing.assert_allclose(stop.value.run.params, 1e30, rtol=1e-6)


def test_the_debug_runtime_names_what_went_wrong():
    with pytest.raises(fs.ClientError, match=r"Round 8, client 2, improve: .* NaN or infinity"):
        fs.solve(trapped(), fs.FedSGM(0.5), rounds=50, runtime="debug")


class Broken(fs.FedSGM):
    def improve(self, client, residual, message):
        if int(client.index) == 4 and int(client.round) == 2:
            raise ZeroDivisionError("no denominator")
        return super().improve(client, residual, message)


def test_the_debug_runtime_says_where_a_method_failed():
    with pytest.raises(fs.ClientError, match="Round 3, client 4, improve: ZeroDivisionError: no d"):
        fs.solve(problem(), Broken(0.1), rounds=5, runtime="debug")
