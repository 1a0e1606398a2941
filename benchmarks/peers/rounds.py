"""The rounds of a Fedsolve run without evaluation, and an evaluation alone; for `meter`."""

from typing import Any

import jax
import numpy as np
from work import Meter

import fedsolve as fs
from fedsolve.runtimes.chunks import GRID, padded
from fedsolve.runtimes.placement import numbers_on_device
from fedsolve.runtimes.simulation import compiled_advance, compiled_start
from fedsolve.solving.options import Options

TRIES = 3


def timed(
    problem: fs.Problem, algorithm: fs.Algorithm, meter: Meter, rounds: int
) -> dict[str, Any]:
    """Time rounds and an evaluation by the program that `fs.solve` runs; return what it found."""
    placed, tuned = problem.on_device(), numbers_on_device(algorithm, None)
    options = Options(rounds).of_rounds(problem)
    state = compiled_start(placed, tuned, jax.random.key_data(jax.random.key(0)), options)

    def played(state, start, stop, wanted=0):
        spans = padded(np.asarray([[start, stop, wanted]], np.int32))
        return jax.block_until_ready(compiled_advance(placed, tuned, state, spans, options))

    state, _ = played(state, 0, 1)
    meter.first_done()
    done = 1
    for _ in range(TRIES):
        state, _ = played(state, done, done + rounds)
        meter.done(rounds)
        done += rounds
    entries = {}
    for _ in range(2):  # the first may load what the second has
        meter.pause()
        _, entries = played(state, done, done, GRID)
        meter.evaluated()
    names = {"loss": "objective", "accuracy": "accuracy"}
    return {ours: float(entries[name][0]) for ours, name in names.items() if name in entries}
