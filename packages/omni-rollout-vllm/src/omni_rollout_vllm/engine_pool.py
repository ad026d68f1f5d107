"""The engines of one rollout: each takes the next batch when it is free, so the least loaded gets it.

An engine that dies while it samples is started again, gets the weights that were pushed last, and runs
its batch again; samples do not depend on the engine, so nobody sees a difference.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from omni_core.rollout import RolloutTimeoutError
from omni_rollout_vllm import messages
from omni_rollout_vllm.counts import Counts
from omni_rollout_vllm.engine_link import EngineDiedError, EngineLink
from omni_rollout_vllm.jobs import Work
from omni_rollout_vllm.options import TimeLimits

log = structlog.get_logger()

Restore = Callable[[EngineLink], None]
"""Gives a fresh engine the weights that were pushed last."""
Finished = Callable[[Work, messages.SampledBatch | Exception], None]
"""Takes what a batch gave; called by an engine's thread, under the pool's lock."""


class EnginePool:
    """See the module's docstring."""

    def __init__(
        self,
        links: Sequence[EngineLink],
        *,
        limits: TimeLimits,
        max_restarts: int,
        restore: Restore,
        finished: Finished,
    ) -> None:
        self.links = list(links)
        self.counts = Counts()
        self.lock = threading.Condition()
        self._limits = limits
        self._max_restarts = max_restarts
        self._restore = restore
        self._finished = finished
        self._queue: deque[Work] = deque()
        self._running: dict[int, Work] = {}
        self._held = True
        self._closed = False
        self._threads: list[threading.Thread] = []

    # -- life --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start every engine, side by side.

        Raises:
            EngineDiedError, RolloutEngineError: one does not start; the others are ended.
        """
        failures: list[Exception] = []

        def run(link: EngineLink) -> None:
            try:
                link.start(timeout=self._limits.start)
            except Exception as error:  # noqa: BLE001 -- raised below, in the caller's thread
                failures.append(error)

        starting = [threading.Thread(target=run, args=(link,)) for link in self.links]
        for thread in starting:
            thread.start()
        for thread in starting:
            thread.join()
        if failures:
            self.end()
            raise failures[0]
        for link in self.links:
            thread = threading.Thread(target=self._serve, args=(link,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def end(self) -> None:
        """End every engine; `start` may be called again."""
        with self.lock:
            self._closed = True
            self.lock.notify_all()
        for thread in self._threads:
            thread.join(self._limits.batch)
        for link in self.links:
            link.end()
        self._threads = []
        self._closed = False

    # -- work --------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Batches that no engine has taken yet."""
        return len(self._queue)

    def add(self, work: Sequence[Work]) -> None:
        """Queue batches."""
        with self.lock:
            self._queue.extend(work)
            self.counts.queue = max(self.counts.queue, len(self._queue))
            self.lock.notify_all()

    def drop(self, unwanted: Callable[[Work], bool]) -> None:
        """Forget batches that no engine has taken yet."""
        with self.lock:
            self._queue = deque(work for work in self._queue if not unwanted(work))

    def hold(self, *, timeout: float) -> None:
        """Let no engine take a batch; returns when none runs.

        Raises:
            RolloutTimeoutError: one still runs after *timeout* seconds.
        """
        with self.lock:
            self._held = True
            if not self.lock.wait_for(lambda: not self._running, timeout):
                names = ", ".join(work.batch.name for work in self._running.values())
                msg = f"pause: {names} still run after {timeout} s"
                raise RolloutTimeoutError(msg)

    def release(self) -> None:
        """Let engines take batches."""
        with self.lock:
            self._held = False
            self.lock.notify_all()

    def ask_all(self, request: Any, *, timeout: float) -> list[Any]:
        """Ask every engine; only while held.

        Raises:
            RolloutEngineError, WeightMismatchError, RolloutTimeoutError, EngineDiedError: of the first
                that fails.
        """
        return [link.call(request, timeout=timeout) for link in self.links]

    def _next(self, number: int) -> Work | None:
        with self.lock:
            self.lock.wait_for(lambda: self._closed or (self._queue and not self._held))
            if self._closed:
                return None
            work = self._running[number] = self._queue.popleft()
            return work

    def _serve(self, link: EngineLink) -> None:
        while (work := self._next(link.number)) is not None:
            started = time.perf_counter()
            try:
                found: messages.SampledBatch | Exception = self._sample(link, work)
            except Exception as error:  # noqa: BLE001 -- raised by `poll`, in the caller's thread
                found = error
            with self.lock:
                del self._running[link.number]
                self.counts.rows += len(work.batch.rows)
                self.counts.busy_seconds += time.perf_counter() - started
                self._finished(work, found)
                self.lock.notify_all()

    def _sample(self, link: EngineLink, work: Work) -> messages.SampledBatch:
        while True:
            try:
                found: messages.SampledBatch = link.call(work.batch, timeout=self._limits.batch)
                return found
            except (EngineDiedError, RolloutTimeoutError) as error:
                self.restart(link, error)
                self._restore(link)

    def restart(self, link: EngineLink, error: Exception) -> None:
        """Start a lost engine again; it has the weights of the model's folder.

        Raises:
            EngineDiedError: too many were lost.
        """
        with self.lock:
            self.counts.restarts += 1
            count = self.counts.restarts
        if count > self._max_restarts:
            msg = (
                f"{count} engines were lost, rollout.max_restarts is {self._max_restarts}: {error}"
            )
            raise EngineDiedError(msg) from error
        log.warning("engine.restart", engine=link.number, restart=count, error=str(error)[:200])
        link.start(timeout=self._limits.start)
