"""MLflow as a tracker: parameters, metrics by round, and the files of the experiment's folder.

MLflow is asked which rounds it has, so that none is logged twice, even after a crash. A run's key
is a tag of the MLflow run, by which a resumed run finds it.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from fedsolve.errors import InvalidInput
from fedsolve.experiments.tracking import Tracked, Tracker
from fedsolve.runtimes.history import History

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

BATCH, PARAMS = 1000, 100  # the most metrics and parameters in one request
WORDS = ("databricks", "databricks-uc", "uc")  # addresses that look like paths, and are none
STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "diverged": "FAILED"}


class MLflow(Tracker):
    """Logs to a tracking server, or to an SQLite file.

    The address is the server's, or the file's path, or a word that MLflow knows, such as
    `databricks`. The default is `MLFLOW_TRACKING_URI`, else `mlflow.db` in the current folder.
    """

    def __init__(self, address: str = ""):
        if importlib.util.find_spec("mlflow") is None:
            raise InvalidInput("The tracker mlflow needs MLflow: pip install 'fedsolve[mlflow]'.")
        theirs = "" if address else os.environ.get("MLFLOW_TRACKING_URI", "")
        address = address or theirs or "mlflow.db"
        if "@" in urlsplit(address).netloc:
            raise InvalidInput(
                "The tracker mlflow: the address must not hold a password; MLflow takes it from"
                " MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."
            )
        if ":" not in address and address not in WORDS:
            # A bare path is a folder to MLflow; here it is a file, unless that folder exists.
            folder = Path(address).is_dir() or (theirs and not Path(address).suffix)
            address = Path(address).resolve().as_uri() if folder else f"sqlite:///{address}"
        if file := re.fullmatch("sqlite:///(.+)", address):
            address = f"sqlite:///{Path(file[1]).resolve()}"
        super().__init__(address)
        self._connected: MlflowClient | None = None
        self._ids: dict[str, str] = {}  # MLflow's run ids by our keys
        self._ended = "finished"

    @property
    def _client(self) -> Any:
        """Connect when it is first needed: importing MLflow takes seconds."""
        if self._connected is None:
            # The follower tries again itself.
            os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
            os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
            os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
            from mlflow.tracking import MlflowClient

            for name in ("mlflow", "alembic"):
                logging.getLogger(name).setLevel(logging.WARNING)
            self._connected = MlflowClient(self.address)
        return self._connected

    def begin(self, run: Tracked) -> int:
        """Find or create the MLflow run, and return the last round that it has."""
        place = self._experiment(run.experiment)
        tags = {"fedsolve.rounds": str(run.settings.get("run.rounds", ""))}
        if run.group:
            group = self._open(place, run.group, run.experiment, {})
            tags["mlflow.parentRunId"] = group.info.run_id
        found = self._open(place, run.key, run.name, tags)
        # MLflow's parameters cannot change, and the number of rounds may: it is a tag.
        there = {"run.rounds", *found.data.params}
        self._params({k: str(v) for k, v in run.settings.items() if k not in there}, run)
        return int(found.data.metrics.get("round", 0))

    def rows(self, run: Tracked, entries: History) -> None:
        """Log every column of numbers as a metric."""
        from mlflow.entities import Metric

        # The round is logged last: if it is there, the row is complete.
        names = [n for n, v in entries.items() if v.ndim == 1 and n != "round"] + ["round"]
        keys = {name: re.sub(r"[^\w\-. :/]", "_", name) for name in names}
        rounds, now, each = entries["round"], int(1000 * time.time()), max(BATCH // len(names), 1)
        for first in range(0, len(rounds), each):
            metrics = [
                Metric(keys[name], float(entries[name][k]), now, int(rounds[k]))
                for k in range(first, min(first + each, len(rounds)))
                for name in names
            ]
            self._client.log_batch(self._ids[run.key], metrics=metrics)

    def end(self, run: Tracked, status: str) -> None:
        """Set the status of the MLflow run."""
        self._client.set_terminated(self._ids[run.key], STATUS[status])
        self._ended = status

    def keep(self, files: Sequence[Path]) -> None:
        """Log the files as artifacts."""
        first = next(iter(self._ids.values()))  # the group's, or the only run's
        for path in files:
            self._client.log_artifact(first, str(path))
        self._client.set_terminated(first, STATUS[self._ended])  # as the last run did

    def _experiment(self, name: str) -> str:
        """Return the id of the experiment with that name, created if it is missing."""
        if found := self._client.get_experiment_by_name(name):
            return found.experiment_id
        file = self.address.removeprefix("sqlite:///")
        beside = None if file == self.address else str(Path(file).parent / "mlruns" / name)
        return self._client.create_experiment(name, artifact_location=beside)

    def _open(self, place: str, key: str, name: str, tags: dict[str, str]) -> Any:
        """Return the run with that key, created if it is missing."""
        same = f"tags.`fedsolve.key` = '{key}'"
        if found := self._client.search_runs([place], same, max_results=1):
            run = found[0]
            for each, value in tags.items():
                self._client.set_tag(run.info.run_id, each, value)
            self._client.update_run(run.info.run_id, status="RUNNING")
        else:
            run = self._client.create_run(place, tags={"fedsolve.key": key} | tags, run_name=name)
        self._ids[key] = run.info.run_id
        return run

    def _params(self, values: dict[str, str], run: Tracked) -> None:
        from mlflow.entities import Param

        params = [Param(name, value[:6000]) for name, value in values.items()]
        for first in range(0, len(params), PARAMS):
            batch = params[first : first + PARAMS]
            self._client.log_batch(self._ids[run.key], params=batch)
