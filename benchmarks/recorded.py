"""A reproduction from runs that were made elsewhere, such as by experiment.py on a GPU.

    python benchmarks/recorded.py fedsgm/table-1 docs/results/fedsgm-table-1.csv \
        --command "python benchmarks/experiment.py fedsgm-table-1" --machine "one H200; JAX 0.11.2"

The CSV file has a line for each variant (or row), seed and round. What `fedsolve reproduce` would
write, but for the runs, is below `reproduced/`; `fedsolve reproduce --page` takes it from there.
"""

import argparse
import datetime
from pathlib import Path

import pandas as pd

from fedsolve import __version__
from fedsolve.experiments.run_folder import Contents
from fedsolve.papers import catalogue, reproduce
from fedsolve.papers.pages import page


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name")
    parser.add_argument("file", type=Path)
    parser.add_argument("--command", required=True)
    parser.add_argument("--machine", required=True)
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--seconds", type=float, default=0.0)
    given = parser.parse_args()
    entry = catalogue.find(given.name)
    ((label, experiment),) = reproduce.plan(entry).items()
    table = pd.read_csv(given.file).rename(columns={"row": "variant"})
    table = table.loc[table["variant"].isin(list(experiment.cells))]
    groups = reproduce.recorded(Contents({}, {}, table, {}), experiment)
    out = Path("reproduced", given.name)
    out.mkdir(parents=True, exist_ok=True)
    made = {"size": "full", "changes": {}, "version": __version__}
    made |= {name: getattr(given, name) for name in ("command", "machine", "date", "seconds")}
    ordered = {variant: groups[variant] for variant in experiment.cells if variant in groups}
    summary = reproduce.finish(entry, {label: ordered}, out, made)
    (out / "page.md").write_text(page(entry, summary))
    print(f"Written to {out}")


if __name__ == "__main__":
    main()
