"""A rollout produces trajectories of the current policy. Its form is asynchronous from the start:
submit, poll, cancel, pause, update, resume, state; blocking calls are helpers over these.
"""

from __future__ import annotations

import enum
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import attrs
from torch import Tensor

from omni_core.options import DiffusionModelConfig, DiffusionSamplingConfig, ScheduleSource
from omni_core.schedule import FlowMatchSchedule
from omni_core.trajectory import RolloutRequest, Trajectory


class RolloutState(enum.StrEnum):
    """What a rollout may be asked for; generating in a state other than READY is refused."""

    READY = "ready"
    PAUSED = "paused"
    ASLEEP = "asleep"
    WEIGHTS_STALE = "weights_stale"


class RolloutStateError(RuntimeError):
    """The rollout cannot do this in its present state."""


class RolloutTimeoutError(TimeoutError):
    """A call of the rollout took longer than it may."""


class WeightMismatchError(ValueError):
    """What was sent is not what the rollout bound; the message lists both by name."""


@attrs.frozen
class RolloutHandle:
    """Requests submitted together."""

    id: int
    requests: int


@attrs.frozen(kw_only=True)
class WeightUpdate:
    """New weights for a rollout."""

    version: int
    """Larger than every version before it, also across a resume."""
    tensors: Mapping[str, Tensor]
    """Name -> value: LoRA tensors of the sampling adapter, or whole weights."""
    adapter: str | None = "default"
    """None for whole (or merged) weights."""
    alpha_over_rank: float | None = None
    """Scale of the adapter."""


def check_version(update: WeightUpdate, *, now: int, pushed: Mapping[str | None, int]) -> None:
    """Check that an update follows what was pushed before.

    Args:
        update: About to be bound.
        now: The rollout's version; -1 before the first push.
        pushed: Adapter -> version of its last push.

    Raises:
        ValueError: it does not.
    """
    if update.version < now or update.version <= pushed.get(update.adapter, -1):
        last = pushed.get(update.adapter, now)
        msg = f"version {update.version} does not follow {max(now, last)}: versions only grow"
        raise ValueError(msg)


@attrs.frozen(kw_only=True)
class UpdateReport:
    """What a rollout did with an update."""

    version: int
    bound: tuple[str, ...]
    """Names that found their place: must equal what was sent."""
    seconds: float
    nbytes: int


@attrs.frozen(kw_only=True)
class PolicyCard:
    """What a rollout that lives in a process without the training engine gets as its `engine`.

    It is plain data. A plugin that can do with it says so (`Plugin.standalone`).
    """

    model_config: DiffusionModelConfig
    number: int = 0
    """Of the process among those that hold the rollout: part of the names of its batches."""

    def get_data_parallel_rank(self) -> int:
        """Return its number."""
        return self.number


