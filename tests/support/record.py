"""Record what every runtime computes, so that a refactoring can be checked against it.

    python tests/support/record.py write       # write record.json from this source tree
    python tests/support/record.py write PPBC  # renew only the cases with this in their names
    python tests/support/record.py check       # compare this source tree with record.json

A case is a run of one algorithm on one runtime, a sweep, or a game. Its record has the final
parameters, the clients' states, the history with all byte counters, and a hash of all of it.
Renew the record in a commit of its own that says which numbers changed, and why.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("record.json")
ROOT = Path(__file__).parents[2]
ROUNDS = 4
RUNTIMES = ("compiled", "blocks", "debug", "streamed", "link", "sharded")

Values = dict[str, Any]  # arrays by name


def processor() -> str:
    """The processor's model and what it can do: compiled programs use the instructions it has.

    Virtual machines may all say "AMD EPYC", so the name alone is not enough.
    """
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    facts = dict(re.findall(r"^(model name|cpu family|model|flags)\s*: (.*)$", text, re.MULTILINE))
    flags = hashlib.sha256(facts.pop("flags", "").encode()).hexdigest()[:8]
    return ", ".join([*(facts[name] for name in sorted(facts)), flags])


def same_machine(environment: dict[str, str]) -> bool:
    """Whether bits can be compared: the same JAX, processor and compiler options."""
    return environment == this_environment()


def this_environment() -> dict[str, str]:
    import jax
    import jaxlib

    return {
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "processor": processor(),
        "optimizations": os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS", "0"),
    }


def lost_sometimes(round: Any, exchange: int, clients: Any) -> Any:
    """All answers arrive in the first two rounds, two thirds of them later."""
    import jax.numpy as jnp

    return (round < 2) | ((round + 2 * exchange + jnp.asarray(clients)) % 3 != 0)


def run_values(run: Any) -> Values:
    """What a run leaves: parameters, average, clients' states, history."""
    import jax
    import numpy as np

    found: Values = {"params": run.params, "average": run.average, "w": run.state.w}
    found |= {"server": run.state.server, "clients": run.state.clients, "memory": run.state.memory}
    flat = {
        f"{name}/{number}": np.asarray(leaf)
        for name, tree in found.items()
        for number, leaf in enumerate(jax.tree.leaves(tree))
    }
    return flat | {f"history/{name}": np.asarray(run.history[name]) for name in sorted(run.history)}


def algorithm_case(name: str, runtime: str) -> Values:
    """One algorithm of the conformance list on one runtime."""
    import fedsolve as fs
    from tests.support import examples
    from tests.support.conformance import ALGORITHMS

    problem, algorithm = examples.least_squares(), ALGORITHMS[name]
    if runtime == "link":
        from tests.support.in_process import Wires, deploy

        with tempfile.TemporaryDirectory() as folder:
            wires = Wires(problem, algorithm, Path(folder))
            run, _ = deploy(problem, algorithm, wires, Path(folder, "server"), ROUNDS)
            return run_values(run)
    options: dict[str, Any] = {
        "compiled": {},
        "blocks": {"clients_at_once": 2},
        "debug": {"runtime": "debug"},
        "streamed": {"runtime": "streamed"},
        "sharded": {"devices": 2},
    }[runtime]
    run = fs.solve(
        problem,
        algorithm,
        rounds=ROUNDS,
        seed=3,
        precision="float64",
        arrivals=lost_sometimes,
        **options,
    )
    return run_values(run)


def sweep_case() -> Values:
    """A sweep of step sizes, seeds and tolerances."""
    import fedsolve as fs
    from tests.support import examples
    from tests.support.conformance import ALGORITHMS

    swept = fs.sweep(
        examples.least_squares(),
        ALGORITHMS["FedSGM soft, Top-K both ways"],
        rounds=ROUNDS,
        seeds=[1, 2],
        precision="float64",
        step_size=[0.05, 0.01],
        tolerance=[0.0, 0.1],
    )
    return {
        f"{number}/{name}": value
        for number, run in enumerate(swept.runs)
        for name, value in run_values(run).items()
    }


def clock_case() -> Values:
    """Simulated time, a stopping rule that looks at the gradient, and followed quantities."""
    import fedsolve as fs
    from tests.support import examples

    run = fs.solve(
        examples.least_squares(constrained=False),
        fs.FedAvg(0.05, participants=3, local_steps=2, uplink=fs.TopK(0.4)),
        rounds=12,
        evaluate_every=3,
        precision="float64",
        clock=fs.Clock(work=0.1, up=fs.LogNormal(1e4, 0.5), latency=0.01, first=2),
        stop=fs.Stationary(below=1e-9),
        follow={"norm": lambda problem, params: (params**2).sum()},
    )
    return run_values(run)


