"""What a rollout is asked for and what it returns.

Axes: B rows (samples), G prompts, T sampling steps, W trained (stochastic) steps of a row,
L text tokens, C H W image, F frames. A request is one prompt group, or the part of it that one rank
samples; a trajectory holds the rows of one or more requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import attrs
import torch
from torch import Tensor

from omni_core.choices import StepKind
from omni_core.input_image import InputImage
from omni_core.prompt_length import PromptLength
from omni_core.records import TensorRecord, join
from omni_core.reverse_step import Latents
from omni_core.schedule import FlowMatchSchedule
from omni_core.seeds import step_noise

__all__ = [
    "BatchPlace",
    "Conditioning",
    "Latents",
    "Media",
    "RolloutRequest",
    "SampleRecord",
    "SamplingSpec",
    "Trajectory",
    "TrajectoryInfo",
]

C = TypeVar("C", bound="Conditioning")


@attrs.frozen(kw_only=True)
class SamplingSpec:
    """Everything that decides how a sample is drawn, but for its prompt, input image and seed.

    It is sent with a request, echoed as `Trajectory.effective` and compared field by field.
    """

    sigmas: tuple[float, ...]
    """The schedule's float32 values, T+1 of them."""
    guidance_scale: float
    """1.0 means no classifier-free guidance."""
    guidance_scale_2: float | None = None
    """The family's second scale (`ModelFamily.second_guidance`); None is `guidance_scale`."""
    height: int
    width: int
    max_sequence_length: int
    num_frames: int = 1
    frame_rate: float = 24.0
    """Video frames a second; of pictures it says nothing."""
    negative_prompt: str = ""
    kind: StepKind
    noise_level: float

    @property
    def num_steps(self) -> int:
        """T."""
        return len(self.sigmas) - 1

    def schedule(self) -> FlowMatchSchedule:
        """Build the schedule (checked)."""
        return FlowMatchSchedule.from_values(self.sigmas)

    def difference(self, other: SamplingSpec) -> str | None:
        """Return None if all fields are equal, else a line for each that differs."""
        lines = [
            f"{f.name}: {getattr(self, f.name)!r} asked, {getattr(other, f.name)!r} used"
            for f in attrs.fields(SamplingSpec)
            if getattr(self, f.name) != getattr(other, f.name)
        ]
        return "\n".join(lines) or None


@attrs.frozen(kw_only=True)
class SampleRecord:
    """Who a row is: plain metadata, one record a row."""

    group_id: str
    """Rows of one prompt in one step; groups are made by ids, never by prompt texts."""
    row_id: str
    """The prompt's row in its data set."""
    k: int
    """Place in the group, 0 <= k < samples_per_prompt."""
    seed: int
    """Of the sample's generator: everything random about it follows from this."""
    prompt: str


@attrs.frozen
class BatchPlace:
    """Where a row was denoised: what an exact replay has to repeat."""

    batch: str
    """Names one batch of one rank for good."""
    place: int
    """0 <= place < size."""
    size: int
    """Rows of the batch. Places that no row has are dummies: copies of the row at place 0."""


@attrs.frozen(kw_only=True)
class RolloutRequest:
    """Samples of one prompt. The pair (group_id, k) names a sample for good."""

    samples: tuple[SampleRecord, ...] = attrs.field(validator=attrs.validators.min_len(1))
    """All of one group and one prompt."""
    sampling: SamplingSpec
    window: tuple[int, ...] = ()
    """Stochastic step indices, ascending, the same for the whole group; empty for ode."""
    adapter: str = "default"
    weight_version: int | None = None
    """The policy version asked for; None takes any."""
    image: InputImage | None = None
    """What the samples are edits of, where the family edits images (`ModelFamily.inputs`)."""

    def __attrs_post_init__(self) -> None:
        if len({(s.group_id, s.prompt) for s in self.samples}) != 1:
            msg = f"a request holds one group and one prompt, got {sorted({s.group_id for s in self.samples})}"
            raise ValueError(msg)
        if len({s.k for s in self.samples}) != len(self.samples):
            msg = f"group {self.group_id!r}: sample numbers repeat: {[s.k for s in self.samples]}"
            raise ValueError(msg)

    @property
    def group_id(self) -> str:
        """The group's id."""
        return self.samples[0].group_id

    @property
    def prompt(self) -> str:
        """The group's prompt."""
        return self.samples[0].prompt

    def expand(self) -> list[RolloutRequest]:
        """One request for each sample."""
        return [attrs.evolve(self, samples=(sample,)) for sample in self.samples]

    def split(self, size: int) -> list[RolloutRequest]:
        """Cut into requests of at most *size* samples, in order."""
        parts = range(0, len(self.samples), size)
        return [attrs.evolve(self, samples=self.samples[i : i + size]) for i in parts]


@attrs.frozen(kw_only=True, eq=False)
class Conditioning(TensorRecord):
    """What a Conditioner makes of prompts and media; each family derives its own class.

    Every field is a tensor [G, ...] (or None where the branch does not exist, such as the negative
    prompt without guidance). A family of masked text pads to a common length in `concat`.
    """

    @property
    def rows(self) -> int:
        """G."""
        for field in attrs.fields(type(self)):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                return len(value)
        msg = f"{type(self).__name__} holds no tensor"
        raise ValueError(msg)


@attrs.frozen(kw_only=True, eq=False)
class Media(TensorRecord):
    """Decoded samples, as a scorer and a person get them. At least one is there."""

    image: Tensor | None = None
    """uint8 [B, H, W, 3], RGB."""
    video: Tensor | None = None
    """uint8 [B, F, H, W, 3], RGB."""
    frame_rate: float | None = None
    """Of the video: frames a second."""
    audio: Tensor | None = None
    """float32 [B, channels, samples], -1 to 1."""
    audio_rate: int | None = None
    """Samples a second."""


