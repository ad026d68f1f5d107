"""The rollout that all ranks share: a rank's client of the servers that hold it.

Requests are cut into batches that do not depend on where they are sampled, and each batch goes to the
server with the least to do, so samples are the same however many servers there are. Rank 0 alone pauses,
pushes and resumes; the other ranks take part in gathering the weights and agree with it on the version.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import attrs
import structlog

from omni_core.metrics import mean_by_name
from omni_core.options import DiffusionRolloutConfig, DiffusionSamplingConfig
from omni_core.rollout import (
    BaseRollout,
    RolloutHandle,
    RolloutState,
    RolloutStateError,
    UpdateReport,
    WeightMismatchError,
    WeightUpdate,
)
from omni_core.schedule import FlowMatchSchedule
from omni_core.trajectory import RolloutRequest, Trajectory
from omni_trainer.workers.server_adapter import ServerAdapter
from omni_trainer.workers.weight_transport import PushHeader, WeightSender, choose

log = structlog.get_logger()

AHEAD = 4
"""Batches of one rank that a server has at once: one runs, the others wait for it."""
PATIENCE = 0.05
"""Seconds that a poll waits for something to be finished."""

Pending = Any
"""A call that was begun."""


class ServerLink(ABC):
    """How one server is reached; what it raises is raised here.

    Raises:
        LostWorkerError: the server's process is gone (any method).
    """

    @abstractmethod
    def begin(self, method: str, *args: Any, **kwargs: Any) -> Pending:
        """Call a method of the server without waiting."""

    @abstractmethod
    def result(self, pending: Pending) -> Any:
        """Wait for what `begin` began."""

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the server."""
        return self.result(self.begin(method, *args, **kwargs))


class ServerLinks(ABC):
    """All servers."""

    links: Sequence[ServerLink]
    one_machine: bool
    """They are on the machine of this process."""

    @abstractmethod
    def finished(self, pending: Sequence[Pending], *, timeout: float) -> list[Pending]:
        """Return those that are finished; waits for one at most *timeout* seconds."""

    @abstractmethod
    def shared(self, value: Any) -> Any:
        """Make one large value ready to be given to several servers."""


_NOWHERE = RolloutHandle(-1, 0)


@attrs.define(eq=False)
class _Batch:
    """Requests that are sampled together, and what became of them."""

    job: int
    requests: tuple[RolloutRequest, ...]
    decode: bool
    server: int = -1
    handle: RolloutHandle = _NOWHERE
    """On its server."""

    @property
    def rows(self) -> int:
        return sum(len(request.samples) for request in self.requests)


