"""Ranks and scorers of a run on Ray, its resources checked first."""

from __future__ import annotations

import os
from typing import Any

import ray

from omni_core import device as devices
from omni_trainer.config import RunConfig
from omni_trainer.group import WorkerGroup
from omni_trainer.reward_pool import NoRewards, RewardPool
from omni_trainer.rpc import cluster
from omni_trainer.rpc.environment import ADDRESS
from omni_trainer.rpc.ray_group import RankWorker, RayGroup
from omni_trainer.rpc.resources import wait_for_resources
from omni_trainer.rpc.reward_pool import RayRewardPool
from omni_trainer.workers.actor_rollout_ref import ActorRolloutRefConfig, ActorRolloutRefWorker


class RayRanks(RayGroup):
    """The ranks of a run: connects Ray, and checks that ranks and scorers fit before one starts."""

    def __init__(self, config: RunConfig, worker: ActorRolloutRefConfig) -> None:
        trainer = config.trainer
        super().__init__(
            RankWorker(ActorRolloutRefWorker, worker),
            size=trainer.ranks,
            resources=rank_resources(config),
            threads=trainer.threads,
            start_timeout=trainer.start_timeout,
        )
        self.config = config
        self.others: list[Any] = []
        """Demands of other roles that have to fit beside the ranks."""
        self._connected = False

    def start(self) -> None:
        """Connect, check, start."""
        trainer = self.config.trainer
        alone = not os.environ.get(ADDRESS) and not ray.is_initialized()
        self._connected = cluster.connect()
        wait_for_resources(
            [self.demand, *self.others],
            cluster.available,
            timeout=trainer.start_timeout,
            can_grow=not alone,
        )
        super().start()

    def shutdown(self) -> None:
        """End the ranks, and Ray if it was started for them."""
        super().shutdown()
        if self._connected:
            ray.shutdown()
            self._connected = False


def rank_resources(config: RunConfig) -> dict[str, float]:
    """What one rank takes: a device, and cores."""
    trainer = config.trainer
    kind = devices.available()[0] if trainer.device == "auto" else trainer.device
    found = {"CPU": trainer.cpus_per_rank}
    resource = devices.ray_resource(kind)
    if resource != "CPU":
        found[resource] = 1.0
    return found


def describe_workers(
    config: RunConfig, worker: ActorRolloutRefConfig
) -> tuple[WorkerGroup, RewardPool]:
    """Describe ranks and scorers of a run; none is started."""
    group = RayRanks(config, worker)
    if config.reward is None:
        return group, NoRewards()
    pool = RayRewardPool(
        config.reward.name,
        config.reward.options,
        seed=config.seeds.reward,
        resources={"CPU": config.trainer.cpus_per_scorer},
        start_timeout=config.trainer.start_timeout,
    )
    group.others.append(pool.group.demand)
    return group, pool
