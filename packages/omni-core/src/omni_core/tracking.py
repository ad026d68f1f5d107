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
                cut back to; None starts anew.
        """

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one step's metrics: finite numbers under unique names."""

    def image(self, step: int, name: str, path: Path) -> None:
        """Show a picture that was written to *path*; a tracker without pictures ignores it."""

    def position(self) -> int | None:
        """Where the next entry goes, for `open(offset=...)`; None if the tracker cannot be cut back."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Write what is buffered."""
