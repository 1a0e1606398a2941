"""The protocol between server and sites, without a network: every loss that a network can cause."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import examples
import fedsolve as fs
from fedsolve.flare.link import Link, TooFew
from fedsolve.flare.server import serve
from fedsolve.flare.site import Share
from fedsolve.flare.wire import decode, encode
from fedsolve.solving import numbers_on_device, precision_of
from fedsolve.sweeping import with_field
from test_conformance import ALGORITHMS, every_algorithm_costly

SITES = {"site-1": (0, 2), "site-2": (2, 1), "site-3": (3, 2), "site-4": (5, 1)}


def part(problem, first, count):
    own = jax.tree.map(lambda leaf: leaf[first : first + count], problem.samples)
    return eqx.tree_at(lambda p: p.samples, problem, own)


class Wires:
    """Sites in this process; `lose(site, message number)` says what happens to a message."""

    def __init__(self, problem, algorithm, home, seed=0, precision="float64"):
        self.problem, self.algorithm, self.home = problem, algorithm, home
        self.seed, self.precision = seed, precision
        self.shares, self.count, self.lose = {}, 0, lambda site, number: ""
        self.spare = 0
        for site in SITES:
            self.start(site)

    def start(self, site):
        """A site (again), with nothing but its disk."""
        self.shares[site] = Share(
            self.home / site,
            part(self.problem, *SITES[site]),
            self.algorithm,
            self.seed,
            self.precision,
        )
        self.shares[site].answer(encode({"kind": "hello", "total": self.problem.n}, {}))

    def __call__(self, messages):
        found = {}
        for site, data in messages.items():
            self.count += 1
            fate = "" if self.spare > 0 else self.lose(site, self.count)
            self.spare -= 1
            if fate == "question lost":
                found[site] = TimeoutError("time-out")
                continue
            reply = self.shares[site].answer(data)
            if fate == "question repeated":
                assert self.shares[site].answer(data) == reply
            if fate == "site killed":
                self.start(site)
            found[site] = (
                TimeoutError("time-out") if fate in ("reply lost", "site killed") else reply
            )
        return found


def deploy(problem, algorithm, wires, home, rounds, seed=0, precision="float64", log=None):
    with precision_of(precision) as dtype:
        link = Link(
            wires,
            problem.on_device(dtype),
            numbers_on_device(algorithm, dtype),
            (log if log is not None else []).append,
        )
    home.mkdir(exist_ok=True)
    run = serve(link, list(SITES), problem, algorithm, rounds, seed, home, precision=precision)
    return run, link


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


def settled(share, link, site):
    """A site's states and memories, with the answers that the server used and has not yet told
    it of."""
    last, used = link.settled.get(site, (-1, []))
    return share._before(99, used if share._round == last else [])


def test_replies_that_do_not_belong_are_refused(tmp_path):
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
        link = Link(wires, placed, tuned, lambda text: None, quorum)
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


class Crash(Exception):
    """The server's machine goes down."""


class Recording(Link):
    """A link that remembers whose replies were used."""

    heard: dict

    def ask(self, round, number, clients, message, w):
        for later in (number, number + 1):  # of an attempt that the server did not survive
            self.heard.pop((round, later), None)
        found = super().ask(round, number, clients, message, w)
        self.heard[round, number] = {client for own, _ in found for client in own}
        return found


def test_nothing_is_lost_and_nothing_counted_twice(tmp_path):
    """200 rounds in which questions and replies are lost, questions repeated, sites killed after
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
                200,
                0,
                tmp_path / "server",
                precision="float64",
                evaluate_every=10,
            )
        except (Crash, TooFew):
            restarts += 1
    assert min(seen[fate] for fate in fates) > 10
    assert restarts > 10

    pattern = np.zeros((200, 2, 6), bool)
    for (round, number), clients in heard.items():
        pattern[round, number, list(clients)] = True
    assert 0.5 < pattern[:, 1].sum() / (200 * 3) < 0.95

    def arrivals(round, exchange, clients):
        return jnp.asarray(pattern)[round, exchange][jnp.asarray(clients)]

    expected = fs.solve(problem, algorithm, rounds=200, precision="float64", arrivals=arrivals)
    np.testing.assert_allclose(run.params, expected.params, atol=1e-10)
    np.testing.assert_allclose(run.average, expected.average, atol=1e-10)
    residuals = np.concatenate([settled(wires.shares[site], link, site)[0] for site in SITES])
    np.testing.assert_allclose(residuals, expected.state.clients, atol=1e-10)
    assert int(run.state.up.exact()) == expected.history["bytes_up_total"][-1]
    assert list(run.history["round"]) == list(range(10, 201, 10))  # no entry lost, none twice
    assert np.isfinite(run.history["objective"]).all()
