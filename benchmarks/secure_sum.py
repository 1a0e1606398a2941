"""What a secure sum costs: bytes and seconds of a client and of the server, beside a plain sum.

    python benchmarks/secure_sum.py [--tiny]

Two of the clients drop out after they have shared their keys, so the server takes their masks off.
"""

import sys
import time

import numpy as np

from fedsolve.privacy.encoding import Encoding, costs
from fedsolve.privacy.masking import Collector, Member

TINY = "--tiny" in sys.argv
CLIENTS = (3, 8, 16)
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
