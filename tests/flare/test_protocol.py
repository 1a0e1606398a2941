"""The protocol between server and sites, without a network: lost, repeated and invalid messages."""

import importlib
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from fedsolve.flare.journal import read
from fedsolve.flare.roster import Roster, TooFew
from fedsolve.flare.server import serve
from fedsolve.flare.site import SiteClients
from fedsolve.runtimes.placement import numbers_on_device, precision_of
from fedsolve.solving.sweep import with_field
from fedsolve.storage.arrays import decode, encode
from tests.support import examples
from tests.support.conformance import ALGORITHMS, every_algorithm_costly
from tests.support.in_process import SITES, Wires, deploy, settled


@every_algorithm_costly
def test_a_deployment_is_the_simulation(algorithm, tmp_path):
    problem = examples.least_squares()
    wires = Wires(problem, algorithm, tmp_path)
    run, link = deploy(problem, algorithm, wires, tmp_path / "server", 20)
    expected = fs.solve(problem, algorithm, rounds=20, precision="float64")
    np.testing.assert_allclose(run.params, expected.params, atol=1e-10)
    # What clients hold back is the sites' own: the server does not know it.
    assert run.history.keys() == expected.history.keys() - {"uplink_error"}
    for name in run.history:
        values = expected.history[name]
        exact = "bytes" in name or name in ("round", "cohort")
        np.testing.assert_allclose(
            run.history[name], values, atol=0 if exact else 1e-10, err_msg=name
        )
    states = jax.tree.map(
        lambda *leaves: np.concatenate(leaves), *[settled(wires.shares[s], link, s) for s in SITES]
    )
    kept = expected.state.clients, expected.state.memory
    for a, b in zip(jax.tree.leaves(states), jax.tree.leaves(kept), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-10)


def test_a_model_of_pytorch_behaves_the_same_over_a_link(tmp_path):
    torch = pytest.importorskip("torch")
    importlib.import_module("fedsolve.torch")
    module = torch.nn.Linear(3, 1).double()
    rng = np.random.default_rng(0)
    data = {"x": rng.standard_normal((6, 4, 3)), "y": rng.standard_normal((6, 4, 1))}

    def loss(model, data):
        return (model(data["x"]) - data["y"]).pow(2).mean()

    problem = fs.torch.problem(module, loss, data)
    algorithm = fs.FedSGM(0.05, 0.1, participants=3)
    wires = Wires(problem, algorithm, tmp_path)
    run, _ = deploy(problem, algorithm, wires, tmp_path / "server", 3)
    expected = fs.solve(problem, algorithm, rounds=3, precision="float64")
    assert run.params.keys() == expected.params.keys() == {"weight", "bias"}
    for name, values in run.params.items():
        np.testing.assert_allclose(values, expected.params[name], atol=1e-10)
    np.testing.assert_allclose(run.history["objective"], expected.history["objective"], atol=1e-10)


def test_invalid_replies_count_as_missing(tmp_path):
    """Of another round, of a site that was not asked, of a wrong shape, not finite, not even bytes:
    noted with the site's name, counted as missing, and the run goes on."""
    problem, algorithm = examples.least_squares(), ALGORITHMS["FedSGM hard"]
    sound = Wires(problem, algorithm, tmp_path)
    old, tampered = {}, []

    def tamper(messages):
        found = dict(sound(messages))
        for site, data in found.items():
            head, arrays = decode(data, 10_000)
            if "round" not in head:
                continue
            known = old.setdefault(head["exchange"], {}).setdefault(site, data)

            def instead(change, head=head, arrays=arrays):
                parts = {"reply": [], "values": []}
                for name, each in arrays.items():
                    part = name.partition(".")[0]
                    parts[part].append(change(each) if part == "reply" else each)
                return encode(head, parts)

            wrong = {
                "site-1": known,
                "site-2": instead(lambda each: each[:, None]),
                "site-3": instead(lambda each: np.full_like(each, np.nan)),
            }
            if head["round"] == 2 and site in wrong:
                found[site] = wrong[site]
                tampered.append(site)
        if tampered and "stranger" not in found:
            found["stranger"] = b"let me in"
        return found

    notes = []
    everyone = with_field(algorithm, ["participants"], None)
    sound.algorithm = everyone
    for site in SITES:
        sound.start(site)
    run, _ = deploy(problem, everyone, tamper, tmp_path / "server", 6, log=notes)
    assert run.rounds == 6
    assert np.isfinite(run.history["objective"]).all()
    for site, reason in [
        ("site-1", "it is for another round"),
        ("site-2", "reply.0 is float64"),
        ("site-3", "is not finite"),
        ("stranger", "it was not asked"),
    ]:
        assert any(note.startswith(site) and reason in note for note in notes), (site, notes)


