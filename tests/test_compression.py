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

from fedsolve.compression import (
    QSGD,
    Compose,
    Compressor,
    Float4,
    Float8,
    Float16,
    Identity,
    Packet,
    RandK,
    TopK,
)
from fedsolve.errors import InvalidInput

DETERMINISTIC: list[Compressor] = [
    Identity(),
    TopK(0.1),
    TopK(1),
    TopK(0.3, block=8),
    Float16(),
    Float8(),
    Float4(),
    Compose(TopK(0.3), Float8()),
    Compose(TopK(0.5, block=8), Float4()),
    Compose(TopK(0.5), TopK(0.5)),
]
RANDOM: list[Compressor] = [
    RandK(0.3),
    RandK(0.3, unbiased=False),
    RandK(1.0),
    QSGD(4),
    QSGD(300),
    Compose(RandK(0.3), QSGD(4)),
    Compose(RandK(0.3), Identity()),
    Compose(RandK(0.5, unbiased=False), Float16()),
    Compose(RandK(0.5, unbiased=False), TopK(0.5)),
]
KEY = jax.random.key(0)


def over(compressors):
    return pytest.mark.parametrize("compressor", compressors, ids=str)


every = over(DETERMINISTIC + RANDOM)
compress = eqx.filter_jit(lambda compressor, v, key=KEY: compressor(v, key))
dense = eqx.filter_jit(lambda compressor, v, key=KEY: compressor(v, key).dense())


