"""metrics.jsonl: one line of finite numbers for each step, and never two for one.

A line is on the disk when `log` returns, so the position that a checkpoint holds stays true after a
crash; a resume cuts the file back to it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from omni_core.recipe import NoOptions
from omni_core.tracking import Tracker

FILE = "metrics.jsonl"


class JsonlTracker(Tracker):
    """Writes `metrics.jsonl` in the run directory."""

    def __init__(self, options: NoOptions | None = None) -> None:
        del options
        self._file: BinaryIO | None = None
        self._last: int | None = None

    def open(self, directory: Path, config: Mapping[str, Any], *, offset: int | None) -> None:
        """Start a new file, or go on at byte *offset* of the one that is there.

        Raises:
            ValueError: the file is shorter than *offset*, or *offset* is inside a line.
        """
        del config
        path = directory / FILE
        if offset is None:
            self._file = path.open("wb")
            self._last = None
            return
        content = path.read_bytes() if path.exists() else b""
        if len(content) < offset or (offset and content[offset - 1 : offset] != b"\n"):
            msg = f"{path} has {len(content)} bytes and no line that ends at {offset}"
            raise ValueError(msg)
        kept = content[:offset].splitlines()
        self._last = json.loads(kept[-1])["step"] if kept else None
        self._file = path.open("r+b" if path.exists() else "wb")
        self._file.truncate(offset)
        self._file.seek(offset)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the step's line: `step`, then the metrics in their order.

        Raises:
            ValueError: a metric is not a finite number or is called `step`, or the step is not above
                the last one.
        """
        if self._last is not None and step <= self._last:
            msg = f"{FILE}: step {step} after step {self._last}"
            raise ValueError(msg)
        wrong = [name for name, value in metrics.items() if not math.isfinite(value)]
        if wrong or "step" in metrics:
            shown = (
                ", ".join(f"{name}={metrics[name]}" for name in wrong) or "a metric named 'step'"
            )
            msg = f"{FILE}: step {step}: {shown}; metrics are finite numbers"
            raise ValueError(msg)
        file = self._opened()
        file.write(json.dumps({"step": step, **metrics}).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
        self._last = step

    def position(self) -> int:
        """Bytes written so far."""
        return self._opened().tell()

    def close(self, *, failed: bool = False) -> None:
        """Close the file."""
        del failed
        if self._file is not None:
            self._file.close()
            self._file = None

    def _opened(self) -> BinaryIO:
        if self._file is None:
            msg = f"{FILE} is not open"
            raise RuntimeError(msg)
        return self._file


def read_metrics(directory: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield (step, metrics) of a run directory's metrics.jsonl; nothing where there is none.

    A last line without its end was being written when the process stopped: it is left out.
    """
    path = directory / FILE
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                values = json.loads(line)
                yield values.pop("step"), values
