"""The secure sum's protocol: whoever drops out whenever, the sum is exact or there is none."""

import itertools

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.privacy.encoding import Encoding, Refused, check_threshold, costs

pytest.importorskip("cryptography")

from fedsolve.privacy.masking import (
    Collector,
    Member,
    combine,
    divide,
    stream,
)

USE, LENGTH = b"round 3, exchange 1", 6


def members(count, threshold):
    found = [Member(u) for u in range(count)]
    channels = {u.number: u.channel for u in found}
    for each in found:
        each.join(channels, threshold)
    return found


def vectors(count, seed=0):
    words = np.random.default_rng(seed).integers(0, 2**32, (count, LENGTH), dtype=np.uint32)
    return dict(enumerate(words))


def play(found, threshold, stops, vectors, use=USE):
    """One sum; `stops[u]` is the phase before which member u drops out (4: it stays)."""

    def there(phase):
        return [each for each in found if stops[each.number] > phase]

    adverts = {each.number: each.advertise(use) for each in there(0)}
    server = Collector(use, threshold, adverts)
    server.sealed = {each.number: each.share(use, adverts) for each in there(1)}
    for each in there(2):
        inbox = server.inbox(each.number)
        server.masked[each.number] = each.mask(use, inbox, vectors[each.number])
    asked = sorted(server.masked)
    shares = {each.number: each.unmask(use, asked) for each in there(3)}
    return server, server.total(shares)


def test_whoever_drops_out_between_any_two_messages_the_sum_is_exact_or_refused():
    count, threshold = 4, 3
    answers = vectors(count)
    sums = refused = 0
    found = members(count, threshold)
    for stops in itertools.product((0, 1, 2, 3, 4), repeat=count):
        use = bytes(stops)
        left = sum(stop > 3 for stop in stops)
        if left < threshold:
            with pytest.raises(Refused):
                play(found, threshold, stops, answers, use)
            refused += 1
            continue
        server, total = play(found, threshold, stops, answers, use)
        inside = [u for u in range(count) if stops[u] > 2]
        assert sorted(server.masked) == inside
        np.testing.assert_array_equal(total, sum(answers[u] for u in inside))
        sums += 1
    assert (sums, refused) == (17, 608)


@pytest.mark.parametrize("count", [3, 8, 16])
def test_a_sum_of_many_members(count):
    threshold, answers = count // 2 + 1, vectors(count)
    _, total = play(members(count, threshold), threshold, [4] * count, answers)
    np.testing.assert_array_equal(total, sum(answers.values()))


def test_one_handshake_serves_many_uses():
    found, answers = members(3, 2), vectors(3)
    sent = []
    for number in range(3):
        server, total = play(found, 2, [4] * 3, answers, use=b"%d" % number)
        np.testing.assert_array_equal(total, sum(answers.values()))
        sent += [server.masked[0], np.frombuffer(server.adverts[0], np.uint32)]
    for one, other in itertools.combinations(sent[::2], 2):
        assert not np.any(one == other)
    assert len({x.tobytes() for x in sent[1::2]}) == 3


def test_repeated_messages_get_the_same_answers():
    found, answers = members(3, 2), vectors(3)
    adverts = {u.number: u.advertise(USE) for u in found}
    assert adverts == {u.number: u.advertise(USE) for u in found}
    server = Collector(USE, 2, adverts)
    server.sealed = {u.number: u.share(USE, adverts) for u in found}
    assert server.sealed[1] == found[1].share(USE, adverts)
    inbox = server.inbox(1)
    once = found[1].mask(USE, inbox, answers[1])
    np.testing.assert_array_equal(once, found[1].mask(USE, inbox, answers[1]))
    told = found[1].unmask(USE, [0, 1])
    assert told == found[1].unmask(USE, [1, 0])
    np.testing.assert_array_equal(once, found[1].mask(USE, inbox, answers[1]))


def test_a_member_contradicts_itself_for_nobody():
    found, answers = members(4, 3), vectors(4)
    adverts = {u.number: u.advertise(USE) for u in found}
    server = Collector(USE, 3, adverts)
    server.sealed = {u.number: u.share(USE, adverts) for u in found}
    inbox = server.inbox(0)
    found[0].mask(USE, inbox, answers[0])
    with pytest.raises(Refused, match="masked another vector"):
        found[0].mask(USE, inbox, answers[1])
    with pytest.raises(Refused, match="masked another vector"):
        found[0].mask(USE, {k: inbox[k] for k in (0, 1, 2)}, answers[0])
    with pytest.raises(Refused, match="keys of a use cannot change"):
        found[0].share(USE, {k: adverts[k] for k in (0, 1, 2)})
    found[0].unmask(USE, [0, 1, 2, 3])
    with pytest.raises(Refused, match="unmasked for other members"):
        found[0].unmask(USE, [0, 1, 2])
    with pytest.raises(Refused, match="members of a run cannot change"):
        found[0].join({u.number: u.channel for u in found}, 4)


def test_a_share_is_of_the_seed_or_of_the_key_and_never_of_both():
    found, answers = members(4, 3), vectors(4)
    adverts = {u.number: u.advertise(USE) for u in found}
    server = Collector(USE, 3, adverts)
    server.sealed = {u.number: u.share(USE, adverts) for u in found}
    for u in found[:3]:
        server.masked[u.number] = u.mask(USE, server.inbox(u.number), answers[u.number])
    shares = {u.number: u.unmask(USE, [0, 1, 2]) for u in found[:3]}
    for member in range(4):
        secret = combine({holder: told[member] for holder, told in shares.items()}, 3)
        if member < 3:  # a seed; alone it does not take the pairwise masks off
            left = server.masked[member] - stream(secret, LENGTH)
            assert not np.any(left == answers[member])
        else:
            assert secret == found[3]._uses[USE].key.private_bytes_raw() != found[3]._uses[USE].own


