"""How close every algorithm's round is to what the machine can do: the tables of docs/limits.md.

    python benchmarks/limits.py                    # measures; writes docs/results/limits.json
    python benchmarks/limits.py FedADMM SCAFFOLD   # some algorithms; the others stay as they are
    python benchmarks/limits.py --page             # fills the page's tables from that file

A round needs operations and bytes, which are counted from the mathematics (`ROUNDS` below), and the
machine has a rate for each, measured in the same run: a matrix product, and a copy. The limit is

    max(operations / product rate, bytes / copy rate).

Operations are those of gradients and values of f_j and g_j; what is linear in d is not counted.
Bytes are what must come from memory at least: the participants' data once an exchange that looks at
them, and the vectors that are kept or sent, once each way. XLA's own count of operations is of the
same round with one local step, since it counts the body of a loop once.

A round is timed inside the compiled program, without evaluation; the best of several.
"""

import argparse
import dataclasses
import datetime
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import fedsolve as fs
from fedsolve.federation.options import RoundOptions
from fedsolve.runtimes.chunks import padded
from fedsolve.runtimes.placement import numbers_on_device
from fedsolve.runtimes.simulation import Simulation, compiled_advance, compiled_start
from tiny import tiny

ROOT = Path(__file__).parent.parent
FILE, PAGE = ROOT / "docs" / "results" / "limits.json", ROOT / "docs" / "limits.md"
ENOUGH = tiny(0.3, 0.0)  # seconds that a measurement takes at least
TRIES = tiny(5, 1)
EPOCH = 10  # rounds of PPBC's epochs
CACHE = 2**22  # bytes of all clients' data that stay in the processor, so that no memory limits


class Work(NamedTuple):
    """A problem, who takes part, and what one client's functions cost."""

    free: fs.Problem
    constrained: fs.Problem
    participants: int  # m
    local_steps: int  # E
    samples: int  # s, of one client
    gradient: float  # operations of ∇f_j; of ∇g_j as many
    value: float  # of g_j
    data: int  # bytes of one client


class Round(NamedTuple):
    """What the mathematics asks of a round: gradients, values, looks at the data, and vectors of d
    numbers read or written. All are for one participant, or for one client where everyone works.
    """

    algorithm: Callable[[Work], fs.Algorithm]
    gradients: Callable[[int], float]  # from the local steps E
    values: float = 0
    looks: int = 1
    vectors: float = 2  # what is sent: written, and read
    constrained: bool = False
    everyone: bool = False
    share: float = 1  # of a client's samples


def _averaging(kind: Callable, **options: Any) -> Callable[[Work], fs.Algorithm]:
    def make(work: Work) -> fs.Algorithm:
        steps, some = work.local_steps, work.participants
        return kind(1e-3, local_steps=steps, participants=some, **options)

    return make


def _game(work: Work) -> fs.Algorithm:
    n = work.free.n
    payoff = fs.games.RandomDiscovery(np.full((n, 2), 0.5))
    half = work.samples / 2  # for ever: the game's step is next to nothing
    game = fs.Game(payoff, fs.games.LinearCost(np.full(n, 0.3)), 1, work.samples, 0.1)
    steps, some = work.local_steps, work.participants
    return fs.IncentFedAvg(game, 1e-3, 1e-9, local_steps=steps, participants=some, start=half)


