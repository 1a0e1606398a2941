"""Gradients that the stopping rule computed are used again by clients at the same w."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from fedsolve.federation.known import InformedClient, Known
from fedsolve.federation.options import RoundOptions
from fedsolve.federation.state import State
from fedsolve.runtimes import blocks, simulation
from fedsolve.runtimes.chunks import padded, spans_of
from fedsolve.runtimes.evaluation import client_values
from fedsolve.runtimes.whole import is_light

NEVER = fs.Stationary(below=1e-30)


def problem_of(**options):
    return fs.problems.linear_regression(clients=9, size=4, smallest=12, largest=40, **options)


def compute(problem, algorithm, rounds, **options):
    return fs.solve(problem, algorithm, rounds, stop=NEVER, precision="float64", **options)


class Plain(fs.FedADMM):
    """The same without reuse."""

    begins_with_gradients = False


@pytest.mark.parametrize(
    ("given", "evaluate_every"),
    [
        ({}, 2),
        ({"accuracy": 1e-4}, 3),
        pytest.param({}, 1, marks=pytest.mark.slow),
        pytest.param({"dual_start": "gradient"}, 1, marks=pytest.mark.slow),
    ],
)
def test_runs_are_those_without_reuse(given, evaluate_every):
    """w moves before the first gradients with dual_start, and between evaluations."""
    given |= {"participants": 4, "local_iterations": 3}
    options = {"evaluate_every": evaluate_every, "seed": 3}
    ours = compute(problem_of(), fs.FedADMM(**given), 9, **options)
    plain = compute(problem_of(), Plain(**given), 9, **options)
    np.testing.assert_allclose(ours.params, plain.params, rtol=1e-9)
    for name in ("objective", "squared_gradient"):
        np.testing.assert_allclose(ours.history[name], plain.history[name], rtol=1e-9)
    assert ours.history.keys() == plain.history.keys()


@pytest.mark.parametrize("valid", [True, False])
def test_known_gradients_take_the_place_of_computed_ones(valid):
    problem = problem_of().on_device()
    algorithm = fs.FedADMM(local_iterations=2, lipschitz=2.0)
    state = State.start(problem, algorithm, jax.random.key(0))

    @eqx.filter_jit
    def play(known):
        fed = simulation.Simulation(problem, state)
        fed.known = known
        return fed.play(algorithm)[0].w

    def wrong():
        return client_values(problem, state.w, gradient=True, own_gradients=True)["gradient"] * 2

    plain, told = play(None), play(Known(jnp.asarray(valid), wrong()))
    assert np.allclose(plain, told, rtol=1e-5) == (not valid)
    if valid:  # one gradient is enough here, and w − w_0 is linear in it
        np.testing.assert_allclose(told, 2 * plain, rtol=1e-5)


def test_samples_outside_are_not_read_where_the_gradient_is_known():
    """With known gradients and one inner step the samples can be anything."""
    problem = problem_of().on_device()
    algorithm = fs.FedADMM(local_iterations=2, lipschitz=2.0, inner_steps=1)
    state = State.start(problem, algorithm, jax.random.key(0))
    rows = client_values(problem, state.w, gradient=True, own_gradients=True)["gradient"]
    values = jax.tree.map(lambda leaf: leaf * jnp.nan, problem.samples.values)
    nothing = eqx.tree_at(lambda p: p.samples.values, problem, values)

    @eqx.filter_jit
    def play(problem, known):
        fed = simulation.Simulation(problem, state)
        fed.known = known
        return fed.play(algorithm)[0].w

    told = play(nothing, Known(jnp.asarray(True), rows))
    np.testing.assert_allclose(told, play(problem, None), rtol=1e-5)


def test_when_gradients_are_kept():
    options, algorithm = RoundOptions(stop=NEVER), fs.FedADMM()
    problem = problem_of().on_device()
    assert simulation.reuses_gradients(problem, algorithm, options)
    assert not simulation.reuses_gradients(problem, algorithm, RoundOptions())
    assert not simulation.reuses_gradients(problem, fs.FedAvg(0.1), options)
    assert not simulation.reuses_gradients(problem_of(batch_size=3).on_device(), algorithm, options)
    few = fs.problems.linear_regression(clients=9, size=50, smallest=3, largest=5).on_device()
    assert not simulation.reuses_gradients(few, algorithm, options)


@pytest.mark.parametrize("size", [None, 1, 4])
def test_each_client_has_its_own_gradient(size):
    """In one piece and in blocks, with clients of different sizes."""
    problem, w = problem_of(seed=2).on_device(), jnp.linspace(-1, 1, 4)
    options = RoundOptions(clients_at_once=size)
    found = client_values(problem, w, options=options, gradient=True, own_gradients=True)
    for index in range(9):
        own = jax.tree.map(lambda leaf, i=index: leaf[i], problem.samples)
        value, slope = jax.value_and_grad(problem.value)(w, own)
        np.testing.assert_allclose(found["objective"][index], value, rtol=1e-5)
        np.testing.assert_allclose(found["gradient"][index], slope, rtol=1e-4, atol=1e-6)


def test_light_functions_make_nothing_large():
    data, w = jnp.ones((40, 30)), jnp.ones(30)

    def linear(data):
        return jax.grad(lambda w: jnp.mean((data @ w) ** 2))(w)

    def inside(data):
        return jax.lax.map(lambda row: jnp.outer(row, row).sum(), data)

    assert is_light(linear, data)
    assert is_light(jax.vmap(linear), data[None])
    assert is_light(jax.jit(linear), data)
    assert not is_light(lambda data: jnp.sum(jnp.tanh(data)), data)
    assert not is_light(inside, data)
    assert not is_light(jax.jit(lambda data: jnp.sum(jnp.tanh(data))), data)


def test_a_restricted_client_computes_its_own_gradient():
    """Known gradients are of all samples."""
    problem = problem_of().on_device()
    own = jax.tree.map(lambda leaf: leaf[0], problem.samples)
    w, key = problem.start(), jax.random.key(0)
    place = w, jnp.int32(0), jnp.int32(0), key, None
    known = Known(jnp.asarray(True), jnp.full(4, 7.0))
    informed = InformedClient(problem, lambda index: own, *place, known)
    plain = problem.client(own, *place)
    assert (informed.grad(informed.w) == 7).all()
    np.testing.assert_allclose(informed.grad(w + 1), plain.grad(w + 1), rtol=1e-6)
    few, same = informed.restricted(3, key), plain.restricted(3, key)
    np.testing.assert_allclose(few.grad(few.w), same.grad(same.w), rtol=1e-6)
    np.testing.assert_allclose(informed.reading(jnp.int32(0)).grad(w), plain.grad(w), rtol=1e-6)


def test_samples_are_not_read_before_the_loop_that_needs_them(monkeypatch):
    """The compiled program gathers a cohort's samples only inside the loop of `FedADMM.iterate`.

    They do not depend on the loop, so the compiler would move the copy of the samples in front of
    it, and copy them in every round, though hardly any round needs them.
    """
    monkeypatch.setattr(blocks, "TOGETHER", 2**10)
    monkeypatch.setattr(blocks, "BLOCK", 2**14)
    problem = fs.problems.linear_regression(clients=20, size=72, smallest=20, largest=37)
    problem, algorithm = problem.on_device(), fs.FedADMM(participants=10)
    options = RoundOptions(stop=NEVER)
    assert simulation.reuses_gradients(problem, algorithm, options)
    seed = jax.random.key_data(jax.random.key(0))
    state = simulation.compiled_start(problem, algorithm, seed, options)
    spans = padded(spans_of(0, 5, 1))
    program = simulation.compiled_advance.lower(problem, algorithm, state, spans, options)
    text, found = program.compile().compiled.as_text(), []
    bodies = dict(re.findall(r"while\(.*body=%?([\w.\-]+), metadata={op_name=\"([^\"]*)", text))
    for part in re.split(r"\n(?=(?:ENTRY )?%[\w.\-]+ \()", text):
        name = part.split(" ")[0].lstrip("%")
        gathers = re.findall(
            r"= f32\[[\d,]*37,72\]\S* (?:gather|fusion)\(.*op_name=\"([^\"]*)\"", part
        )
        if name in bodies:
            found += [bodies[name] for told in gathers if told.endswith("vmap()/while/body/gather")]
    assert found
    assert all(told.endswith("vmap()/while") for told in found)
