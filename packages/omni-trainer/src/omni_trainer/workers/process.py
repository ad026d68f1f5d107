"""A worker's process: its place among the ranks, its threads and the group that its collectives run in."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import attrs
import structlog
import torch
import torch.distributed as dist

from omni_core import device as devices
from omni_core import loopback, plugins

LOOPBACK = "127.0.0.1"
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""A rank that waits longer for the others gives up."""

_TCPStore: Any = dist.TCPStore  # type: ignore[attr-defined]  # public, but its stub is not
_HashStore: Any = dist.HashStore  # type: ignore[attr-defined]

log = structlog.get_logger()


@attrs.frozen(kw_only=True)
class Place:
    """Where a rank stands."""

    role: str = "actor"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Among the ranks of its machine."""
    threads: int = 1
    """CPU threads."""
    registered: Mapping[tuple[str, str], plugins.Plugin] = attrs.field(factory=dict)
    """(group, name) -> plugins that the driver registered without installing them."""


def registered_plugins() -> dict[tuple[str, str], plugins.Plugin]:
    """Collect what this process registered, so that the workers of its run know it too."""
    return {
        (group, name): plugin
        for group in plugins.GROUPS
        for name, plugin in plugins.registry(group).registered().items()
    }


def prepare(place: Place) -> None:
    """Set this process up for its rank: its threads, and what the driver registered."""
    torch.set_num_threads(place.threads)
    for (group, name), plugin in place.registered.items():
        registry = plugins.registry(group)
        if name not in registry.names():
            registry.register(name, plugin)


def stay_on_loopback() -> None:
    """Let the collectives of this process listen on this machine alone: all of its ranks are here."""
    loopback.stay()


class Rendezvous:
    """The store through which ranks find each other; rank 0 holds it."""

    def __init__(self, *, host: str, port: int, is_master: bool) -> None:
        if host == LOOPBACK:
            stay_on_loopback()
        self.store = _TCPStore(
            host, port, is_master=is_master, wait_for_workers=False, timeout=timedelta(minutes=5)
        )

    @property
    def port(self) -> int:
        """Where the store listens (chosen by the system)."""
        return int(self.store.port)


def join(place: Place, device: torch.device, store: Any = None) -> bool:
    """Join the process group of all ranks; None starts a group of one.

    Returns:
        Whether a group was made: False if this process already is in one.

    Raises:
        ValueError: this process is in a group of another size.
    """
    if dist.is_initialized():
        if dist.get_world_size() != place.world_size:
            msg = f"this process is in a group of {dist.get_world_size()} ranks, not {place.world_size}"
            raise ValueError(msg)
        return False
    with loopback.only() if store is None else nullcontext():
        dist.init_process_group(
            devices.collective_backend(device),
            store=_HashStore() if store is None else store,
            rank=place.rank,
            world_size=place.world_size,
            timeout=COLLECTIVE_TIMEOUT,
        )
    log.debug("process_group.joined", world_size=place.world_size, backend=dist.get_backend())
    return True


def leave() -> None:
    """Leave the process group; whatever was sharded in it must have been let go before.

    A sharded module that is freed only when the interpreter ends can take the process with it, group
    or no group, so what nobody holds is collected here.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
