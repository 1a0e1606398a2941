"""Secure sums over a link: the numbers of the simulation, and a server that sees sums only."""

import uuid

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs

pytest.importorskip("cryptography")

from fedsolve.flare.roster import TooFew
from fedsolve.flare.server import serve
from fedsolve.flare.site import SiteClients
from fedsolve.flare.summing import SummingRoster
from fedsolve.runtimes.placement import numbers_on_device, precision_of
from fedsolve.storage.arrays import decode, encode
from tests.support import examples
from tests.support.in_process import SITES, Wires, part, settled

SECURE = fs.SecureSum(clip=200.0)


class SecureWires(Wires):
    """Sites whose answers leave in sums; notes all that they say."""

    rule = SECURE

    def __init__(self, *args, **given):
        self.said = []
        super().__init__(*args, **given)

    def start(self, site):
        self.shares[site] = SiteClients(
            self.home / site,
            part(self.problem, *SITES[site]),
            self.algorithm,
            self.seed,
            self.precision,
            aggregation=self.rule,
        )
        self.shares[site].answer(encode({"kind": "hello", "total": self.problem.n}, {}))

    def __call__(self, messages):
        found = super().__call__(messages)
        for site, data in found.items():
            if isinstance(data, bytes):
                asked, told = decode(messages[site], None), decode(data, None)
                self.said.append((site, asked[0]["kind"], *told))
        return found


class Noting(SummingRoster):
    """Notes whose answers are in which sum."""

    def __init__(self, *args, sums=None, **given):
        super().__init__(*args, **given)
        self.sums = {} if sums is None else sums

    def ask_sum(self, round, number, clients, message, w, size):
        total, there = super().ask_sum(round, number, clients, message, w, size)
        self.sums[round, number] = there
        return total, there


def deploy(problem, algorithm, wires, home, rounds, sites=SITES, **given):
    home.mkdir(exist_ok=True)
    log = []
    with precision_of("float64") as dtype:
        placed, tuned = problem.on_device(dtype), numbers_on_device(algorithm, dtype)
        link = Noting(wires, placed, tuned, log.append, rule=wires.rule, home=home, **given)
    args = (link, list(sites), problem, algorithm, rounds, 0, home)
    run = serve(*args, precision="float64", aggregation=wires.rule)
    return run, link, log


def check_same(run, expected, without=()):
    np.testing.assert_allclose(run.params, expected.params, rtol=1e-9, atol=1e-9)
    assert run.history.keys() == expected.history.keys() - {"uplink_error"}
    for name in run.history.keys() - {*without}:
        np.testing.assert_allclose(
            run.history[name], expected.history[name], rtol=1e-9, atol=1e-9, err_msg=name
        )


def states_of(wires, link):
    parts = [settled(wires.shares[site], link, site) for site in SITES]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


ALGORITHMS = {
    "FedSGM": fs.FedSGM(0.05, 0.1, local_steps=2),
    "SCAFFOLD": fs.SCAFFOLD(0.03, local_steps=2),
    "FedSGM, Rand-K": fs.FedSGM(0.05, 0.1, uplink=fs.RandK(0.4, unbiased=False, shared=True)),
    "FedSGM, sampled": fs.FedSGM(0.05, 0.1, participants=5, uplink=fs.QSGD(16)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n != "SCAFFOLD" else []) for n in ALGORITHMS]
)
def test_a_deployment_is_the_simulation_and_the_server_sees_sums_only(name, tmp_path):
    problem, algorithm = examples.least_squares(), ALGORITHMS[name]
    wires = SecureWires(problem, algorithm, tmp_path)
    run, link, log = deploy(problem, algorithm, wires, tmp_path / "server", 10)
    expected = fs.solve(problem, algorithm, rounds=10, precision="float64", aggregation=SECURE)
    check_same(run, expected)
    assert all(line.startswith("ready: ") for line in log)
    kept = expected.state.clients, expected.state.memory
    for a, b in zip(jax.tree.leaves(states_of(wires, link)), jax.tree.leaves(kept), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-9)
    # All that a site ever said: the number of its clients, keys, sealed shares, and masked vectors.
    kinds = {kind: set() for _, kind, _, _ in wires.said}
    for _, kind, head, arrays in wires.said:
        kinds[kind] |= {(key, array.dtype.name) for key, array in arrays.items()} | {*head}
    vectors = {("reply.0", "uint32"), "status", "view"}
    assert kinds == {
        "hello": {"status", "clients"},
        "keys": {"status", ("channel.0", "uint8"), ("keys.0", "uint8")},
        "shares": {"status", ("sealed.0", "uint8")},
        "ask": vectors | {"round", "exchange", "moved"},
        "evaluate": vectors,
        "unmask": {"status", ("told.0", "uint8")},
    }


