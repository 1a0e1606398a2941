"""Rows of the PPBC paper's Table 1 (CIFAR-10, ResNet-18) on whatever device JAX has.

    FEDSOLVE_DATA=... python benchmarks/cifar_table.py --rows PPBC "FedAvg + GNS" --seeds 0 1 2 \
        --limit-seconds 1500 --out table.csv

Rows are the experiment's variants whose names contain one of `--rows`; all seeds of a row share one
program, and the table is gone through seed by seed. Every evaluation is a line of the CSV file at
once, so nothing is lost if this is killed. `--limit-seconds` counts from the start, compiling
included; a row that is cut short says so. `--set problem.batch_size=128` changes the experiment,
`--row-set algorithm.epoch_length=3` each chosen row.

Seconds a round and an evaluation are a least-squares fit over the pieces that a run is made of,
after the first, which compiles. Work is that of local steps alone: 3 forward passes' operations an
image (5 for MOON), not what weightings ask for, over the device's peak for dense bfloat16.
"""

import argparse
import csv
import time

import jax
import numpy as np

import fedsolve as fs
from fedsolve.experiments import config
from tiny import TINY

PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
PAPER = {
    "FedAvg + PoC": 65.3,
    "FedAvg + FOLB": 71.4,
    "FedAvg + BANT": 11.3,
    "FedAvg + GNS": 71.2,
    "SCAFFOLD + PoC": 69.8,
    "SCAFFOLD + FOLB": 71.8,
    "SCAFFOLD + BANT": 71.3,
    "SCAFFOLD + GNS": 71.8,
    "FedDyn": 76.7,
    "MOON": 75.2,
    "PPBC + PoC": 88.9,
    "PPBC + BANT": 89.0,
    "PPBC + GNS": 88.9,
}


SMALL = [  # of --tiny
    'problem.dataset="mnist"',
    'problem.model="mlp"',
    "problem.hidden=4",
    "problem.augment=false",
    "problem.standardize=false",
    "problem.batch_size=4",
    "algorithm.local_steps=1",
]


def arguments():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--experiment", default="ppbc-table-1", help="a name, or a file.toml")
    parser.add_argument("--rows", nargs="*", default=[""], help="parts of variants' names")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--evaluate-every", type=int)
    parser.add_argument("--limit-seconds", type=float, default=float("inf"))
    parser.add_argument("--out", default="cifar-table.csv")
    parser.add_argument("--set", action="append", default=[], metavar="key=value")
    parser.add_argument("--row-set", action="append", default=[], metavar="key=value")
    options = parser.parse_args()
    if TINY:
        options.rows, options.rounds, options.evaluate_every = ["FedAvg + PoC"], 2, 1
        options.set += SMALL
    return options


def forward_operations(problem):
    """Floating-point operations of one image's way through the network."""
    one = jax.tree.map(lambda leaf: leaf[:1], problem.test)
    accuracy = dict(problem.metrics)["test_accuracy"]
    given = jax.device_put((problem.start(), one), jax.devices("cpu")[0])  # GPUs do not count
    lowered = jax.jit(lambda w, data: accuracy(problem.params_at(w), data)).lower(*given)
    return float((lowered.cost_analysis() or {}).get("flops", np.nan))


def images_a_round(problem, algorithm):
    """How many images local steps work on."""
    everyone = isinstance(algorithm, fs.PPBC) and algorithm.correction
    workers = problem.n if everyone else algorithm.selecting.size or problem.n
    return workers * algorithm.local_steps * problem.batch_size


def paces(pieces):
    """Seconds a round and an evaluation, from (seconds, rounds, evaluations) of pieces. Where they
    always come together, all is the round's."""
    later = np.asarray(pieces[1:], float).reshape(-1, 3)
    if len(later) == 0:
        return np.nan, np.nan
    seconds, counts = later[:, 0], later[:, 1:]
    if np.linalg.matrix_rank(counts) < 2:
        return seconds.sum() / counts[:, 0].sum(), 0.0
    return tuple(np.linalg.lstsq(counts, seconds)[0])


