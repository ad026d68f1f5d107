"""What a service was told of a run, kept in the run directory: a resume goes on with the same run there.

A service keeps what it was sent. The steps between a checkpoint and the stop are the same numbers when
they are trained again (timings aside), so they are not sent twice.
"""

from __future__ import annotations

import json
from pathlib import Path

import attrs

from omni_trainer.run_directory import write_json


@attrs.define
class RemoteRun:
    """The record of one service; `begin` or `found`, then `told` after each step."""

    path: Path
    run_id: str
    """The service's name of the run."""
    last_step: int = -1
    """Metrics up to this step were sent."""

    @classmethod
    def begin(cls, directory: Path, service: str, run_id: str) -> RemoteRun:
        """Start a record; an earlier one of the same directory is replaced."""
        made = cls(directory / f"{service}.json", run_id)
        made._write()
        return made

    @classmethod
    def found(cls, directory: Path, service: str) -> RemoteRun | None:
        """Read the record of an earlier start; None if there is none."""
        path = directory / f"{service}.json"
        if not path.is_file():
            return None
        held = json.loads(path.read_text(encoding="utf-8"))
        return cls(path, str(held["run_id"]), int(held["last_step"]))

    def knows(self, step: int) -> bool:
        """Whether the service has the step already."""
        return step <= self.last_step

    def told(self, step: int) -> None:
        """Note that everything up to *step* was sent."""
        self.last_step = step
        self._write()

    def _write(self) -> None:
        write_json(self.path, {"run_id": self.run_id, "last_step": self.last_step})