# The constraint is violated in every round, so FedSGM follows ∇g_j, and the penalty is on.
ROUNDS = {
    # E gradients; the change is sent.
    "FedAvg": Round(_averaging(fs.FedAvg), lambda E: E),
    "FedProx": Round(_averaging(fs.FedProx), lambda E: E),
    "F3AST": Round(_averaging(fs.F3AST), lambda E: E),
    # w_i is read and written besides.
    "FedAvgAll": Round(_averaging(fs.FedAvgAll), lambda E: E, vectors=4),
    # The dual is read and written.
    "FedDyn": Round(_averaging(fs.FedDyn), lambda E: E, vectors=4),
    # The control is read and written, and its change sent, too.
    "SCAFFOLD": Round(_averaging(fs.SCAFFOLD), lambda E: E, vectors=6),
    # Shared and personal steps; the personal part is read and written.
    "FedAlt": Round(_averaging(fs.FedAlt), lambda E: 2 * E, vectors=4),
    "FedSim": Round(_averaging(fs.FedSim), lambda E: 2 * E, vectors=4),
    # Representations at w and at the previous model need their values once: the samples stay.
    "MOON": Round(_averaging(fs.MOON), lambda E: E, values=2, vectors=4),
    # g_j once, then E gradients of one of the two.
    "FedSGM": Round(_averaging(fs.FedSGM), lambda E: E, 1, 2, constrained=True),
    # g_j once, then E gradients of both.
    "PenaltyFedAvg": Round(
        _averaging(fs.PenaltyFedAvg, rho=1.0), lambda E: 2 * E, 1, 2, constrained=True
    ),
    # g_j once, then both gradients at one point, both sent.
    "IPPConEx": Round(
        lambda work: fs.IPPConEx(1e-3, participants=work.participants),
        lambda E: 2,
        1,
        2,
        4,
        constrained=True,
    ),
    # Everyone's E gradients. The latest is written, the sum read and written, and read again (and
    # sent) once an epoch; what the participants send is less.
    "PPBC": Round(
        lambda work: fs.PPBC(
            1e-3,
            select_epoch=fs.participation.Random(work.participants),
            epoch_length=EPOCH,
            local_steps=work.local_steps,
        ),
        lambda E: E,
        vectors=3 + 3 / EPOCH,
        everyone=True,
    ),
    # One inner step: k_0 iterations need no gradient but the first. π_i and z_i are kept.
    "FedADMM": Round(
        lambda work: fs.FedADMM(inner_steps=1, lipschitz=1.0, participants=work.participants),
        lambda E: 1,
        vectors=6,
    ),
    # On half of the samples, by their contribution.
    "IncentFedAvg": Round(_game, lambda E: E, share=0.5),
}


# Work


def _problems(
    objective: Callable, constraint: Callable, data: dict, **rest: Any
) -> tuple[fs.Problem, fs.Problem]:
    free = fs.Problem(objective, data, **rest)
    return free, fs.Problem(objective, data, constraint=constraint, **rest)


def _bytes(data: dict) -> int:
    return sum(leaf[0].nbytes for leaf in data.values())


def linear(clients: int, some: int, samples: int, size: int, steps: int = 5) -> Work:
    """Least squares: a gradient is two products of a matrix and a vector, 4·s·d."""
    rng = np.random.default_rng(0)
    data = {
        "x": rng.standard_normal((clients, samples, size), np.float32),
        "y": rng.standard_normal((clients, samples), np.float32),
        "z": rng.standard_normal((clients, samples), np.float32),
    }

    def loss(name: str) -> Callable:
        return lambda w, data: 0.5 * jnp.mean((data["x"] @ w - data[name]) ** 2)

    def above(w: Any, data: Any) -> Any:
        return loss("z")(w, data) + 1

    pair = _problems(loss("y"), above, data, params=np.zeros(size, np.float32))
    products = 2 * samples * size
    return Work(*pair, some, steps, samples, 2 * products, products, _bytes(data))


def network(
    clients: int, some: int, samples: int, inputs: int, hidden: int, steps: int = 5
) -> Work:
    """A hidden layer, ten classes: forward and weights' gradients 2·s·d each, and back through the
    last layer."""
    rng = np.random.default_rng(0)
    data = {
        "x": rng.standard_normal((clients, samples, inputs), np.float32),
        "y": rng.integers(0, 10, (clients, samples), np.int32),
        "z": rng.integers(0, 10, (clients, samples), np.int32),
    }
    first = rng.standard_normal((inputs, hidden), np.float32) / np.float32(np.sqrt(inputs))
    last = rng.standard_normal((hidden, 10), np.float32) / np.float32(np.sqrt(hidden))

    def represent(params: Any, data: Any) -> Any:
        return jax.nn.relu(data["x"] @ params["first"])

    def loss(name: str) -> Callable:
        def entropy(params: Any, data: Any) -> Any:
            shares = jax.nn.log_softmax(represent(params, data) @ params["last"])
            return -jnp.mean(jnp.take_along_axis(shares, data[name][:, None], axis=1))

        return entropy

    def above(params: Any, data: Any) -> Any:
        return loss("z")(params, data) + 1

    rest = {"params": {"first": first, "last": last}, "representation": represent}
    pair = _problems(loss("y"), above, data, **rest)
    size = first.size + last.size
    value, back = 2 * samples * size, 2 * samples * last.size
    return Work(*pair, some, steps, samples, 2 * value + back, value, _bytes(data))


