"""An MLflow tracking server, by the extra `omni-trainer[mlflow]`: metrics, parameters and picture grids.

A server that does not answer for a while ends no run: its steps wait and are sent with a later one. What
waited when a process ended is in metrics.jsonl, from which a resume sends it.
"""

from __future__ import annotations

import importlib
import os
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from omni_core.config import leaves
from omni_core.plugins import PluginError
from omni_core.tracking import Tracker
from omni_trainer.reporting.jsonl import read_metrics
from omni_trainer.reporting.options import MLflowOptions
from omni_trainer.reporting.remote_run import RemoteRun

log = structlog.get_logger()

SERVICE = "mlflow"
VARIABLE = "MLFLOW_TRACKING_URI"
_BATCH = 100
"""Parameters that one request takes."""
_LONGEST = 500
"""Characters of a parameter's value that every server takes."""


class MLflowTracker(Tracker):
    """One run of an experiment; a resume goes on with it.

    Raises:
        PluginError: the extra is not installed, or no server is named.
    """

    def __init__(self, options: MLflowOptions) -> None:
        # It would report its use to its makers unless the variable says that it may.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        try:
            self._entities: Any = importlib.import_module("mlflow.entities")
            tracking: Any = importlib.import_module("mlflow.tracking")
            self._error: Any = importlib.import_module("mlflow.exceptions").MlflowException
        except ModuleNotFoundError as exc:
            msg = "trainer.trackers: mlflow is not installed; `pip install 'omni-trainer[mlflow]'`"
            raise PluginError(msg) from exc
        uri = options.uri or os.environ.get(VARIABLE)
        if not uri:
            msg = (
                f"trainer.trackers: mlflow needs a server: set {VARIABLE}, or its option `uri` "
                "({name: mlflow, uri: http://localhost:5000})"
            )
            raise PluginError(msg)
        self.options = options
        self._client: Any = tracking.MlflowClient(uri)
        self._sent: RemoteRun | None = None
        self._waiting: deque[tuple[int, list[Any]]] = deque()
        """(step, metrics) that the server has not taken yet."""

    def open(self, directory: Path, config: Mapping[str, Any], *, offset: int | None) -> None:
        """Start a run, or go on with the one that this directory already is."""
        before = None if offset is None else RemoteRun.found(directory, SERVICE)
        if before is not None:
            self._sent = before
            self._client.update_run(before.run_id, status="RUNNING")
            for step, metrics in read_metrics(directory):
                self._queue(step, metrics)
            self._send()
            return
        name = self.options.run_name or directory.name
        run = self._client.create_run(self._experiment(), run_name=name)
        self._sent = RemoteRun.begin(directory, SERVICE, run.info.run_id)
        values = [
            self._entities.Param(path, str(value)[:_LONGEST]) for path, value in leaves(config)
        ]
        for start in range(0, len(values), _BATCH):
            self._client.log_batch(run.info.run_id, params=values[start : start + _BATCH])

    def _experiment(self) -> str:
        found = self._client.get_experiment_by_name(self.options.experiment)
        if found is not None:
            return str(found.experiment_id)
        return str(self._client.create_experiment(self.options.experiment))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send one step, unless it was sent before a resume."""
        self._queue(step, metrics)
        self._send()

    def _queue(self, step: int, metrics: Mapping[str, float]) -> None:
        if not self._record.knows(step):
            now = int(time.time() * 1000)
            self._waiting.append(
                (step, [self._entities.Metric(name, v, now, step) for name, v in metrics.items()])
            )

    def _send(self) -> None:
        """Send what waits, in order; what the server does not take now goes on waiting."""
        record = self._record
        while self._waiting:
            step, values = self._waiting[0]
            try:
                self._client.log_batch(record.run_id, metrics=values)
            except self._error as exc:
                waiting = len(self._waiting)
                log.warning("tracker.not_sent", tracker=SERVICE, steps=waiting, error=str(exc))
                return
            record.told(step)
            self._waiting.popleft()

    def image(self, step: int, name: str, path: Path) -> None:
        """Send a picture as the artifact `samples/FILE`; one that is not taken stays in the run directory."""
        if self._record.knows(step):
            return
        try:
            self._client.log_artifact(self._record.run_id, str(path), f"samples/{name}")
        except self._error as exc:
            log.warning("tracker.not_sent", tracker=SERVICE, picture=str(path), error=str(exc))

    def position(self) -> int:
        """The step that comes next."""
        return self._record.last_step + 1

    def close(self, *, failed: bool = False) -> None:
        """Send what waits, and end the run, as failed or finished."""
        if self._sent is None:
            return
        self._send()
        run_id, self._sent = self._sent.run_id, None
        try:
            self._client.set_terminated(run_id, "FAILED" if failed else "FINISHED")
        except self._error as exc:
            log.warning("tracker.not_ended", tracker=SERVICE, run=run_id, error=str(exc))

    @property
    def _record(self) -> RemoteRun:
        if self._sent is None:
            msg = f"{SERVICE} is not open"
            raise RuntimeError(msg)
        return self._sent
