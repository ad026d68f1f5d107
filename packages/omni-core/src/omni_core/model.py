"""A model family is three parts that never meet an algorithm: Denoiser, Conditioner, Codec.

The Denoiser is trained and sharded; Conditioner and Codec belong to whoever produces trajectories, are
never trained, and ship all conditioning with what they produce.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from omni_core.options import DiffusionModelConfig, DiffusionPipelineConfig, DiffusionSamplingConfig
from omni_core.prompt_length import PromptLength
from omni_core.reverse_step import Latents
from omni_core.schedule import FlowMatchSchedule
from omni_core.trajectory import Conditioning, Media, SamplingSpec


class TextLayout(enum.StrEnum):
    """How a family treats text shorter than the maximum."""

    FIXED = "fixed"
    """It attends to its padding: the length is part of the model."""
    MASKED = "masked"
    """Padding is masked away: the length does not matter."""


class GuidanceKind(enum.StrEnum):
    """What a family makes of a guidance scale."""

    CLASSIFIER_FREE = "classifier-free"
    """A second forward, of the negative prompt, unless the scale is 1.0."""
    EMBEDDED = "embedded"
    """The module takes the scale as an input (a guidance-distilled model): one forward at any scale."""


@attrs.frozen(kw_only=True)
class Guidance:
    """How strongly the prompt is followed."""

    scale: float
    """1.0: one conditional branch, no classifier-free guidance."""
    second_scale: float | None = None
    """Of what the family names as `ModelFamily.second_guidance`; None takes `scale`."""

    @classmethod
    def of(cls, spec: SamplingSpec) -> Guidance:
        """Return the guidance that samples of a spec are drawn with."""
        return cls(scale=spec.guidance_scale, second_scale=spec.guidance_scale_2)

    @property
    def second(self) -> float:
        """The second scale, or the one that there is."""
        return self.scale if self.second_scale is None else self.second_scale

    @property
    def branches(self) -> int:
        """Forwards that one velocity takes where guidance is classifier-free."""
        return 1 if self.scale == self.second == 1.0 else 2


NO_GUIDANCE = Guidance(scale=1.0)


@attrs.frozen(kw_only=True, eq=False)
class Step:
    """Where each row is in the schedule."""

    index: Tensor
    """int64 [B]."""
    sigma: Tensor
    """float32 [B], on the latents' device."""

    @property
    def timestep(self) -> Tensor:
        """float32 [B]: sigma * 1000, scaled in float32; a module casts it last, if at all."""
        return self.sigma * 1000.0


@attrs.frozen(kw_only=True)
class PositionFactors:
    """What a module says of every position, such as rotary factors: each output has one place for each."""

    dim: int
    """Of the outputs, along which positions lie."""
    streams: tuple[str, ...] = ()
    """Concatenated there in this order; empty where each output is of one stream alone."""


@attrs.frozen(kw_only=True)
class SequencePlan:
    """Where an expert's sequences begin, meet in attention and end, so that ranks can share them.

    A stream (text, image) is a sequence [B, S, D] whose positions meet nowhere but in attention.
    """

    cut: Mapping[str, str]
    """Module whose output is a stream -> the stream's name."""
    join: Mapping[str, str]
    """Module after which a stream is needed whole again -> the stream's name."""
    attention: Mapping[str, tuple[str, ...]]
    """Suffix of the names of attention modules -> the streams that attend to each other there, in the
    order in which they are concatenated. It goes through torch's scaled_dot_product_attention."""
    heads: int
    """Of every attention named above."""
    inputs: Mapping[str, Mapping[str, str]] = attrs.field(factory=dict)
    """Module -> argument of its forward that has all positions [B, S, ...] -> the stream's name: cut as the
    module is called. For streams that begin behind no module, and for masks of keys."""
    factors: Mapping[str, PositionFactors] = attrs.field(factory=dict)
    """Module whose outputs have a place for each position."""
    left_out: Mapping[str, str] = attrs.field(factory=dict)
    """Module behind which the expert drops a stream that lies first in its output, by the length that the
    stream has on all ranks together -> the stream's name."""


class Denoiser(ABC):
    """The trained part: latents in, velocity out."""

    branches_as_batch: bool = False
    """Whether `velocity` calls its expert once, both guidance branches being halves of the batch: then
    two ranks can run them (CFG parallelism)."""
    rowless_inputs: tuple[str, ...] = ()
    """Keyword arguments of the experts that are the same for all rows, though they may be as long."""

    @property
    @abstractmethod
    def experts(self) -> Mapping[str, nn.Module]:
        """The modules that are trained, by name; one named `transformer` for most families."""

    @property
    @abstractmethod
    def lora_targets(self) -> tuple[str, ...]:
        """Suffixes of module names that LoRA adapts by default."""

    @abstractmethod
    def shard_units(self, expert: nn.Module) -> Sequence[nn.Module]:
        """Return the submodules of an expert that are sharded each as a unit (its blocks)."""

    def sequence_plan(self, expert: nn.Module) -> SequencePlan | None:
        """Say how ranks can share an expert's sequences; None where they cannot."""
        del expert
        return None

    def expert_at(self, sigma: float) -> str:
        """Name the expert that serves a noise level (two-expert models override this)."""
        del sigma
        return next(iter(self.experts))

    def route(self, step: int, schedule: FlowMatchSchedule) -> str:
        """Name the expert that serves a step: that of the sigma which it starts from."""
        return self.expert_at(schedule.values()[step])

    def branches(self, guidance: Guidance) -> int:
        """Count the forwards that one velocity takes (embedded guidance: always one)."""
        return guidance.branches

    def single_branch(self, guidance: Guidance) -> Guidance:
        """Return what the conditional branch alone is predicted with, as losses ask that train it alone.

        That is no guidance; where the scale is an input of the module, it stays.
        """
        del guidance
        return NO_GUIDANCE

    @abstractmethod
    def velocity(
        self, latents: Latents, step: Step, conditioning: Conditioning, guidance: Guidance
    ) -> Latents:
        """Predict the velocity, guidance branches combined the family's way.

        Args:
            latents: Modality -> float32 [B, ...].
            step: Rows may be at different steps as long as one expert serves them.
            conditioning: [B, ...], one row for each latent row.
            guidance: The same for all rows.

        Returns:
            Modality -> float32 [B, ...], shaped like *latents*.
        """