@attrs.frozen(kw_only=True)
class TrajectoryInfo:
    """What a driver keeps of a trajectory: no tensor of it."""

    records: tuple[SampleRecord, ...]
    effective: SamplingSpec
    adapter: str
    weight_version: int
    nbytes: int
    seconds: float = 0.0
    """Wall time that sampling it took."""
    decode_seconds: float | None = None
    """Of that, turning latents into media; None where it is not told apart."""
    prompt_length: PromptLength | None = None
    """Of its longest prompt, where that is known."""


@attrs.frozen(kw_only=True, eq=False)
class Trajectory(TensorRecord):
    """Everything that scoring, training and replay need of some samples."""

    latents: Mapping[str, Tensor]
    """Modality -> float32 [B, T+1, ...]: the states x_0 (pure noise) to x_T, as they were stored,
    which is what the log-probs were computed from."""
    step_indices: Tensor
    """int64 [B, W], ascending: the stochastic steps of each row (W = 0 for ode)."""
    log_probs: Tensor
    """float32 [B, W]: published ratio form, mean over the sample's D values."""
    conditioning: Conditioning
    """[G, ...]: one row for each prompt, not for each sample."""
    prompt_index: Tensor
    """int64 [B]: the row's place in `conditioning`."""
    media: Media | None
    """None when decoding was not asked for."""
    records: tuple[SampleRecord, ...]
    """One for each row."""
    effective: SamplingSpec
    """The parameters that were really used."""
    adapter: str
    weight_version: int
    places: tuple[BatchPlace, ...]
    """One for each row."""

    @property
    def rows(self) -> int:
        """B."""
        return len(self.records)

    def info(
        self,
        *,
        seconds: float = 0.0,
        decode_seconds: float | None = None,
        prompt_length: PromptLength | None = None,
    ) -> TrajectoryInfo:
        """Return the part that a driver keeps."""
        return TrajectoryInfo(
            records=self.records,
            effective=self.effective,
            adapter=self.adapter,
            weight_version=self.weight_version,
            nbytes=self.nbytes(),
            seconds=seconds,
            decode_seconds=decode_seconds,
            prompt_length=prompt_length,
        )

    def expanded_conditioning(self) -> Conditioning:
        """Conditioning with one row for each sample, [B, ...]."""
        return self.conditioning.select(self.prompt_index)

    def state(self, index: Tensor) -> Latents:
        """Latents before step *index* (int64 [B]): modality -> [B, ...]."""
        rows = torch.arange(self.rows, device=index.device)
        return {name: value[rows, index] for name, value in self.latents.items()}

    def drawn_noise(self, rows: Tensor, steps: Tensor) -> dict[str, Tensor]:
        """What stochastic steps were drawn with, again, from their samples' seeds.

        Args:
            rows: int64 [M].
            steps: int64 [M], each among its row's `step_indices`.

        Returns:
            modality -> float32 [M, ...] on the CPU.
        """
        shapes = {name: tuple(value.shape[2:]) for name, value in self.latents.items()}
        parts = [
            step_noise(self.records[row].seed, step, shapes)
            for row, step in zip(rows.tolist(), steps.tolist(), strict=True)
        ]
        return {name: torch.cat([part[name] for part in parts]) for name in shapes}

    def select(self, rows: Tensor) -> Trajectory:
        """Take rows (int64 [n]); conditioning keeps only the prompts that are still used."""
        kept, prompt_index = torch.unique(self.prompt_index[rows], return_inverse=True)
        return attrs.evolve(
            self,
            latents={name: value[rows] for name, value in self.latents.items()},
            step_indices=self.step_indices[rows],
            log_probs=self.log_probs[rows],
            conditioning=self.conditioning.select(kept),
            prompt_index=prompt_index,
            media=None if self.media is None else self.media.select(rows),
            records=tuple(self.records[int(row)] for row in rows),
            places=tuple(self.places[int(row)] for row in rows),
        )

    @classmethod
    def concat(cls, parts: Sequence[Trajectory]) -> Trajectory:
        """Join trajectories of one schedule, adapter and weight version.

        Raises:
            ValueError: they were not sampled alike; names what differs.
        """
        if not parts:
            msg = "Trajectory.concat: no parts"
            raise ValueError(msg)
        first = parts[0]
        for part in parts[1:]:
            differs = first.effective.difference(part.effective)
            same = (first.adapter, first.weight_version) == (part.adapter, part.weight_version)
            if differs or not same:
                said = differs or (
                    f"adapter {first.adapter!r} version {first.weight_version}, "
                    f"adapter {part.adapter!r} version {part.weight_version}"
                )
                msg = f"Trajectory.concat: parts were sampled differently: {said}"
                raise ValueError(msg)
        offsets = torch.tensor([0, *(p.conditioning.rows for p in parts[:-1])]).cumsum(0)
        joined = {
            name: join([getattr(p, name) for p in parts], f"Trajectory.{name}")
            for name in ("latents", "step_indices", "log_probs", "media")
        }
        index = [p.prompt_index + o for p, o in zip(parts, offsets, strict=True)]
        return attrs.evolve(
            first,
            **joined,
            conditioning=type(first.conditioning).concat([p.conditioning for p in parts]),
            prompt_index=torch.cat(index),
            records=tuple(record for part in parts for record in part.records),
            places=tuple(place for part in parts for place in part.places),
        )
