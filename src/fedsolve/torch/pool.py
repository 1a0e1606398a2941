"""Threads in which clients are computed, each with one PyTorch thread of its own.

`torch.set_num_threads` sets two things: how many threads the calling thread uses, and how many a
thread uses that begins later. A worker sets the first; the second is put back at once, by a thread
that does nothing else. So what the user chose holds everywhere else.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from fedsolve.types import Function, PyTree

TRIALS = 2  # timed calls of each kind, after one that is not timed


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def _workers() -> ThreadPoolExecutor:
    """Return the threads, which are started with the first clients."""
    chosen = torch.get_num_threads()
    return ThreadPoolExecutor(cores(), "fedsolve-torch", _use_one_thread, (chosen,))


def _use_one_thread(chosen: int) -> None:
    """Give this thread one PyTorch thread, and later threads as many as the user chose."""
    with _setting:
        torch.get_num_threads()  # or the first operator would set it again, to that of the others
        torch.set_num_threads(1)
        after = threading.Thread(target=torch.set_num_threads, args=(chosen,))
        after.start()
        after.join()


_setting = threading.Lock()


class Clients:
    """A function of one client, applied to many.

    Several clients have one PyTorch thread each. Whether they run in several threads at a time or
    one after the other is measured in the first calls, as Python lets only one thread at a time run
    what is not PyTorch's. A client alone has all of PyTorch's threads.

    Args:
        function: The function of one client's arguments. It must not wait for JAX.
    """

    def __init__(self, function: Function):
        self.function = function
        self._seconds: dict[bool, list[float]] = {True: [], False: []}  # per client, if together
        self._warm = False

    def __call__(self, clients: Sequence[tuple[PyTree, ...]]) -> list[PyTree]:
        """Return the function's value for each client, in order."""
        if len(clients) == 1:
            return [self.function(*clients[0])]
        together = self._together()
        began = time.perf_counter()
        if together:
            found = list(_workers().map(lambda client: self.function(*client), clients))
        else:
            found = _workers().submit(self._in_turn, clients).result()
        if self._warm and len(self._seconds[together]) < TRIALS:
            self._seconds[together].append((time.perf_counter() - began) / len(clients))
        self._warm = True
        return found

    def _together(self) -> bool:
        """Return whether to compute several clients at a time."""
        least, counts = {}, {}
        for kind, seconds in self._seconds.items():
            least[kind], counts[kind] = min(seconds, default=0.0), len(seconds)
        if min(counts.values()) < TRIALS:
            return counts[True] <= counts[False]
        return least[True] <= least[False]

    def _in_turn(self, clients: Sequence[tuple[PyTree, ...]]) -> list[PyTree]:
        return [self.function(*client) for client in clients]
