"""Engine-side rollout: it samples with the trained module itself (`shared`), or with a copy (`replica`).

Shared, there is no second copy of the policy and nothing to push. It works while it is polled: each poll
runs one sampling batch, which is a collective where there are several ranks, so all ranks submit,
poll, pause and cancel at the same points (with other requests, or none). Letters: B rows, T steps,
W trained steps, G prompts.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import attrs
import torch

from omni_core import device as devices
from omni_core.choices import StepKind
from omni_core.input_image import InputImage
from omni_core.model import Codec, Conditioner, EditConditioner, Guidance
from omni_core.options import DiffusionPipelineConfig, DiffusionSamplingConfig
from omni_core.reverse_step import Latents
from omni_core.rollout import (
    BaseRollout,
    RolloutHandle,
    RolloutState,
    RolloutStateError,
    UpdateReport,
    WeightUpdate,
)
from omni_core.schedule import FlowMatchSchedule
from omni_core.trajectory import Conditioning, Media, RolloutRequest, SamplingSpec, Trajectory
from omni_engine_fsdp import batches, call_plan
from omni_engine_fsdp.batches import Asked, Batch, Likeness
from omni_engine_fsdp.collector import Collector, Facts
from omni_engine_fsdp.kept_graphs import BatchKeeper, KeptGraphs
from omni_engine_fsdp.options import EngineRolloutConfig, RolloutPlacement
from omni_engine_fsdp.precision import compute_dtype
from omni_engine_fsdp.replica import Replica
from omni_engine_fsdp.request_check import check_requests, pipeline_of
from omni_engine_fsdp.sampling import SampledBatch, SamplingBatch, SamplingRule, sample

REST = torch.device("cpu")
"""Host memory."""


@attrs.frozen(kw_only=True, eq=False)
class _Encoded:
    """The prompts of one submit that share a sampling spec, each encoded once with its image."""

    conditioning: Conditioning
    """[G, ...] on the engine's device."""
    places: Mapping[Asked, int]
    """Prompt and image -> their row."""

    def of(self, asked: Sequence[Asked]) -> Conditioning:
        """One row for each, in new tensors."""
        return self.conditioning.select(torch.tensor([self.places[each] for each in asked]))


@attrs.define(eq=False)
class _Job:
    """What was submitted together, and how far it is."""

    requests: Sequence[RolloutRequest]
    decode: bool
    queue: deque[Batch] | None = None
    """None until the ranks have agreed on the batches."""
    kept: deque[frozenset[int]] = attrs.field(factory=deque)
    """Of each batch in the queue: steps whose graphs are kept, the same on every rank."""
    encoded: dict[Likeness, _Encoded] = attrs.field(factory=dict)
    collector: Collector = attrs.field(init=False)
    version: int | None = None
    """Weight version of what was sampled so far."""

    def __attrs_post_init__(self) -> None:
        self.collector = Collector(self.requests, self._conditioning_of)

    def _conditioning_of(self, request: RolloutRequest) -> Conditioning:
        encoded = self.encoded[Likeness(request.sampling, request.adapter)]
        return encoded.of([(request.prompt, request.image)]).to("cpu")


