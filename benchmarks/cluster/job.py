"""One process of a run over many: started by Slurm, Kubernetes or Ray, or by hand.

    PROCESSES=2 PROCESS=0 COORDINATOR=127.0.0.1:9000 python job.py --rounds 200 --out runs/large

Under Slurm nothing needs to be said: JAX finds out by itself. Without any of it, it is a plain run.
Started again after a loss, it goes on from its checkpoint.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

import jax

import fedsolve as fs
from fedsolve.solving.checkpoint import exists
from fedsolve.solving.interrupt import Flag


def join() -> None:
    """Makes this process one of many, if it was started as one."""
    if "COORDINATOR" in os.environ:
        count, index = int(os.environ["PROCESSES"]), int(os.environ["PROCESS"])
        jax.distributed.initialize(os.environ["COORDINATOR"], count, index)
    elif "SLURM_STEP_NODELIST" in os.environ:
        jax.distributed.initialize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("runs/large"))
    told = parser.parse_args()
    join()
    problem = fs.problems.linear_regression(clients=256, size=100)
    algorithm = fs.FedAvg(0.01, local_steps=10, participants=64)
    file = told.out / "checkpoint"
    try:
        # JAX catches SIGTERM when processes join, to no end here: schedulers send it before they
        # kill. Whichever process gets it, all of them stop, and the first saves.
        with Flag(signal.SIGINT, signal.SIGTERM) as stopped:
            run = fs.solve(
                problem,
                algorithm,
                told.rounds,
                evaluate_every=10,
                devices="all",
                checkpoint=file,
                resume=file if exists(file) else None,
                interrupted=stopped,
            )
    except fs.Interrupted as stop:
        sys.exit(f"{stop} Started again, it goes on from {file}.")
    except fs.ProcessLost as lost:
        print(lost, flush=True)
        os._exit(1)  # an orderly end would wait for the lost one
    if jax.process_index() == 0:
        run.plot(told.out / "plot.png")
        print(f"{jax.process_count()} processes, {jax.device_count()} devices: {run}", flush=True)


if __name__ == "__main__":
    main()
