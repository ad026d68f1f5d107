"""What a rollout's engines did since they were asked last, as numbers for a tracker."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import attrs


@attrs.define
class Counts:
    """Rows, seconds, queue and restarts are written under the pool's lock, by engines' threads too.

    What pushes took is written without it, by the thread that pushes and that takes the counts.
    """

    rows: int = 0
    busy_seconds: float = 0.0
    """Of all engines together."""
    queue: int = 0
    """Most batches that waited for an engine at once."""
    restarts: int = 0
    """Engines that were lost and started again, since the rollout was made."""
    pushed_bytes: int = 0
    pushing: dict[str, float] = attrs.field(factory=dict)
    """Part of a push -> its seconds."""
    _restarts_told: int = 0

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add to the seconds of a part of a push."""
        started = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - started
            self.pushing[part] = self.pushing.get(part, 0.0) + spent

    def take(self, *, engines: int) -> dict[str, float]:
        """Name everything, and begin anew."""
        found = {"queue": float(self.queue), "restarts": float(self.restarts - self._restarts_told)}
        if self.busy_seconds:
            found["images_per_second"] = self.rows * engines / self.busy_seconds
        if self.pushing:
            found["pushed_bytes"] = float(self.pushed_bytes)
            found |= {f"push_{part}_seconds": spent for part, spent in self.pushing.items()}
        self._restarts_told = self.restarts
        self.rows = self.queue = self.pushed_bytes = 0
        self.busy_seconds = 0.0
        self.pushing = {}
        return found