def normal(*shape, dtype=np.float32):
    return np.random.default_rng(0).normal(size=shape).astype(dtype)


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
    st.sampled_from([1, 2, 7, 30, 257]).flatmap(
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
    "compressor, format, codewords",
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
@pytest.mark.parametrize("v", [normal(30), spike(7)], ids=["normal", "spike"])
def test_random_compressors_contract_in_expectation(compressor, v):
    samples = dense_by_keys(compressor, v)
    ratios = squared(samples - v) / squared(v)
    assert np.mean(ratios) <= 1 - compressor.contraction(v.size) + five_standard_errors(ratios)


@over([compressor for compressor in RANDOM if compressor.unbiased])
@pytest.mark.parametrize(
    "v",
    [normal(30), spike(7), 1e30 * normal(7), 1e-30 * normal(7)],
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
    """C(v) by 4000 keys, in float64."""
    sample = eqx.filter_jit(jax.vmap(lambda key: compressor(v, key).dense()))
    return np.asarray(sample(jax.random.split(KEY, 4000)), np.float64)


def five_standard_errors(samples):
    # float32 rounds by 1e-7 of the largest entry, also where there is nothing random.
    return 5 * np.std(samples, axis=0) / np.sqrt(len(samples)) + 1e-6


@pytest.mark.parametrize(
    "compressor, size, q",
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
    "compressor, size, omega",
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
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 7])
def test_shape_and_dtype_are_kept_and_zero_is_zero(compressor, dtype, size):
    with jax.enable_x64(True):
        for v in (normal(size, dtype=dtype), np.zeros(size, dtype)):
            result = dense(compressor, v)
            assert result.shape == v.shape and result.dtype == dtype
            assert np.all(np.isfinite(result))
        assert not np.any(result)


@over([TopK(0.3), Float16(), Float8(), Float4(), Compose(TopK(0.5), Float8())])
def test_contraction_in_float64_beyond_the_range_of_float32(compressor):
    with jax.enable_x64(True):
        v = normal(30, dtype=np.float64)
        result = np.asarray(dense(compressor, 1e200 * v)) / 1e200
        assert squared(result - v) <= (1 - compressor.contraction(30)) * squared(v)


@every
def test_one_entry_is_kept_by_all_but_chance(compressor):
    """With d = 1 there is nothing to drop and nothing between codewords."""
    v = np.array([-0.3], np.float32)
    np.testing.assert_array_equal(dense(compressor, v), v)


@every
def test_jit_and_vmap_agree_with_eager(compressor):
    rows, keys = normal(3, 30), jax.random.split(KEY, 3)
    together = jax.vmap(compressor)(jnp.asarray(rows), keys)
    for i, (row, key) in enumerate(zip(rows, keys, strict=True)):
        eager = compressor(row, key)
        for packet in (compress(compressor, row, key), jax.tree.map(lambda x, i=i: x[i], together)):
            assert jax.tree.structure(packet) == jax.tree.structure(eager)
            for ours, theirs in zip(jax.tree.leaves(packet), jax.tree.leaves(eager), strict=True):
                assert ours.dtype == theirs.dtype
                np.testing.assert_allclose(
                    np.asarray(ours, float), np.asarray(theirs, float), rtol=1e-6
                )


def test_equal_compressors_share_a_compilation():
    traces = []

    @eqx.filter_jit
    def traced(compressor, v):
        traces.append(compressor)
        return compressor(v)

    for fraction in (0.1, 0.1, 0.2, 0.1):
        traced(Compose(TopK(fraction, block=4), Float8()), jnp.ones(30))
    assert [compressor.first.fraction for compressor in traces] == [0.1, 0.2]
    assert hash(TopK(0.1)) == hash(TopK(0.1)) and TopK(0.1) == TopK(0.1) != TopK(0.2)
    assert RandK(0.1) != RandK(0.1, unbiased=False) and Float8() != Float16()


# Bytes


@pytest.mark.parametrize(
    "compressor, size, nbytes",
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
    packet = compressor(normal(size), KEY)
    sent = sum(len(np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(packet))
    assert packet.nbytes == sent == nbytes
    shapes = jax.eval_shape(compressor, jax.ShapeDtypeStruct((size,), jnp.float32), KEY)
    assert shapes.nbytes == nbytes
    stacked = jax.vmap(compressor)(jnp.asarray(normal(3, size)), jax.random.split(KEY, 3))
    assert stacked.nbytes == 3 * nbytes


@pytest.mark.parametrize(
    "size, dtype",
    [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")],
)
def test_indices_are_as_narrow_as_they_can_be(size, dtype):
    v = np.zeros(size, np.float32)
    v[-1] = 2
    for compressor in (TopK(1e-9), RandK(1.0), TopK(1e-9, block=size)):
        packet = compressor(v, KEY)
        assert packet.indices.dtype == dtype
        np.testing.assert_array_equal(packet.dense(), v)


# What each of them does


@quickly
@given(v=vectors)
@example(v=np.ones(30, np.float32))
def test_top_k_keeps_the_largest(v):
    packet = compress(TopK(0.3), v)
    kept = max(1, -(-3 * v.size // 10))
    check_largest(np.asarray(packet.indices), np.asarray(packet.dense()), v, kept)


@pytest.mark.parametrize("fraction, kept", [(0.3, (3, 3, 3, 3)), (0.9, (8, 8, 8, 6))])
def test_top_k_by_blocks_keeps_the_largest_of_each(fraction, kept):
    v = normal(30)
    packet = compress(TopK(fraction, block=8), v)
    result, ends = np.asarray(packet.dense()), np.cumsum(kept)
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
        packet, whole = TopK(0.3, block=block)(normal(30)), TopK(0.3)(normal(30))
        assert eqx.tree_equal(packet, whole)


@pytest.mark.parametrize("unbiased, factor", [(True, 30 / 9), (False, 1)])
def test_rand_k_keeps_distinct_entries(unbiased, factor):
    v = normal(30)
    packet = compress(RandK(0.3, unbiased=unbiased), v)
    indices = np.asarray(packet.indices)
    assert len(set(indices.tolist())) == len(indices) == 9
    expected = np.zeros(30)
    expected[indices] = v[indices] * factor
    np.testing.assert_allclose(packet.dense(), expected, rtol=1e-6)
    other = compress(RandK(0.3, unbiased=unbiased), v, jax.random.key(1))
    assert set(indices.tolist()) != set(np.asarray(other.indices).tolist())


@quickly
@given(v=vectors)
@example(v=np.linspace(-1, 1, 257, dtype=np.float32))
def test_float8_and_float16_round_to_nearest(v):
    unit = v / (np.abs(v).max() or np.float32(1))
    for compressor, format, top in (
        (Float8(), ml_dtypes.float8_e4m3fn, 448),
        (Float16(), np.float16, 65504),
    ):
        expected = (unit * np.float32(top)).astype(format)
        packet = compress(compressor, v)
        assert packet.codes.dtype == format
        np.testing.assert_array_equal(np.asarray(packet.codes, float), expected.astype(float))
        np.testing.assert_array_equal(packet.scale, np.abs(v).max())


@quickly
@given(v=vectors)
@example(v=np.linspace(-1, 1, 257, dtype=np.float32))
@example(v=np.array([-6, 6, -4, 3, 2, -1.5, 1, 0.5, 0, -0.5], np.float32))
def test_float4_rounds_to_nearest(v):
    """Ties are free: only the distance is compared with the least one."""
    scale = np.abs(v.astype(float)).max() / 6 or 1.0
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codebook = np.concatenate([-magnitudes, magnitudes])
    result = np.asarray(dense(Float4(), v), float) / scale
    assert np.all(np.min(np.abs(result[:, None] - codebook), axis=1) < 1e-5)
    least = np.min(np.abs(v[:, None] / scale - codebook), axis=1)
    np.testing.assert_allclose(np.abs(result - v / scale), least, atol=1e-5)


@pytest.mark.parametrize(
    "levels, dtype", [(1, "int8"), (127, "int8"), (128, "int16"), (32767, "int16")]
)
def test_qsgd_rounds_to_a_neighbouring_level(levels, dtype):
    v = spike(30)  # of norm |spike|, so that its code is the largest there is
    packet = compress(QSGD(levels), v)
    assert packet.codes.dtype == dtype
    level = v.astype(float) * levels / np.linalg.norm(v.astype(float))
    assert np.all(np.abs(np.asarray(packet.codes) - level) < 1)
    assert packet.codes[15] == -levels
    expected = np.linalg.norm(v) * np.asarray(packet.codes) / levels
    np.testing.assert_allclose(packet.dense(), expected, rtol=1e-6)


def test_composition_compresses_the_kept_values():
    v = normal(30)
    kept = compress(TopK(0.3), v)
    both = compress(Compose(TopK(0.3), Float4()), v)
    np.testing.assert_array_equal(both.indices, kept.indices)
    expected = np.zeros(30, np.float32)
    expected[np.asarray(kept.indices)] = dense(Float4(), v[np.asarray(kept.indices)])
    np.testing.assert_array_equal(both.dense(), expected)


# Sums of packets


@every
def test_weighted_sum_is_the_sum_and_weight_zero_is_silence(compressor):
    rows, keys = jnp.asarray(normal(3, 30)), jax.random.split(KEY, 3)
    stacked: Packet = jax.vmap(compressor)(rows, keys)
    first, second, third = (
        np.asarray(compressor(*pair).dense()) for pair in zip(rows, keys, strict=True)
    )
    total = stacked.weighted_sum(jnp.array([0.5, 2.0, -1.0]))
    np.testing.assert_allclose(total, 0.5 * first + 2 * second - third, rtol=1e-5, atol=1e-5)
    for poison in (jnp.nan, jnp.inf):
        broken = jax.tree.map(
            lambda leaf, bad=poison: (
                leaf.at[0].set(bad) if jnp.issubdtype(leaf, jnp.floating) else leaf
            ),
            stacked,
        )
        total = broken.weighted_sum(jnp.array([0.0, 2.0, -1.0]))
        np.testing.assert_allclose(total, 2 * second - third, rtol=1e-5, atol=1e-5)
        assert not np.all(np.isfinite(broken.weighted_sum(jnp.ones(3))))


@over([TopK(0.01), TopK(0.01, block=100), RandK(0.01), Compose(TopK(0.01), Float8())])
def test_sparse_sums_make_no_dense_rows(compressor):
    clients, size = 16, 1000
    assert largest_array(compressor, clients, size) == size
    # The same look at a dense packet does see them.
    assert largest_array(Float8(), clients, size) == clients * size


def largest_array(compressor, clients, size):
    """The most elements of any array that a weighted sum computes."""
    keys = jax.random.split(KEY, clients)
    stacked = jax.vmap(compressor)(jnp.ones((clients, size)), keys)
    program = jax.make_jaxpr(lambda packet, w: packet.weighted_sum(w))(stacked, jnp.ones(clients))
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
    "v, sentence",
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
    v = normal(7)
    assert eqx.tree_equal(compressor(v), compressor(v, KEY))


@pytest.mark.parametrize(
    "make, sentence",
    [
        (lambda: TopK(1.5), "TopK needs a fraction in (0, 1], got 1.5."),
        (lambda: TopK(0), "TopK needs a fraction in (0, 1], got 0."),
        (lambda: TopK(float("nan")), "TopK needs a fraction in (0, 1], got nan."),
        (lambda: TopK("half"), "TopK needs a fraction in (0, 1], got 'half'."),
        (lambda: TopK(True), "TopK needs a fraction in (0, 1], got True."),
        (lambda: RandK(-0.1), "RandK needs a fraction in (0, 1], got -0.1."),
        (lambda: RandK(None), "RandK needs a fraction in (0, 1], got None."),
        (
            lambda: TopK(0.1, block=0),
            "TopK needs block to be a positive whole number or None, got 0.",
        ),
        (
            lambda: TopK(0.1, block=8.0),
            "TopK needs block to be a positive whole number or None, got 8.0.",
        ),
        (lambda: QSGD(0), "QSGD needs a whole number of levels from 1 to 32767, got 0."),
        (lambda: QSGD(32768), "QSGD needs a whole number of levels from 1 to 32767, got 32768."),
        (lambda: QSGD(4.0), "QSGD needs a whole number of levels from 1 to 32767, got 4.0."),
        (lambda: QSGD(True), "QSGD needs a whole number of levels from 1 to 32767, got True."),
        (
            lambda: Compose(Float8(), TopK(0.1)),
            "Compose needs TopK or RandK to come first, got Float8().",
        ),
        (lambda: Compose(TopK(0.1), 8), "Compose needs a compressor to come second, got 8."),
        (
            lambda: Compose(TopK(0.1), QSGD(4)),
            "Compose needs two contractive compressors or two unbiased ones, "
            "got TopK(fraction=0.1, block=None) and QSGD(levels=4).",
        ),
        (
            lambda: Compose(RandK(0.1), Float8()),
            "Compose needs two contractive compressors or two unbiased ones, "
            "got RandK(fraction=0.1, unbiased=True) and Float8().",
        ),
    ],
)
def test_bad_arguments_are_refused(make, sentence):
    with pytest.raises(InvalidInput, match=f"^{re.escape(sentence)}$"):
        make()