WORKS = {
    "network": lambda: network(*tiny((64, 16, 256, 256, 128), (4, 2, 8, 8, 4))),
    "linear": lambda: linear(*tiny((128, 64, 256, 1024), (4, 2, 8, 8))),
    "small": lambda: linear(100, 10, 50, 30),
}
SMALL_NETWORK = (100, 10, 50, 30, 16)  # MOON's, which needs representations


def work_for(shape: str, name: str, made: dict[str, Work]) -> Work | None:
    if name == "MOON" and shape != "network":
        return network(*SMALL_NETWORK) if shape == "small" else None
    if shape not in made:
        made[shape] = WORKS[shape]()
    return made[shape]


# What is measured


def best(function: Callable, tries: int = TRIES) -> float:
    """The least wall-clock seconds."""
    found = []
    for _ in range(tries):
        began = time.perf_counter()
        jax.block_until_ready(function())
        found.append(time.perf_counter() - began)
    return min(found)


def rates() -> dict[str, float]:
    """What the device does with all that JAX uses of it: operations of a matrix product, and bytes
    read and written by a copy, in a second."""
    found = {}
    for kind in ("float32", "float64"):
        with jax.enable_x64(kind == "float64"):
            size = tiny(2048, 64) if jax.default_backend() == "cpu" else 8192
            a = jax.random.normal(jax.random.key(0), (size, size), kind)
            product = jax.jit(lambda a: a @ a)
            jax.block_until_ready(product(a))
            found[f"product_{kind}"] = 2 * size**3 / best(lambda a=a, f=product: f(a))
    # In place, and many times in one program: new pages of memory are not the copy's affair.
    long = jnp.ones(tiny(2**26, 2**10), jnp.float32)
    times = 4
    copy = jax.jit(lambda long: jax.lax.fori_loop(0, times, lambda _, x: x + 1, long))
    jax.block_until_ready(copy(long))
    found["copy"] = times * 2 * long.nbytes / best(lambda: copy(long))
    return found


def round_of(name: str, work: Work) -> tuple[float, float]:
    """The operations and bytes that a round needs."""
    of = ROUNDS[name]
    clients = work.free.n if of.everyone else work.participants
    operations = of.gradients(work.local_steps) * work.gradient + of.values * work.value
    size = 4 * work.free.size * of.vectors
    return clients * of.share * operations, clients * (of.looks * of.share * work.data + size)


def _compiled(function: Any, *arguments: Any) -> Any:
    return function.lower(*arguments).compile()


def counted_by_xla(problem: fs.Problem, algorithm: Any, state: Any) -> float:
    """The operations of a round with one local step, all clients in one piece."""
    if hasattr(algorithm, "local_steps"):
        algorithm = dataclasses.replace(algorithm, local_steps=1)
    setting = RoundOptions(clients_at_once=problem.n)

    @eqx.filter_jit
    def one(problem: fs.Problem, algorithm: Any, state: Any) -> Any:
        return Simulation(problem, state, setting).play(algorithm)

    compiled = _compiled(one, problem, algorithm, state)
    return float(compiled.compiled.cost_analysis().get("flops", 0.0))


