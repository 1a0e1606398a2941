"""Arrays as bytes: exact, in the format of safetensors, and anything else is refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save

import fedsolve as fs
from fedsolve.storage.arrays import (
    HEAD,
    Refused,
    decode,
    encode,
    in_order,
    nothing_left,
    size_of,
    take,
)


@pytest.mark.parametrize(
    "compressor",
    [
        fs.Identity(),
        fs.TopK(0.3),
        fs.RandK(0.5),
        fs.Float16(),
        fs.Float8(),
        fs.Float4(),
        fs.QSGD(8),
        fs.Compose(fs.TopK(0.5), fs.Float8()),
    ],
    ids=str,
)
def test_packets_arrive_as_they_were_sent(compressor):
    packet = compressor(jnp.arange(-3.0, 4.0), jax.random.key(0))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), packet)
    data = encode({"round": 3}, {"packet": packet})
    head, arrays = decode(data, size_of(shapes))
    assert head == {"round": 3}
    got = take(arrays, "packet", shapes)
    nothing_left(arrays)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(got)) == packet.nbytes
    np.testing.assert_array_equal(jax.tree.map(jnp.asarray, got).dense(), packet.dense())


ARRAYS = {
    "flags.0": np.asarray([True, False, True]),
    "small.0": np.arange(5, dtype=np.uint8),
    "w.0": np.arange(6.0).reshape(2, 3),
    "none.0": np.zeros((0, 4), np.float32),
    "one.0": np.asarray(7, np.int16),
}


def test_the_format_is_that_of_the_library():
    ours = encode({"a": 1}, {name.split(".")[0]: value for name, value in ARRAYS.items()})
    theirs = save(ARRAYS, {"head": json.dumps({"a": 1})})
    assert len(ours) % 8 == sum(value.nbytes for value in ARRAYS.values()) % 8  # 8-byte head
    for found in (load(ours), decode(theirs, 10_000)[1], decode(ours, None)[1]):
        assert found.keys() == ARRAYS.keys()
        for name, value in ARRAYS.items():
            assert found[name].dtype == value.dtype
            np.testing.assert_array_equal(found[name], value)
    assert decode(theirs, 10_000)[0] == decode(ours, 10_000)[0] == {"a": 1}


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F64", "shape": [2], "data_offsets": [0, 8]},  # more than it says
        {"dtype": "F64", "shape": [-1], "data_offsets": [0, 16]},
        {"dtype": "F64", "shape": [True, 2], "data_offsets": [0, 16]},
        {"dtype": "F64", "shape": [2.0], "data_offsets": [0, 16]},
        {"dtype": "F64", "shape": [2], "data_offsets": [8, 24]},  # beyond the end
        {"dtype": "F64", "shape": [2], "data_offsets": [-16, 0]},
        {"dtype": "F64", "shape": [1], "data_offsets": [8, 16]},  # a gap
        {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]},  # bytes left over
        {"dtype": "O", "shape": [2], "data_offsets": [0, 16]},
        {"dtype": ["F64"], "shape": [2], "data_offsets": [0, 16]},
        {"dtype": "F64", "shape": 2, "data_offsets": [0, 16]},
        {"dtype": "F64", "shape": [2], "data_offsets": [0]},
        {"dtype": "F64", "shape": [2]},
        [],
        None,
    ],
    ids=str,
)
def test_arrays_with_invalid_offsets_are_refused(entry):
    text = json.dumps({"__metadata__": {"head": "{}"}, "w.0": entry}).encode()
    with pytest.raises(Refused, match="not safetensors with a head"):
        decode(len(text).to_bytes(8, "little") + text + bytes(16), 10_000)


def test_overlapping_arrays_are_refused():
    entry = {"dtype": "F64", "shape": [2], "data_offsets": [0, 16]}
    text = json.dumps({"__metadata__": {"head": "{}"}, "a": entry, "b": entry}).encode()
    with pytest.raises(Refused):
        decode(len(text).to_bytes(8, "little") + text + bytes(16), 10_000)


@given(st.lists(st.integers(0, 6), min_size=0, max_size=6))
def test_rows_in_order_are_the_same_rows(rows):
    everything, rows = np.arange(7), np.asarray(rows, int)
    picked = everything[in_order(rows)]
    np.testing.assert_array_equal(picked, everything[rows])
    if len(rows) and (np.diff(rows) == 1).all():
        assert np.shares_memory(picked, everything)


def test_nothing_else_is_taken():
    data = encode({}, {"w": np.arange(3.0)})
    decode(data, 24)
    with pytest.raises(Refused, match="not bytes but str"):
        decode("text", None)
    padded = data + bytes(24 + HEAD - len(data))
    with pytest.raises(Refused, match="not safetensors"):
        decode(padded, 24)
    with pytest.raises(Refused, match=f"^{25 + HEAD} bytes, where at most {24 + HEAD} can be"):
        decode(padded + b" ", 24)
    for broken in (b"", data[:7], data[:8], data[:-1], data + b" ", (2**40).to_bytes(8, "little")):
        for most in (24, None):
            with pytest.raises(Refused, match="not safetensors"):
                decode(broken, most)
    text = json.dumps({"__metadata__": {"head": "[]"}}).encode()
    with pytest.raises(Refused, match="its head is not a table"):
        decode(len(text).to_bytes(8, "little") + text, None)


@pytest.mark.parametrize(
    ("value", "options", "sentence"),
    [
        (np.arange(3.0), {}, r"w\.0 is float64\(3,\), not float64\(2,\)"),
        (np.arange(2), {}, r"w\.0 is int64\(2,\), not float64\(2,\)"),
        (np.arange(2.0), {"rows": 1}, r"w\.0 is float64\(2,\), not float64\(1, 2\)"),
        (np.asarray([1, np.nan]), {}, r"w\.0 is not finite"),
    ],
)
def test_a_tree_is_what_its_template_says(value, options, sentence):
    template = jax.ShapeDtypeStruct((2,), np.float64)
    with pytest.raises(Refused, match=sentence):
        take({"w.0": value}, "w", template, **options)
    with pytest.raises(Refused, match=r"w\.0 is missing"):
        take({"w": value}, "w", template, **options)
    with pytest.raises(Refused, match=r"it has arrays that do not belong: w\.0$"):
        nothing_left({"w.0": value})
    broken = np.asarray([1, np.inf])
    np.testing.assert_array_equal(take({"w.0": broken}, "w", template, finite=False), broken)
