"""The work that every peer does: FedAvg, the server takes the plain mean. NumPy only.

small   two classes by one margin: 30 features, 100 clients of 50 samples, 10 of them a round, 5
        full-batch gradient steps each.
mnist   as FLUTE's benchmark: logistic regression, 1000 clients, 10 of them a round, one epoch of
        batches of 10, rate 0.03. Each client has 60 images of two digits, so that all peers make
        the same 6 steps (FLUTE's clients differ in size).
cifar10 as pfl's benchmark: 1000 users of 50 images, 50 of them a round, one epoch of batches of 10,
        rate 0.1; two convolutions (32 and 64 filters of 3×3), the maxima of 2×2, 128 units, 10
        classes, with pfl's dropout of 0.25 and 0.5.

torch   a network as an unchanged `nn.Module`: 30-16-1 with tanh, 100 clients of 50 samples, 10 of
        them a round, 5 full-batch gradient steps each.
resnet  ResNet-18 with batch normalisation, one client's pass of 20 steps of 32 images.

Which clients take part is the peer's own affair; where it ends is not.
"""

import json
import os
import resource
import time
from typing import NamedTuple

import numpy as np


class Work(NamedTuple):
    clients: int
    samples: int
    shape: tuple[int, ...]  # of the parameters of a linear model
    cohort: int
    steps: int
    rate: float
    batch: int | None = None  # None: all samples in every step
    epochs: int = 1


NAME = os.environ.get("WORK", "small")
TINY = os.environ.get("TINY") == "1"
WORK = {
    "small": Work(100, 50, (30,), 10, 5, 0.1, epochs=5),
    "mnist": Work(1000, 60, (785, 10), 10, 6, 0.03, batch=10),
    "cifar10": Work(1000, 50, (), 50, 5, 0.1, batch=10),
    "torch": Work(100, 50, (30,), 10, 5, 0.1, epochs=5),
    "resnet": Work(1, 2, (), 1, 1, 0.01, batch=2)
    if TINY
    else Work(1, 640, (), 1, 20, 0.01, batch=32),
}[NAME]
ROUNDS = int(os.environ.get("ROUNDS", "200"))
# For those that would be done too soon to be measured:
LONG = {"small": 100, "mnist": 10}.get(NAME, 1) * ROUNDS


def data() -> tuple[np.ndarray, np.ndarray]:
    """Inputs (clients, samples, ...) and classes; for `small` and `torch` 0.0 or 1.0."""
    if "DATA" in os.environ:
        found = np.load(os.environ["DATA"])
        return found["x"], found["y"]
    rng = np.random.default_rng(0)
    if NAME == "resnet":
        shape = WORK.clients, WORK.samples
        return rng.integers(0, 256, (*shape, 32, 32, 3), np.uint8), rng.integers(0, 10, shape)
    x = rng.standard_normal((WORK.clients, WORK.samples, *WORK.shape)).astype(np.float32)
    truth = rng.standard_normal(WORK.shape) / 3
    noisy = x @ truth + 0.5 * rng.standard_normal((WORK.clients, WORK.samples))
    return x, (noisy > 0).astype(np.float32)


def judged(w: np.ndarray) -> dict[str, float]:
    """A linear model's loss over all clients, and accuracy on test images where there are some."""
    x, y = data()
    scores = x.astype(np.float64) @ np.asarray(w, np.float64)
    if NAME == "small":
        return {"loss": float(np.mean(np.logaddexp(0, scores) - y * scores))}
    own = np.take_along_axis(scores, y[..., None].astype(int), axis=-1)[..., 0]
    loss = float(np.mean(np.logaddexp.reduce(scores, axis=-1) - own))
    test = np.load(os.environ["DATA"])
    right = np.argmax(test["test_x"] @ w, axis=-1) == test["test_y"]
    return {"loss": loss, "accuracy": float(np.mean(right))}


class Meter:
    """Seconds to the end of the first piece (starting, compiling), and of the rounds after it, of
    several tries."""

    def __init__(self):
        self._began = self._since = time.perf_counter()
        self._start = 0.0
        self._tries: list[float] = []
        self._evaluation: float | None = None

    def first_done(self) -> None:
        self._since = time.perf_counter()
        self._start = self._since - self._began

    def done(self, rounds: int) -> None:
        """That many rounds since the last call."""
        now = time.perf_counter()
        self._tries.append((now - self._since) / rounds)
        self._since = now

    def evaluated(self) -> None:
        """An evaluation of all clients since the last call."""
        self._evaluation = time.perf_counter() - self._since

    def pause(self) -> None:
        """What was done since the last call does not count."""
        self._since = time.perf_counter()

    def report(self, w: np.ndarray | None = None, **judged_already: float) -> None:
        """Prints what was measured."""
        found = {
            "seconds": float(np.median(self._tries)),
            "start": self._start,
            "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            **({} if self._evaluation is None else {"evaluation": self._evaluation}),
            **(judged_already if w is None else judged(w)),
        }
        print("FOUND " + json.dumps(found), flush=True)
