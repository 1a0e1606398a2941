"""A process that runs every algorithm of the conformance list, made to be killed: started again, it
goes on where it was."""

import os
import sys
from pathlib import Path

import jax
import numpy as np

import conftest  # noqa: F401  (programs that were compiled before are found again)
import examples
import fedsolve as fs
from fedsolve.checkpoints import exists
from test_conformance import ALGORITHMS

ROUNDS = 60


def main(folder: Path) -> None:
    problem = examples.least_squares()
    for number, algorithm in enumerate(ALGORITHMS.values()):
        file, result = folder / str(number), folder / f"{number}.npz"
        if result.exists():
            continue
        resume = file if exists(file) else None
        run = fs.solve(
            problem, algorithm, ROUNDS, checkpoint=file, checkpoint_every=1, resume=resume
        )
        arrays = {f"leaf {k}": leaf for k, leaf in enumerate(jax.tree.leaves(run.state))}
        np.savez(folder / "beside.npz", **arrays, **run.history)
        os.replace(folder / "beside.npz", result)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
