"""Ranks and scorers of a run on Ray, within a session that has checked that they fit."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import ray

from omni_core import device as devices
from omni_trainer.config import RunConfig
from omni_trainer.reward_pool import NoRewards, RewardPool
from omni_trainer.rpc import cluster
from omni_trainer.rpc.environment import ADDRESS
from omni_trainer.rpc.ray_group import RankWorker, RayGroup
from omni_trainer.rpc.resources import Demand, wait_for_resources
from omni_trainer.rpc.reward_pool import RayRewardPool
from omni_trainer.rpc.rollout_server import RolloutServers
from omni_trainer.run_workers import RunWorkers
from omni_trainer.workers.actor_rollout_ref import ActorRolloutRefWorker
from omni_trainer.workers.rank import ActorRolloutRefConfig
from omni_trainer.workers.rollout_server import RolloutServerConfig


@contextmanager
def session(demands: Sequence[Demand], *, timeout: float) -> Iterator[None]:
    """Connect Ray, check that everything fits before any of it starts, and disconnect at the end.

    Raises:
        ResourceError: it does not fit within *timeout* seconds; a table says what is missing.
    """
    grows = bool(os.environ.get(ADDRESS)) or ray.is_initialized()
    connected = cluster.connect()
    try:
        wait_for_resources(demands, cluster.available, timeout=timeout, can_grow=grows)
        yield
    finally:
        if connected:
            ray.shutdown()


def rank_resources(config: RunConfig) -> dict[str, float]:
    """What one rank takes: a device, and cores."""
    trainer = config.trainer
    kind = devices.available()[0] if trainer.device == "auto" else trainer.device
    found = {"CPU": trainer.cpus_per_rank}
    resource = devices.ray_resource(kind)
    if resource != "CPU":
        found[resource] = 1.0
    return found


def server_resources(config: RunConfig) -> dict[str, float]:
    """What one rollout server takes: devices of the kind that ranks use, and cores."""
    trainer = config.trainer
    found = {"CPU": trainer.cpus_per_server}
    for resource in rank_resources(config):
        if resource != "CPU":
            found[resource] = trainer.devices_per_server
    return found


def describe_workers(config: RunConfig, worker: ActorRolloutRefConfig) -> RunWorkers:
    """Describe the session, the ranks, the scorers and the rollout servers of a run; none is started."""
    trainer = config.trainer
    group = RayGroup(
        RankWorker(ActorRolloutRefWorker, worker),
        size=trainer.ranks,
        resources=rank_resources(config),
        threads=trainer.threads,
        start_timeout=trainer.start_timeout,
    )
    demands = [group.demand]
    pool: RewardPool = NoRewards()
    if config.reward is not None:
        scorers = RayRewardPool(
            config.reward.name,
            config.reward.options,
            seed=config.seeds.reward,
            resources={"CPU": trainer.cpus_per_scorer},
            start_timeout=trainer.start_timeout,
        )
        demands.append(scorers.group.demand)
        pool = scorers
    servers = None
    if worker.rollout_options.servers:
        servers = RolloutServers(
            RolloutServerConfig(
                rollout=worker.rollout,
                options=worker.rollout_options,
                model=worker.actor.model,
            ),
            resources=server_resources(config),
            threads=trainer.threads,
            start_timeout=trainer.start_timeout,
        )
        demands.append(servers.group.demand)
    return RunWorkers(
        session=session(demands, timeout=trainer.start_timeout),
        group=group,
        pool=pool,
        servers=servers,
    )
