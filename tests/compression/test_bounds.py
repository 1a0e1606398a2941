"""Compressors keep their bounds: the contraction q and the variance ω."""

from __future__ import annotations

import jax
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
    KEYS,
    RANDOM,
    compress_and_dense_rows,
    dense,
    every,
    normal,
    over,
    quickly,
    spike,
    squared,
    vectors,
)


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
def test_a_bound_that_does_not_exist_raises(compressor):
    assert compressor.unbiased or compressor.contractive
    if not compressor.unbiased:
        with pytest.raises(InvalidInput, match=r"is biased and has no ω"):
            compressor.variance(30)
    if not compressor.contractive:
        with pytest.raises(InvalidInput, match=r"is not contractive and has no q"):
            compressor.contraction(30)


@over(DETERMINISTIC)
def test_contraction_in_float64_beyond_the_range_of_float32(compressor):
    with jax.enable_x64(True):
        v = np.random.default_rng(0).normal(size=30)
        result = np.asarray(dense(compressor, 1e200 * v)) / 1e200
        assert squared(result - v) <= (1 - compressor.contraction(30) + 1e-15) * squared(v)
