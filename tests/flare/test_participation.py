"""Who took part in a run, over which clients it was evaluated, and who was missing."""

import time

import equinox as eqx
import numpy as np
import pytest

import fedsolve as fs
from fedsolve.cli.console import closing_table
from fedsolve.flare import server
from fedsolve.flare.participation import (
    MOST_GAPS,
    NOT_YET,
    Participation,
    clients_expected,
    gaps,
    missing,
    summary,
)
from fedsolve.flare.roster import Roster, TooFew
from fedsolve.flare.server import saved_participation, serve
from fedsolve.flare.site import SiteClients
from fedsolve.runtimes.placement import numbers_on_device, precision_of
from fedsolve.solving.sweep import with_field
from fedsolve.storage.arrays import encode
from tests.support import examples
from tests.support.conformance import ALGORITHMS
from tests.support.in_process import SITES, Wires, part

EVERYONE = with_field(ALGORITHMS["FedSGM hard"], ["participants"], None)
ROUNDS = 8


def start(transport, home, rounds=ROUNDS, algorithm=EVERYONE, log=None, **options):
    """A job with all sites: `quorum` and `sites` of the roster, and `patience`, `waiting`, `go_on`
    of `serve`."""
    problem = examples.least_squares()
    own = {name: options.pop(name) for name in ("quorum", "sites") if name in options}
    with precision_of("float64") as dtype:
        placed, tuned = problem.on_device(dtype), numbers_on_device(algorithm, dtype)
    log = [] if log is None else log
    link = Roster(transport, placed, tuned, log.append, **own)
    home.mkdir(exist_ok=True)
    run = serve(
        link, list(SITES), problem, algorithm, rounds, 0, home, precision="float64", **options
    )
    return run, link.participation.sites


@pytest.fixture
def wires(tmp_path):
    return Wires(examples.least_squares(), EVERYONE, tmp_path)


def refusing(wires, who, reason="'x:y' is not on this machine's allow-list"):
    """A transport over which a site refuses everything."""
    refusal = encode({"status": "refused", "reason": reason}, {})

    def transport(messages):
        found = dict(wires({s: m for s, m in messages.items() if s != who}))
        return found | ({who: refusal} if who in messages else {})

    return transport


def objective_over(run, clients):
    """f at the end of a run, over some clients."""
    data = examples.least_squares().samples.values
    each = [examples.quadratic(run.params, {k: v[i] for k, v in data.items()}) for i in clients]
    return np.mean(each)


def test_every_runtime_says_over_how_many_clients_it_evaluates(tmp_path):
    problem = examples.least_squares()
    for runtime in ("compiled", "debug", "streamed"):
        run = fs.solve(problem, EVERYONE, 4, runtime=runtime, evaluate_every=2)
        np.testing.assert_array_equal(run.history["clients_evaluated"], [6, 6])


def test_a_whole_run_has_nothing_to_tell(wires, tmp_path):
    run, sites = start(wires, tmp_path / "server")
    np.testing.assert_array_equal(run.history["clients_evaluated"], 6)
    assert {s: r["clients"] for s, r in sites.items()} == {s: n for s, (_, n) in SITES.items()}
    for record in sites.values():
        told = [record[name] for name in ("asked", "answered", "refused", "absent", "missed")]
        assert told == [ROUNDS, ROUNDS, 0, 0, []]
    assert (clients_expected(sites), missing(sites), gaps(sites)) == (6, {}, [])
    assert saved_participation(tmp_path / "server/server") == sites


def test_a_site_that_refuses_from_the_beginning_is_named(wires, tmp_path):
    """It never says how many clients it has: nothing is over everyone, nothing is feasible."""
    notes = []
    run, sites = start(refusing(wires, "site-2"), tmp_path / "server", log=notes)
    np.testing.assert_array_equal(run.history["clients_evaluated"], 5)
    record = sites["site-2"]
    assert [record[n] for n in ("asked", "answered", "refused", "absent")] == [0, 0, ROUNDS, 0]
    (gap,) = record["missed"]
    assert (gap["from"], gap["to"]) == (1, ROUNDS)
    assert "allow-list" in gap["why"]
    assert "; not ready: site-2 ('x:y' is not on" in notes[1]
    assert sum("site-2" in note for note in notes) == 2  # not once a round
    assert clients_expected(sites) is None
    (line,) = gaps(sites)
    assert line.startswith("Without site-2: it missed rounds 1 to 8, since 20")
    assert "allow-list" in line
    for path in (tmp_path / "server/server",):
        assert missing(saved_participation(path)).keys() == {"site-2"}
    shown = shown_row(run, sites)
    assert shown["clients"] == "5 of more"
    assert shown["feasible"] == "unknown"


def shown_row(run, sites):
    table = closing_table({"": [run]}, {("", run.seed): summary(sites)})
    return {column.header: str(next(iter(column.cells))) for column in table.columns}