def test_masked_vectors_tell_nothing_of_their_own(tmp_path):
    """The same answer masked twice has nothing in common; bits are even."""
    problem, algorithm = examples.least_squares(), fs.FedSGM(0.05)
    words = []
    for attempt in ("one", "two"):
        (tmp_path / attempt).mkdir()
        wires = SecureWires(problem, algorithm, tmp_path / attempt)
        deploy(problem, algorithm, wires, tmp_path / attempt / "server", 3)
        words.append([a["reply.0"] for _, kind, _, a in wires.said if kind == "ask"])
    one, two = (np.concatenate(each) for each in words)
    assert not (one == two).any()
    assert abs(np.unpackbits(one.view(np.uint8)).mean() - 0.5) < 0.06


FATES = ["", "question lost", "reply lost", "question repeated", "site killed"]


def simulated(problem, algorithm, rounds, sums):
    """The simulation in which those answer who were in the deployment's sums."""
    table = np.zeros((rounds, 2, problem.n), bool)
    for (round, number), there in sums.items():
        table[round, number, list(there)] = True
    table = jnp.asarray(table)

    def arrivals(round, exchange, clients):
        return table[round, exchange, clients]

    given = {"precision": "float64", "aggregation": SECURE, "arrivals": arrivals}
    return fs.solve(problem, algorithm, rounds, **given)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in range(1, 6))]
)
def test_whatever_is_lost_every_answer_counts_once(tmp_path, seed):
    problem, algorithm = examples.least_squares(), ALGORITHMS["SCAFFOLD"]
    rng = np.random.default_rng(seed)
    wires = SecureWires(problem, algorithm, tmp_path)
    fates = rng.choice(FATES, p=[0.92, 0.02, 0.02, 0.02, 0.02], size=100_000)
    wires.lose = lambda site, number: fates[number]
    rounds, sums = 12, {}
    run, link = None, None
    for _ in range(30):  # a round with too few sites is refused, and asked again
        wires.spare = 2 * len(SITES)
        try:
            run, link, _ = deploy(problem, algorithm, wires, tmp_path / "server", rounds, sums=sums)
            break
        except TooFew:
            continue
    sizes = [len(there) for there in sums.values()]
    assert len(sums) == rounds
    assert {*sizes} > {6}  # some sums are without some site
    expected = simulated(problem, algorithm, rounds, sums)
    np.testing.assert_allclose(run.params, expected.params, rtol=1e-9, atol=1e-9)
    kept = expected.state.clients, expected.state.memory
    for a, b in zip(jax.tree.leaves(states_of(wires, link)), jax.tree.leaves(kept), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-9)


def test_a_server_that_is_started_again_has_its_sums_and_asks_nobody_again(tmp_path):
    problem, algorithm = examples.least_squares(), ALGORITHMS["FedSGM"]
    wires, home = SecureWires(problem, algorithm, tmp_path), tmp_path / "server"

    class Killed(BaseException):
        pass

    def killed_at(count):
        asked = []

        def transport(messages):
            kinds = {decode(data, None)[0]["kind"] for data in messages.values()}
            asked.append(kinds)
            if sum(kinds == {"ask"} for kinds in asked) == count:
                raise Killed
            return wires(messages)

        return transport

    wires.rule = SECURE
    for count in (2, 1):  # killed before the second question of a round, and again
        transport = killed_at(count)
        transport.rule = SECURE
        with pytest.raises(Killed):
            deploy(problem, algorithm, transport, home, 4)
    before = sum(kind == "ask" for _, kind, _, _ in wires.said)
    assert before == len(SITES)  # the first question once, the second not yet
    run, _, log = deploy(problem, algorithm, wires, home, 4)
    given = {"precision": "float64", "aggregation": SECURE}
    check_same(run, fs.solve(problem, algorithm, 4, **given))
    assert all(line.startswith("ready: ") for line in log)
    assert sum(kind == "ask" for _, kind, _, _ in wires.said) == 8 * len(SITES)


