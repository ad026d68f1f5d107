"""The driver's side: rank 0 asks all ranks, itself included, and scores where samples lie."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import structlog

from omni_core.reward import RewardInput, RewardResult
from omni_trainer.group import Ref, Streamed, WorkerError, WorkerGroup, failure, nbytes
from omni_trainer.launched import launched_ranks
from omni_trainer.launched.host import ITSELF, SCORES, WORKER, Host, Key, Making, Request
from omni_trainer.launched.link import SESSIONS, Link
from omni_trainer.reward_pool import PoolCounts, RewardPool, add_counts
from omni_trainer.stopping import StopRequest
from omni_trainer.workers.process import registered_plugins

log = structlog.get_logger()


@attrs.frozen(eq=False)
class LaunchedRef:
    """An object that a rank keeps as long as this is held."""

    key: Key

    @property
    def rank(self) -> int:
        """Where it lies."""
        return self.key[0]


class LaunchedGroup(WorkerGroup):
    """One worker in each process of the launcher; made and asked by rank 0."""

    def __init__(
        self,
        worker: Any,
        config: Any,
        *,
        device: str,
        threads: int,
        reward: tuple[str, Any] | None,
        role: str = WORKER,
    ) -> None:
        """Describe the group; nothing starts.

        Args:
            worker: Class, built as `worker(config, place=...)` in each process.
            config: Sent to all.
            device: Device type of the ranks.
            threads: CPU threads of a rank.
            reward: Name and options of the scorer that each rank has; None for none.
            role: Named in errors.
        """
        self.role = role
        self.size = launched_ranks()
        self._making = Making(
            worker=worker,
            config=config,
            threads=threads,
            registered=registered_plugins(),
            reward=reward,
        )
        self._device = device
        self._link: Link | None = None
        self._host: Host | None = None
        self._released: list[Key] = []
        self._failed = False

    def start(self) -> None:
        """Let all processes join, and make their workers and scorers."""
        self._link = link = Link(SESSIONS.begin(self._device), self._device)
        link.say(self._making)
        with_all = self._guard("start", lambda: Host(link, self._making))
        self._host = with_all
        self._guard("start", lambda: link.collect(None))
        log.info("group.started", role=self.role, ranks=self.size)

    def _guard(self, what: str, call: Any) -> Any:
        """Turn whatever goes wrong into the failure of the rank that failed first."""
        assert self._link is not None
        try:
            return call()
        except KeyboardInterrupt:
            self._failed = True  # the others are in the middle of something, and hear nothing
            raise
        except Exception as exc:
            self._failed = True
            # A plain RuntimeError is how a broken collective is told: another rank may have gone.
            lost = type(exc.__cause__ or exc) is RuntimeError
            told = self._link.failure() if lost else None
            if told is not None:
                raise WorkerError(
                    told["role"], told["rank"], told["error"], details=told["details"]
                ) from None
            if isinstance(exc, WorkerError):
                raise
            raise failure(self.role, 0, exc, what) from exc

    def ask(
        self,
        method: str,
        args: Sequence[Sequence[Any]],
        refs: Sequence[Sequence[Ref]] | None = None,
        *,
        target: str = WORKER,
        ranks: Sequence[int] | None = None,
        streams: bool = False,
    ) -> list[Any]:
        """Let ranks call a method; results of all, None of those that did not.

        Raises:
            WorkerError: a rank failed.
            RuntimeError: the group was not started, or was shut down.
        """
        if self._host is None or self._link is None:
            msg = f"{self.role}: the group was not started, or was shut down"
            raise RuntimeError(msg)
        released = tuple(self._released)
        del self._released[: len(released)]  # the list itself is what references report to
        request = Request(
            target=target,
            method=method,
            args=args,
            refs=[[ref.key for ref in own] for own in refs or [()] * self.size],
            ranks=frozenset(range(self.size) if ranks is None else ranks),
            streams=streams,
            released=released,
        )
        link, host = self._link, self._host

        def call() -> list[Any]:
            link.say(request)
            return link.collect(host.do(request))

        found: list[Any] = self._guard(method, call)
        return found

    def _ref(self, key: Key) -> LaunchedRef:
        ref = LaunchedRef(key)
        weakref.finalize(ref, self._released.append, key).atexit = False
        return ref

    # -- calls -------------------------------------------------------------------------------------

    def broadcast(self, method: str, *args: Any) -> list[Any]:
        """Call *method* on all ranks."""
        return self.ask(method, [args] * self.size)

    def scatter(
        self,
        method: str,
        args: Sequence[Sequence[Any]],
        refs: Sequence[Sequence[Ref]] | None = None,
    ) -> list[Any]:
        """Call *method* on each rank with its own arguments; objects go to where they are needed."""
        return self.ask(method, args, refs)

    def call(self, rank: int, method: str, *args: Any, refs: Sequence[Ref] = ()) -> Any:
        """Call *method* on one rank."""
        own = [refs if each == rank else () for each in range(self.size)]
        return self.ask(method, [args] * self.size, own, ranks=[rank])[rank]

    def stream(self, method: str, args: Sequence[Sequence[Any]]) -> Iterator[Streamed]:
        """Run a generator on each rank to its end; objects stay where they are made."""
        for rank, found in enumerate(self.ask(method, args, streams=True)):
            for info, key in found:
                yield Streamed(rank=rank, info=info, ref=self._ref(key))

    def get(self, ref: Ref) -> Any:
        """Bring an object to the driver."""
        refs = [[ref] if rank == ref.rank else [] for rank in range(self.size)]
        found = self.ask("hand_over", [()] * self.size, refs, target=ITSELF, ranks=[ref.rank])[
            ref.rank
        ]
        self.fetched_bytes += nbytes(found)
        return found

    def stop_asked(self) -> int | None:
        """Look whether another process of the launcher had a signal."""
        return None if self._link is None else self._link.stop_asked()

    def shutdown(self) -> None:
        """End the session; after a failure the others find out by themselves."""
        link, self._link = self._link, None
        host, self._host = self._host, None
        if link is None:
            return
        if not self._failed and host is not None:
            link.say(None)
        if host is not None:
            host.close()
        link.close()


class LaunchedRewardPool(RewardPool):
    """Each rank scores what it sampled itself, all ranks at the same time, when scores are collected."""

    def __init__(self, group: LaunchedGroup) -> None:
        self.group = group
        self._waiting: list[tuple[int, LaunchedRef, Sequence[RewardInput]]] = []

    def start(self) -> None:
        """The group makes the scorers together with the workers."""

    def submit(self, key: int, ref: Ref, inputs: Sequence[RewardInput]) -> None:
        """Remember what is to be scored."""
        self._waiting.append((key, ref, inputs))

    def collect(self) -> dict[int, list[RewardResult]]:
        """Let every rank score."""
        waiting, self._waiting = self._waiting, []
        own = [[each for each in waiting if each[1].rank == r] for r in range(self.group.size)]
        found = self.group.ask(
            "score",
            [([inputs for _, _, inputs in each],) for each in own],
            [[ref for _, ref, _ in each] for each in own],
            target=SCORES,
        )
        return {
            key: results
            for each, scored in zip(own, found, strict=True)
            for (key, _, _), results in zip(each, scored, strict=True)
        }

    def collect_until(self, stop: StopRequest) -> dict[int, list[RewardResult]]:
        """Collect to the end: the other ranks score at the same time, and are asked for more afterwards."""
        stop.look()
        found = self.collect()
        stop.look()
        return found

    def counts(self) -> PoolCounts:
        """Add up what the scorers counted."""
        return add_counts(self.group.ask("counts", [()] * self.group.size, target=SCORES))

    def close(self) -> None:
        """The group frees the scorers."""
