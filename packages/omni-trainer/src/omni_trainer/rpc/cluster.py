"""Joins a Ray cluster, or starts one that only this machine can reach."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import ray
import structlog

from omni_trainer.rpc.environment import ADDRESS, ONE_MACHINE

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
    with _own_sigterm():
        if os.environ.get(ADDRESS):
            ray.init(**quiet)
        else:
            _stay_on_loopback()
            ray.init(num_cpus=cpus, include_dashboard=False, **quiet)
    log.info("ray.connected", resources=available())
    return True


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep the process's own way to end on SIGTERM, which `ray.init` replaces by an exit code of 15."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _stay_on_loopback() -> None:
    """Keep a Ray that is about to start off the network, also where ray was imported by others first."""
    os.environ.setdefault(ONE_MACHINE, "0")
    constants: Any = import_module("ray._private.ray_constants")
    constants.ENABLE_RAY_CLUSTER = constants.env_bool(ONE_MACHINE, False)


def available() -> dict[str, float]:
    """Ask the cluster what is free."""
    ask: Any = ray.available_resources
    return dict(ask())


def worker_environment(threads: int) -> dict[str, dict[str, str]]:
    """Make the runtime environment of a worker: its threads, which sleep while they wait."""
    return {"env_vars": {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}}
