"""A model family without files: its weights follow from the config's path, its text encoder from hashes.

Axes: B rows, G prompts, C=3 channels, H W latent height and width (a quarter of the picture's), P = H W,
E=8 text features, F=16 hidden features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from omni_core.model import Codec, Conditioner, Denoiser, Guidance, ModelFamily, Step, TextLayout
from omni_core.options import DiffusionPipelineConfig, DiffusionSamplingConfig
from omni_core.prompt_length import PromptLength
from omni_core.reverse_step import Latents
from omni_core.schedule import FlowMatchSchedule
from omni_core.seeds import derive_seed
from omni_core.trajectory import Conditioning, Media

CHANNELS = 3
TEXT_FEATURES = 8
HIDDEN = 16
TIME_FEATURES = 4
SCALE = 4
"""Pixels of a picture for one latent, along each side."""
SHIFT = 3.0
"""Of the family's stock schedule."""


class ToyLinear(nn.Linear):
    """A linear layer that computes in its input's dtype; weights stay as they are."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        assert self.bias is not None
        return F.linear(input, self.weight.to(input.dtype), self.bias.to(input.dtype))


class ToyBlock(nn.Module):
    """A residual MLP on every pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.up = ToyLinear(HIDDEN, 2 * HIDDEN)
        self.down = ToyLinear(2 * HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, P, F] -> [B, P, F]."""
        return cast(Tensor, hidden + self.down(F.silu(self.up(hidden))))


class ToyTransformer(nn.Module):
    """Pixels, their mean, the text and the time in; the velocity out."""

    def __init__(self) -> None:
        super().__init__()
        self.gradient_checkpointing = False
        self.embed = ToyLinear(2 * CHANNELS + TEXT_FEATURES + TIME_FEATURES, HIDDEN)
        self.blocks = nn.ModuleList(ToyBlock() for _ in range(2))
        self.head = ToyLinear(HIDDEN, CHANNELS)

    def forward(self, sample: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        """Predict the clean picture and return the velocity that leads there.

        Args:
            sample: [B, C, H, W]; its dtype is what is computed in.
            timestep: float32 [B], sigma * 1000.
            text: [B, E].

        Returns:
            [B, C, H, W], in the sample's dtype.
        """
        pixels = sample.flatten(2).transpose(1, 2)
        rows, count, _ = pixels.shape
        sigma = timestep.to(sample.dtype) / 1000.0
        phase = sigma[:, None] * torch.arange(1, TIME_FEATURES + 1, device=sample.device)
        row_features = torch.cat([pixels.mean(1), text.to(sample.dtype), phase.cos()], dim=1)
        features = torch.cat([pixels, row_features[:, None].expand(rows, count, -1)], dim=2)
        hidden = self.embed(features)
        for block in self.blocks:
            if self.gradient_checkpointing and torch.is_grad_enabled():
                hidden = checkpoint(block, hidden, use_reentrant=False)
            else:
                hidden = block(hidden)
        clean = 0.5 * pixels + self.head(hidden)
        velocity: Tensor = (pixels - clean) / sigma.clamp_min(0.1)[:, None, None]
        # No view: FSDP2 hangs its hooks on what a module returns.
        return velocity.transpose(1, 2).reshape(sample.shape).clone()


@attrs.frozen(kw_only=True, eq=False)
class ToyConditioning(Conditioning):
    """What the denoiser is told of a prompt."""

    text: Tensor
    """float32 [G, E]."""
    negative_text: Tensor | None = None
    """float32 [G, E]; None without classifier-free guidance."""


class ToyDenoiser(Denoiser):
    """One expert, to which the values of all modalities are one row of pixels; both guidance branches
    are one batch."""

    def __init__(self, transformer: ToyTransformer, dtype: torch.dtype) -> None:
        self.transformer = transformer
        self.dtype = dtype

    @property
    def experts(self) -> Mapping[str, nn.Module]:
        """`transformer` alone."""
        return {"transformer": self.transformer}

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """Both layers of every block."""
        return ("up", "down")

    def shard_units(self, expert: nn.Module) -> Sequence[nn.Module]:
        """Return the blocks."""
        assert isinstance(expert, ToyTransformer)
        return list(expert.blocks)

    def velocity(
        self, latents: Latents, step: Step, conditioning: Conditioning, guidance: Guidance
    ) -> Latents:
        """Predict the velocity: float32, or float64 where that is computed in."""
        assert isinstance(conditioning, ToyConditioning)
        sample = torch.cat([v.flatten(2) for v in latents.values()], dim=2)[..., None].to(
            self.dtype
        )
        timestep = step.timestep
        if guidance.branches == 1:
            velocity = self.transformer(sample, timestep, conditioning.text)
        else:
            if conditioning.negative_text is None:
                msg = f"guidance scale {guidance.scale} needs the negative prompt's conditioning"
                raise ValueError(msg)
            text = torch.cat([conditioning.text, conditioning.negative_text])
            both = self.transformer(sample.repeat(2, 1, 1, 1), timestep.repeat(2), text)
            prompted, free = both.chunk(2)
            velocity = free + guidance.scale * (prompted - free)
        velocity = velocity.to(torch.promote_types(velocity.dtype, torch.float32))[..., 0]
        parts = velocity.split([v[0, 0].numel() for v in latents.values()], dim=2)
        shaped = zip(latents.items(), parts, strict=True)
        return {name: part.reshape(like.shape) for (name, like), part in shaped}


class ToyConditioner(Conditioner):
    """The mean of a prompt's word vectors, each drawn from a hash of the word."""

    layout = TextLayout.MASKED

    def __init__(self, max_sequence_length: int) -> None:
        self.max_sequence_length = max_sequence_length
        self.device = torch.device("cpu")

    def encode(
        self, prompts: Sequence[str], *, negative_prompt: str, guidance: Guidance
    ) -> ToyConditioning:
        """Encode G prompts; words beyond the maximum length are cut off."""
        text = torch.stack([self._encode(prompt) for prompt in prompts]).to(self.device)
        if guidance.branches == 1:
            return ToyConditioning(text=text)
        negative = self._encode(negative_prompt).to(self.device)
        return ToyConditioning(text=text, negative_text=negative.expand(text.shape).clone())

    def _encode(self, prompt: str) -> Tensor:
        words = prompt.lower().split()[: self.max_sequence_length]
        if not words:
            return torch.zeros(TEXT_FEATURES)
        return torch.stack([_word_vector(word) for word in words]).mean(0)

    def to(self, device: torch.device | str) -> None:
        """Say where the conditioning goes."""
        self.device = torch.device(device)


