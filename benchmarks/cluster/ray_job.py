"""python ray_job.py --processes 4 --gpus 1: the processes of a run as Ray tasks."""

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path

import ray  # pyright: ignore[reportMissingImports]


def address() -> str:
    """Where the first process can be reached; its node keeps the port for the moment."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    return f"{ray.util.get_node_ip_address()}:{port}"


def process(index: int, count: int, coordinator: str, words: list[str]) -> int:
    """A process of its own: JAX must not have been started in it before."""
    told = {"COORDINATOR": coordinator, "PROCESSES": str(count), "PROCESS": str(index)}
    command = [sys.executable, str(Path(__file__).with_name("job.py")), *words]
    return subprocess.run(command, env=os.environ | told, check=False).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=0, help="for each process")
    told, words = parser.parse_known_args()
    ray.init(address=os.environ.get("RAY_ADDRESS"))
    coordinator = ray.get(ray.remote(address).remote())
    task = ray.remote(num_gpus=told.gpus, num_cpus=1, max_retries=0)(process)
    started = [task.remote(i, told.processes, coordinator, words) for i in range(told.processes)]
    sys.exit(max(abs(code) for code in ray.get(started)))


if __name__ == "__main__":
    main()
