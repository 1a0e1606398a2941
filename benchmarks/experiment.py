"""An experiment's variants with all their seeds, as one program each, written as CSV.

    python benchmarks/experiment.py fedsgm-table-1 out.csv                 # every variant
    python benchmarks/experiment.py fedsgm-table-1 out.csv "Top-K 0.5"     # some

`fedsolve run` does the same run by run. On an accelerator all seeds of a variant take about the
time of one. The file has what docs/results keeps: a few columns, rounded.
"""

import sys
import time
from pathlib import Path

import pandas as pd

import fedsolve as fs
from fedsolve.experiments import config
from tiny import tiny

COLUMNS = ("round", "objective", "constraint", "reward", "cost", "switch", "bytes_up_total")


def main(name, path, wanted):
    experiment = config.load(name, rounds=tiny(None, 2))
    tables = []
    for variant, algorithm in experiment.cells.algorithms.items():
        if wanted and variant not in wanted:
            continue
        if experiment.instances is not None:
            raise SystemExit(f"{name} has instances: use fedsolve run.")
        problem = experiment.cells[variant][0]
        began = time.perf_counter()
        runs = fs.sweep(problem, algorithm, seeds=experiment.seeds, **experiment.options).runs
        print(f"{variant}: {time.perf_counter() - began:.1f} s", flush=True)
        for run in runs:
            kept = {name: run.history[name] for name in COLUMNS if name in run.history}
            tables.append(pd.DataFrame({"variant": variant, "seed": run.seed} | kept))
    pd.concat(tables).round(2).to_csv(path, index=False)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
