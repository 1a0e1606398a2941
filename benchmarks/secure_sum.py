"""What a secure sum costs: bytes and seconds of a client and of the server, beside a plain sum.

    python benchmarks/secure_sum.py [--tiny]

Two of the clients drop out after they have shared their keys, so the server takes their masks off.
A second table has whole exchanges between sites and server, in one process, with all of a
deployment but the network.
"""

import sys
import tempfile
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import fedsolve as fs
from fedsolve.flare.roster import Roster
from fedsolve.flare.site import SiteClients
from fedsolve.flare.summing import BATCH, SummingRoster
from fedsolve.privacy.encoding import Encoding, costs
from fedsolve.privacy.masking import Collector, Member

TINY = "--tiny" in sys.argv
CLIENTS = (3, 8, 16)
WARM, ROUNDS = (1, 2) if TINY else (BATCH, BATCH)  # keys are agreed once in so many sums
BYTES = (1_000, 100_000) if TINY else (1_000, 100_000, 1_000_000, 10_000_000, 44_000_000)


def seconds_of(clients: int, words: int) -> tuple[float, float, float]:
    """Return the seconds of a client, of the server, and of a plain sum."""
    threshold = clients // 2 + 1
    members = [Member(number) for number in range(clients)]
    channels = {member.number: member.channel for member in members}
    for member in members:
        member.join(channels, threshold)
    rng, encoding = np.random.default_rng(0), Encoding(1.0, clients)
    values = rng.uniform(-1, 1, words).astype(np.float32)
    there = members if clients == 3 else members[:-2]
    use, spent = b"use", {}
    adverts = {member.number: member.advertise(use) for member in members}
    server = Collector(use, threshold, adverts)
    for member in members:
        began = time.perf_counter()
        server.sealed[member.number] = member.share(use, adverts)
        spent[member.number] = time.perf_counter() - began
    for member in there:
        inbox = server.inbox(member.number)
        began = time.perf_counter()
        server.masked[member.number] = member.mask(use, inbox, encoding.encode(values))
        spent[member.number] += time.perf_counter() - began
    asked = sorted(server.masked)
    shares = {member.number: member.unmask(use, asked) for member in there}
    began = time.perf_counter()
    total = encoding.decode(server.total(shares))
    server_spent = time.perf_counter() - began
    assert np.allclose(total, len(there) * values.astype(float), atol=1e-5)
    began = time.perf_counter()
    np.sum([values] * len(there), axis=0)
    return spent[0], server_spent, time.perf_counter() - began


print("| clients | answer | sent | received | × plain | client | server | plain sum |")
print("|---|---|---|---|---|---|---|---|")
for clients in CLIENTS:
    for size in BYTES:
        up, down = costs(clients, size // 4)
        own, server, plain = seconds_of(clients, size // 4)
        print(
            f"| {clients} | {size / 1e3:,.0f} kB | {up / 1e3:,.1f} kB | {down / 1e3:,.1f} kB "
            f"| {(up + down) / size:.2f} | {own:.3f} s | {server:.3f} s | {plain:.3f} s |"
        )


class Timed:
    """Sites in this process, each timed."""

    def __init__(self, sites: dict[str, SiteClients]):
        self._sites, self.spent, self.sent = sites, dict.fromkeys(sites, 0.0), 0

    def __call__(self, messages: dict[str, bytes]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for site, data in messages.items():
            began = time.perf_counter()
            found[site] = self._sites[site].answer(data)
            self.spent[site] += time.perf_counter() - began
            self.sent += len(data) + len(found[site])
        return found


class Descent(fs.Algorithm):
    """One exchange a round, and hardly any work at a client."""

    def init(self, w):
        return None

    def slope(self, client, state):
        return state, client.w * 1e-3

    def round(self, fed, server, key):
        mean = fed.ask(self.slope, fed.everyone).mean()
        fed.publish(fs.Identity()(-1e-3 * mean))
        return server, {}


def exchange(sites: int, words: int, rule: fs.SecureSum | None) -> tuple[float, float]:
    """Return the seconds of an exchange if sites work at the same time, and bytes of a site."""
    names = [f"site-{number:02}" for number in range(sites)]
    algorithm = Descent()

    def problem(clients: int) -> fs.Problem:
        return fs.Problem(
            lambda w, data: jnp.sum(data["x"]), {"x": np.ones((clients, 1))}, np.ones(words)
        )

    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        ends = {
            name: SiteClients(home / name, problem(1), algorithm, 0, aggregation=rule)
            for name in names
        }
        wires = Timed(ends)
        given = problem(sites).on_device(), algorithm, print
        link = Roster(wires, *given)
        if rule is not None:
            link = SummingRoster(wires, *given, rule=rule, home=home)
        link.hello(names)
        w, clients, each = np.ones(words, np.float32), np.arange(sites), []
        for round in range(WARM + ROUNDS):
            wires.spent, wires.sent = dict.fromkeys(names, 0.0), 0
            began = time.perf_counter()
            if isinstance(link, SummingRoster):
                link.ask_sum(round, 0, clients, None, w, sites)
            else:
                found = link.ask(round, 0, clients, None, w)
                np.sum([reply for _, reply in found], axis=0)
            link.end_round(round)
            server = time.perf_counter() - began - sum(wires.spent.values())
            each.append((server + max(wires.spent.values()), wires.sent / sites))
        seconds, sent = np.mean(each[WARM:], axis=0)
        return float(seconds), float(sent)


print("\nAn exchange of a deployment without its network, sites working at the same time:\n")
print("| sites | answer | plain | secure | × | bytes of a site, plain | secure |")
print("|---|---|---|---|---|---|---|")
for sites in CLIENTS:
    for size in BYTES:
        plain, secure = (exchange(sites, size // 4, rule) for rule in (None, fs.SecureSum()))
        (before, bare), (after, masked) = plain, secure
        print(
            f"| {sites} | {size / 1e3:,.0f} kB | {before * 1e3:.1f} ms | {after * 1e3:.1f} ms "
            f"| {after / before:.1f} | {bare / 1e3:,.1f} kB | {masked / 1e3:,.1f} kB |",
            flush=True,
        )