def test_new_sites_and_quorums(tmp_path):
    """A run that began with two sites goes on with four, and stops below its quorum."""
    problem, algorithm = examples.least_squares(), ALGORITHMS["FedSGM hard"]
    everyone = with_field(algorithm, ["participants"], None)
    wires = Wires(problem, everyone, tmp_path)
    home, early = tmp_path / "server", ["site-1", "site-2"]
    home.mkdir()
    with precision_of("float64") as dtype:
        placed, tuned = problem.on_device(dtype), numbers_on_device(everyone, dtype)

    def serve_with(sites, rounds, quorum=0.0):
        link = Roster(wires, placed, tuned, lambda text: None, quorum)
        return serve(link, sites, problem, everyone, rounds, 0, home, precision="float64")

    run = serve_with(early, 3)
    assert run.history["cohort"].shape == (3, 3)
    wires.lose = lambda site, number: "question lost" if site in early else ""
    wires.spare = 2 * len(SITES)
    with pytest.raises(TooFew, match="3 of 6 clients answered in round 4"):
        serve_with(list(SITES), 6, quorum=0.6)
    wires.lose = lambda site, number: ""
    run = serve_with(list(SITES), 6, quorum=0.6)
    assert run.history["cohort"].shape == (6, 6)
    assert (run.history["cohort"][:3, 3:] == -1).all()
    assert (run.history["cohort"][3:] == np.arange(6)).all()


def restarted(wires, algorithm, home, rounds, log=None):
    """A job of a run that may have had others; it begins with all sites."""
    wires.spare = 2 * len(SITES)
    return deploy(wires.problem, algorithm, wires, home, rounds, log=log)[0]


def test_a_cohort_whose_sites_are_lost_is_a_round_without_arrivals(tmp_path):
    """One client is drawn, and two sites of four are gone for good: the run ends, and is that of a
    simulation in which their clients do not answer."""
    problem = examples.least_squares()
    algorithm = with_field(ALGORITHMS["FedSGM soft, Top-K both ways"], ["participants"], 1)
    wires = Wires(problem, algorithm, tmp_path)
    gone = ["site-1", "site-3"]
    wires.lose = lambda site, number: "question lost" if site in gone else ""
    run = restarted(wires, algorithm, tmp_path / "server", 20)

    def arrivals(round, exchange, clients):
        return jnp.asarray([False, False, True, False, False, True])[jnp.asarray(clients)]

    expected = fs.solve(problem, algorithm, rounds=20, precision="float64", arrivals=arrivals)
    np.testing.assert_allclose(run.params, expected.params, atol=1e-10)
    assert {0, 1, 3, 4} & {*run.history["cohort"].ravel()}
    assert {2, 5} & {*run.history["cohort"].ravel()}


def test_a_round_without_any_reply_is_repeated(tmp_path):
    problem = examples.least_squares()
    algorithm = with_field(ALGORITHMS["FedSGM soft, Top-K both ways"], ["participants"], 1)
    wires = Wires(problem, algorithm, tmp_path)
    home = tmp_path / "server"
    restarted(wires, algorithm, home, 2)
    kept = read(home / "server")
    wires.lose = lambda site, number: "question lost"
    with pytest.raises(TooFew, match="0 of 1 clients answered in round 3") as caught:
        restarted(wires, algorithm, home, 6)
    assert caught.value.missed == list(SITES)
    assert read(home / "server") == kept
    wires.lose = lambda site, number: ""
    assert restarted(wires, algorithm, home, 6).rounds == 6


def test_a_first_evaluation_without_replies_is_nan(tmp_path):
    problem, algorithm = examples.least_squares(), ALGORITHMS["FedSGM hard"]
    wires = Wires(problem, algorithm, tmp_path)
    seen = []

    def without_values(messages):
        found = dict(wires(messages))
        for site, data in found.items():
            head, arrays = decode(data, 10_000)
            if any(name.startswith("values.") for name in arrays) and len(seen) < len(SITES):
                seen.append(site)
                parts = {"reply": [v for k, v in arrays.items() if k.startswith("reply.")]}
                found[site] = encode(head, parts)
        return found

    run, _ = deploy(problem, algorithm, without_values, tmp_path / "server", 3)
    assert np.isnan(run.history["objective"]).tolist() == [True, False, False]
    assert run.history["clients_evaluated"].tolist() == [0, 6, 6]
    assert np.isnan(run.history["constraint"]).tolist() == [True, False, False]


