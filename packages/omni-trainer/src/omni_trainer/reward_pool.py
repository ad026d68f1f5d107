"""Scorers that work while sampling goes on: what is submitted is scored, whoever has time does it."""

from __future__ import annotations

import queue
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import attrs

from omni_core.reward import RewardInput, RewardResult
from omni_trainer.group import Ref, failure
from omni_trainer.stopping import StopRequest

ROLE = "reward"


@attrs.frozen(kw_only=True)
class PoolCounts:
    """What the scorers of a pool have done so far."""

    retries: int = 0
    """Batches that were tried again."""
    seconds: float = 0.0
    """Time spent scoring, of all scorers together."""
    resident: int = 0
    """Bytes that the largest scorer's process holds; 0 where scorers live in the driver's."""


class RewardPool(ABC):
    """Scores trajectories. `start` first, `close` last, also after an error."""

    @abstractmethod
    def start(self) -> None:
        """Load every scorer's models."""

    @abstractmethod
    def submit(self, key: int, ref: Ref, inputs: Sequence[RewardInput]) -> None:
        """Score the trajectory that *ref* refers to; *key* names it until it is collected."""

    @abstractmethod
    def collect(self) -> dict[int, list[RewardResult]]:
        """Wait for everything submitted since the last call.

        Raises:
            WorkerError: a scorer failed in a way that is not a sample's failure.
        """

    def collect_until(self, stop: StopRequest) -> dict[int, list[RewardResult]]:
        """Collect, unless the run is to stop: waiting for scorers may take long, and can be left at once.

        Raises:
            StopAskedError: it is.
            WorkerError: as `collect`.
        """
        with stop.at_once():
            return self.collect()

    @abstractmethod
    def counts(self) -> PoolCounts:
        """Add up what the scorers counted."""

    @abstractmethod
    def close(self) -> None:
        """Free the models; may be called twice."""


class LocalRewardPool(RewardPool):
    """Scorers in threads of the driver's process, or (without overlap) in the driver's own thread."""

    def __init__(self, factory: Callable[[], Any], *, workers: int, overlap: bool) -> None:
        self._factory = factory
        self._workers = workers if overlap else 1
        self._executor = ThreadPoolExecutor(self._workers, ROLE) if overlap else None
        self._idle: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._made: list[Any] = []
        self._waiting: dict[int, Future[list[RewardResult]] | list[RewardResult]] = {}

    def start(self) -> None:
        """Make the scorers, one for each thread: a scorer is not shared."""
        for rank in range(self._workers):
            try:
                worker = self._factory()
                worker.setup()
            except Exception as exc:
                raise failure(ROLE, rank, exc, "setup") from exc
            self._made.append(worker)
            self._idle.put((rank, worker))

    def submit(self, key: int, ref: Ref, inputs: Sequence[RewardInput]) -> None:
        """Score now, or as soon as a thread is free."""
        if self._executor is None:
            self._waiting[key] = self._score(ref, inputs)
        else:
            self._waiting[key] = self._executor.submit(self._score, ref, inputs)

    def _score(self, trajectory: Any, inputs: Sequence[RewardInput]) -> list[RewardResult]:
        rank, worker = self._idle.get()
        try:
            found: list[RewardResult] = worker.score(inputs, trajectory)
        except Exception as exc:
            raise failure(ROLE, rank, exc, "score") from exc
        finally:
            self._idle.put((rank, worker))
        return found

    def collect(self) -> dict[int, list[RewardResult]]:
        """Wait for the threads."""
        waiting, self._waiting = self._waiting, {}
        return {
            key: found.result() if isinstance(found, Future) else found
            for key, found in waiting.items()
        }

    def counts(self) -> PoolCounts:
        """Add up what the scorers counted."""
        found = add_counts([worker.counts() for worker in self._made])
        return attrs.evolve(found, resident=0)

    def close(self) -> None:
        """End the threads, then free the models."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
        made, self._made = self._made, []
        for worker in made:
            worker.close()


class NoRewards(RewardPool):
    """For algorithms that score nothing."""

    def start(self) -> None:
        """Nothing to load."""

    def submit(self, key: int, ref: Ref, inputs: Sequence[RewardInput]) -> None:
        """Nothing to score."""

    def collect(self) -> dict[int, list[RewardResult]]:
        """No result."""
        return {}

    def counts(self) -> PoolCounts:
        """Nothing was done."""
        return PoolCounts()

    def close(self) -> None:
        """Nothing to free."""


def add_counts(counts: Sequence[Any]) -> PoolCounts:
    """Add up the counts of several scorers."""
    return PoolCounts(
        retries=sum(count.retries for count in counts),
        seconds=sum(count.seconds for count in counts),
        resident=max((count.resident for count in counts), default=0),
    )
