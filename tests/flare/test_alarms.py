"""Sites that lie: answers that are too large or never change, and values that cannot be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from fedsolve.compression.clipping import limit
from fedsolve.flare.alarms import (
    CLIENT,
    JUMP,
    LEVEL,
    NUMBER,
    SAME,
    SETTLED,
    Alarms,
    clipped,
    digests_of,
    norms_of,
)
from fedsolve.flare.participation import Participation, alarm_texts, gaps
from fedsolve.flare.roster import Roster
from fedsolve.flare.server import saved_participation, serve
from fedsolve.runtimes.placement import numbers_on_device, precision_of
from fedsolve.storage.arrays import Refused, decode, encode
from tests.support import examples
from tests.support.in_process import SITES, Wires


def sizes(alarms, numbers=False, **levels):
    norms = {site: np.atleast_1d(np.asarray(level, float)) for site, level in levels.items()}
    return {s: a.refused for s, a in alarms.sizes("it", norms, numbers).items()}


@pytest.mark.parametrize(
    ("levels", "found"),
    [
        ({"a": 1, "b": 2, "c": 3}, {}),
        ({"a": 1, "b": 2, "c": 2 * LEVEL}, {}),
        ({"a": 1, "b": 2, "c": 2 * LEVEL + 0.1}, {"c": True}),
        ({"a": 1, "b": 1e30, "c": 1e4}, {"b": True, "c": True}),
        ({"a": 1, "b": np.inf, "c": 2}, {"b": True}),
        ({"a": 0, "b": 0, "c": 5}, {}),  # nothing to compare with
        ({"c": 1e30}, {}),
        ({"a": 1, "b": [1, 1, CLIENT]}, {}),
        ({"a": 1, "b": [1, 1, CLIENT + 0.1]}, {"b": True}),
    ],
)
def test_answers_out_of_proportion(levels, found):
    assert sizes(Alarms(), **levels) == found
    assert sizes(Alarms("note"), **levels) == dict.fromkeys(found, False)


def test_numbers_may_differ_more():
    assert sizes(Alarms(), numbers=True, a=0.01, b=1.0) == {}
    assert sizes(Alarms(), numbers=True, a=0.1, b=0.1 * NUMBER + 0.1) == {"b": True}


def test_what_an_exchange_has_seen_counts_and_lies_do_not():
    alarms = Alarms()
    assert sizes(alarms, a=10, b=10, c=10) == {}
    assert sizes(alarms, a=1, b=1, c=10 * LEVEL) == {}  # as large as others were
    for _ in range(2):
        assert sizes(alarms, a=1, b=1, c=1e6) == {"c": True}
    again = Alarms()
    again.restore(alarms.saved())
    for each in (alarms, again):
        assert sizes(each, a=1, b=LEVEL * LEVEL * 10) == {}  # c was at 60 before it lied
        assert sizes(each, a=1, b=LEVEL * 361) == {"b": True}
        assert sizes(each, a=1, c=LEVEL * 361) == {"c": True}


def settled(*levels, rounds=60):
    """Three sites, of which the first two were at 100 and then at 1."""
    alarms = Alarms()
    for number in range(rounds):
        known = [100.0 if number == 0 else 1.0] * 2
        sizes(alarms, **dict(zip("abc", [*known, *levels], strict=False)))
    return alarms


def test_who_grows_or_has_lied_is_compared_with_what_others_send_now():
    assert sizes(settled(50.0), a=1, b=1, c=50.0) == {}  # it has always been like that
    assert sizes(settled(1.0), a=1, b=1, c=LEVEL + 0.1) == {"c": True}
    assert sizes(settled(), a=1, b=1, c=50.0) == {}  # a new site
    liar = settled()
    assert sizes(liar, a=1, b=1, c=1e6) == {"c": True}
    assert sizes(liar, a=1, b=1, c=LEVEL + 0.1) == {"c": True}
    assert sizes(liar, a=1, b=1, c=LEVEL - 0.1) == {}


def test_a_sudden_jump_is_noted_and_one_of_everybody_is_not():
    for others, found in ((1.0, {"c": False}), (2 * JUMP, {})):
        alarms = settled(0.1)
        assert sizes(alarms, a=others, b=others, c=0.1 * (JUMP + 1)) == found
    early = Alarms()
    for _ in range(SETTLED - 1):
        sizes(early, a=1, b=1, c=1)
    assert sizes(early, a=1, b=1, c=JUMP + 0.5) == {}


def test_the_same_answer_again_and_again():
    def play(moves, others):
        alarms, w = Alarms(), np.zeros(2)
        for round in range(SAME + 1):
            answers = {"a": {0: b"first"}, "b": {1: b"%d" % (round if others else 0)}}
            found = alarms.unchanged("it", w + round * moves, answers)
            assert round == SAME or not found
        return {site: alarm.refused for site, alarm in found.items()}

    assert play(moves=True, others=True) == {"a": False}
    assert play(moves=False, others=True) == {}  # w is where it was
    assert play(moves=True, others=False) == {}  # nobody's answer changes


def test_zeros_are_no_answer_that_is_repeated():
    assert digests_of([4, 7], np.array([[0.0, 0.0], [0.0, 1.0]]))[4] == b""
    alarms = Alarms()
    for round in range(2 * SAME):
        answers = {"a": {0: b""}, "b": {1: b"%d" % round}}
        assert alarms.unchanged("it", np.full(1, round), answers) == {}


@pytest.mark.parametrize(
    "compressor",
    [
        *(fs.Identity(), fs.TopK(0.4), fs.Float8(), fs.Float16(), fs.RandK(0.5)),
        fs.Compose(fs.TopK(0.4), fs.Float8()),
        lambda row, key: limit(fs.TopK(0.4)(row), 1.0),
    ],
    ids=lambda c: type(c).__name__,
)
def test_norms_are_those_of_the_vectors_also_of_clipped_ones(compressor):
    rows = jnp.asarray(np.random.default_rng(0).standard_normal((5, 10)))
    keys = jax.random.split(jax.random.key(0), 5)
    packets = jax.vmap(lambda row, key: compressor(row, key))(rows, keys)
    reply = jax.tree.map(np.asarray, (packets, jnp.arange(5.0)))

    def vectors(reply):
        dense = jax.vmap(lambda packet: packet.dense())(jax.tree.map(jnp.asarray, reply[0]))
        return np.column_stack([dense, reply[1]])

    norms = np.linalg.norm(vectors(reply), axis=1)
    np.testing.assert_allclose(norms_of(reply), norms, rtol=1e-5)
    short = clipped(reply, most := float(np.sort(norms)[2]))
    assert jax.tree.structure(short) == jax.tree.structure(reply)
    factors = np.minimum(1, most / norms)
    np.testing.assert_allclose(vectors(short), factors[:, None] * vectors(reply), rtol=1e-5)
    with pytest.raises(Refused, match="cannot be clipped"):
        clipped((reply[0], np.arange(5)), 1.0)


class Liar(Wires):
    """Sites of which one changes its answers: `lie(head, arrays)` changes the arrays in place."""

    def __init__(self, *given, site="site-4", lie):
        self.liar, self.lie = site, lie
        super().__init__(*given)

    def __call__(self, messages):
        found = super().__call__(messages)
        if self.liar in found and not isinstance(found[self.liar], Exception):
            head, arrays = decode(found[self.liar], None)
            arrays = {name: np.array(value) for name, value in arrays.items()}
            self.lie(head, arrays)
            found[self.liar] = encode(head, {}) if not arrays else again(head, arrays)
        return found


def again(head, arrays):
    """Encode arrays under the names that they had."""
    trees = {}
    for name, value in arrays.items():
        prefix, _, number = name.rpartition(".")
        trees.setdefault(prefix, {})[int(number)] = value
    return encode(head, {prefix: [tree[i] for i in sorted(tree)] for prefix, tree in trees.items()})


def times(factor, first=0):
    def lie(head, arrays):
        if head.get("round", -1) >= first:
            for name, value in arrays.items():
                if name.startswith("reply") and value.ndim == 2:
                    value *= factor

    return lie


def frozen():
    kept = {}

    def lie(head, arrays):
        for name, value in arrays.items():
            if name.startswith("reply") and value.ndim == 2:
                value[...] = kept.setdefault((head["exchange"], name), value.copy())

    return lie


def feasible(head, arrays):
    """Say g = -1000, whoever asks."""
    for name, value in arrays.items():
        if name.startswith("values") and head.get("status") == "ok" and value.ndim == 1:
            value[...] = np.where(np.arange(len(value)) >= 0, -1000.0, value)
        if name.startswith("reply") and value.ndim == 1:
            value[...] = -1000.0


def lied_to(tmp_path, lie, rounds=30, policy="refuse", site="site-4"):
    problem = examples.least_squares()
    algorithm = fs.FedSGM(0.05, 0.1, local_steps=2)
    wires = Liar(problem, algorithm, tmp_path, site=site, lie=lie)
    notes = []
    with precision_of("float64") as dtype:
        placed, tuned = problem.on_device(dtype), numbers_on_device(algorithm, dtype)
        link = Roster(wires, placed, tuned, notes.append, alarms=policy)
    home = tmp_path / "server"
    home.mkdir(parents=True)
    run = serve(link, list(SITES), problem, algorithm, rounds, 0, home, precision="float64")
    return run, saved_participation(home / "server"), notes


def test_honest_sites_raise_no_alarm(tmp_path):
    run, record, _ = lied_to(tmp_path, lambda head, arrays: None)
    assert all("alarms" not in site for site in record.values())
    honest = fs.solve(run.problem, run.algorithm, 30, precision="float64")
    np.testing.assert_allclose(run.params, honest.params, atol=1e-10)


@pytest.mark.parametrize(
    "lie", [times(-20), times(1e4, first=10), times(1e30, first=10)], ids=["-20", "1e4", "1e30"]
)
def test_a_poisoner_is_refused_and_named(tmp_path, lie):
    run, record, notes = lied_to(tmp_path, lie)
    (alarm,) = record["site-4"]["alarms"]
    assert alarm["refused"]
    assert "times as large as other sites'" in alarm["why"]
    assert any("site-4" in note and "refused" in note for note in notes)
    honest = fs.solve(run.problem, run.algorithm, 30, precision="float64")
    assert run.history["objective"][-1] < 1.5 * honest.history["objective"][-1] + 0.1
    assert not any("alarms" in record[site] for site in SITES if site != "site-4")
    (line, *_) = [line for line in gaps(record) if "Alarm" in line]
    assert line.startswith("Alarm: site-4: its answer to 'improve'")


def test_what_a_policy_takes(tmp_path):
    """By `note` all of it, by `clip` what is within the bound."""
    ends = {}
    for policy in ("note", "clip"):
        run, record, notes = lied_to(tmp_path / policy, times(-20), rounds=5, policy=policy)
        (alarm,) = record["site-4"]["alarms"]
        assert (alarm["refused"], alarm.get("clipped", False)) == (False, policy == "clip")
        assert record["site-4"]["answered"] == 5
        assert sum("alarm" in note for note in notes) == 1  # told once
        assert f"({'clipped' if policy == 'clip' else 'taken'}; " in "".join(gaps(record))
        ends[policy] = run.history["objective"][-1]
    assert ends["clip"] < 0.5 * ends["note"]


def test_the_bound_to_which_answers_are_clipped():
    alarms = Alarms("clip")
    norms = {"a": np.ones(2), "b": np.array([2.0, 1.0]), "c": np.array([1e3, 90.0])}
    for _ in range(3):  # lies do not move it
        (alarm,) = alarms.sizes("it", norms).values()
        assert (alarm.refused, alarm.most) == (False, LEVEL * 1.5)
    one = {"a": np.ones(3), "b": np.array([1.0, 1.0, 50.0])}
    assert Alarms("clip").sizes("it", one)["b"].most == CLIENT
    number = Alarms("clip").sizes("it", {"a": np.ones(1), "b": np.full(1, 1e3)}, numbers=True)
    assert number["b"].most == NUMBER


def test_reported_values_are_never_clipped(tmp_path):
    run, record, _ = lied_to(tmp_path, feasible, rounds=5, policy="clip")
    assert any(alarm["refused"] for alarm in record["site-4"]["alarms"])
    np.testing.assert_array_equal(run.history["clients_evaluated"], 5)


def test_an_answer_that_never_changes_is_noted(tmp_path):
    _, record, _ = lied_to(tmp_path, frozen())
    alarms = [alarm for alarm in record["site-4"]["alarms"] if "the same" in alarm["why"]]
    assert len(alarms) == 1
    assert not alarms[0]["refused"]
    assert alarms[0]["to"] == 30


def test_a_site_that_claims_to_be_feasible_is_not_believed(tmp_path):
    run, record, _ = lied_to(tmp_path, feasible)
    whys = {alarm["why"] for alarm in record["site-4"]["alarms"]}
    assert any("constraint" in why for why in whys)
    assert any("'measure'" in why for why in whys)
    assert not record["site-4"]["evaluated"]
    np.testing.assert_array_equal(run.history["clients_evaluated"], 5)  # never called feasible
    assert np.all(run.history["constraint"] > -100)


def test_alarms_are_joined():
    record = Participation()
    record.expect(["a"])
    assert record.alarm("a", 3, "odd", True)
    assert not record.alarm("a", 4, "odd", True)
    assert not record.alarm("a", 4, "odd", True)
    assert record.alarm("a", 9, "strange", False)
    assert alarm_texts(record.sites["a"]) == [
        "odd (refused; 2 rounds, 3 to 4)",
        "strange (taken; 1 round, 9)",
    ]