def test_a_server_put_back_from_an_old_copy_is_refused(tmp_path):
    """What was used since would be used again: sites notice, keep their states and say so."""
    problem = examples.least_squares()
    algorithm = with_field(ALGORITHMS["FedSGM soft, Top-K both ways"], ["participants"], None)
    wires = Wires(problem, algorithm, tmp_path)
    home = tmp_path / "server"
    restarted(wires, algorithm, home, 3)
    shutil.copytree(home, tmp_path / "old")
    restarted(wires, algorithm, home, 5)
    states = [wires.shares[site]._states for site in SITES]
    sentence = "its folder was put back from an older copy; put back the newest"
    with pytest.raises(TooFew, match=sentence) as caught:
        restarted(wires, algorithm, tmp_path / "old", 8)
    assert caught.value.missed == []  # waiting for them would not help
    for before, site in zip(states, SITES, strict=True):
        assert wires.shares[site]._states is before
    run = restarted(wires, algorithm, home, 8)
    expected = fs.solve(problem, algorithm, rounds=8, precision="float64")
    np.testing.assert_allclose(run.params, expected.params, atol=1e-10)
    # And the other way about: a site put back to before its answers were used.
    for path in [*(tmp_path / "site-2").iterdir()]:
        path.unlink()
    wires.start("site-2")
    notes = []
    restarted(wires, algorithm, home, 9, notes)
    assert any(
        note.startswith("site-2: this site has not the answers that the server used in round 8")
        for note in notes
    )


def test_an_invalid_site_cannot_end_the_run(tmp_path):
    """No bytes, an absurd number of clients, a reason as long as a book: noted, no more."""
    problem = examples.least_squares()
    algorithm = with_field(ALGORITHMS["FedSGM hard"], ["participants"], None)
    wires = Wires(problem, algorithm, tmp_path)
    bad = {
        "a": encode({"status": "ok", "clients": 10**12}, {}),
        "b": encode({"status": "ok", "clients": True}, {}),
        "c": encode({"status": "refused", "reason": "\x1b[2Jno" * 10_000}, {}),
        "d": 7,
        "e": None,
    }

    def mixed(messages):
        found = dict(wires({site: data for site, data in messages.items() if site in SITES}))
        found |= {site: bad[site] for site in messages if site in bad}
        if found.keys() == SITES.keys() and wires.count > 20:
            found["site-2"] = ["not", "bytes"]
        return found

    notes = []
    with precision_of("float64") as dtype:
        placed, tuned = problem.on_device(dtype), numbers_on_device(algorithm, dtype)
    link = Roster(mixed, placed, tuned, notes.append)
    (tmp_path / "server").mkdir()
    everyone = [*SITES, *bad]
    run = serve(link, everyone, problem, algorithm, 5, 0, tmp_path / "server", precision="float64")
    assert run.rounds == 5
    assert link.ranges.keys() == SITES.keys()
    for part in ("a: refused its greeting: 1000000000000", "b: refused its greeting: True"):
        assert any(note.startswith(part) for note in notes), notes
    assert "d: not bytes but int" in notes
    assert "e: not bytes but NoneType" in notes
    assert "site-2: not bytes but list" in notes
    assert all(len(note) < 400 and note.isprintable() for note in notes)


def alone(problem, algorithm, home):
    """A site that has all clients, and the link to it."""
    share = SiteClients(home, problem, algorithm, 0)

    def transport(messages):
        return {site: share.answer(data) for site, data in messages.items()}

    placed, tuned = problem.on_device(None), numbers_on_device(algorithm, None)
    return share, Roster(transport, placed, tuned, refuse_complaints)


def refuse_complaints(line):
    if not line.startswith("ready: "):
        pytest.fail(line)


def distance(w, data):
    return jnp.sum((w - data["x"]) ** 2)


def test_more_clients_in_a_question_than_a_head_has_room_for(tmp_path):
    data = {"x": np.arange(200_000.0)[:, None]}
    problem = fs.Problem(distance, data, np.zeros(1))
    algorithm = fs.FedSGM(0.1, 0.0)
    _, link = alone(problem, algorithm, tmp_path)
    run = serve(link, ["one"], problem, algorithm, 1, 0, tmp_path)
    expected = fs.solve(problem, algorithm, rounds=1)
    np.testing.assert_allclose(run.params, expected.params, rtol=1e-5)