def test_feasible_is_over_everyone_or_unknown(wires, tmp_path):
    """A site is gone in the middle of the run: these rounds do not count. At the end: nothing."""
    first = 2 * len(SITES)
    rounds = {"site-4": range(first + 8, first + 24)}

    def lose(site, number):
        return "question lost" if number in rounds.get(site, ()) else ""

    wires.lose = lose
    wires.count = 0
    notes = []
    run, sites = start(wires, tmp_path / "server", 12, log=notes)
    counts = run.history["clients_evaluated"]
    assert set(counts) == {5, 6}
    assert counts[-1] == 6
    record = sites["site-4"]
    assert record["absent"] == sum(gap["to"] - gap["from"] + 1 for gap in record["missed"]) > 0
    assert record["answered"] == 12 - record["absent"]
    assert missing(sites) == {}
    (line,) = gaps(sites)
    assert line.startswith("site-4 was back at the end; it missed round")
    assert [n for n in notes if "site-4" in n][-1] == "site-4: it answers again"
    within = run.history["constraint"] <= float(EVERYONE.tolerance)
    whole = counts == 6
    expected = f"{100 * within[whole].mean():.0f} % of {whole.sum()}"
    assert shown_row(run, sites)["feasible"] == expected
    assert "clients" not in shown_row(run, sites)


def test_a_site_with_a_nan_is_named_and_not_averaged_over(tmp_path):
    """Its replies and values are refused; objective and constraint are over the others, and the
    site's owner is told."""
    problem = examples.least_squares()
    wires, told = Wires(problem, EVERYONE, tmp_path), []
    own = part(problem, *SITES["site-3"])
    values = {k: v.copy() for k, v in own.samples.values.items()}
    values["inputs"][1, 0] = np.nan  # such data are refused when they are loaded; here later
    bad = eqx.tree_at(lambda p: p.samples.values, own, values)
    home = tmp_path / "bad"
    wires.shares["site-3"] = SiteClients(home, bad, EVERYONE, 0, "float64", told.append)
    notes = []
    run, sites = start(wires, tmp_path / "server", log=notes)
    np.testing.assert_array_equal(run.history["clients_evaluated"], 4)
    assert np.isfinite(run.history["objective"]).all()
    assert missing(sites).keys() == {"site-3"}
    assert sites["site-3"]["refused"] > 0
    assert sites["site-3"]["refused"] + sites["site-3"]["answered"] == ROUNDS
    assert "not finite" in missing(sites)["site-3"]
    assert any("is not finite; check the data" in line for line in told)
    assert shown_row(run, sites)["clients"] == "4 of 6"
    assert len([note for note in notes if "site-3" in note]) <= 3


def test_sites_and_quorum_count_sites_that_refuse(wires, tmp_path):
    for number, (needed, quorum) in enumerate([(4, 0.0), (1, 1.0), (1, 0.8)]):
        home, transport = tmp_path / f"server{number}", refusing(wires, "site-2")
        with pytest.raises(TooFew, match=r"3 sites are ready of 4, and 4 must be \(site-2: ") as e:
            start(transport, home, sites=needed, quorum=quorum)
        assert e.value.missed == []  # it answers: to wait for it would not help
    run, _ = start(refusing(wires, "site-2"), tmp_path / "server", sites=3, quorum=0.75)
    assert run.rounds == ROUNDS


def test_sites_and_quorum_count_sites_that_vanished(wires, tmp_path):
    wires.lose = lambda site, number: "question lost" if site == "site-4" else ""
    for needed, quorum in [(4, 0.0), (1, 1.0)]:
        with pytest.raises(TooFew, match="3 sites are ready of 4, and 4 must be") as caught:
            start(wires, tmp_path / "server", sites=needed, quorum=quorum)
        assert caught.value.missed == ["site-4"]
    # A run that has begun: a site that is not back is waited for by the quorum, not by `sites`.
    wires.lose = lambda site, number: ""
    start(wires, tmp_path / "server", 3)
    wires.lose = lambda site, number: "question lost" if site == "site-4" else ""
    with pytest.raises(TooFew, match="3 sites are ready of 4, and 4 must be"):
        start(wires, tmp_path / "server", quorum=1.0)
    run, sites = start(wires, tmp_path / "server", sites=4)
    assert run.rounds == ROUNDS
    (gap,) = sites["site-4"]["missed"]
    assert (gap["from"], gap["to"], gap["why"]) == (4, ROUNDS, "no answer (time-out)")
    assert run.history["clients_evaluated"].tolist() == [6] * 3 + [5] * 5
    assert missing(sites).keys() == {"site-4"}


