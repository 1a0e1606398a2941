"""Checks of a site before a run: `fedsolve deploy check`, one line for each thing."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import psutil

from fedsolve.data.schema import Schema
from fedsolve.data.table_files import TABLES, Source, files_of, held_out, read_rows
from fedsolve.data.tables import Issue, read_table
from fedsolve.errors import InvalidInput
from fedsolve.experiments.config import resolve
from fedsolve.flare.kit_checks import (
    certificate_end,
    check_certificate,
    check_connection,
    server_of,
)
from fedsolve.flare.limits import Limits
from fedsolve.flare.preprocessing import tables_in
from fedsolve.flare.provisioning import kit_name
from fedsolve.flare.site_config import check_data, load_clients, read_owners_file, site_problem
from fedsolve.problem.samples import counts
from fedsolve.types import Table

KINDS = {
    "types": ("not a number", "not a date"),
    "words": ("unknown category",),
    "ranges": ("out of range",),
    "missing values": ("missing value",),
}
MOST = 3  # examples of one kind


class Line(NamedTuple):
    """What was found about one thing."""

    name: str
    fits: bool
    text: str


def checks(kit: Path, owners: Path, config: Table | None) -> Iterator[Line]:
    """Check a site's kit, its server, its file and, with an experiment, its data."""
    yield _line("certificate", lambda: _certificate(kit))
    yield _line("server", lambda: _server(kit))
    versions = [f"{p} {importlib.metadata.version(p)}" for p in ("fedsolve", "nvflare", "jax")]
    yield Line("version", True, ", ".join(versions))
    yield (own := _line("site file", lambda: _own_file(owners)))
    if not own.fits:
        return
    data = read_owners_file(owners)["data"]
    tables = None if config is None else tables_in(config)
    if tables is not None and data.get("loader") in TABLES:
        yield from _table_lines(owners, Source.of(data), tables.schema)
        if (sums := tables.sums()) is not None:
            yield _line("sums", lambda: _sums(owners, sums))
        config = tables.blank()
    if config is not None:
        yield _line("data", lambda: _memory(owners, config))


def _line(name: str, check: Callable[[], str]) -> Line:
    try:
        return Line(name, True, check())
    except InvalidInput as error:
        return Line(name, False, str(error))


def _certificate(kit: Path) -> str:
    check_certificate(kit)
    return f"{kit_name(kit)}, valid until {certificate_end(kit):%Y-%m-%d}"


def _server(kit: Path) -> str:
    check_connection(kit)
    return f"{server_of(kit)} answers and accepts this kit"


def _own_file(owners: Path) -> str:
    check_data(owners)
    table = read_owners_file(owners)
    limits = Limits.of(table)
    load_clients(owners)
    return f"{owners.name} is valid; a client needs {limits.samples} samples"


def _table_lines(owners: Path, source: Source, schema: Schema) -> Iterator[Line]:
    """Check the files of a site against the schema."""
    issues: list[tuple[Path, Issue]] = []
    labels: Counter[str] = Counter()
    rows, held, absent = 0, 0, Counter[str]()
    try:
        for file in files_of(owners):
            columns, found = read_table(schema, file, source)
            issues += [(file, issue) for issue in found]
            rows += len(columns["label"])
            held += int(held_out(file, *read_rows(file, source), source).sum())
            for name, count in Counter(columns["label"].tolist()).items():
                if name >= 0:
                    labels[schema.label.words[name]] += count
            for feature in schema.features:
                values = columns[f"feature {feature.name}"]
                gap = values == "" if feature.collects else values == -1
                empty = np.isnan(values) if feature.is_number else gap
                absent[feature.name] += int(empty.sum())
    except InvalidInput as error:
        yield Line("schema", False, str(error))
        return
    files = len(files_of(owners))
    columns = len(schema.columns())
    kept = f", {held} of them held out" if held else ""
    yield Line("schema", True, f"{columns} columns, {rows} rows in {files} file(s){kept}")
    for name, kinds in KINDS.items():
        wrong = [(file, issue) for file, issue in issues if issue.kind in kinds]
        filled = ", ".join(f"{k}: {n}" for k, n in absent.items() if n and not wrong)
        text = _examples(wrong) if wrong else "all fit"
        if name == "missing values" and not wrong:
            text = f"filled as the schema says ({filled})" if filled else "none"
        yield Line(name, not wrong, text)
    counted = ", ".join(f"{word} {labels[word]}" for word in schema.label.words)
    both = all(labels[word] for word in schema.label.words)
    yield Line("classes", True, counted + ("" if both else ": only one class is here"))


def _sums(owners: Path, config: Table) -> str:
    """Compute the sums that leave the site before the first round, and say what they are."""
    problem = resolve("sums", config).cells[""][0]
    site_problem(problem, owners)
    kinds = {"count": "means", "histogram": "histograms", "words": "categories"}
    there = {name.split()[0] for name in problem.params}
    return f"{', '.join(text for name, text in kinds.items() if name in there)} can be summed"


def _examples(wrong: list[tuple[Path, Issue]]) -> str:
    shown = [
        f"{file.name}, row {issue.row}, column {issue.column!r}: {issue.text}"
        for file, issue in wrong[:MOST]
    ]
    more = f"; and {len(wrong) - MOST} more" if len(wrong) > MOST else ""
    return "; ".join(shown) + more


def _memory(owners: Path, config: Table) -> str:
    """Build the problem with the site's data, and say how much memory it takes."""
    owned = read_owners_file(owners)
    limits = Limits.of(owned)
    experiment = resolve("check", config, owned.get("allow", {}).get("problems", []))
    limits.check_problems(experiment)
    problem = next(iter(experiment.cells.values()))[0]
    own = site_problem(problem, owners)
    limits.check_samples(own)
    size = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(own.samples))
    free = psutil.virtual_memory().available
    sizes = ", ".join(map(str, counts(own.samples)[:10])) if own.samples.mask is not None else ""
    if size > free / 2:
        raise InvalidInput(f"The data take {size / 1e6:.1f} MB, and {free / 1e6:.0f} MB are free.")
    rows = f" of {sizes} samples" if sizes else ""
    return f"{own.n} client(s){rows}, {size / 1e6:.1f} MB of {free / 1e6:.0f} MB free"
