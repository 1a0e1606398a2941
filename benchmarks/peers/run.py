"""Fedsolve beside its peers: one command.

    python benchmarks/peers/run.py [NAME ...]                   # small work
    python benchmarks/peers/run.py --work mnist                 # FLUTE's MNIST configuration
    python benchmarks/peers/run.py --work cifar10 [--rounds 3]  # pfl's; 1500 rounds, for a GPU

Makes an environment for each peer (in the cache folder, by name and version), runs the same work in
each, one after the other, and prints the table. Where a peer cannot run, its row says why. Seconds
are the median of three tries (of one for cifar10). `TORCH=torch==…` is for another PyTorch.
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
        "pfl 0.6.0": Peer("cifar_pfl_peer.py", ("pfl[pytorch]==0.6.0", TORCH)),
    },
}
ROUNDS = {"small": 200, "mnist": 100, "cifar10": 1500}


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
    parser.add_argument("--tiny", action="store_true", help="one round, to see that it runs")
    given = parser.parse_args()
    peers, told = PEERS[given.work], {"WORK": given.work}
    if given.work != "small":
        told["DATA"] = str(prepared(given.work, given.tiny))
    columns = (
        "s a round | ratio | start and compile, s | peak memory, MB | loss | accuracy | rounds"
    )
    print(f"| | {columns} |")
    print("|---|---|---|---|---|---|---|---|")
    ours = None
    for name in given.names or peers:
        rounds = 1 if given.tiny else given.rounds or peers[name].rounds or ROUNDS[given.work]
        found = measured(name, peers[name], told | {"ROUNDS": str(rounds)})
        if isinstance(found, str):
            print(f"| {name} | {found} | | | | | | |", flush=True)
            continue
        ours = found["seconds"] if name == "Fedsolve" else ours
        times = found["seconds"] / ours if ours else 0.0
        ratio = f"{times:.2f}" if times < 10 else f"{times:.0f}"
        cells = [f"{found['seconds']:.2e}", ratio, f"{found['start']:.1f}", f"{found['peak']:.0f}"]
        right = f"{found['accuracy']:.3f}" if "accuracy" in found else ""
        cells += [f"{found['loss']:.4f}", right, str(rounds)]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print(f"\n{time.strftime('%Y-%m-%d')}, load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
