"""Scorers on Ray: a trajectory goes to the scorer with the least to do, and only scores come back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import ray

from omni_core.options import RewardConfig
from omni_core.reward import RewardInput, RewardResult
from omni_trainer.group import Ref
from omni_trainer.reward_pool import ROLE, PoolCounts, RewardPool, add_counts
from omni_trainer.rpc.failures import first_failure
from omni_trainer.rpc.ray_group import RayGroup
from omni_trainer.workers import process
from omni_trainer.workers.reward import RewardWorker


@attrs.frozen
class ScorerFactory:
    """Makes a scorer in its actor."""

    name: str
    options: RewardConfig

    def __call__(self, place: process.Place, store: Any) -> RewardWorker:
        """Build the scorer (its models are loaded by `setup`)."""
        del store
        process.prepare(place)
        return RewardWorker(self.name, self.options)


class RayRewardPool(RewardPool):
    """Built on a group of actors without collectives."""

    def __init__(
        self,
        name: str,
        options: RewardConfig,
        *,
        seed: int,
        resources: Mapping[str, float],
        start_timeout: float = 120.0,
    ) -> None:
        self.group = RayGroup(
            ScorerFactory(name, options),
            size=options.workers,
            resources=resources,
            role=ROLE,
            collective=False,
            start_timeout=start_timeout,
        )
        self._seed = seed
        self._waiting: dict[Any, tuple[int, int]] = {}
        """Reference of a result -> (key, scorer)."""
        self._load: Counter[int] = Counter()

    def start(self) -> None:
        """Make the actors and load the models."""
        self.group.start()
        self.group.broadcast("setup", self._seed)

    def submit(self, key: int, ref: Ref, inputs: Sequence[RewardInput]) -> None:
        """Hand the trajectory to the scorer with the least to do; returns at once."""
        rank = min(range(self.group.size), key=lambda scorer: (self._load[scorer], scorer))
        self._load[rank] += 1
        result = self.group.begin(rank, "score", inputs, refs=[ref])
        self._waiting[result] = (key, rank)

    def collect(self) -> dict[int, list[RewardResult]]:
        """Wait for every scorer."""
        found: dict[int, list[RewardResult]] = {}
        waiting, self._waiting = self._waiting, {}
        self._load.clear()
        while waiting:
            (done, *_), _ = ray.wait(list(waiting), num_returns=1)
            key, rank = waiting.pop(done)
            try:
                found[key] = ray.get(done)
            except Exception as exc:  # noqa: BLE001 -- whatever Ray raises is a worker's failure
                others = {ref: other for ref, (_, other) in waiting.items()}
                raise first_failure(ROLE, rank, exc, others) from None
        return found

    def counts(self) -> PoolCounts:
        """Add up what the scorers counted."""
        return add_counts(self.group.broadcast("counts"))

    def close(self) -> None:
        """End the actors."""
        self._waiting.clear()
        self.group.shutdown()
