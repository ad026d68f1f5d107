"""Joins a Ray cluster, or starts one that only this machine can reach."""

from __future__ import annotations

import logging
import os
from typing import Any

import ray
import structlog

from omni_trainer.rpc.environment import ADDRESS, QUIET

log = structlog.get_logger()


def connect(*, cpus: int | None = None) -> bool:
    """Make Ray usable in this process: join the cluster of RAY_ADDRESS, or start Ray here.

    Args:
        cpus: Cores that a Ray started here has; None counts the machine's.

    Returns:
        Whether Ray was started or joined by this call: `ray.shutdown` is then the caller's.
    """
    if ray.is_initialized():
        return False
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
    if os.environ.get(ADDRESS):
        ray.init(**quiet)
    else:
        ray.init(num_cpus=cpus, include_dashboard=False, **quiet)
    log.info("ray.connected", resources=available())
    return True


def available() -> dict[str, float]:
    """Ask the cluster what is free."""
    ask: Any = ray.available_resources
    return dict(ask())


def worker_environment(threads: int) -> dict[str, dict[str, str]]:
    """Make the runtime environment of a worker: its threads, which sleep while they wait."""
    own = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    return {"env_vars": {**QUIET, **own}}
