"""Fedsolve beside its peers: one command.

    python benchmarks/peers/run.py [NAME ...]                   # small work
    python benchmarks/peers/run.py --work mnist                 # FLUTE's MNIST configuration
    python benchmarks/peers/run.py --work cifar10               # pfl's, with dropout
    python benchmarks/peers/run.py --work torch                 # a small nn.Module
    python benchmarks/peers/run.py --work resnet                # ResNet-18, one client's pass

Makes an environment for each peer (in the cache folder, by name and version), runs the same work in
each, one after the other, `--tries` times over, and prints the table of medians. Every try is a
process that times its rounds three times after a first one. Where a peer cannot run, its row says
why. `--rounds 1500` is pfl's whole run. `TORCH=torch==…` is for another PyTorch.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "fedsolve", "peers")
LIMIT = 900  # seconds for an installation, and for a run
TORCH = os.environ.get("TORCH", "torch==2.13.0")


class Peer(NamedTuple):
    """A script, and what it needs (None for what this interpreter has); or why there is none."""

    script: str | None
    packages: tuple[str, ...] | None = None
    rounds: int | None = None  # where the work's own would take too long
    reason: str = ""
    mode: str = ""


LINEAR = {
    "Fedsolve": Peer("ours.py"),
    "bare scan": Peer("bare_scan.py"),
    "PyTorch by hand": Peer("torch_by_hand.py", (TORCH, "numpy")),
    "FedJAX 0.0.17": Peer("fedjax_peer.py", ("fedjax==0.0.17", "jax==0.10.2")),
    "pfl 0.6.0": Peer("pfl_peer.py", ("pfl[pytorch]==0.6.0", TORCH)),
    "Flower 1.41": Peer("flower_peer.py", ("flwr[simulation]==1.41.0",), rounds=30),
}
FLUTE = Peer(None, reason="not in the package registry: it is run from its own repository")
PEERS = {
    "small": LINEAR,
    "mnist": LINEAR | {"FLUTE": FLUTE},
    "cifar10": {
        "Fedsolve": Peer("cifar_ours.py"),
        "Fedsolve, nn.Module": Peer("torch_ours.py"),
        "PyTorch loop": Peer("torch_loop.py"),
        "pfl 0.6.0": Peer("cifar_pfl_peer.py", ("pfl[pytorch]==0.6.0", TORCH)),
    },
    "torch": {
        "Fedsolve": Peer("torch_ours.py"),
        "Fedsolve, callback": Peer("torch_ours.py", mode="callback"),
        "PyTorch loop": Peer("torch_loop.py"),
    },
    "resnet": {"Fedsolve": Peer("torch_ours.py"), "PyTorch loop": Peer("torch_loop.py")},
}
ROUNDS = {"small": 200, "mnist": 100, "cifar10": 2, "torch": 200, "resnet": 1}
PREPARED = ("mnist", "cifar10")


def prepared(work: str, tiny: bool) -> Path:
    """The work's data in one file, since peers do not have our datasets."""
    import fedsolve as fs

    path = CACHE / f"{work}{'-tiny' if tiny else ''}.npz"
    if path.exists():
        return path
    found, rng = fs.datasets.load(work), np.random.default_rng(0)
    labels = np.asarray(found.train["y"])
    if work == "mnist":  # 60 images each, of two digits, less what is over
        order = np.argsort(labels, kind="stable")
        parts = order.reshape(2000, 30)[rng.permutation(2000)].reshape(1000, 60)
    else:
        parts = rng.permutation(len(labels)).reshape(1000, 50)

    if tiny:
        parts = parts[:50]
    test_count = 200 if tiny else None

    def seen(images: np.ndarray) -> np.ndarray:
        if work == "cifar10":
            return images
        pixels = images.reshape(len(images), -1).astype(np.float32) / 255
        return np.append(pixels, np.ones((len(pixels), 1), np.float32), axis=1)

    test = {"test_x": seen(found.test["x"][:test_count]), "test_y": found.test["y"][:test_count]}
    CACHE.mkdir(parents=True, exist_ok=True)
    x = seen(found.train["x"])[parts]
    np.savez(path, x=x, y=labels[parts].astype(np.int32), **test)  # type: ignore[arg-type]
    return path


