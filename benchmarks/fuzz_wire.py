"""A million wrong messages for the decoder: none may do anything but be refused.

    python benchmarks/fuzz_wire.py              # mutations of right messages, by chance
    python benchmarks/fuzz_wire.py --guided     # guided by coverage (pip install atheris)

Says how many were taken and refused, the slowest, and how much memory they took.
"""

from __future__ import annotations

import argparse
import importlib
import resource
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedsolve as fs
from fedsolve.flare.wire import Refused, decode, encode, nothing_left, size_of, take

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


def by_chance(count: int) -> None:
    good, rng = right(), np.random.default_rng(0)
    assert read(good)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    taken, slowest, began = 0, 0.0, time.perf_counter()
    for _ in range(count):
        data = mutated(good, rng)
        clock = time.perf_counter()
        taken += read(data)
        slowest = max(slowest, time.perf_counter() - clock)
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(
        f"{count:,} inputs in {time.perf_counter() - began:.0f} s: {taken:,} taken (a changed "
        f"value is a value), the rest refused; slowest {1e3 * slowest:.1f} ms; "
        f"{more:.1f} MiB more memory"
    )


def guided(count: int) -> None:
    atheris: Any = importlib.import_module("atheris")
    atheris.instrument_func(decode)
    atheris.instrument_func(take)
    words = [sys.argv[0], f"-runs={count}", "-max_len=4096", "-rss_limit_mb=4096", "-timeout=5"]
    atheris.Setup(words, lambda data: read(bytes(data)) and None)
    atheris.Fuzz()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--guided", action="store_true")
    chosen = parser.parse_args()
    (guided if chosen.guided else by_chance)(chosen.count)