def _word_vector(word: str) -> Tensor:
    generator = torch.Generator().manual_seed(derive_seed("toy-word", word))
    return torch.randn(TEXT_FEATURES, generator=generator)


class ToyCodec(Codec):
    """A sigmoid, and every latent a square of pixels."""

    def latent_shapes(self, pipeline: DiffusionPipelineConfig) -> dict[str, tuple[int, ...]]:
        """Modality -> (C, H, W)."""
        if pipeline.num_frames != 1:
            msg = f"num_frames {pipeline.num_frames}: this family makes images; take 1"
            raise ValueError(msg)
        if pipeline.height % SCALE or pipeline.width % SCALE:
            msg = (
                f"toy pictures are multiples of {SCALE} pixels on each side, got "
                f"{pipeline.height} x {pipeline.width}"
            )
            raise ValueError(msg)
        return {"image": (CHANNELS, pipeline.height // SCALE, pipeline.width // SCALE)}

    def decode(self, latents: Latents) -> Media:
        """[B, C, H, W] -> uint8 [B, 4H, 4W, 3]."""
        image = torch.sigmoid(2.0 * latents["image"].float())
        image = image.repeat_interleave(SCALE, dim=2).repeat_interleave(SCALE, dim=3)
        return Media(image=(image * 255.0).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous())

    def to(self, device: torch.device | str) -> None:
        """Nothing to move."""


class ToyFamily(ModelFamily):
    """Reads nothing: equal paths give equal weights."""

    pipeline_classes = ("ToyPipeline",)
    text_layout = TextLayout.MASKED

    def load_denoiser(self, dtype: torch.dtype) -> ToyDenoiser:
        """Make the trained part: weights in float64 where that is computed in, else in float32."""
        transformer = ToyTransformer().to(torch.promote_types(dtype, torch.float32))
        for name, parameter in transformer.named_parameters():
            generator = torch.Generator().manual_seed(
                derive_seed("toy-weights", self.config.path, name)
            )
            width = parameter.shape[-1] if parameter.ndim == 2 else 1
            drawn = torch.randn(parameter.shape, generator=generator) / math.sqrt(width)
            with torch.no_grad():
                parameter.copy_(drawn * (0.1 if parameter.ndim == 1 else 0.5))
        return ToyDenoiser(transformer, dtype)

    def load_conditioner(self, dtype: torch.dtype) -> ToyConditioner:
        """Make the text encoder (float32 whatever *dtype* is)."""
        del dtype
        return ToyConditioner(self.config.pipeline.max_sequence_length)

    def load_codec(self, dtype: torch.dtype) -> Codec:
        """Make the codec (float32 whatever *dtype* is)."""
        del dtype
        return ToyCodec()

    def prompt_lengths(self, prompts: Sequence[str]) -> list[PromptLength]:
        """Count words."""
        limit = self.config.pipeline.max_sequence_length
        return [PromptLength(tokens=len(prompt.split()), limit=limit) for prompt in prompts]

    def stock_schedule(self, sampling: DiffusionSamplingConfig) -> FlowMatchSchedule:
        """Return even sigmas shifted by 3."""
        return FlowMatchSchedule.linear(sampling.num_inference_steps, shift=SHIFT)
