"""A tracker writes what a run reports; the plugin of `omni.trackers`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Tracker(ABC):
    """Built as `Tracker(options)`; opened once by the driver of a run."""

    @abstractmethod
    def open(self, directory: Path, config: Mapping[str, Any], *, offset: int | None) -> None:
        """Start or go on.

        Args:
            directory: The run directory.
            config: The resolved config as plain data.
            offset: On a resume, the position (`position()` at the checkpoint) that later entries are
                cut back to; None starts anew, also where an earlier start left entries.
        """

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one step's metrics: finite numbers under unique names."""

    def image(self, step: int, name: str, path: Path) -> None:
        """Show a picture that was written to *path*; a tracker without pictures ignores it.

        It comes before the metrics of its step.
        """

    def position(self) -> int | None:
        """Where the next entry goes, for `open(offset=...)`: bytes, a step, or whatever the tracker counts.

        What came before is safe by then. None: the tracker always starts anew.
        """
        return None

    @abstractmethod
    def close(self, *, failed: bool = False) -> None:
        """Write what is buffered.

        Args:
            failed: The run ends by an error or a signal.
        """