def test_a_last_evaluation_over_everyone_is_waited_for(wires, tmp_path, monkeypatch):
    """A site that is back within the patience is heard, with the values of the last w."""
    monkeypatch.setattr(server, "ASK_AGAIN", 0.01)
    away, waited = True, []

    def waiting(sites):
        nonlocal away
        away = False
        waited.append(sites)

    wires.lose = lambda site, number: "question lost" if away and site == "site-4" else ""
    wires.spare = 4 * len(SITES)  # both greetings and the first round
    run, sites = start(wires, tmp_path / "server", patience=60.0, waiting=waiting)
    assert waited == [["site-4"]]
    assert run.history["clients_evaluated"].tolist()[-2:] == [5, 6]
    np.testing.assert_allclose(run.history["objective"][-1], objective_over(run, range(6)))
    assert sites["site-4"]["absent"] == ROUNDS - 1
    assert (missing(sites), len(gaps(sites))) == ({}, 1)


def test_the_wait_ends_with_the_patience(wires, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "ASK_AGAIN", 0.01)
    wires.lose = lambda site, number: "question lost" if site == "site-4" else ""
    wires.spare = 4 * len(SITES)
    waited, began = [], time.monotonic()
    run, sites = start(wires, tmp_path / "server", patience=0.3, waiting=waited.append)
    assert time.monotonic() - began >= 0.3
    assert waited == [["site-4"]]
    assert missing(sites).keys() == {"site-4"}
    assert run.history["clients_evaluated"][-1] == 5
    np.testing.assert_allclose(run.history["objective"][-1], objective_over(run, range(5)))


def test_a_wait_makes_room_for_a_job_with_the_site_that_is_back(wires, tmp_path, monkeypatch):
    """The next job asks for the last evaluation only, and it is over everyone."""
    monkeypatch.setattr(server, "ASK_AGAIN", 0.01)
    wires.lose = lambda site, number: "question lost" if site == "site-4" else ""
    wires.spare = 4 * len(SITES)
    waited = []
    with pytest.raises(TooFew, match="make room"):
        start(
            wires,
            tmp_path / "server",
            patience=60.0,
            waiting=waited.append,
            go_on=lambda: not waited,
        )
    wires.lose = lambda site, number: ""
    run, sites = start(wires, tmp_path / "server", patience=60.0)
    assert run.rounds == ROUNDS
    assert run.history["clients_evaluated"].tolist()[-2:] == [5, 6]
    assert run.history["round"].tolist() == list(range(1, ROUNDS + 1))
    np.testing.assert_allclose(run.history["objective"][-1], objective_over(run, range(6)))
    assert missing(sites) == {}


def test_nobody_waits_for_a_site_that_refuses(wires, tmp_path):
    waited = []
    transport = refusing(wires, "site-2")
    _, sites = start(transport, tmp_path / "server", 2, patience=60.0, waiting=waited.append)
    assert waited == []
    assert missing(sites).keys() == {"site-2"}


def test_a_site_that_joins_later_missed_the_rounds_before(wires, tmp_path):
    refuses = refusing(wires, "site-2")
    start(refuses, tmp_path / "server", 3)
    run, sites = start(wires, tmp_path / "server")
    assert run.history["clients_evaluated"].tolist() == [5, 5, 5, 6, 6, 6, 6, 6]
    assert missing(sites) == {}
    assert clients_expected(sites) == 6
    assert [(gap["from"], gap["to"]) for gap in sites["site-2"]["missed"]] == [(1, 3)]
    assert shown_row(run, sites)["feasible"].endswith("% of 5")


def test_gaps_are_joined_counted_and_bounded():
    record = Participation()
    record.expect(["a", "b"])
    for round in range(5):
        gone = {"a": "no answer"} if round in (1, 2, 4) else {}
        record.end_round(round, {"a", "b"}, {"a", "b"} - gone.keys(), set(gone), gone)
    gone = [(gap["from"], gap["to"]) for gap in record.sites["a"]["missed"]]
    assert gone == [(2, 3), (5, 5)]
    assert [record.sites["a"][n] for n in ("asked", "answered", "refused", "absent")] == [
        5,
        2,
        0,
        3,
    ]
    record.expect(["a", "c"])
    (late,) = record.sites["c"]["missed"]
    assert (late["from"], late["to"], late["why"]) == (1, 5, NOT_YET)
    record.end_evaluation(["a", "b", "c"], {})
    assert missing(record.sites).keys() == {"c"}  # it was heard at the end, and in no round
    for round in range(5, 10 * MOST_GAPS):
        gone = {"b": f"reason {round}"}
        record.end_round(round, {"a", "b"}, {"a"}, set(), gone)
    kept = record.sites["b"]["missed"]
    assert (len(kept), kept[-1]["to"]) == (MOST_GAPS, 10 * MOST_GAPS)
    again = Participation()
    again.restore(record.saved())
    assert again.sites == record.sites
    assert "and 1 earlier gap, since" in gaps(record.sites)[0]
