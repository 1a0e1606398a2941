"""Sums that do not depend on the order of the clients."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedsolve as fs
from fedsolve.flare.roster import Roster
from fedsolve.flare.server import serve
from fedsolve.privacy.exact import ExactReplies, exact_sum
from fedsolve.runtimes.placement import numbers_on_device, precision_of
from tests.support import examples
from tests.support.in_process import SITES, Wires

ORDER = [3, 1, 5, 0, 2, 4]


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([2, 20, 300]), st.floats(0, 30))
def test_the_sum_is_that_of_the_set_and_right(seed, terms, spread):
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((terms, 3)) * 10.0 ** rng.uniform(-spread, spread, (terms, 3))
    for dtype, roundings in ((np.float64, 2), (np.float32, 2)):
        with jax.enable_x64(dtype == np.float64):
            own = rows.clip(-1e30, 1e30).astype(dtype)
            found = np.asarray(exact_sum(jnp.asarray(own)))
            for _ in range(3):
                again = exact_sum(jnp.asarray(own[rng.permutation(terms)]))
                np.testing.assert_array_equal(found, again)
            right = np.array([math.fsum(column) for column in own.T.astype(float)])
            # relative to the largest term: what cancels beyond that is lost in every sum
            error = np.abs(found - right) / np.abs(own.astype(float)).max(0)
            assert np.all(error <= roundings * terms * np.finfo(dtype).eps)
            fine = np.abs(found - right) <= roundings * np.finfo(dtype).eps * np.abs(right) + (
                np.abs(own.astype(float)).max(0) * float(np.finfo(dtype).eps) ** 1.5
            )
            assert fine.all()


def test_plain_sums_depend_on_the_order_and_these_do_not():
    rows = np.random.default_rng(0).standard_normal((50, 200))
    with jax.enable_x64(True):
        plain, exact = set(), set()
        for seed in range(5):
            order = np.random.default_rng(seed).permutation(50)
            own = fs.Replies(jnp.asarray(rows[order]), np.ones(50, bool))
            plain.add(np.asarray(own.mean()).tobytes())
            exact.add(np.asarray(ExactReplies(own.values, own.arrived).mean()).tobytes())
    assert (len(plain) > 1, len(exact)) == (True, 1)


def test_weights_missing_answers_and_packets():
    rows = jnp.asarray(np.random.default_rng(0).standard_normal((4, 10)))
    packets = jax.vmap(fs.TopK(0.3))(rows)
    arrived, weights = np.array([True, False, True, True]), jnp.asarray([1.0, 5.0, 2.0, 0.5])
    broken = rows.at[1].set(jnp.nan)
    for values in (packets, broken, {"a": broken, "b": jnp.arange(4)}):
        plain, exact = fs.Replies(values, arrived), ExactReplies(values, arrived)
        for wanted in (None, weights):
            for a, b in [
                (plain.sum(wanted), exact.sum(wanted)),
                (plain.mean(wanted), exact.mean(wanted)),
            ]:
                jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), a, b)
    assert exact.pick("a").sum().shape == (10,)
    assert type(exact.pick("a")) is ExactReplies


def test_too_many_terms_are_refused():
    with pytest.raises(fs.InvalidInput, match="too many for exact sums in float32"):
        jax.eval_shape(exact_sum, jax.ShapeDtypeStruct((2**22, 1), jnp.float32))


def permuted(problem):
    order = np.array(ORDER)
    return eqx.tree_at(
        lambda p: p.samples, problem, jax.tree.map(lambda leaf: leaf[order], problem.samples)
    )


def steep(clients=6, apart=0.7):
    """Two targets far apart: a steep switch moves to and fro between them, and never settles."""
    rng = np.random.default_rng(0)
    x, way = rng.standard_normal((clients, 40, 12)), rng.standard_normal(12)
    way *= apart / np.linalg.norm(way)
    t, u = (x @ end + 0.1 * rng.standard_normal((clients, 40)) for end in (way, -way))
    return fs.Problem(
        objective=lambda w, data: 0.5 * jnp.mean((data["x"] @ w - data["t"]) ** 2),
        constraint=lambda w, data: 0.5 * jnp.mean((data["x"] @ w - data["u"]) ** 2) - 0.5,
        params=jnp.zeros(12),
        clients={"x": x, "t": t, "u": u},
    )


STEEP = fs.FedSGM(0.1, 0.05, switching=fs.Soft(40.0))


def test_the_order_of_clients_does_not_change_a_run():
    """Switching amplifies rounding: with plain sums, 1e-16 becomes 1e-2 within 100 rounds."""

    def ends(rule):
        runs = [
            fs.solve(each, STEEP, 100, precision="float64", aggregation=rule)
            for each in (steep(), permuted(steep()))
        ]
        return [np.asarray(run.params) for run in runs]

    one, other = ends(None)
    assert np.abs(one - other).max() > 1e-6
    one, other = ends(fs.ExactSum())
    np.testing.assert_array_equal(one, other)


def test_a_deployment_has_the_bits_of_the_simulation(tmp_path):
    problem, rule = steep(), fs.ExactSum()
    wires = Wires(problem, STEEP, tmp_path)
    with precision_of("float64") as dtype:
        tuned = numbers_on_device(STEEP, dtype)
        link = Roster(wires, problem.on_device(dtype), tuned, [].append)
    (home := tmp_path / "server").mkdir()
    run = serve(
        *(link, list(SITES), problem, STEEP, 100, 0, home),
        precision="float64",
        aggregation=rule,
    )
    expected = fs.solve(problem, STEEP, 100, precision="float64", aggregation=rule)
    np.testing.assert_array_equal(run.params, expected.params)


@pytest.mark.parametrize("runtime", ["compiled", "debug", "streamed"])
def test_every_runtime_takes_it(runtime):
    problem, algorithm = examples.least_squares(), fs.FedSGM(0.05, 0.1, participants=3)
    given = {"precision": "float64", "rounds": 4, "runtime": runtime}
    plain = fs.solve(problem, algorithm, **given)
    exact = fs.solve(problem, algorithm, **given, aggregation=fs.ExactSum())
    np.testing.assert_allclose(plain.params, exact.params, atol=1e-12)


def test_sums_that_nobody_sees_are_refused():
    with pytest.raises(fs.InvalidInput):
        fs.solve(
            examples.least_squares(),
            fs.FedAvg(0.1),
            2,
            aggregation=fs.ExactSum(),
            privacy=fs.Private(clip=1.0, noise=1.0),
        )
