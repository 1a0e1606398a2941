"""Sites with very many clients, and a site that claims to have more than there can be."""

import threading
import tracemalloc

import jax
import numpy as np
import pytest

import fedsolve as fs
from fedsolve.experiments import config
from fedsolve.flare import jobs
from fedsolve.flare.local_federation import local_federation, run_on
from fedsolve.flare.site import SiteClients
from fedsolve.storage.arrays import decode, encode
from tests.support import examples
from tests.support.in_process import SITES, Wires, deploy

pytestmark = pytest.mark.filterwarnings("ignore")  # FLARE's own


@pytest.mark.parametrize("claim", [9_000_000, 2**62, 0, -1, True, 2.0, "many", None, [1]])
def test_an_absurd_number_of_clients_is_refused_and_the_others_go_on(tmp_path, claim):
    problem, log = examples.least_squares(), []
    algorithm = fs.FedSGM(0.05, 0.1, participants=2)
    wires = Wires(problem, algorithm, tmp_path)
    share = wires.shares["site-2"]

    class Liar:
        def answer(self, data):
            head, _ = decode(data, None)
            if head["kind"] == "hello":
                return encode({"status": "ok", "clients": claim}, {})
            return share.answer(data)

    wires.shares["site-2"] = Liar()
    run, link = deploy(problem, algorithm, wires, tmp_path / "server", 3, log=log)
    assert run.rounds == 3
    assert np.isfinite(run.history["objective"]).all()
    assert link.ranges.keys() == SITES.keys() - {"site-2"}
    assert [entry for entry in log if entry.startswith("site-2: refused its greeting")]


def test_sites_are_asked_from_any_thread(monkeypatch):
    """JAX calls the server from a thread of its own where a round is large."""

    class Client:
        name = "site-1"

    class Queue(list):
        failures = {}  # noqa: RUF012

    here = threading.local()

    class Collab:
        clients = [Client()]  # noqa: RUF012
        is_aborted = False

        @property
        def context(self):
            return "the job's"

        def get_clients(self, names):
            assert here.context == "the job's"
            return lambda **options: self

        def answer(self, cell, data):
            return Queue([("site-1", b"answer to " + data)])

    monkeypatch.setattr(jobs, "collab", Collab())
    monkeypatch.setattr(jobs, "set_call_context", lambda context: setattr(here, "context", context))
    transport, found = jobs.CollabTransport(1.0, lambda entry: None, set()), []
    thread = threading.Thread(target=lambda: found.append(transport(0, {"site-1": b"it"})))
    thread.start()
    thread.join()
    assert found == [{"site-1": b"answer to it"}]


def test_a_question_takes_memory_for_those_asked_and_not_for_all(tmp_path):
    """A site with 20,000 clients copies nothing that has a row for each of them."""
    clients, size = 20_000, 50
    problem = fs.problems.linear_regression(clients=clients, size=size, smallest=1, largest=1)
    algorithm = fs.FedSGM(0.01, participants=16, uplink=fs.TopK(0.1))
    share = SiteClients(tmp_path, problem, algorithm, 0)
    share.answer(encode({"kind": "hello", "total": clients}, {}))
    rng, peaks = np.random.default_rng(0), []
    head = {"kind": "ask", "exchange": 0, "method": share._protocol.exchanges[0].method}
    head |= {"first": 0, "used": [], "w": {"want": "w", "whole": True}}
    w = np.zeros(size, np.float32)
    for round in range(6):
        message = jax.tree.map(
            lambda x: np.zeros(x.shape, x.dtype), share._protocol.exchanges[0].message
        )
        who = np.sort(rng.choice(clients, 16, replace=False)).astype(np.int32)
        settled = {"round": round, "settled": (round - 1, [0] if round else [])}
        data = encode(head | settled, {"clients": who, "message": message, "w": w})
        tracemalloc.start()
        answer, _ = decode(share.answer(data), None)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert (answer["status"], answer["moved"]) == ("ok", True)
    assert max(peaks[2:]) < clients * size * 4 / 20


@pytest.mark.slow
def test_twenty_thousand_clients_on_two_sites():
    """A program that is large enough for JAX to call out of another thread."""
    table = config.read("neyman-pearson")
    table["problem"] = {"kind": "linear_regression", "clients": 20_000, "size": 10}
    for change in [
        "problem.smallest=2",
        "problem.largest=4",
        "algorithm.participants=100",
        "run.rounds=6",
        "run.evaluate_every=3",
        "run.precision=float64",
    ]:
        table = config.override(table, change)
    wanted = config.resolve("many", table)
    with local_federation(20_000, 2, lambda news: None) as federation:
        ((run,),) = run_on(federation, wanted, "many", lambda news: None).values()
    problem, algorithm = wanted.cells[""]
    expected = fs.solve(problem, algorithm, seed=0, **wanted.options)
    np.testing.assert_allclose(run.params, expected.params, atol=1e-10)
    np.testing.assert_array_equal(run.history["bytes_up_total"], expected.history["bytes_up_total"])