class EngineRollout(BaseRollout):
    """Samples with an engine's own denoiser; built as `EngineRollout(options, engine=engine)`.

    Conditioner and codec are read when first needed, and stay on the engine's device unless the options
    let them rest in host memory.
    """

    def __init__(self, options: EngineRolloutConfig, *, engine: Any) -> None:
        if options.merge_lora and engine.model_config.lora is None:
            raise ValueError("rollout.merge_lora: model.lora is null, so there is nothing to merge")
        if options.merge_lora and engine.engine_config.keep_graph:
            raise ValueError(
                "engine.keep_graph: rollout.merge_lora samples without the adapter's own weights in the "
                "graph; take one of them"
            )
        self.options = options
        self._replica = Replica(engine) if options.placement is RolloutPlacement.REPLICA else None
        self.engine = engine if self._replica is None else self._replica.engine
        """Whose denoiser samples."""
        # Weights that were added first do not give the last bits of two products that are added.
        self.replays_exactly = not options.merge_lora
        self._state = RolloutState.READY
        self._jobs: dict[int, _Job] = {}
        self._submits = 0
        self._batches = 0
        self.decode_seconds: float = 0.0

    # -- what it samples with ---------------------------------------------------------------------

    @cached_property
    def conditioner(self) -> Conditioner:
        """Of the engine's family, in the model's dtype."""
        loaded: Conditioner = self.engine.family.load_conditioner(self._dtype)
        if not self.options.offload_encoders:
            loaded.to(self.engine.device)
        return loaded

    @cached_property
    def codec(self) -> Codec:
        """Of the engine's family, in the model's dtype."""
        loaded: Codec = self.engine.family.load_codec(self._dtype)
        if not self.options.offload_codec:
            loaded.to(self.engine.device)
        return loaded

    def setup(self) -> None:
        """Load conditioner and codec.

        Raises:
            ValueError: the family takes no such text length or picture size; says what fits.
        """
        self.latent_shapes()
        _ = self.conditioner

    @contextmanager
    def _at_work(self, part: Conditioner | Codec, *, rests: bool) -> Iterator[None]:
        """Have a part that rests in host memory on the engine's device."""
        if not rests:
            yield
            return
        part.to(self.engine.device)
        try:
            yield
        finally:
            part.to(REST)

    @property
    def _dtype(self) -> torch.dtype:
        return compute_dtype(self.engine.model_config.dtype)

    def schedule(self, sampling: DiffusionSamplingConfig) -> FlowMatchSchedule:
        """Return the schedule that a sampling config asks of the engine's family."""
        found: FlowMatchSchedule = self.engine.family.schedule(sampling)
        return found

    def latent_shapes(
        self, pipeline: DiffusionPipelineConfig | None = None
    ) -> dict[str, tuple[int, ...]]:
        """Modality -> shape of one sample's latents; None takes the model's own pipeline config."""
        return self.codec.latent_shapes(pipeline or self.engine.model_config.pipeline)

    def encode(
        self,
        prompts: Sequence[str],
        *,
        images: Sequence[InputImage | None] = (),
        negative_prompt: str = "",
        guidance: Guidance,
    ) -> Conditioning:
        """Encode G prompts, at most a batch at a time: [G, ...] on the engine's device.

        Args:
            prompts: G.
            images: What each edits, where the family edits images; None stands for a black one.
            negative_prompt: Of all.
            guidance: Of all.

        Raises:
            ValueError: no prompt, or one that the family cannot take.
        """
        if not prompts:
            raise ValueError("there is no prompt to encode")
        size = self.options.batch_size
        with self._at_work(self.conditioner, rests=self.options.offload_encoders):
            parts = [
                self._encode(
                    prompts[start : start + size],
                    images[start : start + size],
                    negative_prompt=negative_prompt,
                    guidance=guidance,
                )
                for start in range(0, len(prompts), size)
            ]
        return type(parts[0]).concat(parts)

    def _encode(
        self, prompts: Sequence[str], images: Sequence[InputImage | None], **keywords: Any
    ) -> Conditioning:
        conditioner = self.conditioner
        if not isinstance(conditioner, EditConditioner):
            return conditioner.encode(prompts, **keywords)
        pixels = [self._black() if image is None else image.pixels() for image in images]
        with self._at_work(self.codec, rests=self.options.offload_codec):
            return conditioner.encode_edits(prompts, pixels, self.codec, **keywords)

    def _black(self) -> torch.Tensor:
        """What a rank without any row of its own edits along with the others."""
        size = self.engine.model_config.pipeline
        return torch.zeros(size.height, size.width, 3, dtype=torch.uint8)

    # -- the rollout's form -----------------------------------------------------------------------

    @property
    def state(self) -> RolloutState:
        """READY or PAUSED: its weights are never stale."""
        return self._state

    @property
    def weight_version(self) -> int:
        """The engine's: optimizer steps taken."""
        version: int = self.engine.weight_version
        return version

    def submit(self, requests: Sequence[RolloutRequest], *, decode: bool = True) -> RolloutHandle:
        """Queue requests; with several ranks, all submit at the same point, with none if need be.

        Raises:
            ValueError: a request that it cannot serve (size, window, kind, adapter, version); names
                the group and what would fit.
        """
        check_requests(requests, engine=self.engine, latent_shapes=self.latent_shapes)
        self._check_pushed(requests)
        handle = RolloutHandle(self._submits, len(requests))
        self._submits += 1
        if requests or self._group is not None:
            self._jobs[handle.id] = _Job(tuple(requests), decode)
        return handle

    def _check_pushed(self, requests: Sequence[RolloutRequest]) -> None:
        replica = self._replica
        for request in requests:
            if replica is not None and not replica.has(request.adapter):
                raise ValueError(
                    f"group {request.group_id!r}: adapter {request.adapter!r} was not pushed with "
                    f"version {self.weight_version}, so this rollout's is an older one"
                )

    def poll(self, handle: RolloutHandle) -> list[Trajectory]:
        """Run the next batch of *handle* (none while paused) and return what it completed.

        Raises:
            KeyError: the handle is unknown, cancelled or drained.
            CallPlanError: ranks were about to sample differently.
            RolloutStateError: the weights changed while it was being sampled.
        """
        job = self._job(handle)
        if self._state is RolloutState.PAUSED:
            return []
        if job.queue is None:
            job.queue = self._plan(job)
            job.kept = self._plan_kept(job.queue)
        finished = self._run(job, job.queue[0], job.kept[0]) if job.queue else []
        if job.queue:
            job.queue.popleft()
            job.kept.popleft()
        if not job.queue:
            del self._jobs[handle.id]
        return finished

    def done(self, handle: RolloutHandle) -> bool:
        """Whether nothing of *handle* is left to poll (dummy batches included).

        Raises:
            KeyError: it was never submitted here.
        """
        if not 0 <= handle.id < self._submits:
            raise KeyError(f"handle {handle.id} was never submitted to this rollout")
        return handle.id not in self._jobs

    def cancel(self, handle: RolloutHandle) -> None:
        """Drop what was not sampled; with several ranks, all cancel at the same point.

        Raises:
            KeyError: the handle is unknown, cancelled or drained.
        """
        self._job(handle)
        del self._jobs[handle.id]

    def pause(self) -> None:
        """Stop sampling: nothing runs outside of `poll`, so this returns at once."""
        self._state = RolloutState.PAUSED

    def update(self, update: WeightUpdate) -> UpdateReport:
        """Bind new weights in a replica; a shared module's weights are the rollout's own.

        Raises:
            RolloutStateError: the placement is `shared`, or it is not paused.
            WeightMismatchError: what is sent is not what is here, by name or shape.
            ValueError: the version does not grow.
        """
        if self._replica is not None:
            if self._state is not RolloutState.PAUSED:
                raise RolloutStateError(
                    f"an update needs a paused rollout, this one is {self._state.value}"
                )
            return self._replica.update(update)
        raise RolloutStateError(
            f"rollout.placement is {RolloutPlacement.SHARED.value}: it samples with the trained "
            f"module itself (weight version {self.weight_version}), so there is nothing to push "
            f"(version {update.version} was offered); train the engine instead"
        )

    def resume(self) -> None:
        """Sample again."""
        self._state = RolloutState.READY

    def close(self) -> None:
        """Forget every request, and free conditioner, codec and a replica, which cannot be used again."""
        self._jobs.clear()
        if self._replica is not None:
            self._replica = self.engine = None
        for name in ("conditioner", "codec"):
            self.__dict__.pop(name, None)

    # -- sampling ---------------------------------------------------------------------------------

    @property
    def _graphs(self) -> KeptGraphs | None:
        """Where the engine keeps what it samples, while it does."""
        graphs: KeptGraphs | None = getattr(self.engine, "graphs", None)
        return graphs if graphs is not None and graphs.open else None

    @property
    def _group(self) -> Any | None:
        return self.engine.mesh.group

    def _job(self, handle: RolloutHandle) -> _Job:
        if handle.id not in self._jobs:
            raise KeyError(f"handle {handle.id} is unknown, cancelled or drained")
        return self._jobs[handle.id]

    def _plan(self, job: _Job) -> deque[Batch]:
        """Deal rows into batches, agree on them with the other ranks, and encode every prompt once."""
        group = self._group
        rows = ((s.group_id, s.k, s.seed) for r in job.requests for s in r.samples)
        call_plan.agree_on_rows(rows, self.engine.mesh.together, phase="sample")
        queue = deque(batches.deal(job.requests, batch_size=self.options.batch_size, group=group))
        if group is not None:
            calls = [call for batch in queue for call in self._calls(batch)]
            call_plan.agree(call_plan.CallPlan(phase="sample", calls=tuple(calls)), group)
        asked: dict[Likeness, dict[Asked, int]] = {}
        for batch in queue:
            known = asked.setdefault(batch.likeness, {})
            for row in batch.padded():
                known.setdefault(row.asked, len(known))
        for likeness, places in asked.items():
            conditioning = self.encode(
                [prompt for prompt, _ in places],
                images=[image for _, image in places],
                negative_prompt=likeness.sampling.negative_prompt,
                guidance=Guidance.of(likeness.sampling),
            )
            job.encoded[likeness] = _Encoded(conditioning=conditioning, places=places)
        return queue

    def _plan_kept(self, queue: Sequence[Batch]) -> deque[frozenset[int]]:
        """Agree on the steps of each batch whose graphs are kept: those that any rank trains."""
        graphs = self._graphs
        if graphs is None:
            return deque(frozenset() for _ in queue)
        own = [sorted({step for row in batch.rows for step in row.window}) for batch in queue]
        said = call_plan.gather_text(json.dumps(own), self._group, phase="keep_graph")
        each_rank = [json.loads(text) for text in said]
        agreed = [frozenset().union(*steps) for steps in zip(*each_rank, strict=True)]
        graphs.expected += sum(map(len, agreed))
        return deque(agreed)

    def _calls(self, batch: Batch) -> list[call_plan.Call]:
        rule = rule_of(batch.likeness.sampling)
        shapes = self.latent_shapes(pipeline_of(batch.likeness.sampling))
        return batches.calls(
            [
                self.engine.denoiser.route(step, rule.schedule)
                for step in range(rule.schedule.num_steps)
            ],
            batch.size * self.engine.denoiser.branches(rule.guidance),
            [side for shape in shapes.values() for side in shape],
        )

    def _run(self, job: _Job, batch: Batch, kept: frozenset[int]) -> list[Trajectory]:
        """Denoise one batch; return the trajectories of the requests that it completed."""
        version = self.weight_version
        if job.version not in (None, version):
            raise RolloutStateError(
                f"weights went from version {job.version} to {version} while requests were being "
                "sampled; poll every request before an optimizer step, or cancel"
            )
        job.version = version
        size, rule = pipeline_of(batch.likeness.sampling), rule_of(batch.likeness.sampling)
        name = f"{self.engine.get_data_parallel_rank()}/{version}/{self._batches}"
        self._batches += 1
        keeper = self._keeper(name, kept, rule)
        sampled = self._sample(batch, job.encoded[batch.likeness], rule, size, keeper)
        media = None
        if job.decode and batch.rows:
            final = {name: value[: len(batch.rows), -1] for name, value in sampled.latents.items()}
            media = self._decode(final)
        facts = Facts(
            effective=self._effective(batch, rule, size),
            weight_version=version,
            name=name,
        )
        return job.collector.add(batch, sampled, media, facts)

    def _keeper(self, name: str, steps: frozenset[int], rule: SamplingRule) -> BatchKeeper | None:
        if self._graphs is None or not steps:
            return None
        route = self.engine.denoiser.route
        return self._graphs.keeper(name, steps, lambda step: route(step, rule.schedule))

    def _decode(self, latents: Latents) -> Media:
        """Decode, and count the seconds: between two waits for the device, which works on its own."""
        devices.synchronize(self.engine.device)
        started = time.perf_counter()
        with self._at_work(self.codec, rests=self.options.offload_codec):
            media = self.codec.decode(latents)
        devices.synchronize(self.engine.device)
        self.decode_seconds += time.perf_counter() - started
        return media

    def _sample(
        self,
        batch: Batch,
        encoded: _Encoded,
        rule: SamplingRule,
        size: DiffusionPipelineConfig,
        keeper: BatchKeeper | None,
    ) -> SampledBatch:
        rows = batch.padded()
        engine, adapter = self.engine, batch.likeness.adapter
        use = engine.merged_adapter if self.options.merge_lora else engine.use_adapter
        with engine.eval_mode(), use(adapter):
            return sample(
                self.engine.denoiser,
                SamplingBatch(
                    seeds=[row.sample.seed for row in rows],
                    windows=[row.window for row in rows],
                    conditioning=encoded.of([row.asked for row in rows]),
                ),
                rule,
                shapes=self.latent_shapes(size),
                device=self.engine.device,
                keeper=keeper,
            )

    def _effective(
        self, batch: Batch, rule: SamplingRule, size: DiffusionPipelineConfig
    ) -> SamplingSpec:
        """Say what was used, from what was used: the requests are not asked again."""
        return SamplingSpec(
            sigmas=rule.schedule.values(),
            guidance_scale=rule.guidance.scale,
            guidance_scale_2=rule.guidance.second_scale,
            height=size.height,
            width=size.width,
            max_sequence_length=self.engine.model_config.pipeline.max_sequence_length,
            num_frames=size.num_frames,
            frame_rate=self.engine.model_config.pipeline.frame_rate,
            negative_prompt=batch.likeness.sampling.negative_prompt,
            kind=rule.kind,
            noise_level=rule.noise_level,
        )


def rule_of(spec: SamplingSpec) -> SamplingRule:
    """Return how a spec's rows are denoised."""
    return SamplingRule(
        schedule=spec.schedule(),
        guidance=Guidance.of(spec),
        kind=StepKind.parse(spec.kind),
        noise_level=spec.noise_level,
    )