class Conditioner(ABC):
    """Prompts (and media) to conditioning, the negative branch included."""

    layout: TextLayout

    @abstractmethod
    def encode(
        self, prompts: Sequence[str], *, negative_prompt: str, guidance: Guidance
    ) -> Conditioning:
        """Encode G prompts, each once.

        Raises:
            ValueError: a prompt that the family cannot take; names it.
        """

    @abstractmethod
    def to(self, device: torch.device | str) -> None:
        """Move the encoders."""


class EditConditioner(Conditioner):
    """Prompts, and the image that each edits, to conditioning."""

    def encode(
        self, prompts: Sequence[str], *, negative_prompt: str, guidance: Guidance
    ) -> Conditioning:
        """Refuse prompts without images.

        Raises:
            ValueError: always.
        """
        del negative_prompt, guidance
        msg = f"{type(self).__name__} edits images: each of the {len(prompts)} prompts needs one"
        raise ValueError(msg)

    @abstractmethod
    def encode_edits(
        self,
        prompts: Sequence[str],
        images: Sequence[Tensor],
        codec: Codec,
        *,
        negative_prompt: str,
        guidance: Guidance,
    ) -> Conditioning:
        """Encode G prompts with their images, each once.

        Args:
            prompts: G.
            images: uint8 [H, W, 3] each, of any size.
            codec: Of the same family; its `encode` makes latents of the images.
            negative_prompt: Of all.
            guidance: Of all.

        Raises:
            ValueError: a prompt that the family cannot take; names it.
        """


class Codec(ABC):
    """Media to latents and back."""

    @abstractmethod
    def latent_shapes(self, pipeline: DiffusionPipelineConfig) -> dict[str, tuple[int, ...]]:
        """Modality -> shape of one sample's latents (no batch axis).

        Raises:
            ValueError: the size does not fit the family; says which sizes do.
        """

    @abstractmethod
    def decode(self, latents: Latents) -> Media:
        """Decode final latents, modality -> float32 [B, ...]."""

    def encode(self, images: Tensor) -> Tensor:
        """Encode images, uint8 [B, H, W, 3], as latents of the codec's dtype, without randomness.

        Raises:
            NotImplementedError: the family edits no images.
        """
        msg = f"{type(self).__name__} decodes only; got {len(images)} images to encode"
        raise NotImplementedError(msg)

    @abstractmethod
    def to(self, device: torch.device | str) -> None:
        """Move the codec."""


class ModelFamily(ABC):
    """Loads the parts of one pipeline directory; the plugin of `omni.models`.

    Built as `Family(model_config)`; nothing is read from disk until a part is asked for.
    """

    pipeline_classes: tuple[str, ...]
    """`_class_name` values of model_index.json that it serves."""
    text_layout: TextLayout = TextLayout.FIXED
    """What its conditioner does; said here so that it is known before anything is loaded."""
    guidance: GuidanceKind = GuidanceKind.CLASSIFIER_FREE
    """What its denoiser makes of a guidance scale."""
    tasks: tuple[str, ...] = ("text-to-image",)
    """What it is trained to do."""
    inputs: tuple[str, ...] = ("text",)
    """What a sample is made from: `text`, and `image` where prompts edit one (`EditConditioner`)."""
    modalities: tuple[str, ...] = ("image",)
    """Keys of its latents."""
    lora_targets: tuple[str, ...] = ()
    """Of its denoiser, where they do not depend on the weights."""
    expert_names: tuple[str, ...] = ("transformer",)
    """Of its denoiser's `experts`, in their order."""
    second_guidance: str | None = None
    """What `guidance_scale_2` is the scale of; None where the family knows one scale alone."""

    def __init__(self, config: DiffusionModelConfig) -> None:
        self.config = config

    @abstractmethod
    def load_denoiser(self, dtype: torch.dtype) -> Denoiser:
        """Read the trained part."""

    @abstractmethod
    def load_conditioner(self, dtype: torch.dtype) -> Conditioner:
        """Read tokenizers and encoders, frozen."""

    @abstractmethod
    def load_codec(self, dtype: torch.dtype) -> Codec:
        """Read the codec, frozen."""

    @abstractmethod
    def stock_schedule(self, sampling: DiffusionSamplingConfig) -> FlowMatchSchedule:
        """Return the sigmas that the family's own stock pipeline would use."""

    def stock_call(self, sampling: DiffusionSamplingConfig) -> dict[str, Any]:
        """Return the keywords with which the family's stock pipeline draws the same samples.

        Prompt and generator come to them; an export's card carries them.
        """
        return self.config.pipeline.stock_call(sampling)

    def prompt_lengths(self, prompts: Sequence[str]) -> list[PromptLength] | None:
        """Count each prompt's tokens for the encoder that reads most; reads tokenizers, no weights.

        None, the default, is a family that cannot tell.
        """
        del prompts
        return None

    def schedule(self, sampling: DiffusionSamplingConfig) -> FlowMatchSchedule:
        """Return the schedule that a sampling config asks for."""
        if sampling.schedule == "linear":
            return FlowMatchSchedule.linear(sampling.num_inference_steps, shift=sampling.shift)
        return self.stock_schedule(sampling)
