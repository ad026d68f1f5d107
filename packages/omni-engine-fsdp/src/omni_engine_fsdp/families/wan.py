"""Wan text-to-video: one transformer, or two of which each serves a range of noise (Wan2.2), fixed text length.

Its stock pipeline samples with UniPC; here a step is an Euler step on UniPC's sigmas, of which the
first is 0.999999, and is conditioned on sigma * 1000 where UniPC rounds that down to a whole number.
Letters: G prompts, B rows, C F H W latents, L tokens, D text width. Source: arXiv 2503.20314.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from torch import Tensor, nn

from omni_core.families.wan import WanConditioning
from omni_core.model import Guidance, PositionFactors, SequencePlan, Step, TextLayout
from omni_core.options import DiffusionSamplingConfig
from omni_core.prompt_length import PromptLength
from omni_core.reverse_step import Latents
from omni_core.schedule import NUM_TRAIN_TIMESTEPS, FlowMatchSchedule
from omni_core.trajectory import Conditioning
from omni_engine_fsdp.families.folder_family import EULER, FolderFamily, sigmas_of
from omni_engine_fsdp.families.text_encoders import StockConditioner
from omni_engine_fsdp.families.transformer import (
    ATTENTION,
    EXPERT,
    TransformerDenoiser,
    check_scale,
    conditioning_of,
    guided,
    negative_of,
    own_output,
    twice,
)
from omni_engine_fsdp.families.video_codec import VIDEO, VideoCodec, unscaled

LOW_NOISE = "transformer_2"
MAX_TEXT = 512
"""UMT5 tokens that the models are trained with."""
STOCK_UNIT = 16
"""Sides that the stock pipeline takes are multiples of this, in pixels."""


class WanDenoiser(TransformerDenoiser):
    """One transformer, or `transformer` above the boundary and `transformer_2` below it.

    LoRA adapts the projections of self-attention and of attention to the text.
    """

    targets = tuple(f"{layer}.{name}" for layer in ("attn1", "attn2") for name in ATTENTION)
    blocks = ("blocks",)
    branches_as_batch = True

    def __init__(
        self,
        transformer: nn.Module,
        dtype: torch.dtype,
        *,
        low_noise: nn.Module | None = None,
        boundary: float = 0.0,
    ) -> None:
        """
        Args:
            transformer: Of all noise levels, or of those from *boundary* on.
            dtype: That they compute in.
            low_noise: Of the noise levels below.
            boundary: A timestep, sigma * 1000.
        """
        super().__init__(transformer, dtype)
        self.low_noise = low_noise
        self.boundary = boundary
        for module in self.experts.values():
            own_output(module)

    @property
    def experts(self) -> Mapping[str, nn.Module]:
        """`transformer`, and `transformer_2` where there are two."""
        found = {EXPERT: self.transformer}
        return found if self.low_noise is None else {**found, LOW_NOISE: self.low_noise}

    def sequence_plan(self, expert: nn.Module) -> SequencePlan:
        """Positions of the video meet in `attn1`; in `attn2` each looks at the whole text by itself."""
        config: Any = expert.config
        return SequencePlan(
            cut={},
            join={"proj_out": VIDEO},
            attention={"attn1": (VIDEO,)},
            heads=config.num_attention_heads,
            inputs={"blocks.0": {"hidden_states": VIDEO}},
            factors={"rope": PositionFactors(dim=1)},
        )

    def expert_at(self, sigma: float) -> str:
        """`transformer` from the boundary on, `transformer_2` below it."""
        low = self.low_noise is not None and sigma * NUM_TRAIN_TIMESTEPS < self.boundary
        return LOW_NOISE if low else EXPERT

    def velocity(
        self, latents: Latents, step: Step, conditioning: Conditioning, guidance: Guidance
    ) -> Latents:
        """Predict the velocity as the stock pipeline does, each expert with its own scale.

        Returns:
            `video` -> [B, C, F, H, W], float32 (float64 where the transformer computes in it).

        Raises:
            ValueError: rows of two experts, or guidance without a negative prompt.
        """
        own = conditioning_of(conditioning, WanConditioning)
        expert = self._expert_of(step)
        if self.branches(guidance) == 1:
            return {VIDEO: self._predict(expert, latents[VIDEO], step.timestep, own.prompt_embeds)}
        (text,) = negative_of(own.negative_prompt_embeds)
        both = self._predict(
            expert,
            twice(latents[VIDEO]),
            twice(step.timestep),
            torch.cat([text, own.prompt_embeds]),
        )
        scale = guidance.second if expert == LOW_NOISE else guidance.scale
        return {VIDEO: guided(both, Guidance(scale=scale))}

    def _expert_of(self, step: Step) -> str:
        if self.low_noise is None:
            return EXPERT
        found = {self.expert_at(sigma) for sigma in step.sigma.tolist()}
        if len(found) > 1:
            raise ValueError(
                f"the rows of a batch are at sigmas of several experts: {sorted(found)}"
            )
        return found.pop()

    def _predict(self, expert: str, sample: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        predicted: Tensor = self.experts[expert](
            hidden_states=sample.to(self.dtype),
            timestep=timestep,
            encoder_hidden_states=text.to(self.dtype),
            return_dict=False,
        )[0]
        return self.widened(predicted)


class WanConditioner(StockConditioner):
    """`encode_prompt` of a WanPipeline that holds its tokenizer and frozen encoder alone.

    With ftfy installed the stock pipeline repairs a prompt's Unicode first; without it, it does not.
    """

    layout = TextLayout.FIXED

    @torch.no_grad()
    def encode(
        self, prompts: Sequence[str], *, negative_prompt: str, guidance: Guidance
    ) -> WanConditioning:
        """Encode G prompts, and the negative prompt G times where there is guidance.

        Raises:
            ValueError: scales that the stock pipeline takes for none.
        """
        check_scale(guidance, "WanPipeline")
        if guidance.scale == 1.0 != guidance.second:
            raise ValueError(
                f"guidance_scale 1.0 and guidance_scale_2 {guidance.second}: WanPipeline guides "
                "neither expert unless guidance_scale is above 1"
            )
        text, negative = self.pipeline.encode_prompt(
            prompt=list(prompts),
            negative_prompt=negative_prompt,
            do_classifier_free_guidance=guidance.branches == 2,
            max_sequence_length=self.max_sequence_length,
            device=self.device,
        )
        return WanConditioning(prompt_embeds=text, negative_prompt_embeds=negative)


class WanCodec(VideoCodec):
    """The pipeline's AutoencoderKLWan, decoding only."""

    def to_pixels(self, latents: Tensor) -> Tensor:
        """Undo the channel-wise scaling, and decode."""
        pixels: Tensor = self.vae.decode(unscaled(latents, self.vae), return_dict=False)[0]
        return pixels


