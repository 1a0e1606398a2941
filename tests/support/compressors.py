"""The compressors that tests run through, and vectors to compress."""

from __future__ import annotations

import equinox as eqx
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings

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


def shapes(compressor, size):
    """The packet of a vector of this size, without its numbers."""
    return jax.eval_shape(compressor, jax.ShapeDtypeStruct((size,), jnp.float32), KEY)
