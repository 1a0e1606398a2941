"""Markdown pages of reproduced figures and tables, with our numbers beside the papers'."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image

from fedsolve.errors import InvalidInput
from fedsolve.papers.catalogue import Entry, catalogue, costs, duration, papers
from fedsolve.plots import has_numbers
from fedsolve.storage.atomic import write_atomically
from fedsolve.types import Table

HEADINGS = {
    "objective": "f",
    "constraint": "g",
    "over": "over ε",
    "worst": "worst g",
    "step_size": "step",
    "deviation": "g's deviation",
    "violations": "violating rounds",
    "test_accuracy": "test accuracy",
    "test_parity_gap": "test gap",
    "test_concordance": "concordance",
    "test_loss": "test loss",
    "squared_gradient": "‖∇f‖²",
}
SHARES = ("over", "test_accuracy")  # shown in percent
INTRODUCTION = """\
<!-- Written by `fedsolve reproduce --page docs/results.md`: change papers/papers.toml. -->

# The papers' figures and tables

Every figure and table of the five papers, by `fedsolve reproduce NAME` (`--quick` for a small
version, in minutes on a CPU), beside what the paper says. `fedsolve reproduce` lists them with
what they cost.

Numbers are means over seeds, ± the standard deviation over seeds, of the last fifth of a run's
evaluations unless a round is named; *over ε* is the share of those evaluations with g above the
tolerance, *worst g* the greatest g among them. In pictures, lines are means and bands go from the
least to the greatest seed (CartPole: 0.2 standard deviations, as in its paper). Times of 2026-11-16
on 2 cores were taken while other work kept them busy: a quiet machine needs a third or less.

Where a table has a column *step*, each row's step size was chosen by one rule, which
`fedsolve reproduce` applies before it runs the row: of the steps of a grid with mean g ≤ ε the one
with the least mean f; if there is none, the one with the least mean g. Means are those of the
table. The grid is that of the FedSGM paper, 1, 0.3, 0.1, … 1e-4, unless a note says otherwise. In
these tables every seed is another division of the data, and another start where that is random.
"""


def page(entry: Entry, summary: Table) -> str:
    """Return a figure's page."""
    name = papers()[entry.paper_of]["title"].partition(" (")[0]
    return plain(f"# {name}, {title(entry)}\n\n{part(entry, summary)}\n")


def plain(text: str) -> str:
    """Return a text without its links to the documentation."""
    return re.sub(r"\[([^]]+)\]\([\w-]+\.md\)", r"\1", text)


def part(entry: Entry, summary: Table, pictures: str = "") -> str:
    """Return pictures, numbers, what the paper says, and how the results were made."""
    entry = _as_measured(entry, summary)
    parts = _about(entry)
    for name in summary["pictures"]:
        parts.append(f"![{entry.shows}]({pictures}{name})")
        parts.append(_numbers(entry, summary["numbers"][name.removesuffix(".png")]))
    if entry.claims:
        rows = [f"| {says} | {found} |" for says, found in entry.claims]
        parts.append("\n".join(["| the paper | what was found |", "|---|---|", *rows]))
    return "\n\n".join([*parts, _made(entry, summary)])


def _as_measured(entry: Entry, summary: Table) -> Entry:
    """Return the entry with the columns of the summary's size, if they were measured by then."""
    now = entry.shown(summary["size"])
    rows = [row for rows in summary["numbers"].values() for row in rows]
    return now if any(column in row for row in rows for column in now.columns) else entry


def title(entry: Entry) -> str:
    """Return a heading such as `Figure 2`."""
    if entry.heading:
        return entry.heading
    kind, _, number = entry.name.partition("/")[2].partition("-")
    return f"{kind.capitalize()} {number}"


def _about(entry: Entry) -> list[str]:
    state = {"in part": "In part. ", "other data": "On other data. "}.get(entry.state, "")
    return [f"**{entry.shows}.** {state}{entry.note}".rstrip()]


def _numbers(entry: Entry, rows: list[Table]) -> str:
    """Return a table with a row for each variant, and the paper's numbers beside ours."""
    columns = [c for c in entry.columns if any(row.get(c) for row in rows)]
    if entry.picture == "rounds" and has_numbers(row["variant"] for row in rows):
        return "\n\n".join(_by_number(entry, rows, column) for column in columns)
    beside = {c for c in columns if any(c in own for own in entry.paper.values())}
    head, lines = [""], []
    for column in columns:
        head += [_heading(column), "paper"] if column in beside else [_heading(column)]
    for row in rows:
        cells = [row["variant"]]
        for column in columns:
            found = row.get(column)
            cells.append(_number(column, found, row["seeds"]) if found else "not reached")
            if column in beside:
                own = entry.paper.get(row["variant"], {}).get(column)
                cells.append("" if own is None else _number(column, [own]))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *lines])


def _by_number(entry: Entry, rows: list[Table], column: str) -> str:
    """Return a table of one measure, of labels such as "FedADMM: k_0 = 5": a column for each 5."""
    cells: dict[str, dict[str, str]] = {}
    name = ""
    for row in rows:
        heading, _, at = row["variant"].partition(": ")
        name, _, number = at.partition(" = ")
        found, own = row.get(column), entry.paper.get(row["variant"], {}).get(column)
        text = _number(column, found, row["seeds"]) if found else "not reached"
        if own is not None:
            text += f" (paper: {_number(column, [own])})"
        cells.setdefault(heading, {})[number] = text
    numbers = list(dict.fromkeys(number for shown in cells.values() for number in shown))
    head = [f"{_heading(column)}, {name} =", *numbers]
    lines = [
        " | ".join([heading, *(shown.get(number, "") for number in numbers)])
        for heading, shown in cells.items()
    ]
    first, *rest = (f"| {line} |" for line in [" | ".join(head), *lines])
    return "\n".join([first, "|---" * len(head) + "|", *rest])


