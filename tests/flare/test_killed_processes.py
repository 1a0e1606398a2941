"""Every answer is used exactly once, although server and sites are killed."""

import contextlib
import json
import multiprocessing as mp
import os
import signal
import threading
import time
from multiprocessing.connection import Client, Listener

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from fedsolve.flare.journal import read
from fedsolve.flare.roster import Roster, TooFew
from fedsolve.flare.server import saved_run, serve
from fedsolve.flare.site import SiteClients
from fedsolve.runtimes.compilation import keep_compiled_programs
from fedsolve.runtimes.placement import numbers_on_device, precision_of
from fedsolve.storage.arrays import decode, encode, take
from tests.support import examples

EVERYONE = (0, 6)
SITES = {"site-1": (0, 2), "site-2": (2, 1), "site-3": (3, 2), "site-4": (5, 1)}
ROUNDS, SERVER_KILLS = 200, 6
FATES = ["answered", "question lost", "reply lost", "reply late", "repeated", "killed"]
CHANCES = [0.78, 0.06, 0.06, 0.02, 0.07, 0.01]
ALGORITHM = fs.FedSGM(
    0.05,
    0.1,
    fs.Soft(5.0),
    participants=3,
    local_steps=2,
    uplink=fs.TopK(0.4),
    downlink=fs.TopK(0.4),
)

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.slow]


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def share_of(home, site):
    whole = examples.least_squares()
    first, count = SITES.get(site, EVERYONE)
    data = {k: v[first : first + count] for k, v in whole.samples.values.items()}
    part = fs.Problem(examples.quadratic, data, whole.params, examples.half_space)
    return SiteClients(home / site, part, ALGORITHM, 0, "float64")


def site_process(home, site):
    """Answers one message after the other; the first byte is what is to become of the answer."""
    keep_compiled_programs()
    share = share_of(home, site)
    share.answer(encode({"kind": "hello", "total": 6}, {}))
    (home / f"{site}.socket").unlink(missing_ok=True)
    with Listener(str(home / f"{site}.socket")) as listener:
        while True:
            with contextlib.suppress(EOFError, OSError), listener.accept() as line:
                data = line.recv_bytes()
                fate, reply = FATES[data[0]], share.answer(data[1:])
                if fate == "killed":
                    die()
                if fate == "repeated":
                    assert share.answer(data[1:]) == reply
                if fate == "reply late":
                    time.sleep(0.3)
                if fate != "reply lost":
                    line.send_bytes(reply)


def server_process(home, attempt):
    """Serves the run from its checkpoint on, and is killed at a random moment."""
    keep_compiled_programs()
    rng = np.random.default_rng(attempt)
    problem = examples.least_squares()
    greetings = 2 * len(SITES)

    def deliver(site, data):
        nonlocal greetings
        fate = "answered" if greetings > 0 else str(rng.choice(FATES, p=CHANCES))
        greetings -= 1
        with open(home / "fates", "a") as file:
            file.write(fate + "\n")
        if fate == "question lost":
            raise TimeoutError("lost")
        while True:  # a site that was killed is waited for: else it would miss the whole run
            try:
                line = Client(str(home / f"{site}.socket"))
                break
            except OSError:
                time.sleep(0.02)
        with line:
            line.send_bytes(bytes([FATES.index(fate)]) + data)
            if not line.poll(0.1 if fate == "reply late" else 20):
                raise TimeoutError("late")
            return line.recv_bytes()

    def transport(messages):
        found = {}
        for site, data in messages.items():
            try:
                found[site] = deliver(site, data)
            except (OSError, EOFError) as error:
                found[site] = error
        return found

    class Recording(Roster):
        def ask(self, round, number, clients, message, w):
            if number == 0 and not hasattr(self, "doomed"):
                self.doomed = attempt < SERVER_KILLS
                if self.doomed:
                    threading.Timer(rng.uniform(0.1, 1.5), die).start()
            found = super().ask(round, number, clients, message, w)
            if number == 1:  # of a round that is asked again, the last answers count
                parts = {f"reply{place}": reply for place, (_, reply) in enumerate(found)}
                head = {"round": round, "clients": [own for own, _ in found]}
                used = encode(head, {"message": message, "w": w} | parts)
                (home / f"used-{round}").write_bytes(used)
            with open(home / "heard", "a") as file:
                file.write(
                    json.dumps([round, number, sorted(c for own, _ in found for c in own)]) + "\n"
                )
            return found

    with precision_of("float64") as dtype:
        placed, tuned = problem.on_device(dtype), numbers_on_device(ALGORITHM, dtype)
        link = Recording(transport, placed, tuned, lambda text: None)
    options = {"precision": "float64", "evaluate_every": ROUNDS}
    with contextlib.suppress(TooFew):
        serve(link, list(SITES), problem, ALGORITHM, ROUNDS, 0, home / "server", **options)
        (home / "done").touch()
    os._exit(0)  # the timer may still wait