def python_of(name: str, peer: Peer) -> str:
    """The interpreter of the peer's own environment."""
    if peer.packages is None:
        return sys.executable
    folder = CACHE / name.replace(" ", "-")
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [folder / "bin" / "python", "-m", "pip", "install", "-q", *peer.packages]
        subprocess.run(pip, check=True, capture_output=True, text=True, timeout=LIMIT)
        (folder / "ready").touch()
    return str(folder / "bin" / "python")


def measured(name: str, peer: Peer, told: dict[str, str]) -> dict[str, float] | str:
    """What it found, or why it did not."""
    if peer.script is None:
        return peer.reason
    told = told | {"MODE": peer.mode or "compiled"}
    if peer.packages is not None:  # nothing of this environment
        told = told | {"PYTHONPATH": ""}
    try:
        command = [python_of(name, peer), str(HERE / peer.script)]
        done = subprocess.run(
            command, env=os.environ | told, capture_output=True, text=True, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        return f"took more than {LIMIT} s"
    except subprocess.CalledProcessError as error:
        lines = str(error.stderr or error).strip().splitlines()
        return f"cannot be installed: {lines[-1]}"
    for line in done.stdout.splitlines():
        if line.startswith("FOUND "):
            return json.loads(line.removeprefix("FOUND "))
    lines = (done.stderr or done.stdout).strip().splitlines() or ["nothing was said"]
    return f"failed: {lines[-1][:100]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="some of the peers")
    parser.add_argument("--work", choices=list(PEERS), default="small")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--ours", action="store_true", help="those that need no other environment")
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="one round, to see that it runs")
    given = parser.parse_args()
    peers, told = PEERS[given.work], {"WORK": given.work, "TINY": str(int(given.tiny))}
    if given.work in PREPARED:
        told["DATA"] = str(prepared(given.work, given.tiny))
    names = given.names or list(peers)
    if given.ours:
        names = [name for name in names if peers[name].script and not peers[name].packages]
    rounds = {
        name: 1 if given.tiny else given.rounds or peers[name].rounds or ROUNDS[given.work]
        for name in names
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    for _ in range(1 if given.tiny else given.tries):
        for name in names:
            if name in failed:
                continue
            one = measured(name, peers[name], told | {"ROUNDS": str(rounds[name])})
            if isinstance(one, str):
                failed[name] = one
            else:
                found[name].append(one)
                print(name, one, file=sys.stderr, flush=True)
    print_table({name: failed.get(name) or medians(found[name]) for name in names}, rounds)
    print(f"\n{time.strftime('%Y-%m-%d')}, load at the end {os.getloadavg()[0]:.1f}")


def medians(tries: list[dict[str, float]]) -> dict[str, float]:
    """The median of each number over the tries."""
    return {name: float(np.median([one[name] for one in tries])) for name in tries[0]}


def print_table(found: dict[str, dict[str, float] | str], rounds: dict[str, int]) -> None:
    """One row for each peer."""
    columns = ["s a round", "ratio", "start and compile, s", "peak memory, MB", "evaluation, s"]
    columns += ["loss", "accuracy", "rounds"]
    print(f"| | {' | '.join(columns)} |")
    print("|---" * (len(columns) + 1) + "|")
    ours = found.get("Fedsolve")
    for name, one in found.items():
        if isinstance(one, str):
            print(f"| {name} | {one}{' |' * len(columns)}")
            continue
        times = one["seconds"] / ours["seconds"] if isinstance(ours, dict) else 0.0
        cells = [f"{one['seconds']:.2e}", f"{times:.2f}" if times < 10 else f"{times:.0f}"]
        cells += [f"{one['start']:.1f}", f"{one['peak']:.0f}"]
        cells += [f"{one['evaluation']:.2f}" if "evaluation" in one else "", f"{one['loss']:.4f}"]
        cells += [f"{one['accuracy']:.3f}" if "accuracy" in one else "", str(rounds[name])]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
