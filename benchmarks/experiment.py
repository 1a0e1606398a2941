"""An experiment's variants with all their seeds, as few programs as possible, written as CSV.

    python benchmarks/experiment.py fedsgm-table-1 out.csv                 # every variant
    python benchmarks/experiment.py fedsgm-table-1 out.csv "Top-K 0.5"     # some

`fedsolve run` does the same run by run. Here all runs whose problems and algorithms differ in
numbers only are one program; on an accelerator they take little longer than one run. Where
`run.instances` is set, every seed has its own problem, as in `fedsolve run`. The file has what
docs/results keeps: a few columns, rounded.
"""

import sys
import time
from pathlib import Path

import pandas as pd

import batched
from fedsolve.experiments import config
from tiny import tiny

COLUMNS = ("round", "objective", "constraint", "reward", "cost", "switch", "bytes_up_total")


def main(name, path, wanted):
    experiment = config.load(name, rounds=tiny(None, 2))
    options = dict(experiment.options)
    rounds, every = options.pop("rounds"), options.pop("evaluate_every", 1)
    if any(value is not None for value in options.values()):
        raise SystemExit(f"{name} has options that one program for all runs cannot have: {options}")
    labels = [run for run in experiment.runs if not wanted or run[0] in wanted]
    cells = [(*experiment.cell(variant, seed), seed) for variant, seed in labels]
    tables = {}
    for places in batched.groups(cells):
        began = time.perf_counter()
        found = batched.histories([cells[place] for place in places], rounds, every)
        for place, history in zip(places, found, strict=True):
            variant, seed = labels[place]
            kept = {name: history[name] for name in COLUMNS if name in history}
            tables[place] = pd.DataFrame({"variant": variant, "seed": seed} | kept)
        shown = ", ".join(dict.fromkeys(labels[place][0] for place in places))
        print(f"{shown}: {time.perf_counter() - began:.1f} s", flush=True)
    pd.concat([tables[place] for place in sorted(tables)]).round(2).to_csv(path, index=False)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