def test_a_sum_that_a_server_lost_is_never_computed_again(tmp_path):
    """The sites have unmasked it, and the server was killed before it was on the disk."""
    problem, algorithm = examples.least_squares(), ALGORITHMS["FedSGM"]
    wires, home = SecureWires(problem, algorithm, tmp_path), tmp_path / "server"

    class Killed(BaseException):
        pass

    def transport(messages):
        found = wires(messages)
        if wires.said[-1][1] == "unmask":
            raise Killed
        return found

    transport.rule = SECURE
    with pytest.raises(Killed):
        deploy(problem, algorithm, transport, home, 3)
    sums = {}
    run, _, log = deploy(problem, algorithm, wires, home, 3, sums=sums)
    assert sums[0, 0] == set()
    assert all(len(sums[key]) == 6 for key in sums.keys() - {(0, 0)})
    expected = simulated(problem, algorithm, 3, sums)
    np.testing.assert_allclose(run.params, expected.params, rtol=1e-9, atol=1e-9)
    assert any("has masked its answer to this question before" in line for line in log)


def question(wires, **changes):
    """A question to the first site as a server asks it, with keys that are agreed."""
    first, batch = wires.shares["site-1"], uuid.uuid4().hex
    names = list(SITES)
    keys = {}
    for number, site in enumerate(names):
        head = {"kind": "keys", "batch": batch, "number": number, "count": 1}
        keys[number] = decode(wires.shares[site].answer(encode(head, {})), None)[1]
    arrays = {
        "channels": np.stack([each["channel.0"] for each in keys.values()]),
        "keys": np.stack([each["keys.0"] for each in keys.values()], axis=1),
    }
    head = {"kind": "shares", "batch": batch, "members": [0, 1, 2, 3], "threshold": 3}
    sealed = [
        decode(wires.shares[site].answer(encode(head, arrays)), None)[1]["sealed.0"]
        for site in names
    ]
    asked = {
        "kind": "ask",
        "round": 0,
        "exchange": 0,
        "method": first._protocol.exchanges[0].method,
        "first": 0,
        "used": [],
        "settled": (-1, []),
        "w": {"want": "w", "whole": True},
        "sum": {"batch": batch, "use": 0, "size": 6, "members": [0, 1, 2, 3]},
    } | changes
    arrays = {
        "clients": np.asarray([0, 1], np.int32),
        "w": np.zeros(5),
        "inbox": np.stack([each[0, 0] for each in sealed]),
    }
    return first, asked, {k: v for k, v in arrays.items() if "sum" in asked or k != "inbox"}


@pytest.fixture
def wires(tmp_path):
    return SecureWires(examples.least_squares(), ALGORITHMS["FedSGM"], tmp_path)


def refused(site, head, arrays):
    told, _ = decode(site.answer(encode(head, arrays)), None)
    assert told["status"] == "refused"
    return told["reason"]


def test_a_site_answers_in_sums_only(wires):
    site, head, arrays = question(wires)
    plain = {k: v for k, v in head.items() if k != "sum"}
    bare = {k: v for k, v in arrays.items() if k != "inbox"}
    assert "leave this site in sums only" in refused(site, plain, bare)
    assert "leave this site in sums only" in refused(site, head | {"look": 1}, arrays)
    values = {"kind": "evaluate", "round": 1, "first": 0, "settled": (-1, []), "w": head["w"]}
    assert "leave this site in sums only" in refused(site, values, {"w": np.zeros(5)})