def test_more_publications_than_a_head_has_room_for(tmp_path):
    """A site that missed thousands gets the whole w, one that missed a thousand gets those; and the
    server's own file may have a head of any length."""
    size = 2500
    problem = fs.Problem(distance, {"x": np.ones((2, 1))}, np.zeros(size))
    algorithm = fs.FedSGM(0.1, 0.0, downlink=fs.TopK(1 / size))
    share, link = alone(problem, algorithm, tmp_path)
    link.hello(["one"])
    w, first = np.zeros(size, np.float32), np.eye(1, size, dtype=np.float32)[0]
    packet = algorithm.downlink(jnp.asarray(first))
    sent = []
    share.answer, answer = (lambda data: sent.append(data) or answer(data)), share.answer
    for missed in (3000, 1000):
        for _ in range(missed):
            link.publish(0, packet, w.nbytes)
            w = w + first
        link.request_values(0, w, jax.eval_shape(lambda: {"objective": jnp.zeros(())}))
        assert list(link.values()) == ["one"]
        np.testing.assert_array_equal(share._w, w)
    news = [decode(data, 10**6)[0]["w"] for data in sent]
    assert [("whole" in each, len(each.get("packets", []))) for each in news] == [
        (True, 0),
        (False, 1000),
    ]
    head, arrays = link.saved()
    again, found = decode(encode(head | {"names": head["names"] * 40}, arrays), None)
    assert len(json.dumps(again)) > 2**20
    assert len(found) == len(jax.tree.leaves(arrays))


class Crash(Exception):
    """The server's machine goes down."""


class Recording(Roster):
    """A link that remembers whose replies were used."""

    heard: dict

    def ask(self, round, number, clients, message, w):
        for later in (number, number + 1):  # of an attempt that the server did not survive
            self.heard.pop((round, later), None)
        found = super().ask(round, number, clients, message, w)
        self.heard[round, number] = {client for own, _ in found for client in own}
        return found


@pytest.mark.parametrize("rounds", [60, pytest.param(200, marks=pytest.mark.slow)])
def test_nothing_is_lost_and_nothing_counted_twice(tmp_path, rounds):
    """Rounds in which questions and replies are lost, questions repeated, sites killed after
    computing, and the server killed anywhere: the run is a simulation with the same arrivals."""
    problem = examples.least_squares()
    algorithm = ALGORITHMS["FedSGM soft, Top-K both ways"]
    wires = Wires(problem, algorithm, tmp_path)
    rng = np.random.default_rng(0)
    fates = ["question lost", "reply lost", "question repeated", "site killed", "server killed"]
    seen = dict.fromkeys(fates, 0)

    def lose(site, number):
        fate = rng.choice(["", *fates], p=[0.73, 0.07, 0.07, 0.06, 0.055, 0.015])
        seen[fate] = seen.get(fate, 0) + 1
        if fate == "server killed":
            raise Crash
        return fate

    heard, restarts, run = {}, 0, None
    (tmp_path / "server").mkdir()
    while run is None:
        with precision_of("float64") as dtype:
            link = Recording(
                wires, problem.on_device(dtype), numbers_on_device(algorithm, dtype), [].append
            )
        link.heard = heard
        wires.lose, wires.spare = lose, 2 * len(SITES)  # each job begins with all sites
        try:
            run = serve(
                link,
                list(SITES),
                problem,
                algorithm,
                rounds,
                0,
                tmp_path / "server",
                precision="float64",
                evaluate_every=10,
            )
        except (Crash, TooFew):
            restarts += 1
    assert min(seen[fate] for fate in fates) > rounds // 20
    assert restarts > rounds // 20

    pattern = np.zeros((rounds, 2, 6), bool)
    for (round, number), clients in heard.items():
        pattern[round, number, list(clients)] = True
    assert 0.5 < pattern[:, 1].sum() / (rounds * 3) < 0.95

    def arrivals(round, exchange, clients):
        return jnp.asarray(pattern)[round, exchange][jnp.asarray(clients)]

    expected = fs.solve(problem, algorithm, rounds, precision="float64", arrivals=arrivals)
    np.testing.assert_allclose(run.params, expected.params, atol=1e-10)
    np.testing.assert_allclose(run.average, expected.average, atol=1e-10)
    residuals = np.concatenate([settled(wires.shares[site], link, site)[0] for site in SITES])
    np.testing.assert_allclose(residuals, expected.state.clients, atol=1e-10)
    assert int(run.state.bytes_up.exact()) == expected.history["bytes_up_total"][-1]
    assert list(run.history["round"]) == list(
        range(10, rounds + 1, 10)
    )  # no entry lost, none twice
    assert np.isfinite(run.history["objective"]).all()
