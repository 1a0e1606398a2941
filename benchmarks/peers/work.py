"""The work that every peer does: FedAvg on logistic regression, small. NumPy only.

30 features, 100 clients of 50 samples, 10 of them a round, 5 full-batch gradient steps each; the
server takes the plain mean. Which clients take part is the peer's own affair; where it ends is not.
"""

import json
import os
import resource
import time

import numpy as np

CLIENTS, SAMPLES, FEATURES, COHORT, STEPS, RATE = 100, 50, 30, 10, 5, 0.1
ROUNDS = int(os.environ.get("ROUNDS", "200"))
LONG = 100 * ROUNDS  # for those that would be done too soon to be measured


def data() -> tuple[np.ndarray, np.ndarray]:
    """Inputs (clients, samples, features) and labels 0 or 1."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((CLIENTS, SAMPLES, FEATURES)).astype(np.float32)
    truth = rng.standard_normal(FEATURES) / 3
    noisy = x @ truth + 0.5 * rng.standard_normal((CLIENTS, SAMPLES))
    return x, (noisy > 0).astype(np.float32)


def loss(w: np.ndarray) -> float:
    """Over all clients."""
    x, y = data()
    margin = x.astype(np.float64) @ np.asarray(w, np.float64)
    return float(np.mean(np.logaddexp(0, margin) - y * margin))


class Meter:
    """Seconds to the end of the first piece (starting, compiling), and of the rounds after it; of
    several tries the best."""

    def __init__(self):
        self._began = self._since = time.perf_counter()
        self._start = 0.0
        self._best = np.inf

    def first_done(self) -> None:
        self._since = time.perf_counter()
        self._start = self._since - self._began

    def done(self, rounds: int) -> None:
        """That many rounds since the last call."""
        now = time.perf_counter()
        self._best, self._since = min(self._best, (now - self._since) / rounds), now

    def report(self, w: np.ndarray) -> None:
        """Prints what was measured."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        found = {
            "seconds": self._best,
            "start": self._start,
            "peak": peak,
            "loss": loss(w),
        }
        print("FOUND " + json.dumps(found), flush=True)
