"""A live page of runs: `fedsolve watch`.

The page asks this machine, and no other can: the server listens on the loopback interface, and
answers only to its own names. It reads what a run writes into its folder while it goes on.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path

import numpy as np

from fedsolve.errors import InvalidInput
from fedsolve.solving.judgement import judgement
from fedsolve.types import Table

NEWS = "news.jsonl"  # in the folder of a deployed run: what the server tells
MOST_POINTS = 600  # of a line on the page
MOST_NOTES = 50  # of a run
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
)


def watch(folder: str | Path, port: int = 0) -> ThreadingHTTPServer:
    """Return a server of the page, ready for `serve_forever`; its address is `server_address`.

    Args:
        folder: The folder of a run, or one with the folders of runs.
        port: The port; 0 for any that is free.

    Returns:
        The server, on the loopback interface.

    Raises:
        InvalidInput: If there is no such folder, or the port is taken.
    """
    place = Path(folder)
    if not place.is_dir():
        raise InvalidInput(f"There is no folder {folder} to watch.")
    try:
        return ThreadingHTTPServer(("127.0.0.1", port), _handler(place))
    except OSError as error:
        raise InvalidInput(f"Cannot use port {port}: {error.strerror}.") from None


def _handler(folder: Path) -> type[BaseHTTPRequestHandler]:
    page = resources.files("fedsolve.experiments").joinpath("watch.html").read_bytes()
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = self.headers.get("Host", "").rpartition(":")[0]
            if host not in ("127.0.0.1", "localhost"):  # a name that leads here from elsewhere
                self._answer(403, b"This page is for this machine only.", "text/plain")
            elif self.path == "/":
                self._answer(200, page, "text/html; charset=utf-8")
            elif self.path == "/data":
                with lock:
                    body = json.dumps(list(runs_in(folder))).encode()
                tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
                same = self.headers.get("If-None-Match") == tag
                self._answer(304 if same else 200, b"" if same else body, "application/json", tag)
            else:
                self._answer(404, b"There is no such page.", "text/plain")

        def _answer(self, status: int, body: bytes, kind: str, tag: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Security-Policy", POLICY)
            self.send_header("X-Content-Type-Options", "nosniff")
            if tag:
                self.send_header("ETag", tag)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing of every question."""

    return Handler


def runs_in(folder: Path) -> Iterator[Table]:
    """Return what is known of each run in a folder, or in the folders in it."""
    places = [folder] if (folder / "run.json").is_file() else sorted(folder.iterdir())
    for place in places:
        if (place / "run.json").is_file() and (place / "config.toml").is_file():
            yield from _runs_of(place)


def _runs_of(place: Path) -> Iterator[Table]:
    """Return the runs of an experiment's folder."""
    try:
        facts = json.loads((place / "run.json").read_text(encoding="utf-8"))
        config = tomllib.loads((place / "config.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # it is being written
    status = facts.get("status", "running")
    rounds = config.get("run", {}).get("rounds", 0)
    news = _news(place)
    for name, columns in _histories(place).items():
        label = f"{place.name}/{name}" if name != "seed-0" else place.name
        tolerance = _tolerance(config, facts, name)
        last = int(columns["round"][-1])
        there = status if last < rounds or status != "running" else "writing results"
        told = news.get(name, {})
        notes = [
            {"text": text, "alarm": alarm} for text, alarm in news.get("", {}).get("notes", [])
        ]
        if facts.get("message"):
            notes.append({"text": facts["message"], "alarm": status != "finished"})
        yield {
            "key": label,
            "status": there,
            "round": last,
            "rounds": rounds,
            "tolerance": tolerance,
            "history": _shown(columns),
            "answered": told.get("answered"),
            "missing": told.get("missing", []),
            "notes": notes[-MOST_NOTES:],
            "judgement": judgement(columns, tolerance),
        }


def _tolerance(config: Table, facts: Table, name: str) -> float:
    """Return up to which g a round is feasible."""
    found = facts.get("tolerances", {}).get(name)
    if found is None:
        found = config.get("algorithm", {}).get("tolerance", 0.0)
    return float(found) if isinstance(found, int | float) else 0.0


def _histories(place: Path) -> dict[str, dict[str, np.ndarray]]:
    """Return the histories of a folder, by variant and seed; rows that are not whole are left."""
    try:
        with open(place / "history.csv", encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))
    except OSError:
        return {}
    header, rows = (rows[0], rows[1:]) if rows else ([], [])
    if "round" not in header or "seed" not in header:
        return {}
    variant, seed = header.index("variant") if "variant" in header else None, header.index("seed")
    groups: dict[str, list[list[str]]] = {}
    for row in rows:
        if len(row) == len(header) and row[header.index("round")].isdigit():
            before = f"{row[variant]}/" if variant is not None and row[variant] else ""
            groups.setdefault(f"{before}seed-{row[seed]}", []).append(row)
    names = [name for name in header if name not in ("variant", "seed")]
    return {
        name: {
            column: np.array([_number(row[header.index(column)]) for row in group])
            for column in names
        }
        for name, group in groups.items()
    }


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _shown(columns: dict[str, np.ndarray]) -> dict[str, list[float | None]]:
    """Return the columns that the page draws, thinned."""
    sent = [columns[name] for name in ("bytes_up_total", "bytes_down_total") if name in columns]
    if sent:
        columns = columns | {"bytes": np.sum(sent, axis=0)}
    chosen = ("round", "objective", "constraint", "bytes", "seconds_total", "milliseconds")
    names = [n for n in columns if n in chosen or n.startswith("test_") or n == "clients_evaluated"]
    if len({*columns.get("clients_evaluated", np.zeros(0)).tolist()}) < 2:
        names = [name for name in names if name != "clients_evaluated"]
    count = len(columns["round"])
    keep = np.unique(np.linspace(0, count - 1, min(count, MOST_POINTS)).round().astype(int))
    return {
        name: [v if math.isfinite(v) else None for v in columns[name][keep].tolist()]
        for name in names
        if len(columns[name]) == count
    }


def _news(place: Path) -> dict[str, Table]:
    """Return what a deployment's server told: notes under "", and who answered, by run."""
    found: dict[str, Table] = {"": {"notes": []}}
    try:
        lines = (place / NEWS).read_text(encoding="utf-8").splitlines()
    except OSError:
        return found
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # it is being written
        if "note" in entry:
            found[""]["notes"].append((str(entry["note"]), bool(entry.get("warning"))))
        elif "round" in entry:
            before = f"{entry['variant']}/" if entry.get("variant") else ""
            missing = entry.get("missing", {})
            said = (
                [f"{k}: {v}" for k, v in missing.items()] if isinstance(missing, dict) else missing
            )
            name = f"{before}seed-{entry.get('seed', 0)}"
            found[name] = {"answered": entry.get("answered", []), "missing": list(said)}
    return found
