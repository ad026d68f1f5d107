"""Weights & Biases, by the extra `omni-trainer[wandb]`: metrics, config and picture grids.

Its files lie in the run directory; offline runs are sent later by `wandb sync RUN/wandb/offline-run-*`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omni_core.plugins import PluginError
from omni_core.tracking import Tracker
from omni_trainer.reporting.options import WandbOptions
from omni_trainer.reporting.remote_run import RemoteRun

SERVICE = "wandb"


class WandbTracker(Tracker):
    """One run of W&B; a resume goes on with it.

    Raises:
        PluginError: the extra is not installed.
    """

    def __init__(self, options: WandbOptions) -> None:
        try:
            self._wandb: Any = importlib.import_module("wandb")
        except ModuleNotFoundError as exc:
            msg = "trainer.trackers: wandb is not installed; `pip install 'omni-trainer[wandb]'`"
            raise PluginError(msg) from exc
        self.options = options
        self._run: Any = None
        self._sent: RemoteRun | None = None

    def open(self, directory: Path, config: Mapping[str, Any], *, offset: int | None) -> None:
        """Start a run, or go on with the one that this directory already is."""
        before = None if offset is None else RemoteRun.found(directory, SERVICE)
        options = self.options
        self._run = self._wandb.init(
            project=options.project,
            entity=options.entity,
            name=options.run_name or directory.name,
            group=options.group,
            tags=list(options.tags) or None,
            mode=None if options.mode is None else options.mode.value,
            dir=str(directory),
            config=dict(config),
            id=None if before is None else before.run_id,
            resume=None if before is None else "allow",
        )
        self._sent = before or RemoteRun.begin(directory, SERVICE, self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send one step, unless it was sent before a resume."""
        if not self._record.knows(step):
            self._run.log(dict(metrics), step=step)
            self._record.told(step)

    def image(self, step: int, name: str, path: Path) -> None:
        """Send a picture under `samples/NAME`."""
        if not self._record.knows(step):
            self._run.log({f"samples/{name}": self._wandb.Image(str(path))}, step=step)

    def position(self) -> int:
        """The step that comes next."""
        return self._record.last_step + 1

    def close(self, *, failed: bool = False) -> None:
        """End the run, as failed or finished."""
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=int(failed))

    @property
    def _record(self) -> RemoteRun:
        if self._sent is None or self._run is None:
            msg = f"{SERVICE} is not open"
            raise RuntimeError(msg)
        return self._sent
