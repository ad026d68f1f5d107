"""A step's samples as requests: each with its seed, each group with its window, dealt to the ranks.

What a sample is follows from the prompt's row, the step and the run's seeds alone, so the same samples
are drawn on any number of ranks; only where they are drawn differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from omni_core.choices import StepKind
from omni_core.options import DiffusionPipelineConfig, DiffusionSamplingConfig
from omni_core.seeds import sample_seed
from omni_core.trajectory import RolloutRequest, SampleRecord, SamplingSpec
from omni_trainer.data import PromptBatch, PromptRow

Window = Callable[[int], tuple[int, ...]]
"""Seed of a group -> its stochastic steps."""

SampleKey = tuple[str, int]
"""(group_id, k): names a sample for good."""


def sampling_spec(
    sampling: DiffusionSamplingConfig,
    pipeline: DiffusionPipelineConfig,
    *,
    sigmas: Sequence[float],
    kind: StepKind | str,
    noise_level: float,
) -> SamplingSpec:
    """Put together everything that decides how a sample is drawn, but for its prompt and seed."""
    return SamplingSpec(
        sigmas=tuple(sigmas),
        guidance_scale=sampling.guidance_scale,
        guidance_scale_2=sampling.guidance_scale_2,
        height=pipeline.height,
        width=pipeline.width,
        max_sequence_length=pipeline.max_sequence_length,
        num_frames=pipeline.num_frames,
        frame_rate=pipeline.frame_rate,
        negative_prompt=sampling.negative_prompt,
        kind=StepKind.parse(kind),
        noise_level=noise_level,
    )


@attrs.frozen(kw_only=True)
class RolloutPlan:
    """Who samples what."""

    requests: tuple[RolloutRequest, ...]
    """One for each group, in the order of the prompts."""
    rows: tuple[PromptRow, ...]
    """The prompt's row of each request."""
    by_rank: tuple[tuple[RolloutRequest, ...], ...]
    """The same samples: each rank a stretch of them, so a group may span two ranks."""

    @property
    def keys(self) -> tuple[SampleKey, ...]:
        """Every sample, in the natural order: group after group."""
        return tuple((r.group_id, s.k) for r in self.requests for s in r.samples)

    @property
    def seeds(self) -> dict[SampleKey, int]:
        """The seed of every sample."""
        return {(r.group_id, s.k): s.seed for r in self.requests for s in r.samples}


def plan_rollout(
    batch: PromptBatch,
    *,
    purpose: str,
    step: int,
    samples_per_prompt: int,
    base_seed: int,
    sampling: SamplingSpec,
    window: Window,
    ranks: int,
    adapter: str = "default",
    weight_version: int | None = None,
) -> RolloutPlan:
    """Make the requests of one step.

    Args:
        batch: Prompts, each with how often it came before in the batch.
        purpose: `rollout` or `validation`: other seeds for each.
        step: Trained step, counted from 0; a resumed run counts on.
        samples_per_prompt: Rows of a group.
        base_seed: `seeds.rollout`.
        sampling: The same for all samples.
        window: Chooses a group's stochastic steps from the group's own seed.
        ranks: Data-parallel ranks.
        adapter: Named policy adapter that samples.
        weight_version: The policy version asked for.
    """
    requests = []
    for row, occurrence in zip(batch.rows, batch.occurrences, strict=True):

        def seed(purpose: str, k: int, row: PromptRow = row, occurrence: int = occurrence) -> int:
            return sample_seed(
                purpose=purpose,
                base_seed=base_seed,
                step=step,
                row_id=row.row_id,
                occurrence=occurrence,
                k=k,
            )

        group = f"{purpose}-{step}-{row.row_id}-{occurrence}"
        samples = tuple(
            SampleRecord(
                group_id=group, row_id=row.row_id, k=k, seed=seed(purpose, k), prompt=row.prompt
            )
            for k in range(samples_per_prompt)
        )
        requests.append(
            RolloutRequest(
                samples=samples,
                sampling=sampling,
                window=window(seed(f"{purpose}-window", 0)),
                adapter=adapter,
                weight_version=weight_version,
                image=row.image,
            )
        )
    return RolloutPlan(
        requests=tuple(requests), rows=tuple(batch.rows), by_rank=deal(requests, ranks)
    )


def deal(requests: Sequence[RolloutRequest], ranks: int) -> tuple[tuple[RolloutRequest, ...], ...]:
    """Cut all samples into *ranks* stretches that differ by at most one sample, in order."""
    total = sum(len(request.samples) for request in requests)
    bounds = [total * rank // ranks for rank in range(ranks + 1)]
    dealt: list[list[RolloutRequest]] = [[] for _ in range(ranks)]
    start = 0
    for request in requests:
        stop = start + len(request.samples)
        for rank in range(ranks):
            low, high = max(start, bounds[rank]), min(stop, bounds[rank + 1])
            if low < high:
                part = request.samples[low - start : high - start]
                dealt[rank].append(attrs.evolve(request, samples=part))
        start = stop
    return tuple(tuple(part) for part in dealt)