class WanFamily(FolderFamily):
    """Loads the parts of a WanPipeline folder."""

    name = "wan"
    pipeline_classes = ("WanPipeline",)
    transformer_class = WanTransformer3DModel
    tasks = ("text-to-video",)
    modalities = (VIDEO,)
    lora_targets = WanDenoiser.targets
    expert_names = (EXPERT, LOW_NOISE)
    second_guidance = "the low-noise expert, transformer_2"

    def load_denoiser(self, dtype: torch.dtype) -> WanDenoiser:
        """Read one transformer or two; they are kept in *dtype* and compute in `model.dtype`.

        Raises:
            ValueError: two transformers without a boundary between them, or a model whose timesteps
                are one for each token.
        """
        index = self.folder.settings
        if index.get("expand_timesteps"):
            raise ValueError(
                f"{self.folder.root}: expand_timesteps (Wan2.2 TI2V) is not supported: family 'wan' "
                "takes models of one timestep for a video"
            )
        ratio = index.get("boundary_ratio")
        two = LOW_NOISE in self.folder.components
        if two != (ratio is not None):
            raise ValueError(
                f"{self.folder.root}: a second transformer and a boundary_ratio go together; there "
                f"is {'no ratio' if two else 'no transformer_2'}"
            )
        low = self.folder.load(LOW_NOISE, WanTransformer3DModel, dtype=dtype) if two else None
        boundary = 0.0 if ratio is None else float(ratio) * NUM_TRAIN_TIMESTEPS
        high = self.load_transformer(dtype)
        return WanDenoiser(high, self.compute_dtype, low_noise=low, boundary=boundary)

    def load_conditioner(self, dtype: torch.dtype) -> WanConditioner:
        """Read tokenizer and encoder.

        Raises:
            ValueError: `model.pipeline.max_sequence_length` is more than the models take.
        """
        self.folder.require("text_encoder", "UMT5EncoderModel")
        return self.conditioner_of(
            WanConditioner, WanPipeline, dtype, most=MAX_TEXT, transformer_2=None
        )

    def prompt_lengths(self, prompts: Sequence[str]) -> list[PromptLength]:
        """Count with UMT5's tokenizer, as the stock pipeline cleans a prompt."""
        length = self.config.pipeline.max_sequence_length
        clean: Any = prompt_clean
        texts = [clean(prompt) for prompt in prompts]
        return self.count_tokens("tokenizer", texts, limit=length)

    def load_codec(self, dtype: torch.dtype) -> WanCodec:
        """Read the autoencoder."""
        vae = self.folder.load("vae", AutoencoderKLWan, dtype=dtype)
        scale = int(vae.config.scale_factor_spatial)
        return WanCodec(
            vae,
            channels=int(self.transformer_config["in_channels"]),
            scale=scale,
            frames=int(vae.config.scale_factor_temporal),
            unit=math.lcm(STOCK_UNIT, scale * int(self.transformer_config["patch_size"][1])),
            frame_rate=self.config.pipeline.frame_rate,
        )

    def stock_call(self, sampling: DiffusionSamplingConfig) -> dict[str, Any]:
        """Say frames and the second scale, too; the solver has to be replaced (see above)."""
        call = {**super().stock_call(sampling), "num_frames": self.config.pipeline.num_frames}
        if sampling.guidance_scale_2 is not None:
            call["guidance_scale_2"] = sampling.guidance_scale_2
        return call

    def stock_schedule(self, sampling: DiffusionSamplingConfig) -> FlowMatchSchedule:
        """Ask the pipeline's own scheduler; UniPC's first sigma is 0.999999."""
        scheduler = self.scheduler("UniPCMultistepScheduler", EULER)
        return sigmas_of(scheduler, num_inference_steps=sampling.num_inference_steps)
