"""Messages between server and site: valid ones are accepted, all others refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

import fedsolve as fs
from fedsolve.flare.protocol import protocol
from fedsolve.flare.site import SiteClients
from fedsolve.storage.arrays import Refused, decode, encode, nothing_left, size_of, take
from tests.support import examples
from tests.support.strategic import a_game, mean_problem

ALGORITHM = fs.FedSGM(0.1, 0.1, participants=3, uplink=fs.TopK(0.4), downlink=fs.Float4())

PROTOCOL = protocol(examples.least_squares().on_device(), ALGORITHM, 6)

REPLY = PROTOCOL.exchanges[1].reply


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
def test_arbitrary_bytes_are_taken_or_refused(noise, place, value):
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
    share = SiteClients(home, examples.least_squares(), ALGORITHM, 0)
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


def test_a_site_answers_valid_requests(share):
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
def test_a_site_refuses_invalid_requests(share, change, reason):
    told, why = status(share, HEAD | change)
    assert told == "refused"
    assert reason in why


def test_a_site_refuses_clients_that_are_not_here(share):
    assert status(share, HEAD, [6])[1] == "it asks for clients that are not here"
    for clients in ([], [0] * 7, [[0, 1]]):
        assert status(share, HEAD, clients)[1] == "it does not say which clients it asks"


@pytest.mark.parametrize("kind", ["IncentFedAvg", "Strategic"])
def test_a_site_refuses_games_that_are_not_its_own(tmp_path, kind):
    """It knows its samples, and the server does not."""
    game = a_game()  # five players with up to 6 samples each
    algorithm = (
        fs.IncentFedAvg(game, 0.1, 1.0)
        if kind == "IncentFedAvg"
        else fs.FedAvg(0.1, weighting=fs.Strategic(game, 1.0))
    )
    for samples, total, expected in (
        (6, 4, "the game has 5 players, the sites 4 clients"),
        (4, 5, "Client 3 has 4 samples, and the upper bound of its contribution is 6."),
        (6, 5, ""),
    ):
        home = tmp_path / f"{samples}-{total}"
        site = SiteClients(home, mean_problem(clients=2, samples=samples), algorithm, 0)
        told, why = status(site, {"kind": "hello", "total": total})
        if told == "ok":
            method = site._protocol.exchanges[0].method
            head = HEAD | {"method": method, "first": 3}
            question = {"clients": np.asarray([3, 4], np.int32), "message": np.full(5, 3.0, "f4")}
            answered, _ = decode(site.answer(encode(head, question)), 10_000)
            told, why = answered["status"], answered.get("reason", "")
        if expected:
            assert (told, why) == ("refused", expected)
        else:
            assert "samples" not in why
            assert "players" not in why


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
def test_arbitrary_heads_do_not_break_a_site(share, changes):
    assert status(share, HEAD | changes)[0] in ("ok", "behind", "refused")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 2000), st.integers(0, 255), st.booleans())
def test_arbitrary_requests_do_not_break_a_site(share, noise, place, value, keep):
    """Of a right question one byte changed, or noise from some place on."""
    good = encode(HEAD, {"clients": np.asarray([0, 2], np.int32)})
    place %= len(good)
    rest = good[place + 1 :] if keep else noise
    answered, _ = decode(share.answer(good[:place] + bytes([value]) + rest), 10_000)
    assert answered["status"] in ("ok", "behind", "refused")