def test_shares_that_were_changed_on_their_way_are_refused():
    found, answers = members(3, 2), vectors(3)
    adverts = {u.number: u.advertise(USE) for u in found}
    server = Collector(USE, 2, adverts)
    server.sealed = {u.number: u.share(USE, adverts) for u in found}
    inbox = server.inbox(0)
    inbox[1] = inbox[1][:-1] + bytes([inbox[1][-1] ^ 1])
    found[0].mask(USE, inbox, answers[0])
    with pytest.raises(Refused, match="shares of member 1 were changed"):
        found[0].unmask(USE, [0, 1, 2])


def test_masks_of_members_who_were_told_different_things_do_not_cancel():
    for views in ([b"a"] * 3, [b"a", b"a", b"b"]):
        found, answers = members(3, 2), vectors(3)
        adverts = {u.number: u.advertise(USE) for u in found}
        server = Collector(USE, 2, adverts, view=b"a")
        server.sealed = {u.number: u.share(USE, adverts) for u in found}
        for u, view in zip(found, views, strict=True):
            server.masked[u.number] = u.mask(USE, server.inbox(u.number), answers[u.number], view)
        total = server.total({u.number: u.unmask(USE, range(3)) for u in found})
        right = total == sum(answers.values())
        assert right.all() if views[2] == b"a" else not right.any()


@pytest.mark.parametrize("key", [bytes(32), b"short"])
def test_keys_that_are_none_are_refused(key):
    found = members(3, 2)
    adverts = {u.number: u.advertise(USE) for u in found} | {1: key}
    server = Collector(USE, 2, adverts)
    server.sealed = {0: found[0].share(USE, adverts), 2: {}}
    inbox = {0: server.sealed[0][0], 1: bytes(148)}
    with pytest.raises(Refused, match="public key is not valid"):
        found[0].mask(USE, inbox, vectors(3)[0])


def test_masked_vectors_look_random():
    # Of equal vectors of zeros: bits are even, and no two members' masks agree.
    found = members(3, 2)
    adverts = {u.number: u.advertise(USE) for u in found}
    server = Collector(USE, 2, adverts)
    server.sealed = {u.number: u.share(USE, adverts) for u in found}
    zeros = np.zeros(20_000, np.uint32)
    masked = [u.mask(USE, server.inbox(u.number), zeros) for u in found]
    for each in masked:
        ones = np.unpackbits(each.view(np.uint8)).mean()
        assert abs(ones - 0.5) < 5 * 0.5 / np.sqrt(640_000)
    assert np.mean(masked[0] == masked[1]) < 1e-3


# Shamir's scheme


def test_any_threshold_of_the_shares_gives_the_secret_and_fewer_do_not():
    secret = bytes(range(32))
    shares = divide(secret, range(6), 4)
    for some in itertools.combinations(range(6), 4):
        assert combine({k: shares[k] for k in some}, 4) == secret
    with pytest.raises(Refused, match="3 shares are there, and 4 are needed"):
        combine({k: shares[k] for k in range(3)}, 4)
    with pytest.raises(Refused, match="not of one secret"):
        combine({k: shares[k] for k in range(3)}, 3)
    assert divide(secret, range(6), 4) != shares


# The encoding


def test_sums_are_exact_to_the_rounding_and_do_not_overflow():
    for count, bound in ((3, 1.0), (16, 1e-3), (100, 1e6)):
        encoding = Encoding(bound, count)
        for values in (np.full((count, 5), bound), np.full((count, 5), -bound)):
            total = np.sum([encoding.encode(row) for row in values], axis=0, dtype=np.uint32)
            np.testing.assert_allclose(encoding.decode(total), values.sum(0), rtol=1e-7)
        values = np.random.default_rng(0).uniform(-bound, bound, (count, 50))
        total = np.sum([encoding.encode(row) for row in values], axis=0, dtype=np.uint32)
        error = np.abs(encoding.decode(total) - values.sum(0)).max()
        assert error <= count / (2 * encoding.scale)


def test_an_encoding_that_could_overflow_is_refused():
    with pytest.raises(fs.InvalidInput, match="could overflow: 10 numbers up to 1"):
        Encoding(1.0, 10, scale=2.0**30)
    for bad in (1.01, np.nan, np.inf):
        with pytest.raises(fs.InvalidInput, match="larger than the bound 1"):
            Encoding(1.0, 10).encode(np.asarray([0.0, bad]))


@pytest.mark.parametrize(
    ("threshold", "count", "sentence"),
    [
        (2, 2, "at least 3 members"),
        (2, 4, "more than half of 4 members"),
        (5, 4, "at most all"),
    ],
)
def test_unsafe_thresholds_are_refused(threshold, count, sentence):
    with pytest.raises(fs.InvalidInput, match=sentence):
        check_threshold(threshold, count)


def test_the_costs_are_what_is_sent():
    count, threshold, answers = 5, 3, vectors(5)
    found = members(count, threshold)
    adverts = {u.number: u.advertise(USE) for u in found}
    server = Collector(USE, threshold, adverts)
    server.sealed = {u.number: u.share(USE, adverts) for u in found}
    up = len(adverts[0]) + sum(map(len, server.sealed[0].values()))
    down = sum(map(len, adverts.values())) + sum(map(len, server.inbox(0).values()))
    up += found[0].mask(USE, server.inbox(0), answers[0]).nbytes
    up += sum(map(len, found[0].unmask(USE, range(5)).values()))
    assert costs(count, LENGTH) == (up, down + 1)