def main():
    began = time.monotonic()
    options = arguments()
    described = config.read(options.experiment)
    if options.rounds:
        described["run"]["rounds"] = options.rounds
    if options.evaluate_every:
        described["run"]["evaluate_every"] = options.evaluate_every
    for assignment in options.set:
        described = config.override(described, assignment)
    variants = described["variants"]
    wanted = [name for name in variants if any(part in name for part in options.rows)]
    if not wanted:
        raise SystemExit(f"No row has such a name; there are: {', '.join(variants)}.")
    changes = {}
    for assignment in options.row_set:
        key = assignment.partition("=")[0].strip()
        changes[key] = config.override({}, "value=" + assignment.partition("=")[2])["value"]
    described["variants"] = {name: variants[name] | changes for name in wanted}
    experiment = config.resolve(options.experiment, described)
    device = jax.devices()[0]
    peak = next((p for name, p in PEAK.items() if name in device.device_kind), None)
    print(f"{device.device_kind}; {len(wanted)} rows, seeds {options.seeds}", flush=True)
    placed, found = {}, []
    with open(options.out, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["row", "seed", "round", "seconds", "objective", "test_accuracy"])
        for seed in options.seeds:
            for row in wanted:
                if time.monotonic() - began > options.limit_seconds:
                    print(f"{row}, seed {seed}: not begun, the time is over", flush=True)
                    continue
                problem, algorithm = experiment.cells[row]
                if id(problem) not in placed:  # on the device once, for all rows
                    placed[id(problem)] = problem.on_device(), forward_operations(problem)
                there, operations = placed[id(problem)]
                line = one_run(there, algorithm, experiment, row, seed, options, began, table, file)
                work = operations * (5 if isinstance(algorithm, fs.MOON) else 3)
                line["work"] = work * images_a_round(problem, algorithm) / line["a round"]
                share = f", {line['work'] / peak:.1%} of its peak" if peak else ""
                print(
                    f"{row}, seed {seed}: {line['accuracy']:.2%} after {line['rounds']} rounds "
                    f"(paper: {PAPER.get(row, '–')} %), {line['a round']:.3g} s a round, "
                    f"{line['a look']:.3g} s an evaluation, {line['compiling']:.0f} s to begin; "
                    f"{line['work'] / 1e12:.3g} Tflop/s{share}",
                    flush=True,
                )
                found.append((row, line["accuracy"]))
    for row in wanted:
        values = [100 * value for name, value in found if name == row]
        if values:
            print(f"{row:16} {np.mean(values):6.2f} ± {np.std(values):.2f} ({len(values)} seeds)")


def one_run(problem, algorithm, experiment, row, seed, options, began, table, file):
    pieces, last = [], [time.monotonic(), 0]
    accuracy = [float("nan")]

    def progress(done, rounds, entries):
        now = time.monotonic()
        pieces.append((now - last[0], done - last[1], len(entries["round"])))
        last[:] = now, done
        for i, at in enumerate(entries["round"]):
            accuracy[0] = float(entries["test_accuracy"][i])
            loss = f"{float(entries['objective'][i]):.5f}"
            table.writerow([row, seed, at, f"{now - began:.1f}", loss, f"{accuracy[0]:.4f}"])
        file.flush()
        if now - began > options.limit_seconds and done < rounds:
            raise KeyboardInterrupt

    try:
        fs.solve(problem, algorithm, seed=seed, progress=progress, **experiment.options)
    except fs.Interrupted as stopped:
        print(f"{row}, seed {seed}: {stopped}", flush=True)
    except fs.Diverged as stopped:
        print(f"{row}, seed {seed}: {stopped}", flush=True)
    each, look = paces(pieces)
    first = pieces[0][0] if pieces else float("nan")
    return {
        "accuracy": accuracy[0],
        "rounds": last[1],
        "compiling": first,
        "a round": each,
        "a look": look,
    }


if __name__ == "__main__":
    main()