def game_case() -> Values:
    """Equilibria and welfare of the contribution game."""
    import numpy as np

    import fedsolve as fs
    from tests.support import examples

    game = examples.contribution_game()
    equilibrium = game.equilibrium()
    found: Values = {
        "equilibrium": equilibrium,
        "regret": game.regret(np.full(6, 4.0)),
        "social optimum": fs.games.social_optimum(game),
        "prices": fs.games.externality_prices(game),
    }
    import jax

    return {
        f"{name}/{number}": np.asarray(leaf, np.float64)
        for name, tree in found.items()
        for number, leaf in enumerate(jax.tree.leaves(tree))
    }


def cases() -> dict[str, Callable[[], Values]]:
    """Everything that is recorded, by name."""
    from tests.support.conformance import ALGORITHMS

    found: dict[str, Callable[[], Values]] = {
        f"{runtime}: {name}": lambda name=name, runtime=runtime: algorithm_case(name, runtime)
        for runtime in RUNTIMES
        for name in ALGORITHMS
    }
    return found | {"sweep": sweep_case, "clock": clock_case, "game": game_case}


def as_record(values: Values) -> dict[str, Any]:
    """Values and their hash, as JSON can hold them; floating-point numbers lose nothing."""
    import numpy as np

    digest = hashlib.sha256()
    for name, value in values.items():
        value = np.asarray(value)
        digest.update(f"{name} {value.dtype} {value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    plain = {
        name: np.asarray(v, np.float64 if v.dtype.kind == "V" else None).tolist()
        for name, v in values.items()
    }
    return {"hash": digest.hexdigest()[:16], "values": plain}


def sharded(names: list[str]) -> dict[str, dict[str, Any]]:
    """Cases over two devices, which a process must be started with."""
    from tests.support.environment import QUICK

    flags = os.environ | {"XLA_FLAGS": f"{QUICK} --xla_force_host_platform_device_count=2"}
    code = "import json, sys; from tests.support.record import print_cases as show; "
    code += "show(json.loads(sys.argv[1]))"
    words = [sys.executable, "-c", code, json.dumps(names)]
    done = subprocess.run(words, cwd=ROOT, env=flags, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def print_cases(names: list[str]) -> None:
    known = cases()
    print(json.dumps({name: as_record(known[name]()) for name in names}))


def here(names: list[str]) -> dict[str, dict[str, Any]]:
    """The cases of those names, as this source tree computes them."""
    known = cases()
    apart = [name for name in names if name.startswith("sharded")]
    found = {name: as_record(known[name]()) for name in names if name not in apart}
    return found | (sharded(apart) if apart else {})


def differences(name: str, recorded: dict[str, Any], found: dict[str, Any], exact: bool) -> str:
    """What differs from the record, in a line; empty if nothing does."""
    import numpy as np

    if exact and recorded["hash"] == found["hash"]:
        return ""
    wanted, got = recorded["values"], found["values"]
    if missing := sorted(wanted.keys() - got.keys()):
        return f"{name}: recorded {missing} are not there"
    tolerance = 0.0 if exact else 1e-12
    for key, value in wanted.items():
        a, b = np.asarray(value, np.float64), np.asarray(got[key], np.float64)
        if a.shape != b.shape or not np.allclose(a, b, rtol=tolerance, atol=tolerance):
            return f"{name}: {key} is {b.tolist()}, recorded as {a.tolist()}"
    same_columns = wanted.keys() == got.keys()  # a new column of the history changes the hash
    return f"{name}: types differ" if exact and same_columns else ""


def main() -> None:
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    sys.path.insert(0, str(ROOT))
    writes, only = sys.argv[1:2] == ["write"], "".join(sys.argv[2:3])
    found = here([name for name in cases() if only in name])
    if writes:
        before = json.loads(FILE.read_text()) if only else {"cases": {}}
        if only and not same_machine(before["environment"]):
            sys.exit("A part of the record can be renewed only where the rest was written.")
        kept = before["cases"]
        lines = [f"{json.dumps(k)}: {json.dumps(each)}" for k, each in (kept | found).items()]
        head = json.dumps(this_environment())
        body = ",\n".join(lines)
        FILE.write_text(f'{{"environment": {head},\n"cases": {{\n{body}\n}}}}\n')
        print(f"{len(found)} cases written")
        return
    record = json.loads(FILE.read_text())
    exact = same_machine(record["environment"])
    wrong = [differences(n, record["cases"][n], each, exact) for n, each in found.items()]
    print("\n".join(filter(None, wrong)) or f"{len(found)} cases agree, exact: {exact}")
    sys.exit(any(wrong))


if __name__ == "__main__":
    main()
