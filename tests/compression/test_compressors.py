"""What each compressor computes, in every type and under every transformation; bad input."""

from __future__ import annotations

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given

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
from fedsolve.errors import InvalidInput
from tests.support.compressors import (
    DETERMINISTIC,
    KEY,
    KEYS,
    RANDOM,
    compress,
    compress_and_dense,
    compress_and_dense_rows,
    dense,
    every,
    normal,
    over,
    quickly,
    spike,
    vectors,
)


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
def test_bad_vectors_raise(compressor, v, sentence):
    with pytest.raises(InvalidInput, match=f"^{type(compressor).__name__} .*{sentence}"):
        compressor(jnp.asarray(v), KEY)


def test_non_finite_values_pass_where_they_cannot_be_seen():
    v = jnp.array([1.0, jnp.nan])
    np.testing.assert_array_equal(jax.jit(Identity())(v).dense(), v)


@over(RANDOM)
def test_random_compressors_need_a_key(compressor):
    with pytest.raises(InvalidInput, match=r"draws at random and needs a key"):
        compressor(normal(7))


@over(DETERMINISTIC)
def test_deterministic_compressors_need_no_key(compressor):
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
def test_bad_arguments_raise(kind, arguments, sentence):
    with pytest.raises(InvalidInput, match=f"^{re.escape(sentence)}$"):
        kind(*arguments)
