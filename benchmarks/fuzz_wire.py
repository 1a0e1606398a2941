"""A million wrong messages for each end: none may do anything but be refused.

    python benchmarks/fuzz_wire.py                # replies, as the server reads them
    python benchmarks/fuzz_wire.py --questions    # questions, as a site answers them
    python benchmarks/fuzz_wire.py --guided       # replies, guided by coverage (needs atheris)

By chance they are mutations of right messages, of their bytes and of the values in their heads.
Says how many were taken and refused, the slowest, and how much memory they took: more than
MEMORY is a failure, as is any exception.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedsolve as fs
from fedsolve.flare.site import SiteClients
from fedsolve.storage.arrays import Refused, decode, encode, nothing_left, size_of, take
from tiny import tiny

MEMORY = 256  # MiB that all of them together may take
COMPRESSOR = fs.Compose(fs.TopK(0.4), fs.Float8())
REPLY = jax.eval_shape(lambda: COMPRESSOR(jnp.ones(50), jax.random.key(0)))
MOST = 3 * size_of(REPLY)


def read(data: bytes) -> bool:
    """Whether a receiver takes these bytes for a reply of three clients."""
    try:
        _, arrays = decode(data, MOST)
        take(arrays, "reply", REPLY, rows=3)
        nothing_left(arrays)
        return True
    except Refused:
        return False


def right() -> bytes:
    packets = jax.vmap(lambda v: COMPRESSOR(v, jax.random.key(0)))(jnp.ones((3, 50)))
    return encode({"status": "ok", "round": 3, "exchange": 1}, {"reply": packets})


def mutated(good: bytes, rng: np.random.Generator) -> bytes:
    """Bytes changed, cut, doubled, inserted; lengths and brackets are favourites."""
    data = bytearray(good)
    for _ in range(rng.integers(1, 5)):
        place, kind = int(rng.integers(len(data) + 1)), int(rng.integers(5))
        if kind == 0 and place < len(data):
            data[place] = int(rng.integers(256))
        elif kind == 1:
            del data[place : place + int(rng.integers(1, 40))]
        elif kind == 2:
            data[place:place] = data[place : place + int(rng.integers(1, 40))]
        elif kind == 3:
            data[place:place] = bytes(rng.choice(list(b'{}[]",:0123456789-'), 3).tolist())
        else:
            data[:8] = int(rng.integers(2**63)).to_bytes(8, "little")
    return bytes(data)


class Questions:
    """A site with three clients, and what a server may ask it."""

    def __init__(self, home: Path):
        data = {"x": np.ones((3, 50), np.float32)}
        problem = fs.Problem(
            objective=lambda w, data: jnp.sum((w - data["x"]) ** 2),
            constraint=lambda w, data: jnp.sum(w) - 1,
            clients=data,
            params=np.zeros(50),
        )
        algorithm = fs.FedSGM(0.1, 0.0, uplink=COMPRESSOR, downlink=COMPRESSOR)
        self._share = SiteClients(home, problem, algorithm, 0)
        hello = {"kind": "hello", "total": 3}
        look = {"kind": "evaluate", "round": 1, "first": 0, "w": {"want": "start"}}
        ask = {"kind": "ask", "round": 2, "exchange": 0, "method": "measure", "first": 0}
        ask |= {"used": [], "settled": [-1, []], "w": {"want": "start"}}
        clients, everything = np.arange(3, dtype=np.int32), np.zeros(50, np.float32)
        packet = COMPRESSOR(jnp.ones(50), jax.random.key(0))
        moved = {"want": "next", "from": ["start"], "packets": [0]}
        improve = ask | {"exchange": 1, "method": "improve", "look": 2}
        self.right = [
            (hello, {}),
            (look, {}),
            (look | {"w": {"want": "start", "whole": True}}, {"w": everything}),
            (look | {"w": moved}, {"packet0": packet}),
            (ask, {"clients": clients}),
            (improve, {"clients": clients, "message": np.float32(1)}),
        ]
        for head, arrays in self.right[:1] + self.right[4:]:
            assert self.answer(encode(head, arrays)) == "ok", head

    def answer(self, data: bytes) -> str:
        return decode(self._share.answer(data), 10**6)[0]["status"]

    def wrong(self, rng: np.random.Generator) -> bytes:
        """Of one of them, some values of the head changed, or some bytes, or both. Now and then the
        site is brought back to where they are right."""
        if rng.integers(20) == 0:
            self.answer(encode(*self.right[2]))
        head, arrays = self.right[int(rng.integers(len(self.right)))]
        how = int(rng.integers(3))
        if how != 1:
            head = other(head, rng)
        data = encode(head, arrays)
        return mutated(data, rng) if how else data


VALUES = [None, True, -1, 0, 1, 2, 7, 2**31, 2**70, 1.5, "", "start", [], [0], [[]], {}, [-1, []]]


def other(table: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """A table with some of its values changed, taken away or doubled under another name."""
    table = dict(table)
    for _ in range(rng.integers(1, 3)):
        name = str(rng.choice(list(table) or ["none"]))
        if isinstance(table.get(name), dict) and rng.integers(2):
            table[name] = other(table[name], rng)
        elif rng.integers(8) == 0:
            table.pop(name, None)
        else:
            table[name] = VALUES[int(rng.integers(len(VALUES)))]
    return table


def by_chance(count: int, make: Callable[[], bytes], take: Callable[[bytes], str]) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    slowest, began = 0.0, time.perf_counter()
    found: collections.Counter[str] = collections.Counter()
    for _ in range(count):
        data = make()
        clock = time.perf_counter()
        found[take(data)] += 1
        slowest = max(slowest, time.perf_counter() - clock)
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(
        f"{count:,} inputs in {time.perf_counter() - began:.0f} s: {dict(found)} (a changed value "
        f"is a value); slowest {1e3 * slowest:.1f} ms; {more:.1f} MiB more memory"
    )
    assert more < MEMORY


def replies(count: int) -> None:
    good, rng = right(), np.random.default_rng(0)
    assert read(good)
    by_chance(count, lambda: mutated(good, rng), lambda data: "ok" if read(data) else "refused")


def questions(count: int) -> None:
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as home:
        asked = Questions(Path(home))
        by_chance(count, lambda: asked.wrong(rng), asked.answer)


def guided(count: int) -> None:
    atheris: Any = importlib.import_module("atheris")
    atheris.instrument_func(decode)
    atheris.instrument_func(take)
    words = [sys.argv[0], f"-runs={count}", "-max_len=4096", "-rss_limit_mb=4096", "-timeout=5"]
    atheris.Setup(words, lambda data: read(bytes(data)) and None)
    atheris.Fuzz()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=tiny(1_000_000, 200))
    parser.add_argument("--guided", action="store_true")
    parser.add_argument("--questions", action="store_true")
    chosen = parser.parse_args()
    act = guided if chosen.guided else questions if chosen.questions else replies
    act(chosen.count)
