"""A federation of a server and four sites in one process, without a network."""

import equinox as eqx
import jax
import numpy as np

from fedsolve.flare.roster import Roster
from fedsolve.flare.server import serve
from fedsolve.flare.site import SiteClients
from fedsolve.runtimes.placement import numbers_on_device, precision_of
from fedsolve.storage.arrays import encode

SITES = {"site-1": (0, 2), "site-2": (2, 1), "site-3": (3, 2), "site-4": (5, 1)}


def part(problem, first, count):
    own = jax.tree.map(lambda leaf: leaf[first : first + count], problem.samples)
    return eqx.tree_at(lambda p: p.samples, problem, own)


class Wires:
    """Sites in this process; `lose(site, message number)` says what happens to a message."""

    def __init__(self, problem, algorithm, home, seed=0, precision="float64"):
        self.problem, self.algorithm, self.home = problem, algorithm, home
        self.seed, self.precision = seed, precision
        self.shares, self.count, self.lose = {}, 0, lambda site, number: ""
        self.spare = 0
        for site in SITES:
            self.start(site)

    def start(self, site):
        """A site (again), with nothing but its disk."""
        self.shares[site] = SiteClients(
            self.home / site,
            part(self.problem, *SITES[site]),
            self.algorithm,
            self.seed,
            self.precision,
        )
        self.shares[site].answer(encode({"kind": "hello", "total": self.problem.n}, {}))

    def __call__(self, messages):
        found = {}
        for site, data in messages.items():
            self.count += 1
            fate = "" if self.spare > 0 else self.lose(site, self.count)
            self.spare -= 1
            if fate == "question lost":
                found[site] = TimeoutError("time-out")
                continue
            reply = self.shares[site].answer(data)
            if fate == "question repeated":
                assert self.shares[site].answer(data) == reply
            if fate == "site killed":
                self.start(site)
            found[site] = (
                TimeoutError("time-out") if fate in ("reply lost", "site killed") else reply
            )
        return found


def deploy(problem, algorithm, wires, home, rounds, seed=0, precision="float64", log=None):
    with precision_of(precision) as dtype:
        link = Roster(
            wires,
            problem.on_device(dtype),
            numbers_on_device(algorithm, dtype),
            (log if log is not None else []).append,
        )
    home.mkdir(exist_ok=True)
    run = serve(link, list(SITES), problem, algorithm, rounds, seed, home, precision=precision)
    return run, link


def settled(share, link, site):
    """A site's states and memories, with the answers that the server used and has not yet told
    it of."""
    last, used = link.settled.get(site, (-1, []))
    return share._before(99, used if share._round == last else [], np.arange(share._count))
