"""Fedsolve beside its peers: one command.

    python benchmarks/peers/run.py [NAME ...]

Makes an environment for each peer (in the cache folder, by name and version), runs the same work in
each, one after the other, and prints the table. Where a peer cannot run, its row says why.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "fedsolve", "peers")
LIMIT = 900  # seconds for an installation, and for a run


class Peer(NamedTuple):
    """A script, and what it needs; None for what this interpreter has."""

    script: str
    packages: tuple[str, ...] | None
    rounds: int


PEERS = {
    "bare scan": Peer("bare_scan.py", None, 200),
    "Fedsolve": Peer("ours.py", None, 200),
    "PyTorch by hand": Peer("torch_by_hand.py", ("torch==2.13.0", "numpy"), 200),
    "FedJAX 0.0.17": Peer("fedjax_peer.py", ("fedjax==0.0.17", "jax==0.10.2"), 200),
    "pfl 0.6.0": Peer("pfl_peer.py", ("pfl[pytorch]==0.6.0", "torch==2.13.0"), 200),
    "Flower 1.41": Peer("flower_peer.py", ("flwr[simulation]==1.41.0",), 30),
}


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


def measured(name: str, peer: Peer) -> dict[str, float] | str:
    """What it found, or why it did not."""
    told = {"ROUNDS": str(peer.rounds)}
    if peer.packages is not None:  # nothing of this environment
        told["PYTHONPATH"] = ""
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
    chosen = sys.argv[1:] or list(PEERS)
    print("| | s a round | ratio | start and compile, s | peak memory, MB | loss | rounds |")
    print("|---|---|---|---|---|---|---|")
    ours = None
    for name in sorted(chosen, key=lambda name: name != "Fedsolve"):  # ours first, for ratios
        found = measured(name, PEERS[name])
        if isinstance(found, str):
            print(f"| {name} | {found} | | | | | |", flush=True)
            continue
        ours = found["seconds"] if name == "Fedsolve" else ours
        times = found["seconds"] / ours if ours else 0.0
        ratio = f"{times:.2f}" if times < 10 else f"{times:.0f}"
        cells = [f"{found['seconds']:.2e}", ratio, f"{found['start']:.1f}", f"{found['peak']:.0f}"]
        cells += [f"{found['loss']:.4f}", str(PEERS[name].rounds)]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
