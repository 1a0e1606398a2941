"""Compressors keep their promises: bounds, unbiasedness, bytes, and sums of packets."""

from __future__ import annotations

import re

import equinox as eqx
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings

from fedsolve.compression.compressors import (
    QSGD,
    Compose,
    Compressor,
    Float4,
    Float8,
    Float16,
    Identity,
    RandK,
    TopK,
)
from fedsolve.errors import InvalidInput

DETERMINISTIC: list[Compressor] = [
    Identity(),
    TopK(0.3),
    TopK(0.3, block=8),
    Float16(),
    Float8(),
    Float4(),
    Compose(TopK(0.3), Float8()),
    Compose(TopK(0.5, block=8), Float4()),
]
RANDOM: list[Compressor] = [
    RandK(0.3),
    RandK(0.3, unbiased=False),
    QSGD(4),
    Compose(RandK(0.3), QSGD(4)),
    Compose(RandK(0.5, unbiased=False), TopK(0.5)),
]
KEY = jax.random.key(0)
KEYS = jax.random.split(KEY, 4000)


def over(compressors):
    return pytest.mark.parametrize("compressor", compressors, ids=str)


every = over(DETERMINISTIC + RANDOM)


# Compiled once for each compressor and size, for all tests.


@eqx.filter_jit
def compress_and_dense(compressor, v, key):
    packet = compressor(v, key)
    return packet, packet.dense()


@eqx.filter_jit
def compress_and_dense_rows(compressor, rows, keys):
    packets = jax.vmap(compressor)(rows, keys)
    return packets, jax.vmap(lambda packet: packet.dense())(packets)


def compress(compressor, v, key=KEY):
    return compress_and_dense(compressor, v, key)[0]


