"""Packets: their bytes, their indices, and weighted sums of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedsolve.compression.compressors import (
    QSGD,
    Compose,
    Float4,
    Float8,
    Float16,
    Identity,
    RandK,
    TopK,
)
from tests.support.compressors import (
    KEY,
    KEYS,
    compress,
    compress_and_dense_rows,
    dense,
    every,
    normal,
    over,
    shapes,
)


@pytest.mark.parametrize(
    ("compressor", "size", "nbytes"),
    [
        (Identity(), 30, 30 * 4),
        (TopK(0.1), 30, 3 * 1 + 3 * 4),
        (TopK(0.1), 1000, 100 * 2 + 100 * 4),
        (TopK(0.1), 100_000, 10_000 * 4 + 10_000 * 4),
        (TopK(0.1, block=250), 1000, 100 * 1 + 100 * 4),
        (TopK(0.5, block=8), 29, (4 + 4 + 4 + 4) * (1 + 4)),
        (TopK(0.5, block=8), 26, (4 + 4 + 4 + 2) * (1 + 4)),
        (RandK(0.1), 1000, 100 * 2 + 100 * 4),
        (Float16(), 30, 4 + 60),
        (Float8(), 30, 4 + 30),
        (Float4(), 30, 4 + 15),
        (Float4(), 31, 4 + 16),
        (QSGD(127), 30, 4 + 30),
        (QSGD(128), 30, 4 + 60),
        (Compose(TopK(0.1), Float8()), 1000, 100 * 2 + 4 + 100),
        (Compose(TopK(0.1, block=250), Float4()), 1000, 100 * 1 + 4 + 50),
        (Compose(RandK(0.1), QSGD(4)), 1000, 100 * 2 + 4 + 100),
    ],
    ids=str,
)
def test_bytes_on_the_wire(compressor, size, nbytes):
    assert shapes(compressor, size).nbytes == nbytes
    rows, keys = jax.ShapeDtypeStruct((3, size), jnp.float32), jax.random.split(KEY, 3)
    assert jax.eval_shape(jax.vmap(compressor), rows, keys).nbytes == 3 * nbytes


@every
def test_bytes_are_those_of_the_arrays(compressor):
    packet = compress(compressor, normal(30))
    sent = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(packet))
    assert packet.nbytes == len(sent) == shapes(compressor, 30).nbytes


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")],
)
def test_indices_are_as_narrow_as_they_can_be(size, dtype):
    for compressor in (TopK(0.1), RandK(0.1), TopK(0.1, block=size), Compose(TopK(0.1), Float8())):
        assert shapes(compressor, size).indices.dtype == dtype
    assert shapes(TopK(0.1, block=256), size).indices.dtype == "uint8"


@pytest.mark.parametrize("size", [256, 257, 65537])
def test_the_last_index_fits(size):
    v = np.zeros(size, np.float32)
    v[-1] = 2
    np.testing.assert_array_equal(dense(TopK(1e-9), v), v)
    np.testing.assert_array_equal(dense(TopK(1e-9, block=256), v), v)


@every
def test_weighted_sums_ignore_packets_of_weight_zero(compressor):
    weights = np.zeros(len(KEYS), np.float32)
    weights[:3] = 0.5, 2, -1
    stacked, rows = compress_and_dense_rows(compressor, normal(len(KEYS), 30), KEYS)
    weighted_sum = jax.jit(lambda packets, weights: packets.weighted_sum(weights))
    np.testing.assert_allclose(weighted_sum(stacked, weights), weights @ rows, atol=1e-5)
    for poison in (np.nan, np.inf):
        broken = jax.tree.map(lambda leaf, poison=poison: poisoned(leaf, poison), stacked)
        assert not np.all(np.isfinite(weighted_sum(broken, weights)))
        silent = np.where(np.arange(len(KEYS)) == 0, 0, weights)
        np.testing.assert_allclose(weighted_sum(broken, silent), silent @ rows, atol=1e-5)


def poisoned(leaf, poison):
    """The first packet's numbers are spoilt, its integers are not."""
    leaf = np.array(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        leaf[0] = poison
    return leaf


@over([TopK(0.01), TopK(0.01, block=100), RandK(0.01), Compose(TopK(0.01), Float8())])
def test_sparse_sums_make_no_dense_rows(compressor):
    clients, size = 16, 1000
    assert largest_array(compressor, clients, size) == size
    # The same look at a dense packet does see them.
    assert largest_array(Float8(), clients, size) == clients * size


def largest_array(compressor, clients, size):
    """The most elements of any array that a weighted sum computes."""
    rows, keys = jnp.ones((clients, size)), jax.random.split(KEY, clients)
    stacked = jax.eval_shape(jax.vmap(compressor), rows, keys)
    program = jax.make_jaxpr(lambda packets, w: packets.weighted_sum(w))(stacked, jnp.ones(clients))
    return max(variable.aval.size for variable in computed(program.jaxpr))


def computed(jaxpr):
    for equation in jaxpr.eqns:
        yield from equation.outvars
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(value, "eqns"):
                yield from computed(getattr(value, "jaxpr", value))