def unaccounted(home, residuals):
    """The largest entry of Σ Δ_j − (Σ v_j + e_j) over all clients: v_j are the packets that the
    server used, Δ_j the progress of the same rounds, computed anew from the server's own w by a
    site that holds nothing back."""
    fresh = share_of(home / "fresh", "all")
    fresh.answer(encode({"kind": "hello", "total": 6}, {}))
    exchange, total = fresh._protocol.exchanges[1], -residuals
    counted = 0
    with precision_of("float64"):
        for file in home.glob("used-*"):
            head, arrays = decode(file.read_bytes(), None)
            fresh._w = take(arrays, "w", fresh._protocol.w)
            message = take(arrays, "message", exchange.message)
            for place, clients in enumerate(head["clients"]):
                own, nothing = np.asarray(clients), np.zeros((len(clients), residuals.shape[1]))
                used = take(arrays, f"reply{place}", exchange.reply, rows=len(clients))
                rows = (nothing, None)
                (left, _), sent = fresh._compute(1, head["round"], own, own, rows, message)
                dense = jax.vmap(lambda packet: packet.dense())
                np.add.at(total, own, left + np.asarray(dense(sent)) - np.asarray(dense(used)))
                counted += len(clients)
    return np.abs(total).max(), counted


def test_nothing_is_lost_by_processes_that_are_killed(tmp_path, capsys):
    """200 rounds with questions and replies lost, late and repeated, sites SIGKILLed between
    computing and answering, the server SIGKILLed at random moments: parameters and residuals are
    those of a simulation with the same arrivals."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    (tmp_path / "server").mkdir()
    sites, deaths, attempts, killed = {}, 0, 0, 0
    server, end = None, time.monotonic() + 400
    try:
        while not (tmp_path / "done").exists():
            assert time.monotonic() < end, "it does not come to an end"
            for site in SITES:
                if site not in sites or not sites[site].is_alive():
                    deaths += site in sites
                    sites[site] = context.Process(target=site_process, args=(tmp_path, site))
                    sites[site].start()
            if server is None or not server.is_alive():
                killed += server is not None and server.exitcode == -signal.SIGKILL
                server = context.Process(target=server_process, args=(tmp_path, attempts))
                server.start()
                attempts += 1
            server.join(0.05)
    finally:
        for process in [*sites.values(), server]:
            process.kill()
            process.join()

    fates = (tmp_path / "fates").read_text().split("\n")
    counted = {fate: fates.count(fate) for fate in FATES}
    assert min(counted.values()) > 0
    assert deaths >= 5
    assert killed > SERVER_KILLS / 2

    heard = {}
    for line in (tmp_path / "heard").read_text().splitlines():
        round, number, clients = json.loads(line)
        heard = {k: v for k, v in heard.items() if k[0] < round or k == (round, 0)}
        heard[round, number] = clients
    pattern = np.zeros((ROUNDS, 2, 6), bool)
    for (round, number), clients in heard.items():
        pattern[round, number, clients] = True

    def arrivals(round, exchange, clients):
        return jnp.asarray(pattern)[round, exchange][jnp.asarray(clients)]

    expected = fs.solve(
        examples.least_squares(), ALGORITHM, rounds=ROUNDS, precision="float64", arrivals=arrivals
    )
    kept = tmp_path / "server/server"
    run = saved_run(kept, examples.least_squares(), ALGORITHM, 0, "float64")
    # 200 rounds of switching and Top-K carry rounding up to 1e-8 (between the two runtimes of a
    # simulation, too); a reply lost or counted twice would be seen at 1e-3.
    np.testing.assert_allclose(run.params, expected.params, atol=1e-7)
    np.testing.assert_allclose(run.average, expected.average, atol=1e-7)
    base, records = read(kept)
    head, _ = decode([base, *records][-1], None)
    residuals = []
    for site in SITES:
        share = share_of(tmp_path, site)
        last, used = head["link"]["settled"].get(site, (-1, []))
        used = used if share._round == last else []
        residuals.append(share._before(99, used, np.arange(share._count))[0])
    residuals = np.concatenate(residuals)
    difference = np.abs(residuals - np.asarray(expected.state.clients)).max()
    assert difference < 1e-7
    lost, used = unaccounted(tmp_path, residuals)
    assert used > ROUNDS
    assert lost < 1e-10
    with capsys.disabled():
        print(
            f"\nexactly once over {ROUNDS} rounds: {counted}, {deaths} sites and {killed} servers "
            f"killed; of {used} used replies, sum of v + e - delta is {lost:.1e}; residuals differ "
            f"from the simulation's by {difference:.1e}"
        )