def dense(compressor, v, key=KEY):
    return compress_and_dense(compressor, v, key)[1]


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def spike(size):
    v = np.full(size, 1e-6, np.float32)
    v[size // 2] = -3
    return v


def squared(v):
    return np.sum(np.asarray(v, np.float64) ** 2, axis=-1)


# Few sizes, as each is a compilation. Entries are 0 or 1e-3 to 1 in magnitude, with many ties.
entries = st.one_of(
    st.sampled_from([0.0, 1.0, -1.0, 0.5, -0.75]),
    st.floats(2.0**-10, 1, width=32),
    st.floats(-1, -(2.0**-10), width=32),
)
vectors = st.builds(
    lambda v, scale: v * np.float32(scale),
    st.sampled_from([1, 30, 257]).flatmap(
        lambda size: hnp.arrays(np.float32, size, elements=entries)
    ),
    st.sampled_from([1e-30, 1.0, 1e30]),
)
quickly = settings(deadline=None, max_examples=30, derandomize=True)


# Bounds


@over(DETERMINISTIC)
@quickly
@given(v=vectors)
@example(v=np.zeros(30, np.float32))
@example(v=np.ones(30, np.float32))
@example(v=spike(257))
@example(v=normal(257))
@example(v=1e30 * normal(257))
def test_deterministic_compressors_contract(compressor, v):
    q = compressor.contraction(v.size)
    assert 0 < q <= 1
    error = squared(np.asarray(dense(compressor, v), np.float64) - v)
    # Both sides are summed in float64, which rounds by some 1e-15 of ‖v‖².
    assert error <= (1 - q + 1e-15) * squared(v)


@pytest.mark.parametrize(
    ("compressor", "format", "codewords"),
    [
        (Float4(), ml_dtypes.float4_e2m1fn, 8),
        (Float8(), ml_dtypes.float8_e4m3fn, 0x7F),
        (Float16(), np.float16, 0x7C00),
    ],
)
@pytest.mark.parametrize("size", [2, 30])
def test_the_contraction_of_small_floats_is_attained(compressor, format, codewords, size):
    """The worst vector has one entry at the top and the others midway between two codewords."""
    patterns = np.arange(codewords, dtype=np.uint16 if format == np.float16 else np.uint8)
    codebook = patterns.view(format).astype(np.float32)
    v = np.repeat((codebook[1:, None] + codebook[:-1, None]) / 2, size, axis=1)
    v[:, 0] = codebook[-1]
    result = jax.jit(jax.vmap(lambda row: compressor(row).dense()))(v)
    worst = np.max(squared(np.asarray(result, np.float64) - v) / squared(v))
    bound = 1 - compressor.contraction(size)
    assert 0.99 * bound < worst <= bound


@over([compressor for compressor in RANDOM if compressor.contractive])
@pytest.mark.parametrize("v", [normal(30), spike(30)], ids=["normal", "spike"])
def test_random_compressors_contract_in_expectation(compressor, v):
    samples = dense_by_keys(compressor, v)
    ratios = squared(samples - v) / squared(v)
    assert np.mean(ratios) <= 1 - compressor.contraction(v.size) + five_standard_errors(ratios)


@over([compressor for compressor in RANDOM if compressor.unbiased])
@pytest.mark.parametrize(
    "v",
    [normal(30), spike(30), 1e30 * normal(30), 1e-30 * normal(30)],
    ids=["normal", "spike", "huge", "tiny"],
)
def test_unbiased_compressors_have_the_right_mean_and_variance(compressor, v):
    samples = dense_by_keys(compressor, v)
    scale = np.abs(v).max()
    mean_error = np.abs(np.mean(samples / scale, axis=0) - v / scale)
    assert np.all(mean_error <= five_standard_errors(samples / scale))
    ratios = squared((samples - v) / scale) / squared(v / scale)
    assert np.mean(ratios) <= compressor.variance(v.size) + five_standard_errors(ratios)


def test_the_variance_of_rand_k_is_exact():
    v = normal(30)
    ratios = squared(dense_by_keys(RandK(0.3), v) - v) / squared(v)
    assert abs(np.mean(ratios) - (30 / 9 - 1)) <= five_standard_errors(ratios)


def dense_by_keys(compressor, v):
    """C(v) by many keys, in float64."""
    rows = np.tile(v, (len(KEYS), 1))
    return np.asarray(compress_and_dense_rows(compressor, rows, KEYS)[1], float)


def five_standard_errors(samples):
    # float32 rounds by 1e-7 of the largest entry, also where there is nothing random.
    return 5 * np.std(samples, axis=0) / np.sqrt(len(samples)) + 1e-6


@pytest.mark.parametrize(
    ("compressor", "size", "q"),
    [
        (Identity(), 30, 1),
        (TopK(0.1), 30, 3 / 30),
        (TopK(0.07), 100, 7 / 100),  # 0.07 · 100 is more than 7 in floating point
        (TopK(0.01), 30, 1 / 30),
        (TopK(0.3, block=8), 30, 3 / 8),
        (TopK(0.3, block=64), 30, 9 / 30),
        (RandK(0.3, unbiased=False), 30, 9 / 30),
        (RandK(1.0), 30, 1),
        (Float4(), 1, 1),
        (Compose(TopK(0.3), TopK(0.5)), 30, 9 / 30 * 5 / 9),
        (Compose(TopK(0.3, block=8), TopK(0.5)), 30, 3 / 8 * 6 / 12),
        (Compose(TopK(0.3), Float8()), 30, 9 / 30 * Float8().contraction(9)),
    ],
    ids=str,
)
def test_contraction_of_known_cases(compressor, size, q):
    assert compressor.contractive
    assert compressor.contraction(size) == pytest.approx(q, rel=1e-12)


@pytest.mark.parametrize(
    ("compressor", "size", "omega"),
    [
        (Identity(), 30, 0),
        (RandK(0.1), 30, 9),
        (RandK(1.0), 30, 0),
        (QSGD(20), 100, 100 / 400),
        (QSGD(2), 100, 10 / 2),
        (Compose(RandK(0.1), QSGD(3)), 90, 10 * (1 + 1) - 1),
    ],
    ids=str,
)
def test_variance_of_known_cases(compressor, size, omega):
    assert compressor.unbiased
    assert compressor.variance(size) == pytest.approx(omega, rel=1e-12)


@every
def test_a_bound_that_does_not_exist_is_refused(compressor):
    assert compressor.unbiased or compressor.contractive
    if not compressor.unbiased:
        with pytest.raises(InvalidInput, match=r"is biased and has no ω"):
            compressor.variance(30)
    if not compressor.contractive:
        with pytest.raises(InvalidInput, match=r"is not contractive and has no q"):
            compressor.contraction(30)


# Shapes, dtypes, transformations


@every
@pytest.mark.parametrize(("dtype", "size"), [("float32", 1), ("float32", 30), ("float64", 30)])
def test_shape_and_dtype_are_kept_and_zero_is_zero(compressor, dtype, size):
    with jax.enable_x64(dtype == "float64"):
        result = dense(compressor, normal(size).astype(dtype))
        assert result.shape == (size,)
        assert result.dtype == dtype
        assert np.all(np.isfinite(result))
        assert not np.any(dense(compressor, np.zeros(size, dtype)))


@over([Float16(), Float8(), Float4(), QSGD(4)])
def test_bfloat16_is_quantized_too(compressor):
    v = jnp.asarray(normal(30), jnp.bfloat16)
    result = dense(compressor, v)
    assert result.dtype == v.dtype
    wide = dense(compressor, np.asarray(v, np.float32))
    np.testing.assert_allclose(np.asarray(result, float), wide, rtol=2**-6)


@over(DETERMINISTIC)
def test_contraction_in_float64_beyond_the_range_of_float32(compressor):
    with jax.enable_x64(True):
        v = np.random.default_rng(0).normal(size=30)
        result = np.asarray(dense(compressor, 1e200 * v)) / 1e200
        assert squared(result - v) <= (1 - compressor.contraction(30) + 1e-15) * squared(v)


@every
def test_a_single_entry_is_kept(compressor):
    """With d = 1 there is nothing to drop and nothing between codewords."""
    v = np.array([-0.3], np.float32)
    np.testing.assert_allclose(dense(compressor, v), v, rtol=1e-6)


@every
def test_jit_and_vmap_agree_with_eager(compressor):
    rows = normal(len(KEYS), 30)
    eager = compressor(rows[1], KEYS[1])
    alone = compress(compressor, rows[1], KEYS[1])
    stacked, _ = compress_and_dense_rows(compressor, rows, KEYS)
    among = jax.tree.map(lambda leaf: np.asarray(leaf)[1], stacked)
    for packet in (alone, among):
        assert jax.tree.structure(packet) == jax.tree.structure(eager)
        for ours, theirs in zip(jax.tree.leaves(packet), jax.tree.leaves(eager), strict=True):
            assert ours.dtype == theirs.dtype
            np.testing.assert_allclose(np.asarray(ours, float), np.asarray(theirs, float), 1e-6)


def test_equal_compressors_share_a_compilation():
    traces = []

    @eqx.filter_jit
    def traced(compressor, v):
        traces.append(compressor)
        return compressor(v)

    for fraction in (0.1, 0.1, 0.2, 0.1):
        traced(Compose(TopK(fraction, block=4), Float8()), jnp.ones(30))
    assert [compressor.first.fraction for compressor in traces] == [0.1, 0.2]
    assert hash(TopK(0.1)) == hash(TopK(0.1))
    assert TopK(0.1) == TopK(0.1) != TopK(0.2)
    assert RandK(0.1) != RandK(0.1, unbiased=False)
    assert Float8() != Float16()


# Bytes


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


def shapes(compressor, size):
    """The packet of a vector of this size, without its numbers."""
    return jax.eval_shape(compressor, jax.ShapeDtypeStruct((size,), jnp.float32), KEY)


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


# What each of them does


@quickly
@given(v=vectors)
@example(v=np.ones(30, np.float32))
def test_top_k_keeps_the_largest(v):
    packet, result = compress_and_dense(TopK(0.3), v, KEY)
    kept = max(1, -(-3 * v.size // 10))
    check_largest(np.asarray(packet.indices), np.asarray(result), v, kept)


@pytest.mark.parametrize(("fraction", "kept"), [(0.3, (3, 3, 3, 3)), (0.9, (8, 8, 8, 6))])
def test_top_k_by_blocks_keeps_the_largest_of_each(fraction, kept):
    v = normal(30)
    packet, result = compress_and_dense(TopK(fraction, block=8), v, KEY)
    result, ends = np.asarray(result), np.cumsum(kept)
    for block, indices in enumerate(np.split(np.asarray(packet.indices), ends[:-1])):
        part = slice(8 * block, 8 * block + 8)
        check_largest(indices, result[part], v[part], kept[block])


def check_largest(indices, result, v, kept):
    """Ties are free: only magnitudes are compared with the sorted ones."""
    assert len(set(indices.tolist())) == len(indices) == kept
    np.testing.assert_array_equal(result[indices], v[indices])
    assert not np.any(np.delete(result, indices))
    np.testing.assert_array_equal(np.sort(np.abs(v[indices])), np.sort(np.abs(v))[-kept:])


def test_a_block_longer_than_the_vector_is_the_vector():
    for block in (30, 31, 1000):
        packet = compress(TopK(0.3, block=block), normal(30))
        assert eqx.tree_equal(packet, compress(TopK(0.3), normal(30)))


@pytest.mark.parametrize(("unbiased", "factor"), [(True, 30 / 9), (False, 1)])
def test_rand_k_keeps_distinct_entries(unbiased, factor):
    v = normal(30)
    packet, result = compress_and_dense(RandK(0.3, unbiased=unbiased), v, KEY)
    indices = np.asarray(packet.indices)
    assert len(set(indices.tolist())) == len(indices) == 9
    expected = np.zeros(30)
    expected[indices] = v[indices] * factor
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    other = compress(RandK(0.3, unbiased=unbiased), v, jax.random.key(1))
    assert set(indices.tolist()) != set(np.asarray(other.indices).tolist())


@quickly
@given(v=vectors)
@example(v=np.linspace(-1, 1, 257, dtype=np.float32))
def test_float8_and_float16_round_to_nearest(v):
    for compressor, format, top in (
        (Float8(), ml_dtypes.float8_e4m3fn, 448),
        (Float16(), np.float16, 65504),
    ):
        packet = compress(compressor, v)
        assert packet.codes.dtype == format
        assert packet.scale == np.abs(v).max()
        scaled = v.astype(float) * top / (np.abs(v.astype(float)).max() or 1)
        check_nearest(np.asarray(packet.codes, float), scaled.astype(format).astype(float), scaled)


@quickly
@given(v=vectors)
@example(v=np.linspace(-1, 1, 257, dtype=np.float32))
@example(v=np.tile([-6, 6, -4, 3, 2, -1.5, 1, 0.5, 0, -0.5], 3).astype(np.float32))
def test_float4_rounds_to_nearest(v):
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codebook = np.concatenate([-magnitudes, magnitudes])
    scale = np.abs(v.astype(float)).max() / 6 or 1.0
    result = np.asarray(dense(Float4(), v), float) / scale
    codes = codebook[np.argmin(np.abs(result[:, None] - codebook), axis=1)]
    np.testing.assert_allclose(result, codes, rtol=1e-6)
    nearest = codebook[np.argmin(np.abs(v[:, None] / scale - codebook), axis=1)]
    check_nearest(codes, nearest, v / scale)


def check_nearest(codes, nearest, scaled):
    """Ties are free, also those that float32 makes: only distances are compared."""
    excess = np.abs(codes - scaled) - np.abs(nearest - scaled)
    assert np.all(excess <= 1e-6 * np.abs(scaled))


@pytest.mark.parametrize(("levels", "dtype"), [(127, "int8"), (32767, "int16")])
def test_qsgd_rounds_to_a_neighbouring_level(levels, dtype):
    v = spike(30)  # of norm |spike|, so that its code is the largest there is
    packet, result = compress_and_dense(QSGD(levels), v, KEY)
    assert packet.codes.dtype == dtype
    level = v.astype(float) * levels / np.linalg.norm(v.astype(float))
    assert np.all(np.abs(np.asarray(packet.codes) - level) < 1)
    assert packet.codes[15] == -levels
    expected = np.linalg.norm(v) * np.asarray(packet.codes) / levels
    np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_composition_compresses_the_kept_values():
    v = normal(30)
    kept = np.asarray(compress(TopK(0.3), v).indices)
    both, result = compress_and_dense(Compose(TopK(0.3), Float8()), v, KEY)
    np.testing.assert_array_equal(both.indices, kept)
    expected = np.zeros(30, np.float32)
    expected[kept] = dense(Float8(), v[kept])
    np.testing.assert_array_equal(result, expected)


# Sums of packets


@every
def test_weighted_sum_is_the_sum_and_weight_zero_is_silence(compressor):
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


# Bad input gets a sentence


@every
@pytest.mark.parametrize(
    ("v", "sentence"),
    [
        (np.array([1, np.nan], np.float32), "compresses finite vectors, got one with NaN"),
        (np.array([-np.inf, 1], np.float32), "compresses finite vectors, got one with NaN"),
        (np.ones((2, 3), np.float32), r"1-D float vector, got float32 of shape \(2, 3\)"),
        (np.float32(1), r"1-D float vector, got float32 of shape \(\)"),
        (np.ones(0, np.float32), r"1-D float vector, got float32 of shape \(0,\)"),
        (np.ones(3, np.int32), r"1-D float vector, got int32 of shape \(3,\)"),
    ],
)
def test_bad_vectors_are_refused(compressor, v, sentence):
    with pytest.raises(InvalidInput, match=f"^{type(compressor).__name__} .*{sentence}"):
        compressor(jnp.asarray(v), KEY)


def test_non_finite_values_pass_where_they_cannot_be_seen():
    v = jnp.array([1.0, jnp.nan])
    np.testing.assert_array_equal(jax.jit(Identity())(v).dense(), v)


@over(RANDOM)
def test_chance_needs_a_key(compressor):
    with pytest.raises(InvalidInput, match=r"draws at random and needs a key"):
        compressor(normal(7))


@over(DETERMINISTIC)
def test_no_chance_needs_no_key(compressor):
    v = normal(30)
    assert eqx.tree_equal(compressor(v), compressor(v, KEY))


FRACTION = "needs a fraction in (0, 1]"
BLOCK = "TopK needs block to be a positive whole number or None"
LEVELS = "QSGD needs a whole number of levels from 1 to 32767"
PAIR = "Compose needs two contractive compressors or two unbiased ones"


@pytest.mark.parametrize(
    ("kind", "arguments", "sentence"),
    [
        (TopK, (1.5,), f"TopK {FRACTION}, got 1.5."),
        (TopK, (0,), f"TopK {FRACTION}, got 0."),
        (TopK, (float("nan"),), f"TopK {FRACTION}, got nan."),
        (TopK, ("half",), f"TopK {FRACTION}, got 'half'."),
        (TopK, (True,), f"TopK {FRACTION}, got True."),
        (RandK, (-0.1,), f"RandK {FRACTION}, got -0.1."),
        (RandK, (None,), f"RandK {FRACTION}, got None."),
        (TopK, (0.1, 0), f"{BLOCK}, got 0."),
        (TopK, (0.1, 8.0), f"{BLOCK}, got 8.0."),
        (QSGD, (0,), f"{LEVELS}, got 0."),
        (QSGD, (32768,), f"{LEVELS}, got 32768."),
        (QSGD, (4.0,), f"{LEVELS}, got 4.0."),
        (QSGD, (True,), f"{LEVELS}, got True."),
        (
            Compose,
            (Float8(), TopK(0.1)),
            "Compose needs TopK or RandK to come first, got Float8().",
        ),
        (Compose, (TopK(0.1), 8), "Compose needs a compressor to come second, got 8."),
        (Compose, (TopK(0.1), QSGD(4)), f"{PAIR}, got TopK(fraction=0.1) and QSGD(levels=4)."),
        (Compose, (RandK(0.1), Float8()), f"{PAIR}, got RandK(fraction=0.1) and Float8()."),
    ],
)
def test_bad_arguments_are_refused(kind, arguments, sentence):
    with pytest.raises(InvalidInput, match=f"^{re.escape(sentence)}$"):
        kind(*arguments)
