"""What the processes of a launched run say to each other.

Two roads: the launcher's store, which is there before any process group and outlives a broken one
(sessions begin and end there, and failures are told there, as text), and a gloo group of their own for
requests, results and samples. Objects travel as torch's object collectives send them, between processes
of one run, as they do on Ray.
"""

from __future__ import annotations

import gc
import json
import os
import time
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from omni_core import device as devices
from omni_trainer.workers import process

PATIENCE = timedelta(days=7)
"""How long a rank waits to be asked for something: a driver may be busy with anything."""
GRACE = 5.0
"""Seconds in which the rank that failed first can say so, after another one lost it."""

_PrefixStore: Any = dist.PrefixStore  # type: ignore[attr-defined]  # public, but its stub is not
_POLL = 0.05
_END, _STOP = "end", "stop"


@cache
def launchers_store() -> Any:
    """Return the store that MASTER_ADDR and MASTER_PORT name."""
    here = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    if here or os.environ.get("MASTER_ADDR") in ("localhost", process.LOOPBACK):
        process.stay_on_loopback()
    found: Any = next(iter(rendezvous("env://")))
    return _PrefixStore("omni", found[0])


class Sessions:
    """Rank 0 begins them, one after another; the others wait for the next, or the end."""

    def __init__(self) -> None:
        self.count = 0

    def begin(self, device: str) -> int:
        """Let all ranks join the next session; returns its number."""
        number, self.count = self.count, self.count + 1
        launchers_store().set(f"session/{number}", device)
        return number

    def end(self) -> None:
        """Let the others go."""
        number, self.count = self.count, self.count + 1
        launchers_store().set(f"session/{number}", _END)

    def next(self) -> tuple[int, str] | None:
        """Wait for the next session: its number and the device type that it is on; None at the end."""
        number, self.count = self.count, self.count + 1
        store = launchers_store()
        store.wait([f"session/{number}"], PATIENCE)
        text = store.get(f"session/{number}").decode()
        return None if text == _END else (number, text)


SESSIONS = Sessions()


class Link:
    """One session of this process: the process group, and the road for requests."""

    def __init__(self, number: int, device: str) -> None:
        self.rank = int(os.environ["RANK"])
        self.size = int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._store = _PrefixStore(f"run/{number}", launchers_store())
        place = process.Place(rank=self.rank, world_size=self.size)
        own = devices.resolve(device, local_rank=self.local_rank)
        self._made = process.join(place, own, _PrefixStore("group", self._store))
        self.group: Any = dist.new_group(
            backend=devices.collective_backend("cpu"), timeout=PATIENCE
        )

    def say(self, request: Any) -> None:
        """Ask something of all other ranks; rank 0 alone."""
        dist.broadcast_object_list([request], src=0, group=self.group)

    def hear(self) -> Any:
        """Wait for what rank 0 asks next."""
        found: list[Any] = [None]
        dist.broadcast_object_list(found, src=0, group=self.group)
        return found[0]

    def collect(self, result: Any) -> list[Any]:
        """Bring every rank's result to rank 0, in their order; empty elsewhere."""
        found: list[Any] = [None] * self.size if self.rank == 0 else []
        dist.gather_object(result, found or None, dst=0, group=self.group)
        return found

    def send(self, found: Any, rank: int) -> None:
        """Send an object to another rank, which receives at the same time."""
        dist.send_object_list([found], dst=rank, group=self.group)

    def receive(self, rank: int) -> Any:
        """Receive what another rank sends."""
        found: list[Any] = [None]
        dist.recv_object_list(found, src=rank, group=self.group)
        return found[0]

    def tell_failure(self, role: str, error: str, details: str) -> bool:
        """Say that this rank failed; returns whether it is the first to say so."""
        text = json.dumps({"role": role, "rank": self.rank, "error": error, "details": details})
        first = int(self._store.add("failures", 1)) == 1
        if first:
            self._store.set("failure", text)
        return first

    def failure(self, *, seconds: float = GRACE) -> dict[str, Any] | None:
        """Return what the first rank that failed said, if any does within so many seconds."""
        until = time.monotonic() + seconds
        while not self._store.check(["failure"]):
            if time.monotonic() > until:
                return None
            time.sleep(_POLL)
        found: dict[str, Any] = json.loads(self._store.get("failure").decode())
        self._store.set("heard", "")
        return found

    def wait_until_heard(self) -> None:
        """Give rank 0 a moment to read this rank's failure before its process ends."""
        until = time.monotonic() + GRACE
        while not self._store.check(["heard"]) and time.monotonic() < until:
            time.sleep(_POLL)

    def tell_stop(self, number: int) -> None:
        """Say that this rank had a signal."""
        self._store.set(_STOP, str(number))

    def stop_asked(self) -> int | None:
        """Return the number of a signal that another rank had."""
        return int(self._store.get(_STOP)) if self._store.check([_STOP]) else None

    def close(self) -> None:
        """Leave the group; what was sharded in it was let go before."""
        gc.collect()
        if self._made:
            process.leave()