def _heading(column: str) -> str:
    name, _, when = column.partition("@")
    at = f", after {when}" if " " in when else f", round {when}"
    when = {"": "", "end": ", end"}.get(when, at)
    return HEADINGS.get(name, name) + when


def _number(column: str, found: Sequence[float | int], seeds: int = 1) -> str:
    """Return the middle to three figures, and the spread over seeds to as many decimals."""
    name, unit = column.partition("@")[0], ""
    if name == "step_size":
        return f"{found[0]:g}"
    if name in SHARES:
        found, unit, decimals = [100 * value for value in found], " %", 1
    elif column in ("CR", "violations"):
        decimals = 0
    else:
        decimals = min(max(2 - math.floor(math.log10(abs(found[0]) or 1)), 1), 4)
    shown = [f"{value:.{decimals}f}" for value in found]
    return (" ± ".join(shown) if seeds > 1 else shown[0]) + unit


def _made(entry: Entry, summary: Table) -> str:
    """Return how the results were made, in a line."""
    commit = f"commit {summary['commit']}" if "commit" in summary else ""
    parts = [
        f"`{summary['command']}`",
        summary["date"],
        commit or f"version {summary['version']}",
        summary["machine"],
        f"{duration(summary['seconds'] / 60)} for all runs" if summary.get("seconds") else "",
    ]
    size = ""
    if summary["size"] == "quick":
        changes = ", ".join(f"{key} = {value}" for key, value in summary["changes"].items())
        size = f"**Quick version** ({changes}). "
    return size + "; ".join(text for text in parts if text) + "."


def whole_page(path: Path, found: Path) -> list[str]:
    """Write the page of all figures, and return the names of those that have results.

    Summaries are read from the folder beside the page (`docs/results/` for `docs/results.md`),
    after those in the folder `found` were copied there.
    """
    kept = path.with_suffix("")
    try:
        for summary in sorted(found.glob("*/*/summary.json")):
            _keep(summary.parent, kept)
        text, shown = whole(kept)
        write_atomically(path, text.encode())
    except OSError as error:
        raise InvalidInput(f"Cannot write {path}: {error.strerror}.") from None
    except (ValueError, KeyError) as error:
        raise InvalidInput(f"A summary below {found} or {kept} is damaged: {error}.") from None
    return shown


def _keep(made: Path, kept: Path) -> None:
    """Copy a reproduction's summary and pictures; a quick one does not replace a full one."""
    summary = json.loads((made / "summary.json").read_text(encoding="utf-8"))
    place = kept / summary["name"]
    there = place / "summary.json"
    before = json.loads(there.read_text(encoding="utf-8"))["size"] if there.is_file() else ""
    if summary["size"] == "quick" and before == "full":
        return
    place.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(made / "summary.json", place / "summary.json")
    for name in summary["pictures"]:  # in 64 colours, which keeps them small
        with Image.open(made / name) as picture:
            picture.convert("RGB").quantize(64).save(place / name, optimize=True)


def _anchor(entry: Entry) -> str:
    return entry.name.replace("/", "-")


def _link(entry: Entry) -> str:
    return f"[{entry.name}](#{_anchor(entry)})"


def _differences(entries: Mapping[str, Entry]) -> list[tuple[Entry, str, str]]:
    """Return the claims that do not hold here: what was found has text in bold."""
    return [(e, says, found) for e in entries.values() for says, found in e.claims if "**" in found]


def _lacks(entry: Entry, summary: Table) -> bool:
    """Return whether variants of which the paper has numbers were not run."""
    run = {
        row["variant"] for rows in summary["numbers"].values() for row in rows if "variant" in row
    }
    return bool(entry.paper.keys() - run)


def whole(kept: Path) -> tuple[str, list[str]]:
    """Return the page of all figures, and the names of those that have results."""
    entries, shown = catalogue(), []
    parts = [INTRODUCTION]
    rows = ["| | shows | state | here |", "|---|---|---|---|"]
    for paper, figures in papers().items():
        parts.append(f"## {figures['title']}")
        for name, entry in entries.items():
            if entry.paper_of != paper:
                continue
            head = f'<a id="{_anchor(entry)}"></a>\n\n### {title(entry)}'
            file = kept / name / "summary.json"
            if file.is_file():
                summary = json.loads(file.read_text(encoding="utf-8"))
                shown.append(name)
                here = summary["size"] + (", some rows" if _lacks(entry, summary) else "")
                parts.append(f"{head}\n\n{part(entry, summary, f'{kept.name}/{name}/')}")
            else:
                here = "not run yet" if entry.experiments else "nothing to run"
                here = f"[page]({entry.study})" if entry.study else here
                parts += [head, *_about(entry)]
                if entry.experiments:
                    quick, full, gpu = costs(entry)
                    told = f"Not run yet: `fedsolve reproduce {name}` takes about {full} on 2 cores"
                    told += f", {gpu} on a GPU" if gpu else ""
                    parts.append(f"{told}; `--quick` about {quick}.")
            rows.append(f"| {_link(entry)} | {entry.shows} | {entry.state} | {here} |")
    differ = [f"| {_link(e)} | {says} | {found} |" for e, says, found in _differences(entries)]
    head = "## Where we differ", "| | the paper | here |\n|---|---|---|\n" + "\n".join(differ)
    parts[1:1] = ["\n".join(rows), *head]
    return "\n\n".join(text.rstrip("\n") for text in parts) + "\n", shown
