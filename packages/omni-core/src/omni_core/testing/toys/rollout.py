"""A rollout in the engine's process: each poll denoises one batch, so nothing runs between calls.

Axes: B rows of a batch, T steps, W stochastic steps of a row.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import perf_counter

import attrs
import torch
from torch import Tensor

from omni_core.choices import StepKind
from omni_core.model import Denoiser, Guidance
from omni_core.options import DiffusionSamplingConfig, EngineConfig
from omni_core.request_check import check_frame_rate, check_guidance, check_image, check_length
from omni_core.rollout import (
    BaseRollout,
    PolicyCard,
    RolloutHandle,
    RolloutState,
    RolloutStateError,
    UpdateReport,
    WeightMismatchError,
    WeightUpdate,
    check_version,
)
from omni_core.schedule import FlowMatchSchedule
from omni_core.testing.toys import lora
from omni_core.testing.toys.engine import ToyEngine
from omni_core.testing.toys.options import ToyPlacement, ToyRolloutConfig
from omni_core.testing.toys.sampling import denoise
from omni_core.trajectory import (
    BatchPlace,
    Conditioning,
    RolloutRequest,
    SampleRecord,
    SamplingSpec,
    Trajectory,
)


@attrs.frozen(kw_only=True, eq=False)
class _Row:
    """One sample that waits."""

    job: int
    request: int
    sample: SampleRecord
    asked: RolloutRequest


@attrs.frozen(kw_only=True, eq=False)
class _Sampled:
    """One sample that is done: no batch axis."""

    latents: dict[str, Tensor]
    """modality -> float32 [T+1, ...]."""
    log_probs: Tensor
    """float32 [W]."""
    place: BatchPlace
    version: int


@attrs.define(kw_only=True, eq=False)
class _Job:
    requests: tuple[RolloutRequest, ...]
    decode: bool
    conditioning: dict[tuple[str, str, Guidance], Conditioning]
    done: dict[tuple[int, int], _Sampled] = attrs.field(factory=dict)
    """(request, k) -> sample."""
    given: set[int] = attrs.field(factory=set)


class ToyRollout(BaseRollout):
    """Built as `ToyRollout(options, engine=engine)`; a replica needs no more of it than a `PolicyCard`."""

    def __init__(self, options: ToyRolloutConfig, *, engine: ToyEngine | PolicyCard) -> None:
        self.options = options
        self._number = engine.get_data_parallel_rank()
        if isinstance(engine, PolicyCard):
            engine = _base_of(engine, options)
        self.engine = engine
        self.conditioner = engine.family.load_conditioner(torch.float32)
        self.codec = engine.family.load_codec(torch.float32)
        self._replica = options.placement is ToyPlacement.REPLICA
        self._denoiser: Denoiser = (
            copy.deepcopy(engine.denoiser) if self._replica else engine.denoiser
        )
        self._version = -1
        """The last one pushed."""
        self._versions: dict[str | None, int] = {}
        """Adapter -> the last one pushed for it."""
        self._state = RolloutState.WEIGHTS_STALE if self._replica else RolloutState.READY
        self._before_sleep: RolloutState | None = None
        self._queue: list[_Row] = []
        self._jobs: dict[int, _Job] = {}
        self._handles = itertools.count()
        self._batches = itertools.count()

    @property
    def state(self) -> RolloutState:
        """What it may be asked for now."""
        return self._state

    @property
    def weight_version(self) -> int:
        """Version of the policy that samples."""
        return self._version if self._replica else self.engine.weight_version

    def schedule(self, sampling: DiffusionSamplingConfig) -> FlowMatchSchedule:
        """Return the family's schedule."""
        return self.engine.family.schedule(sampling)

    def latent_shapes(self) -> dict[str, tuple[int, ...]]:
        """Modality -> shape of one sample's latents, of the configured size."""
        return self.codec.latent_shapes(self.engine.model_config.pipeline)

    # -- requests ----------------------------------------------------------------------------------

    def submit(self, requests: Sequence[RolloutRequest], *, decode: bool = True) -> RolloutHandle:
        """Check and queue requests, each prompt encoded once."""
        if self._state not in (RolloutState.READY, RolloutState.PAUSED):
            msg = f"the rollout is {self._state.value}: nothing can be sampled before the next push"
            raise RolloutStateError(msg)
        for request in requests:
            self._check(request)
        conditioning = {key: self._encode(*key) for key in {_prompt_key(r) for r in requests}}
        handle = RolloutHandle(next(self._handles), len(requests))
        if requests:
            self._jobs[handle.id] = _Job(
                requests=tuple(requests), decode=decode, conditioning=conditioning
            )
        self._queue += [
            _Row(job=handle.id, request=place, sample=sample, asked=request)
            for place, request in enumerate(requests)
            for sample in request.samples
        ]
        return handle

    def _check(self, request: RolloutRequest) -> None:
        spec, where = request.sampling, f"group {request.group_id!r}"
        self._shapes(spec)
        schedule = spec.schedule()
        pipeline = self.engine.model_config.pipeline
        check_length(spec, pipeline.max_sequence_length)
        check_frame_rate(spec, pipeline.frame_rate)
        check_guidance(spec, self.engine.family.second_guidance)
        check_image(request, self.engine.family.inputs)
        if request.window:
            if spec.kind is StepKind.ODE or spec.noise_level == 0.0:
                msg = f"{where}: a deterministic sampler has no window, got {request.window}"
                raise ValueError(msg)
            if list(request.window) != sorted(set(request.window)):
                msg = f"{where}: window {request.window} is not ascending"
                raise ValueError(msg)
            schedule.check_window(request.window[0], request.window[-1] + 1, where=where)
        if request.weight_version not in (None, self.weight_version):
            msg = (
                f"{where}: weight version {request.weight_version} was asked for, "
                f"{self.weight_version} is here"
            )
            raise ValueError(msg)
        with self._policy(request.adapter):
            pass

    def _shapes(self, spec: SamplingSpec) -> dict[str, tuple[int, ...]]:
        pipeline = self.engine.model_config.pipeline
        return self.codec.latent_shapes(
            attrs.evolve(pipeline, height=spec.height, width=spec.width, num_frames=spec.num_frames)
        )

    def _encode(self, prompt: str, negative_prompt: str, guidance: Guidance) -> Conditioning:
        return self.conditioner.encode([prompt], negative_prompt=negative_prompt, guidance=guidance)

    def poll(self, handle: RolloutHandle) -> list[Trajectory]:
        """Denoise the next batch, and return what *handle* has ready."""
        job = self._jobs[handle.id]
        if self._state is RolloutState.READY and self._queue:
            self._sample_batch()
        ready = [
            place
            for place, request in enumerate(job.requests)
            if place not in job.given and all((place, s.k) in job.done for s in request.samples)
        ]
        finished = [self._trajectory(job, place) for place in ready]
        job.given.update(ready)
        if len(job.given) == len(job.requests):
            del self._jobs[handle.id]
        return finished

    def done(self, handle: RolloutHandle) -> bool:
        """Whether nothing of *handle* is left (an empty submit is done at once)."""
        return handle.id not in self._jobs

    def cancel(self, handle: RolloutHandle) -> None:
        """Drop what has not been polled."""
        self._jobs.pop(handle.id, None)
        self._queue = [row for row in self._queue if row.job != handle.id]

    # -- sampling ----------------------------------------------------------------------------------

    @contextmanager
    def _policy(self, adapter: str) -> Iterator[None]:
        with ExitStack() as stack:
            if self._replica:
                (module,) = self._denoiser.experts.values()
                if self.engine.has_adapter:
                    stack.enter_context(lora.active(module, adapter))
                stack.enter_context(torch.no_grad())
            else:
                stack.enter_context(self.engine.eval_mode())
                stack.enter_context(self.engine.use_adapter(adapter))
            yield

    def _sample_batch(self) -> None:
        """Take rows that are sampled alike, up to the batch size, and denoise them."""
        first = self._queue[0].asked
        alike = [
            row
            for row in self._queue
            if (row.asked.sampling, row.asked.adapter) == (first.sampling, first.adapter)
        ][: self.options.batch_size]
        taken = {id(row) for row in alike}
        self._queue = [row for row in self._queue if id(row) not in taken]
        name = f"{self._number}.{self.weight_version}.{next(self._batches)}"
        with self._policy(first.adapter):
            kinds = [self._jobs[r.job].conditioning[_prompt_key(r.asked)] for r in alike]
            latents, log_probs = denoise(
                self._denoiser,
                type(kinds[0]).concat(kinds),
                first.sampling,
                seeds=[row.sample.seed for row in alike],
                windows=[row.asked.window for row in alike],
                shapes=self._shapes(first.sampling),
            )
        for place, row in enumerate(alike):
            window = list(row.asked.window)
            self._jobs[row.job].done[row.request, row.sample.k] = _Sampled(
                latents={name: value[place] for name, value in latents.items()},
                log_probs=log_probs[place, window],
                place=BatchPlace(name, place, len(alike)),
                version=self.weight_version,
            )

    def _trajectory(self, job: _Job, place: int) -> Trajectory:
        request = job.requests[place]
        rows = [job.done.pop((place, sample.k)) for sample in request.samples]
        if len({row.version for row in rows}) != 1:
            msg = f"group {request.group_id!r}: the policy changed while it was sampled"
            raise RolloutStateError(msg)
        latents = {n: torch.stack([row.latents[n] for row in rows]) for n in rows[0].latents}
        count, spec = len(rows), request.sampling
        return Trajectory(
            latents=latents,
            step_indices=torch.tensor([request.window] * count, dtype=torch.int64).reshape(
                count, -1
            ),
            log_probs=torch.stack([row.log_probs for row in rows]),
            conditioning=job.conditioning[_prompt_key(request)].owned(),
            prompt_index=torch.zeros(count, dtype=torch.int64),
            media=self.codec.decode({n: v[:, -1] for n, v in latents.items()})
            if job.decode
            else None,
            records=request.samples,
            effective=attrs.evolve(spec, sigmas=spec.schedule().values()),
            adapter=request.adapter,
            weight_version=rows[0].version,
            places=tuple(row.place for row in rows),
        )

    # -- weights -----------------------------------------------------------------------------------

    def pause(self) -> None:
        """Nothing runs between calls, so this is acknowledged at once."""
        if self._state is RolloutState.READY:
            self._state = RolloutState.PAUSED
        elif self._state is RolloutState.ASLEEP:
            msg = "the rollout is asleep: wake it first"
            raise RolloutStateError(msg)

    def update(self, update: WeightUpdate) -> UpdateReport:
        """Bind new weights; a shared module has them, so there it is only checked that it does."""
        started = perf_counter()
        if self._state not in (RolloutState.PAUSED, RolloutState.WEIGHTS_STALE):
            msg = f"an update needs a paused rollout, this one is {self._state.value}"
            raise RolloutStateError(msg)
        check_version(update, now=self._version, pushed=self._versions)
        ours = self._named_weights(update.adapter)
        if ours.keys() != update.tensors.keys():
            msg = (
                f"names differ; sent: {', '.join(sorted(update.tensors))}; "
                f"known here: {', '.join(sorted(ours))}"
            )
            raise WeightMismatchError(msg)
        if self._replica:
            lora.copy_tensors(update.tensors, ours)
        else:
            other = [n for n, v in update.tensors.items() if not torch.equal(v, ours[n])]
            if other:
                msg = f"the shared module has other values of {', '.join(other)} than were sent"
                raise WeightMismatchError(msg)
        self._version = self._versions[update.adapter] = update.version
        self._state = RolloutState.PAUSED
        nbytes = sum(v.numel() * v.element_size() for v in update.tensors.values())
        return UpdateReport(
            version=update.version,
            bound=tuple(update.tensors),
            seconds=perf_counter() - started,
            nbytes=nbytes,
        )

    def _named_weights(self, adapter: str | None) -> dict[str, Tensor]:
        (module,) = self._denoiser.experts.values()
        if adapter is not None:
            (some, *_) = lora.layers(module).values()
            if self._replica and adapter not in some.lora_A:  # a policy that was not pushed before
                lora.add_adapter(module, adapter, seed=0)
            return lora.tensors(module, adapter)
        named = module.named_parameters()
        return {n.replace(".base.", "."): p for n, p in named if ".lora_" not in n}

    def resume(self) -> None:
        """Sample again."""
        if self._state is RolloutState.PAUSED:
            self._state = RolloutState.READY
        elif self._state is not RolloutState.READY:
            msg = f"the rollout is {self._state.value} and cannot resume"
            raise RolloutStateError(msg)

    def sleep(self, level: int = 1) -> None:
        """A replica keeps its weights at level 1 and drops them at level 2."""
        if not self._replica:
            super().sleep(level)
        if self._state is RolloutState.ASLEEP:
            return
        self._before_sleep = self._state if level < 2 else RolloutState.WEIGHTS_STALE
        self._state = RolloutState.ASLEEP

    def wake(self) -> None:
        """Undo `sleep`; awake, it does nothing."""
        if self._state is RolloutState.ASLEEP:
            assert self._before_sleep is not None
            self._state = self._before_sleep

    def close(self) -> None:
        """Drop everything that waits."""
        self._queue.clear()
        self._jobs.clear()


def _base_of(card: PolicyCard, options: ToyRolloutConfig) -> ToyEngine:
    """Make the model that a replica is a copy of, from what is known of it."""
    if options.placement is not ToyPlacement.REPLICA:
        msg = f"rollout.placement: {options.placement.value} samples with the engine's own module, and "
        msg += f"there is no engine in this process; take {ToyPlacement.REPLICA.value}"
        raise ValueError(msg)
    engine = ToyEngine(card.model_config, EngineConfig(), None, None)
    engine.initialize()
    return engine


def _prompt_key(request: RolloutRequest) -> tuple[str, str, Guidance]:
    spec = request.sampling
    return request.prompt, spec.negative_prompt, Guidance.of(spec)
