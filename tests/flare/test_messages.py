"""What crosses the network: exact, and deaf to everything else."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

import fedsolve as fs
from fedsolve.flare.protocol import protocol
from fedsolve.flare.site import Share
from fedsolve.storage.arrays import Refused, decode, encode, in_order, nothing_left, size_of, take
from tests.support import examples

ALGORITHM = fs.FedSGM(0.1, 0.1, participants=3, uplink=fs.TopK(0.4), downlink=fs.Float4())
PROTOCOL = protocol(examples.least_squares().on_device(), ALGORITHM, 6)
REPLY = PROTOCOL.exchanges[1].reply


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
    for found in (load(ours), decode(theirs, 10_000)[1], decode(ours, 10_000)[1]):
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
def test_arrays_that_lie_elsewhere_are_refused(entry):
    text = json.dumps({"__metadata__": {"head": "{}"}, "w.0": entry}).encode()
    with pytest.raises(Refused, match="not safetensors with a head"):
        decode(len(text).to_bytes(8, "little") + text + bytes(16), 10_000)


def test_arrays_on_top_of_each_other_are_refused():
    entry = {"dtype": "F64", "shape": [2], "data_offsets": [0, 16]}
    text = json.dumps({"__metadata__": {"head": "{}"}, "a": entry, "b": entry}).encode()
    with pytest.raises(Refused):
        decode(len(text).to_bytes(8, "little") + text + bytes(16), 10_000)


def test_a_round_is_known_beforehand():
    assert [exchange.method for exchange in PROTOCOL.exchanges] == ["measure", "improve"]
    assert size_of(PROTOCOL.exchanges[0].reply) == 4
    assert size_of(REPLY) == 2 * (1 + 4)
    assert [size_of(packet) for packet in PROTOCOL.packets] == [4 + 3]
    residual, memory = PROTOCOL.client
    assert residual.shape == PROTOCOL.w.shape == (5,)
    assert memory is None


def reply(rows=3):
    return jax.vmap(ALGORITHM.uplink)(jnp.ones((rows, 5)))


def as_bytes(**changes):
    leaves = {f"reply.{i}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(reply()))}
    kept = {k: v for k, v in (leaves | changes).items() if v is not None}
    return save(kept, metadata={"head": json.dumps({"status": "ok"})})


GOOD = as_bytes()
BAD = {
    "not bytes": ("text", "not bytes"),
    "empty": (b"", "not safetensors"),
    "not safetensors": (b"\x80\x04\x95pickle, or so" * 3, "not safetensors"),
    "a head that is too long": ((2**40).to_bytes(8, "little") + b"x" * 100, "not safetensors"),
    "absurdly large": (b"\0" * (2**20 + 1000), "bytes, where at most"),
    "no head": (save({"reply.0": np.zeros(3)}), "with a head"),
    "a head that is a list": (save({}, metadata={"head": "[1]"}), "its head is not a table"),
    "too few rows": (
        as_bytes(**{"reply.0": np.zeros((2, 2), np.uint8)}),
        r"reply.0 is uint8\(2, 2\)",
    ),
    "another type": (as_bytes(**{"reply.1": np.zeros((3, 2))}), "reply.1 is float64"),
    "a missing array": (as_bytes(**{"reply.1": None}), "reply.1 is missing"),
    "an array too many": (as_bytes(extra=np.zeros(2)), "arrays that do not belong: extra"),
    "not finite": (as_bytes(**{"reply.1": np.full((3, 2), np.nan, np.float32)}), "not finite"),
}


@pytest.mark.parametrize(("data", "reason"), BAD.values(), ids=BAD.keys())
def test_a_wrong_reply_is_refused(data, reason):
    with pytest.raises(Refused, match=reason):
        read(data)


def read(data):
    head, arrays = decode(data, 3 * size_of(REPLY) + 100)
    got = take(arrays, "reply", REPLY, rows=3)
    nothing_left(arrays)
    return head, got


def test_a_right_reply_is_taken():
    head, got = read(GOOD)
    assert head["status"] == "ok"
    np.testing.assert_array_equal(got.values.vector, reply().values.vector)


@settings(max_examples=3000, deadline=None)
@given(st.binary(max_size=400), st.integers(0, 400), st.integers(0, 255))
def test_no_bytes_at_all_do_harm(noise, place, value):
    """Pure noise, noise behind a right beginning, and one changed byte: taken or refused, nothing
    else."""
    changed = bytearray(GOOD)
    changed[place % len(GOOD)] = value
    for data in (noise, GOOD[: place % len(GOOD)] + noise, bytes(changed)):
        try:
            read(data)
        except Refused:
            continue


@pytest.fixture(scope="module")
def share(tmp_path_factory):
    home = tmp_path_factory.mktemp("share")
    share = Share(home, examples.least_squares(), ALGORITHM, 0)
    assert status(share, {"kind": "hello", "total": 6}) == ("ok", "")
    return share


HEAD = {
    "kind": "ask",
    "round": 0,
    "exchange": 0,
    "method": "measure",
    "first": 0,
    "used": [],
    "settled": [-1, []],
    "w": {"want": "start", "from": [], "packets": []},
}


def status(share, head, clients=(0, 2)):
    arrays = {"clients": np.asarray(clients, np.int32)} if head["kind"] == "ask" else {}
    answered, _ = decode(share.answer(encode(head, arrays)), 10_000)
    return answered["status"], answered.get("reason", "")


def test_a_site_answers_what_it_should(share):
    assert status(share, HEAD) == ("ok", "")
    assert status(share, {"kind": "hello", "total": 0}) == ("ok", "")
    assert status(share, HEAD | {"w": {"want": "elsewhere"}})[0] == "behind"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kind": "run_code"}, "no such kind"),
        ({"kind": "hello", "total": "6"}, "total is no whole number"),
        ({"kind": "hello", "total": 2**30}, "is the most"),
        ({"exchange": 7}, "no exchange 7"),
        ({"exchange": -1}, "exchange is no whole number"),
        ({"round": "0"}, "round is no whole number"),
        ({"method": "__init__"}, "exchange 0 is 'measure'"),
        ({"w": None}, "does not say what w is"),
        ({"settled": [0, []]}, "settles a round before its end"),
    ],
    ids=str,
)
def test_a_site_refuses_what_it_should(share, change, reason):
    told, why = status(share, HEAD | change)
    assert told == "refused"
    assert reason in why


def test_a_site_refuses_clients_that_are_not_here(share):
    assert status(share, HEAD, [6])[1] == "it asks for clients that are not here"
    for clients in ([], [0] * 7, [[0, 1]]):
        assert status(share, HEAD, clients)[1] == "it does not say which clients it asks"


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([*HEAD, "other"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.sampled_from(["want", "from", "packets", "whole"]), inner)
            ),
            max_leaves=6,
        ),
    )
)
def test_no_head_at_all_breaks_a_site(share, changes):
    assert status(share, HEAD | changes)[0] in ("ok", "behind", "refused")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 2000), st.integers(0, 255), st.booleans())
def test_no_question_at_all_breaks_a_site(share, noise, place, value, keep):
    """Of a right question one byte changed, or noise from some place on."""
    good = encode(HEAD, {"clients": np.asarray([0, 2], np.int32)})
    place %= len(good)
    rest = good[place + 1 :] if keep else noise
    answered, _ = decode(share.answer(good[:place] + bytes([value]) + rest), 10_000)
    assert answered["status"] in ("ok", "behind", "refused")


@given(st.lists(st.integers(0, 6), min_size=0, max_size=6))
def test_rows_in_order_are_the_same_rows(rows):
    everything, rows = np.arange(7), np.asarray(rows, int)
    picked = everything[in_order(rows)]
    np.testing.assert_array_equal(picked, everything[rows])
    if len(rows) and (np.diff(rows) == 1).all():
        assert np.shares_memory(picked, everything)