def test_a_site_masks_an_answer_once_whatever_it_is_asked(wires):
    site, head, arrays = question(wires)
    once = site.answer(encode(head, arrays))
    assert site.answer(encode(head, arrays)) == once
    assert "no keys for that sum" in refused(
        site, head | {"sum": head["sum"] | {"batch": "other"}}, arrays
    )
    # Another server, new keys, and even a new process: the answer was part of a sum.
    wires.start("site-1")
    again, head, arrays = question(wires)
    assert again is not site
    assert "has masked its answer to this question before" in refused(again, head, arrays)
    later = head | {"round": 1}
    assert decode(again.answer(encode(later, arrays)), None)[0]["status"] == "ok"


def test_members_that_were_asked_different_things_say_so(tmp_path):
    # Their masks would not cancel (tests/privacy/test_masking.py); the server sees who differs.
    views = []
    for number, changed in enumerate(({}, {"members": [0, 1, 2]}, {"size": 7}, {"w": 1.0}, {})):
        wires = SecureWires(examples.least_squares(), ALGORITHMS["FedSGM"], tmp_path / str(number))
        site, head, arrays = question(wires)
        arrays["w"] = arrays["w"] + changed.pop("w", 0.0)
        wish = head["sum"] | changed
        arrays["inbox"] = arrays["inbox"][: len(wish["members"])]
        told, _ = decode(site.answer(encode(head | {"sum": wish}, arrays)), None)
        views.append(told["view"])
    assert views[0] == views[-1]
    assert len({*views}) == 4


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"threshold": 2}, "its threshold is 2 of 4 members, and this run's is 3"),
        ({"members": [0, 1, 1, 3]}, "not in order"),
        ({"members": [0, 1]}, "channels.0 is not what it must be"),
        ({"batch": "x"}, "no keys for that sum"),
    ],
)
def test_questions_about_keys_that_cannot_be_right_are_refused(wires, change, sentence):
    site = wires.shares["site-1"]
    head = {"kind": "keys", "batch": "b", "number": 0, "count": 1}
    told = decode(site.answer(encode(head, {})), None)[1]
    head = {"kind": "shares", "batch": "b", "members": [0, 1, 2, 3], "threshold": 3} | change
    others = np.random.default_rng(0).integers(0, 256, (3, 32), np.uint8)
    arrays = {
        "channels": np.concatenate([told["channel.0"][None], others]),
        "keys": np.concatenate([told["keys.0"], others])[None],
    }
    assert sentence in refused(site, head, arrays)


def test_too_few_sites_are_refused(tmp_path):
    problem, algorithm = examples.least_squares(), ALGORITHMS["FedSGM"]
    wires = SecureWires(problem, algorithm, tmp_path)
    with pytest.raises(fs.InvalidInput, match="at least 3 sites, and there are 2"):
        deploy(problem, algorithm, wires, tmp_path / "server", 2, sites=["site-1", "site-2"])
    gone = ["site-1", "site-3"]
    wires.lose = lambda site, number: "question lost" if site in gone else ""
    wires.spare = 2 * len(SITES)
    with pytest.raises(TooFew, match="2 of 4 sites can take part in a secure sum, and 3 must"):
        deploy(problem, algorithm, wires, tmp_path / "server", 2)
    assert not any(kind == "ask" for _, kind, _, _ in wires.said)  # nothing was masked


@pytest.mark.parametrize(
    ("algorithm", "sentence"),
    [
        (fs.FedSGM(0.1, uplink=fs.TopK(0.4)), "say which entries they keep"),
        (fs.FedAvg(0.1, weighting="DataSize"), "looks at single answers"),
    ],
)
def test_what_cannot_be_summed_is_refused_before_anyone_is_asked(tmp_path, algorithm, sentence):
    problem = examples.least_squares()
    plain = Wires(problem, algorithm, tmp_path)
    plain.rule = SECURE
    with pytest.raises(fs.InvalidInput, match=sentence):
        deploy(problem, algorithm, plain, tmp_path / "server", 2)
