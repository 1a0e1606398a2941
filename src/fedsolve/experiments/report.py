"""`fedsolve report`: an HTML page, in one file, with the charts of experiments' folders.

The page is `report.html` with the numbers of the folders in it as JSON. Names come from users: they
are escaped here, and the page writes them as text only.
"""

from __future__ import annotations

import json
import math
from importlib import resources
from pathlib import Path

import numpy as np

from fedsolve.errors import InvalidInput
from fedsolve.experiments.audit import read_audits
from fedsolve.experiments.config import settings_of
from fedsolve.experiments.run_folder import read
from fedsolve.plots import participation
from fedsolve.storage.atomic import write_atomically
from fedsolve.types import Table

LINES, POINTS = 40, 400  # the most clients and rounds in a chart with a line for each client


def report(folders: list[Path], path: Path) -> None:
    """Write the page of these folders to a file.

    Raises:
        InvalidInput: If a folder has no finished run, or the page cannot be written.
    """
    groups = [group for folder in folders for group in _groups(folder, len(folders) > 1)]
    page = (
        resources.files("fedsolve.experiments").joinpath("report.html").read_text(encoding="utf-8")
    )
    try:
        write_atomically(path, page.replace("@DATA@", as_script(groups)).encode())
    except OSError as error:
        raise InvalidInput(f"Cannot write to {path}: {error.strerror}.") from None


def as_script(value: object) -> str:
    """Return JSON that cannot end the script element around it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _groups(folder: Path, several: bool) -> list[Table]:
    """Return a group for each variant: its configuration, and the history of each seed."""
    found = read(folder)
    config, facts, table, wide = found.config, found.facts, found.table, found.wide
    audits = read_audits(folder)
    groups = []
    for variant, rows in table.groupby("variant", sort=False):
        flat = settings_of(config, str(variant))
        names = [folder.resolve().name] if several or not variant else []
        numbers = rows.select_dtypes("number").drop(columns=["seed", "diverged"], errors="ignore")
        group: Table = {
            "name": ": ".join([*names, *([str(variant)] if variant else [])]),
            "status": str(facts.get("status", "")),
            "config": {key: str(value) for key, value in flat.items()},
            "tolerance": float(flat.get("algorithm.tolerance", 0.0)),
            "certificates": [],
            "best": [],
            "seeds": [],
            "clients": [],
            "sites": [],
        }
        for seed, entries in rows.groupby("seed", sort=False):
            columns = numbers.loc[entries.index]
            history = {str(name): _numbers(columns[name].to_numpy()) for name in columns}
            group["seeds"].append({"seed": int(str(seed)), "history": history})
            prefix = f"{variant}/seed-{seed}/".lstrip("/")
            run = prefix.removesuffix("/")
            if (record := facts.get("participation", {}).get(run)) is not None:
                group["seeds"][-1]["total"] = record["clients"]
                group["sites"].append(_sites(int(str(seed)), record, history["round"][-1]))
            if (there := facts.get("tolerances", {}).get(run)) is not None:  # a theorem may set it
                group["tolerance"] = float(there)
            if best := facts.get("best", {}).get(run):
                group["best"].append(f"Seed {seed}: {best['text']}")
            if said := facts.get("certificates", {}).get(run):
                group["certificates"].append(f"Seed {seed}: {said}")
            if (audit := audits.get(run)) is not None:
                group["certificates"].append(f"Seed {seed}, held-out data:\n{audit}")
            own = {k.removeprefix(prefix): v for k, v in wide.items() if k.startswith(prefix)}
            if len(group["seeds"]) == 1:
                rounds = columns["round"].to_numpy()
                shown = {k: v for k, v in own.items() if _of_clients(k, v, own)}
                group["clients"] = [
                    _by_client(k, v, rounds, own.get(f"{k}/settles")) for k, v in shown.items()
                ]
        groups.append(group)
    return groups


def _sites(seed: int, record: Table, rounds: object) -> Table:
    """Return what is shown of a deployed run's sites: the rounds that each of them missed."""
    missing, alarms = record["missing"], record.get("alarms", {})
    return {
        "seed": seed,
        "rounds": rounds,
        "rows": [
            {
                "name": name,
                "clients": site["clients"],
                "counts": [site[key] for key in ("asked", "answered", "refused", "absent")],
                "missed": [[gap["from"], gap["to"], gap["why"]] for gap in site["missed"]],
                "without": missing.get(name, ""),
                "alarms": alarms.get(name, []),
            }
            for name, site in sorted(record["sites"].items())
        ],
    }


def _of_clients(name: str, values: np.ndarray, others: dict[str, np.ndarray]) -> bool:
    """Return whether a column has an entry for each client, and is worth a chart.

    Columns with an entry for each member of a drawn cohort have not. The cohorts themselves are
    shown unless every client takes part in every round.
    """
    if values.ndim != 2 or name == "picks":  # "cohort" shows these
        return False
    cohort = others.get("cohort")
    if cohort is None:
        return True
    everyone = bool((cohort >= 0).all()) and cohort.max(initial=0) < cohort.shape[1]
    if name == "cohort":
        return not everyone
    return everyone or values.shape[1] != cohort.shape[1]


def _by_client(
    name: str, values: np.ndarray, rounds: np.ndarray, settles: np.ndarray | None
) -> Table:
    """Return a chart of clients.

    For cohorts, the share of rounds in which each client took part; for other columns, a line for
    each client, and where it is known to settle.
    """
    if name == "cohort":  # each row names the clients of a round
        ends, shares = participation(values, rounds)
        return {"name": name, "kind": "shares", "rounds": ends.tolist(), "values": _rows(shares)}
    step = math.ceil(len(values) / POINTS)
    kept = values[::step, :LINES].astype(float)
    title = f"{name} ({LINES} of {values.shape[1]} clients)" if values.shape[1] > LINES else name
    return {
        "name": title,
        "kind": "lines",
        "rounds": rounds[::step].tolist(),
        "values": _rows(kept),
        "settles": [] if settles is None else _numbers(settles[:LINES].astype(float)),
    }


def _rows(values: np.ndarray) -> list[list[float | int | None]]:
    return [_numbers(row) for row in values]


def _numbers(values: np.ndarray) -> list[float | int | None]:
    """Return numbers for JSON, which has no NaN and no infinity."""
    return [v if math.isfinite(v) else None for v in values.tolist()]