class BaseRollout(ABC):
    """Samples trajectories.

    Life of a weight push, done by whoever owns the policy::

        rollout.pause()             # returns once nothing is running (acknowledged)
        rollout.update(new)         # checks names both ways, sets the version
        rollout.resume()

    Several adapters of one version are pushed one after the other within one pause: a version must be
    larger than the last one of the same adapter, and not smaller than that of any other.
    """

    replays_exactly: bool = True
    """Whether the training engine's replay runs the very kernels that sampled. Another engine's differ in
    the last bits, so a trainer bounds its replay instead of asking for equal ones."""

    decode_seconds: float | None = None
    """Spent turning latents into media so far; None where that is not told apart from sampling."""

    pipeline_classes: tuple[str, ...] | None = None
    """`_class_name` values of the pipelines that it samples from; None for those of every model family."""

    @property
    @abstractmethod
    def state(self) -> RolloutState:
        """What it may be asked for now."""

    @property
    @abstractmethod
    def weight_version(self) -> int:
        """Version of the policy that samples."""

    def setup(self) -> None:
        """Load what sampling needs, and check that samples of the model's configured size can be made.

        Called once, before anything is asked; a rollout that finds this out elsewhere does nothing here.

        Raises:
            ValueError: they cannot; says what fits.
        """

    def schedule(self, sampling: DiffusionSamplingConfig) -> FlowMatchSchedule:
        """Return the sigmas that a sampling config means for its pipeline.

        Raises:
            ValueError: `stock` asked of a rollout that knows no pipeline (override this then).
        """
        if sampling.schedule is ScheduleSource.LINEAR:
            return FlowMatchSchedule.linear(sampling.num_inference_steps, shift=sampling.shift)
        msg = f"{type(self).__name__} knows no stock schedule; take sampling.schedule: linear"
        raise ValueError(msg)

    @abstractmethod
    def submit(self, requests: Sequence[RolloutRequest], *, decode: bool = True) -> RolloutHandle:
        """Queue requests; returns at once.

        Raises:
            RolloutStateError: asleep, or its weights are stale.
            ValueError: a request that it cannot serve; names the group and what would fit.
        """

    @abstractmethod
    def poll(self, handle: RolloutHandle) -> list[Trajectory]:
        """Return the trajectories finished since the last poll, one for each request.

        Raises:
            KeyError: the handle is unknown, cancelled or drained.
        """

    @abstractmethod
    def done(self, handle: RolloutHandle) -> bool:
        """Whether every trajectory of *handle* has been polled."""

    @abstractmethod
    def cancel(self, handle: RolloutHandle) -> None:
        """Drop what has not been sampled or polled."""

    @abstractmethod
    def pause(self) -> None:
        """Return once no request is running; queued ones wait."""

    @abstractmethod
    def update(self, update: WeightUpdate) -> UpdateReport:
        """Bind new weights while paused.

        Raises:
            RolloutStateError: not paused.
            WeightMismatchError: bound names differ from sent names.
            ValueError: the version is older than the rollout's, or was pushed for this adapter already.
        """

    @abstractmethod
    def resume(self) -> None:
        """Sample again."""

    def sleep(self, level: int = 1) -> None:
        """Give memory back until `wake`; a rollout that cannot says so."""
        msg = f"{type(self).__name__} has no memory of its own to give back (sleep level {level})"
        raise RolloutStateError(msg)

    def wake(self) -> None:
        """Undo `sleep`; weights dropped by it are stale until the next update. Awake: does nothing."""

    def metrics(self) -> Mapping[str, float]:
        """Measure what was done since the last call, or how things stand: name -> number.

        A trainer asks once a step and logs each as `rollout/NAME`, the mean over its ranks; what ends in
        `_rss`, GiB of a process, as `memory/NAME`, the largest.
        """
        return {}

    def close(self) -> None:
        """Free everything; nothing may be asked afterwards."""

    # -- blocking helpers --------------------------------------------------------------------------

    def stream(
        self,
        requests: Sequence[RolloutRequest],
        *,
        decode: bool = True,
        timeout: float | None = None,
        interval: float = 0.005,
    ) -> Iterator[Trajectory]:
        """Yield trajectories as they finish.

        Raises:
            RolloutTimeoutError: nothing finished for *timeout* seconds.
        """
        handle = self.submit(requests, decode=decode)
        last = time.monotonic()
        while not self.done(handle):
            finished = self.poll(handle)
            if finished:
                try:
                    yield from finished
                except GeneratorExit:  # the reader wants no more
                    if not self.done(handle):
                        self.cancel(handle)
                    raise
                last = time.monotonic()
            elif timeout is not None and time.monotonic() - last > timeout:
                self.cancel(handle)
                msg = f"no trajectory in {timeout} s; {handle.requests} requests were submitted"
                raise RolloutTimeoutError(msg)
            else:
                time.sleep(interval)

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        *,
        decode: bool = True,
        timeout: float | None = None,
    ) -> list[Trajectory]:
        """Sample everything and return it in the order of *requests*."""
        found = {_key(t): t for t in self.stream(requests, decode=decode, timeout=timeout)}
        return [found[r.group_id, tuple(s.k for s in r.samples)] for r in requests]


def _key(trajectory: Trajectory) -> tuple[str, tuple[int, ...]]:
    return trajectory.records[0].group_id, tuple(record.k for record in trajectory.records)