class SharedRollout(BaseRollout):
    """Built in each rank, over links to the servers."""

    replays_exactly = False
    """The servers' processes and batches are not the rank's own."""

    def __init__(
        self,
        servers: ServerLinks,
        *,
        options: DiffusionRolloutConfig,
        rank: int,
        schedule: Callable[[DiffusionSamplingConfig], FlowMatchSchedule] | None = None,
    ) -> None:
        """Describe the client; no server is asked.

        Args:
            servers: The way to them.
            options: The rollout's.
            rank: This process's; 0 pushes.
            schedule: Answers `schedule`; None asks a server.
        """
        self.servers = servers
        self.options = options
        self.rank = rank
        self._adapters = [ServerAdapter(_answers(link)) for link in servers.links]
        self._schedule = schedule
        self._version = -1
        self._handles = itertools.count()
        self._queue: deque[_Batch] = deque()
        self._running: dict[Pending, _Batch] = {}
        self._left: dict[int, int] = {}
        """Handle -> requests that are not polled yet."""
        self._ready: dict[int, list[Trajectory]] = {}
        self._failed: dict[int, Exception] = {}
        self._load = [0] * len(servers.links)
        """Rows of this rank that each server has."""
        self._sender: WeightSender | None = None

    # -- what it is --------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        """Whether this rank pushes."""
        return self.rank == 0

    @property
    def state(self) -> RolloutState:
        """What the servers may be asked for now; of states that differ, the one that allows less."""
        order = list(RolloutState)
        return max((one.state for one in self._adapters), key=order.index)

    @property
    def weight_version(self) -> int:
        """Of the last push that this rank took part in; -1 before the first.

        It is not asked of the servers: ranks compare it to decide whether they gather the weights, and
        have to come to the same answer.
        """
        return self._version

    def schedule(self, sampling: DiffusionSamplingConfig) -> FlowMatchSchedule:
        """Return the schedule that the training engine's family means, or a server's rollout."""
        return (self._schedule or self._adapters[0].schedule)(sampling)

    # -- requests ----------------------------------------------------------------------------------

    def submit(self, requests: Sequence[RolloutRequest], *, decode: bool = True) -> RolloutHandle:
        """Cut requests into batches, and send as many as servers may have at once.

        Raises:
            RolloutStateError, ValueError: as a server's rollout does; of batches that wait here first,
                by `poll`.
        """
        if self.state not in (RolloutState.READY, RolloutState.PAUSED):
            msg = f"the rollout is {self.state.value}: nothing can be sampled before the next push"
            raise RolloutStateError(msg)
        handle = RolloutHandle(next(self._handles), len(requests))
        if requests:
            self._left[handle.id], self._ready[handle.id] = len(requests), []
            self._queue.extend(
                _Batch(handle.id, batch, decode)
                for batch in batches(requests, rows=self.options.batch_size)
            )
        try:
            self._send()
        except BaseException:
            self._forget(handle)
            raise
        return handle

    def _send(self) -> None:
        """Give waiting batches to the servers with the least to do."""
        count = len(self._load)
        while self._queue:
            under_way = [0] * count
            for batch in self._running.values():
                under_way[batch.server] += 1
            # Ranks begin with different servers.
            free = [server for server in range(count) if under_way[server] < AHEAD]
            if not free:
                return
            server = min(free, key=lambda one: (self._load[one], (one - self.rank) % count))
            batch = self._queue.popleft()
            batch.server = server
            batch.handle = self._adapters[server].submit(batch.requests, decode=batch.decode)
            pending = self.servers.links[server].begin("collect", batch.handle)
            self._running[pending] = batch
            self._load[server] += batch.rows

    def poll(self, handle: RolloutHandle) -> list[Trajectory]:
        """Return what finished since the last poll; waits a moment where that is nothing.

        Raises:
            KeyError: the handle is unknown, cancelled or drained.
            LostWorkerError: a server's process is gone.
            Exception: whatever a batch of it failed with on a server.
        """
        self._check(handle)
        if not self._ready[handle.id]:
            self._receive()
        if handle.id in self._failed:
            error = self._failed.pop(handle.id)
            self._forget(handle)
            raise error
        ready, self._ready[handle.id] = self._ready[handle.id], []
        self._left[handle.id] -= len(ready)
        if not self._left[handle.id]:
            del self._left[handle.id], self._ready[handle.id]
        return ready

    def _receive(self) -> None:
        for pending in self.servers.finished(list(self._running), timeout=PATIENCE):
            batch = self._running.pop(pending)
            self._load[batch.server] -= batch.rows
            try:
                self._ready[batch.job] += self.servers.links[batch.server].result(pending)
            except Exception as error:  # noqa: BLE001 -- raised by the poll of its own handle
                self._failed.setdefault(batch.job, error)
        self._send()

    def _check(self, handle: RolloutHandle) -> None:
        if handle.id not in self._left:
            msg = f"handle {handle.id} is unknown, cancelled or drained"
            raise KeyError(msg)

    def done(self, handle: RolloutHandle) -> bool:
        """Whether nothing of *handle* is left."""
        return handle.id not in self._left

    def cancel(self, handle: RolloutHandle) -> None:
        """Drop what was not sampled or polled.

        Raises:
            KeyError: the handle is unknown, cancelled or drained.
        """
        self._check(handle)
        self._forget(handle)

    def _forget(self, handle: RolloutHandle) -> None:
        for kept in (self._left, self._ready, self._failed):
            kept.pop(handle.id, None)
        self._queue = deque(batch for batch in self._queue if batch.job != handle.id)
        for pending, batch in list(self._running.items()):
            if batch.job != handle.id:
                continue
            del self._running[pending]
            self._load[batch.server] -= batch.rows
            with suppress(KeyError):  # it was finished meanwhile
                self._adapters[batch.server].cancel(batch.handle)

    # -- weights -----------------------------------------------------------------------------------

    def _all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every server, side by side."""
        begun = [(link, link.begin(method, *args)) for link in self.servers.links]
        return [link.result(pending) for link, pending in begun]

    def pause(self) -> None:
        """Return once no server runs a request; for all ranks, by rank 0."""
        if self.leads:
            self._all("answer", "pause")

    def resume(self) -> None:
        """Let the servers sample again; for all ranks, by rank 0."""
        if self.leads:
            self._all("answer", "resume")

    def update(self, update: WeightUpdate) -> UpdateReport:
        """Push to every server, by rank 0; the others only learn the version.

        Raises:
            RolloutStateError, WeightMismatchError, ValueError: as a server's rollout does.
        """
        started = time.perf_counter()
        if self.leads:
            self._push(update)
        self._version = update.version
        return UpdateReport(
            version=update.version,
            bound=tuple(update.tensors),
            seconds=time.perf_counter() - started,
            nbytes=sum(value.nbytes for value in update.tensors.values()),
        )

    def _push(self, update: WeightUpdate) -> None:
        if self._sender is None:
            transport = choose(self.options.transport, one_machine=self.servers.one_machine)
            self._sender = WeightSender(transport, bucket_mib=self.options.bucket_mib)
            log.info("weights.transport", transport=transport.value)
        header = PushHeader.of(update)
        self._all("begin_push", header)
        for bucket in self._sender.buckets(update):
            self._all("take_bucket", header, self.servers.shared(bucket))
        for number, report in enumerate(self._all("finish_push", header)):
            lost = sorted(set(update.tensors) - set(report.bound))
            if lost:
                msg = f"server {number} did not bind {lost}; it bound {sorted(report.bound)}"
                raise WeightMismatchError(msg)

    def sleep(self, level: int = 1) -> None:
        """Give the servers' memory back; for all ranks, by rank 0."""
        if self.leads:
            self._all("answer", "sleep", level)

    def wake(self) -> None:
        """Undo `sleep`; for all ranks, by rank 0."""
        if self.leads:
            self._all("answer", "wake")

    def metrics(self) -> Mapping[str, float]:
        """Return the mean over the servers, at rank 0 alone."""
        return mean_by_name(self._all("answer", "metrics")) if self.leads else {}

    def close(self) -> None:
        """Let go of the buckets; the servers belong to whoever started them."""
        self._queue.clear()
        self._running.clear()
        if self._sender is not None:
            self._sender.close()
            self._sender = None


def _answers(link: ServerLink) -> Callable[..., Any]:
    def transport(method: str, *args: Any, **kwargs: Any) -> Any:
        return link.call("answer", method, *args, **kwargs)

    return transport


def batches(requests: Sequence[RolloutRequest], *, rows: int) -> list[tuple[RolloutRequest, ...]]:
    """Cut requests into batches of at most *rows* samples that are sampled alike, in order.

    A request stays whole, so one of more samples than that is a batch by itself, which the rollout cuts.
    """
    found: list[list[RolloutRequest]] = []
    open_at: dict[object, int] = {}
    for request in requests:
        likeness = (request.sampling, request.adapter)
        place = open_at.get(likeness)
        filled = rows if place is None else sum(len(r.samples) for r in found[place])
        if place is None or filled + len(request.samples) > rows:
            open_at[likeness] = place = len(found)
            found.append([])
        found[place].append(request)
    return [tuple(batch) for batch in found]
