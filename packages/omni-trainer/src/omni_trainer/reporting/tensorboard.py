"""TensorBoard event files: scalars of every step, and the picture grids.

`tensorboard --logdir RUN/tensorboard`. A resume purges what was written after its checkpoint, so no
step is there twice.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

from omni_core.recipe import NoOptions
from omni_core.tracking import Tracker

FOLDER = "tensorboard"


class TensorBoardTracker(Tracker):
    """Writes `tensorboard/` in the run directory."""

    def __init__(self, options: NoOptions | None = None) -> None:
        del options
        self._writer: SummaryWriter | None = None
        self._next = 0

    def open(self, directory: Path, config: Mapping[str, Any], *, offset: int | None) -> None:
        """Start anew, or hide whatever an earlier writer said of step *offset* and later ones."""
        folder = directory / FOLDER
        if offset is None:
            shutil.rmtree(folder, ignore_errors=True)
        self._next = offset or 0
        self._writer = SummaryWriter(str(folder), purge_step=offset)
        if offset is None:
            text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
            indented = "".join(f"    {line}\n" for line in text.splitlines())
            self._writer.add_text("config", indented, 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one scalar for each metric; on the disk when this returns."""
        writer = self._opened()
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()
        self._next = step + 1

    def image(self, step: int, name: str, path: Path) -> None:
        """Write the picture at *path* under `samples/NAME`."""
        with Image.open(path) as picture:
            pixels = np.asarray(picture.convert("RGB"))
        writer = self._opened()
        writer.add_image(f"samples/{name}", pixels, step, dataformats="HWC")

    def position(self) -> int:
        """The step that comes next: its metrics are not written yet."""
        return self._next

    def close(self, *, failed: bool = False) -> None:
        """Close the files."""
        del failed
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _opened(self) -> SummaryWriter:
        if self._writer is None:
            msg = f"{FOLDER} is not open"
            raise RuntimeError(msg)
        return self._writer