def measured(name: str, work: Work) -> dict[str, float]:
    problem = (work.constrained if ROUNDS[name].constrained else work.free).on_device()
    algorithm = numbers_on_device(ROUNDS[name].algorithm(work), None)
    words, setting = jax.random.key_data(jax.random.key(0)), RoundOptions()
    state = jax.block_until_ready(compiled_start(problem, algorithm, words, setting))

    def spans(rounds: int) -> Any:
        return padded(np.asarray([[0, rounds, 0]], np.int32))

    began = time.perf_counter()
    program = _compiled(compiled_advance, problem, algorithm, state, spans(1), setting)
    seconds = time.perf_counter() - began

    def rounds(count: int) -> Any:
        return program(problem, algorithm, state, spans(count), setting)

    state = rounds(2)[0]  # who meets for the first time does so here
    few = best(lambda: rounds(3), 2)
    count = 3 + int(ENOUGH / (few / 3))
    each = best(lambda: rounds(count)) / count
    operations, data = round_of(name, work)
    once = round_of(name, work._replace(local_steps=1))[0]
    xla = counted_by_xla(problem, algorithm, state)
    return {
        "operations": operations,
        "bytes": data,
        "seconds": each,
        "compile": seconds,
        "xla": xla / once,
        "all": problem.n * work.data,
    }


def limit(found: dict[str, float], rates: dict[str, float]) -> tuple[float, str]:
    """Seconds, and what sets them."""
    work, memory = found["operations"] / rates["product_float32"], found["bytes"] / rates["copy"]
    if found["all"] < CACHE:
        return work, "products"
    return max(work, memory), "products" if work > memory else "memory"


# The page


def tables(known: dict[str, Any]) -> dict[str, str]:
    """The page's tables by name."""
    rates = known["rates"]
    text = {"machine": _machine(known)}
    for shape, rows in known["rounds"].items():
        lines = ["| | Mflop | MB | limit, ms | set by | a round, ms | ratio | XLA's | compile, s |"]
        lines.append("|---|---|---|---|---|---|---|---|---|")
        for name, found in rows.items():
            least, by = limit(found, rates)
            ratio = found["seconds"] / least
            cells = [
                _plain(found["operations"] / 1e6),
                f"{found['bytes'] / 1e6:.3g}",
                f"{1e3 * least:.2g}",
                by,
                f"{1e3 * found['seconds']:.3g}",
                f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}",
                f"{found['xla']:.2f}",
                f"{found['compile']:.1f}",
            ]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        text[shape] = "\n".join(lines)
    return text


def _plain(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _machine(known: dict[str, Any]) -> str:
    rates = known["rates"]
    return (
        f"*{known['date']}, {known['machine']}; load before the run {known['load']:.1f}. "
        f"Matrix product {rates['product_float32'] / 1e9:.0f} Gflop/s in float32, "
        f"{rates['product_float64'] / 1e9:.0f} in float64; copy {rates['copy'] / 1e9:.1f} GB/s, "
        "read and written.*"
    )


def filled(page: str, known: dict[str, Any]) -> str:
    """The page with its tables as the file has them."""
    for name, table in tables(known).items():
        mark = f"<!-- {name} -->"
        page = re.sub(
            rf"{mark}.*?<!-- end -->", f"{mark}\n\n{table}\n\n<!-- end -->", page, flags=re.S
        )
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="ALGORITHM", help="; ".join(ROUNDS))
    parser.add_argument("--page", action="store_true", help="only fill the page")
    parser.add_argument("--out", type=Path, default=FILE)
    given = parser.parse_args()
    known: dict[str, Any] = {"rounds": {}}
    if given.out.exists():
        known = json.loads(given.out.read_text())
    if not given.page:
        device = jax.devices()[0]
        known |= {
            "date": datetime.date.today().isoformat(),
            "machine": f"{os.cpu_count()} cores; JAX {jax.__version__} on {device.device_kind}",
            "load": os.getloadavg()[0],
            "rates": rates(),
        }
        made: dict[str, Work] = {}
        for shape in WORKS:
            rows = known["rounds"].setdefault(shape, {})
            for name in given.names or ROUNDS:
                work = work_for(shape, name, made)
                if work is not None:
                    rows[name] = measured(name, work)
                    print(shape, name, rows[name], flush=True)
        again = rates()  # what else went on is not the machine's limit
        known["rates"] = {k: max(v, again[k]) for k, v in known["rates"].items()}
        given.out.write_text(json.dumps(known, indent=1) + "\n")
    if given.out == FILE and PAGE.exists():
        PAGE.write_text(filled(PAGE.read_text(), known))
    print("\n\n".join(tables(known).values()))


if __name__ == "__main__":
    main()
