"""The rollout `vllm_omni`: a `BaseRollout` over vLLM-Omni engines in processes of their own.

The policy is pushed to it: it starts WEIGHTS_STALE. A push is checked on both sides by name, and
takes effect on all engines or on none that may sample. Letters: B rows.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import structlog
import torch

from omni_core.choices import StepKind
from omni_core.options import DiffusionSamplingConfig, WeightTransport
from omni_core.resident import session_bytes
from omni_core.resources import resolve
from omni_core.rollout import (
    BaseRollout,
    RolloutHandle,
    RolloutState,
    RolloutStateError,
    RolloutTimeoutError,
    UpdateReport,
    WeightMismatchError,
    WeightUpdate,
    check_version,
)
from omni_core.schedule import FlowMatchSchedule
from omni_core.trajectory import RolloutRequest, SamplingSpec, Trajectory
from omni_core.weight_buckets import (
    AnyBucket,
    BucketedWeights,
    BucketStore,
    DeviceStore,
    PackedBucket,
    WeightStore,
)
from omni_rollout_vllm import messages, upstream
from omni_rollout_vllm.counts import Counts
from omni_rollout_vllm.engine_link import EngineDiedError, EngineLink
from omni_rollout_vllm.engine_pool import EnginePool
from omni_rollout_vllm.families import FAMILIES, Folder, family_of
from omni_rollout_vllm.jobs import Job, Work
from omni_rollout_vllm.options import Executor, VllmOmniRolloutConfig
from omni_rollout_vllm.pushed import Pushed, digest_of, expects_change, replaced_by
from omni_rollout_vllm.request_check import Served, check_requests
from omni_rollout_vllm.weight_names import mismatch

log = structlog.get_logger()

ADAPTERS = 4
"""Named adapters that an engine keeps at once."""
MIB = 2**20


class VllmOmniRollout(BaseRollout):
    """Built as `VllmOmniRollout(options, engine=engine)`; starts its engines at once.

    Of the training engine it reads `model_config` and the data-parallel rank, which a `PolicyCard` has
    too, and `family.schedule`, which only `schedule` needs.
    """

    replays_exactly = False
    """Its kernels are not the training engine's: a replay differs in the last bits."""

    pipeline_classes = tuple(FAMILIES)
    """Those that it has a recording pipeline for."""

    def __init__(self, options: VllmOmniRolloutConfig, *, engine: Any) -> None:
        upstream.check(internals=False)
        self.options = options
        self.engine = engine
        model = engine.model_config
        self.folder = Folder(resolve(model.path))
        self.family = family_of(self.folder)
        self._state = RolloutState.WEIGHTS_STALE
        self._before_sleep = RolloutState.WEIGHTS_STALE
        self._version = -1
        self._pushed: dict[str | None, Pushed] = {}
        self._stores: dict[str | None, WeightStore] = {}
        self._jobs: dict[int, Job] = {}
        self._handles = itertools.count()
        self._pool = EnginePool(
            [
                EngineLink(self._spec(), number=number, cpu_devices=str(options.tensor_parallel))
                for number in range(options.replicas)
            ],
            limits=options.limits,
            max_restarts=options.max_restarts,
            restore=self._restore,
            finished=self._finished,
        )
        try:
            self._pool.start()
        except BaseException:
            self.close()
            raise

    def _spec(self) -> messages.EngineSpec:
        options, model = self.options, self.engine.model_config
        executor = None if options.executor is Executor.AUTO else options.executor.value
        return messages.EngineSpec(
            model=str(self.folder.root.absolute()),
            dtype=model.dtype.value,
            batch_size=options.batch_size,
            tensor_parallel=options.tensor_parallel,
            executor=executor,
            enforce_eager=options.enforce_eager,
            adapters=ADAPTERS,
            probe=SamplingSpec(
                sigmas=(1.0, 0.0),
                guidance_scale=1.0,
                height=model.pipeline.height,
                width=model.pipeline.width,
                max_sequence_length=model.pipeline.max_sequence_length,
                num_frames=model.pipeline.num_frames,
                kind=StepKind.ODE,
                noise_level=0.0,
            ),
            timeout=max(options.limits.batch, options.limits.update),
        )

    # -- the rollout's form ------------------------------------------------------------------------

    @property
    def state(self) -> RolloutState:
        """What it may be asked for now."""
        return self._state

    @property
    def weight_version(self) -> int:
        """Of the last push; -1 before the first."""
        return self._version

    def schedule(self, sampling: DiffusionSamplingConfig) -> FlowMatchSchedule:
        """Return the schedule that the training engine's family means; engines take what is sent."""
        found: FlowMatchSchedule = self.engine.family.schedule(sampling)
        return found

    def submit(self, requests: Sequence[RolloutRequest], *, decode: bool = True) -> RolloutHandle:
        """Queue requests.

        Raises:
            RolloutStateError: asleep, or its weights are stale.
            ValueError: a request that it cannot serve; names the group and what would fit.
        """
        if self._state not in (RolloutState.READY, RolloutState.PAUSED):
            msg = f"the rollout is {self._state.value}: nothing can be sampled before the next push"
            raise RolloutStateError(msg)
        check_requests(requests, self._served())
        handle = RolloutHandle(next(self._handles), len(requests))
        if not requests:
            return handle
        job = Job(tuple(requests), decode)
        self._jobs[handle.id] = job
        work = job.deal(
            batch_size=self.options.batch_size,
            prefix=f"{self.engine.get_data_parallel_rank()}/{self._version}/{handle.id}/",
            adapters=bool(self._adapters) and not self._merges,
        )
        self._pool.add(work)
        return handle

    def _served(self) -> Served:
        pipeline = self.engine.model_config.pipeline
        present = {name for name in self._adapters if self._pushed[name].version == self._version}
        return Served(
            family=self.family,
            folder=self.folder,
            max_sequence_length=pipeline.max_sequence_length,
            frame_rate=pipeline.frame_rate,
            adapters=present or {"default"},
            weight_version=self._version,
        )

    @property
    def _adapters(self) -> set[str]:
        return {name for name in self._pushed if name is not None}

    @property
    def _merges(self) -> bool:
        return not self.options.keeps_adapters

    def poll(self, handle: RolloutHandle) -> list[Trajectory]:
        """Return what finished since the last poll.

        Raises:
            KeyError: the handle is unknown, cancelled or drained.
            RolloutEngineError, EngineDiedError: a batch of it failed.
            RolloutStateError: what came back is not what was asked for.
        """
        with self._pool.lock:
            job = self._job(handle)
            if job.failure is not None:
                del self._jobs[handle.id]
                raise job.failure
            finished = list(job.ready)
            job.ready.clear()
            if not job.left:
                del self._jobs[handle.id]
        return finished

    def done(self, handle: RolloutHandle) -> bool:
        """Whether nothing of *handle* is left."""
        return handle.id not in self._jobs

    def cancel(self, handle: RolloutHandle) -> None:
        """Drop what was not sampled; a batch that runs is finished and thrown away.

        Raises:
            KeyError: the handle is unknown, cancelled or drained.
        """
        with self._pool.lock:
            job = self._job(handle)
            job.cancelled = True
            del self._jobs[handle.id]
        self._pool.drop(lambda work: work.job is job)

    def _job(self, handle: RolloutHandle) -> Job:
        if handle.id not in self._jobs:
            msg = f"handle {handle.id} is unknown, cancelled or drained"
            raise KeyError(msg)
        return self._jobs[handle.id]

    def _finished(self, work: Work, found: messages.SampledBatch | Exception) -> None:
        job = work.job
        if job.cancelled or job.failure is not None:
            return
        if isinstance(found, Exception):
            job.failure = found
            return
        try:
            job.take(work, found, version=self._version)
        except Exception as error:  # noqa: BLE001 -- raised by `poll`
            job.failure = error

    # -- pause and push ----------------------------------------------------------------------------

    def pause(self) -> None:
        """Return once no batch is running; queued ones wait.

        Raises:
            RolloutStateError: asleep.
            RolloutTimeoutError: a batch took longer than it may.
        """
        if self._state is RolloutState.ASLEEP:
            msg = "the rollout is asleep: wake it first"
            raise RolloutStateError(msg)
        with self._counts.timed("pause"):
            self._pool.hold(timeout=self.options.limits.batch)
        if self._state is RolloutState.READY:
            self._state = RolloutState.PAUSED

    def resume(self) -> None:
        """Sample again.

        Raises:
            RolloutStateError: asleep, or its weights are stale.
        """
        if self._state not in (RolloutState.PAUSED, RolloutState.READY):
            msg = f"the rollout is {self._state.value} and cannot resume"
            raise RolloutStateError(msg)
        self._state = RolloutState.READY
        self._pool.release()

    def update(self, update: WeightUpdate) -> UpdateReport:
        """Bind new weights on every engine.

        Where a push fails once weights began to move, the rollout is WEIGHTS_STALE until one succeeds;
        where only names did not fit, it is as before.

        Raises:
            RolloutStateError: not paused.
            WeightMismatchError: bound names differ from sent names, or the samples did not change
                although the weights did.
            ValueError: the version does not grow.
        """
        started = time.perf_counter()
        if self._state not in (RolloutState.PAUSED, RolloutState.WEIGHTS_STALE):
            msg = f"an update needs a paused rollout, this one is {self._state.value}"
            raise RolloutStateError(msg)
        versions = {name: one.version for name, one in self._pushed.items()}
        check_version(update, now=self._version, pushed=versions)
        pushed = Pushed(
            version=update.version,
            names=tuple(update.tensors),
            adapter=update.adapter,
            alpha_over_rank=1.0 if update.alpha_over_rank is None else update.alpha_over_rank,
            digest=digest_of(update, getattr(torch, self.engine.model_config.dtype.value)),
        )
        self._check_names(pushed, self._pushed.get(update.adapter))
        before = replaced_by(pushed, self._pushed, one_adapter=self._merges)
        buckets, bound = self._push(update, pushed)
        nbytes = sum(value.nbytes for value in update.tensors.values())
        self._counts.pushed_bytes += nbytes
        for one in bound:
            self._check_bound(pushed, one, expect_change=expects_change(pushed, before))
        self._forget_others(update.adapter)
        self._pushed[update.adapter] = attrs.evolve(pushed, buckets=buckets)
        self._version = update.version
        self._state = RolloutState.PAUSED
        return UpdateReport(
            version=update.version,
            bound=bound[0].names,
            seconds=time.perf_counter() - started,
            nbytes=nbytes,
        )

    def _push(
        self, update: WeightUpdate, pushed: Pushed
    ) -> tuple[tuple[AnyBucket, ...], list[messages.Bound]]:
        """Bind an update on every engine; one that is lost meanwhile is started again, and all anew.

        Returns:
            The buckets that hold it, and what each engine bound.

        Raises:
            WeightMismatchError: names do not fit.
            EngineDiedError: too many engines were lost.
        """
        while True:
            try:
                with self._counts.timed("send"):
                    buckets = self._send(update, pushed)
                with self._counts.timed("verify"):
                    return buckets, [self._end(link, pushed) for link in self._pool.links]
            except (EngineDiedError, RolloutTimeoutError) as error:
                self._state = RolloutState.WEIGHTS_STALE
                for link in [one for one in self._pool.links if not one.alive]:
                    self._pool.restart(link, error)
                    self._restore(link, but=update.adapter)

    def _send(self, update: WeightUpdate, pushed: Pushed) -> tuple[AnyBucket, ...]:
        for link in self._pool.links:
            self._begin(link, pushed)
        self._state = RolloutState.WEIGHTS_STALE
        sent: list[AnyBucket] = []
        for bucket in self._buckets(update):
            sent.append(bucket)
            self._ask(messages.TakeBucket(bucket=bucket))
        return tuple(sent)

    def _buckets(self, update: WeightUpdate) -> Iterator[AnyBucket]:
        """Put an update's tensors where the engines' processes find them; they may lie there already."""
        tensors = update.tensors
        if isinstance(tensors, BucketedWeights) and not any(
            isinstance(bucket, PackedBucket) for bucket in tensors.buckets
        ):
            yield from tensors.buckets
            return
        if update.adapter not in self._stores:
            kind = (
                DeviceStore if self.options.transport is WeightTransport.CUDA_IPC else BucketStore
            )
            self._stores[update.adapter] = kind(bucket_bytes=self.options.bucket_mib * MIB)
        yield from self._stores[update.adapter].write(tensors)

    def _forget_others(self, adapter: str | None) -> None:
        """Whole weights are the policy themselves, and of merged adapters there is one at a time."""
        if adapter is not None and not self._merges:
            return
        for name in [name for name in self._pushed if name not in (adapter, None)]:
            del self._pushed[name]
            if name in self._stores:
                self._stores.pop(name).close()

    def _check_names(self, pushed: Pushed, before: Pushed | None) -> None:
        """Names do not change from push to push."""
        if before is None or set(before.names) == set(pushed.names):
            return
        lost = sorted(set(pushed.names) - set(before.names))
        missing = sorted(set(before.names) - set(pushed.names))
        raise mismatch(lost, missing, sorted(set(pushed.names) & set(before.names)))

    def _begin(self, link: EngineLink, pushed: Pushed) -> None:
        whole = pushed.adapter is None
        begin = messages.BeginUpdate(names=pushed.names, adapter=not whole, at_once=whole)
        link.call(begin, timeout=self.options.limits.update)

    def _end(self, link: EngineLink, pushed: Pushed) -> messages.Bound:
        end = messages.EndUpdate(
            adapter=pushed.adapter,
            alpha_over_rank=pushed.alpha_over_rank,
            merge=self._merges and pushed.adapter is not None,
            probe=self.options.probe,
        )
        bound: messages.Bound = link.call(end, timeout=self.options.limits.update)
        return bound

    def _ask(self, request: Any) -> list[Any]:
        return self._pool.ask_all(request, timeout=self.options.limits.update)

    def _check_bound(self, pushed: Pushed, bound: messages.Bound, *, expect_change: bool) -> None:
        if set(bound.names) != set(pushed.names):
            lost = sorted(set(pushed.names) - set(bound.names))
            raise mismatch(lost, [], sorted(bound.names))
        if bound.changed is False and expect_change:
            msg = (
                f"all {len(pushed.names)} names are bound and other values were sent, but a "
                "denoising step comes out the same: the engine does not use what it bound"
            )
            raise WeightMismatchError(msg)

    def _restore(self, link: EngineLink, *, but: str | None = "") -> None:
        """Give a fresh engine what was pushed last, whole weights first, without those of *but*."""
        for adapter in sorted(self._pushed, key=lambda name: name is not None):
            if adapter == but:
                continue
            pushed = self._pushed[adapter]
            self._begin(link, pushed)
            for bucket in pushed.buckets:
                link.call(messages.TakeBucket(bucket=bucket), timeout=self.options.limits.update)
            self._check_bound(pushed, self._end(link, pushed), expect_change=False)

    @property
    def _counts(self) -> Counts:
        return self._pool.counts

    def metrics(self) -> dict[str, float]:
        """Say how fast the engines sampled, what waited, how many were lost, what pushes took, what they hold.

        A push waits for running batches (`pause`), sends the weights (`send`), binds and probes them
        (`verify`).
        """
        with self._pool.lock:
            found = self._counts.take(engines=self.options.replicas)
        held = [session_bytes(link.pid) for link in self._pool.links if link.pid is not None]
        return found | ({"engine_rss": max(held) / 2**30} if held else {})

    # -- memory ------------------------------------------------------------------------------------

    def sleep(self, level: int = 1) -> None:
        """Give memory back once nothing runs; level 1 keeps the weights in main memory.

        vLLM-Omni 0.30 cannot wake from its own level 2, so level 2 ends the engines' processes, which
        gives back everything; `wake` starts new ones.

        Raises:
            ValueError: another level.
            RolloutEngineError: an engine refuses.
        """
        if level not in (1, 2):
            msg = f"sleep level {level}: there are 1 and 2"
            raise ValueError(msg)
        if self._state is RolloutState.ASLEEP:
            return
        before = self._state
        self._pool.hold(timeout=self.options.limits.batch)
        if level == 1:
            self._pool.ask_all(messages.Sleep(), timeout=self.options.limits.control)
            self._before_sleep = before
        else:
            self._pool.end()
            self._pushed.clear()
            self._drop_stores()
            self._before_sleep = RolloutState.WEIGHTS_STALE
        self._level = level
        self._state = RolloutState.ASLEEP

    def wake(self) -> None:
        """Undo `sleep`; after level 2 the weights are stale until the next push. Awake: does nothing."""
        if self._state is not RolloutState.ASLEEP:
            return
        if self._level == 1:
            self._pool.ask_all(messages.Wake(), timeout=self.options.limits.control)
        else:
            self._pool.start()
        self._state = self._before_sleep
        if self._state is RolloutState.READY:
            self._pool.release()

    def close(self) -> None:
        """End the engines."""
        with self._pool.lock:
            self._jobs.clear()
        self._pool.drop(lambda work: True)
        self._pool.end()
        for link in self._pool.links:
            link.close()
        self._drop_stores()

    def _drop_stores(self) -> None:
        for store in self._stores.values():
            store.close()
        self._stores.clear()
