"""FLUX.1: guidance-distilled (dev) or step-distilled (schnell), CLIP and T5, fixed text length.

The guidance scale of dev is an input of the transformer, so there is one forward at any scale and no
negative prompt; schnell takes no scale. Letters: G prompts, B rows, N image patches, C H W latents.
Source: github.com/black-forest-labs/flux and the FluxPipeline of diffusers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from torch import nn

from omni_core.families.flux import FluxConditioning
from omni_core.model import (
    Guidance,
    GuidanceKind,
    PositionFactors,
    SequencePlan,
    Step,
    TextLayout,
)
from omni_core.options import DiffusionSamplingConfig
from omni_core.prompt_length import PromptLength
from omni_core.reverse_step import Latents
from omni_core.schedule import FlowMatchSchedule
from omni_core.trajectory import Conditioning
from omni_engine_fsdp.families.folder_family import FolderFamily, shift_keywords, sigmas_of
from omni_engine_fsdp.families.image_codec import IMAGE, KLCodec
from omni_engine_fsdp.families.packing import PATCH, grid_ids, pack, unpack
from omni_engine_fsdp.families.text_encoders import StockConditioner
from omni_engine_fsdp.families.transformer import (
    JOINT_ATTENTION,
    TEXT,
    TransformerDenoiser,
    conditioning_of,
    float32_inputs,
)

MAX_TEXT = 512
"""T5 tokens that the stock pipeline takes at most."""
AXES = 3
"""Of a token's place: unused, row, column."""


class FluxDenoiser(TransformerDenoiser):
    """The transformer over packed latents; its guidance scale is an input."""

    targets = tuple(f"attn.{name}" for name in JOINT_ATTENTION)
    blocks = ("transformer_blocks", "single_transformer_blocks")

    def sequence_plan(self, expert: nn.Module) -> SequencePlan:
        """Text and image meet in every block's attention; their rotary factors are made together."""
        config: Any = expert.config
        return SequencePlan(
            cut={"x_embedder": IMAGE, "context_embedder": TEXT},
            join={"proj_out": IMAGE},
            attention={"attn": (TEXT, IMAGE)},
            heads=config.num_attention_heads,
            factors={"pos_embed": PositionFactors(dim=0, streams=(TEXT, IMAGE))},
        )

    def branches(self, guidance: Guidance) -> int:
        """One, at any scale."""
        del guidance
        return 1

    def single_branch(self, guidance: Guidance) -> Guidance:
        """The same: without its scale the module is not defined."""
        return guidance

    def velocity(
        self, latents: Latents, step: Step, conditioning: Conditioning, guidance: Guidance
    ) -> Latents:
        """Predict the velocity as the stock pipeline does.

        Returns:
            `image` -> [B, C, H, W], float32 (float64 where the transformer computes in it).
        """
        own = conditioning_of(conditioning, FluxConditioning)
        sample, transformer = latents[IMAGE], cast(Any, self.transformer)
        sigma = step.timestep / 1000  # as the stock pipeline rounds it
        scale = None
        if transformer.config.guidance_embeds:
            scale = torch.full_like(sigma, guidance.scale)
        height, width = (side // PATCH for side in sample.shape[-2:])
        text = own.prompt_embeds.to(self.dtype)
        sinusoids = transformer.time_text_embed.time_proj
        with float32_inputs(transformer, sinusoids, timestep=1000.0, guidance=1000.0):
            predicted = transformer(
                hidden_states=pack(sample).to(self.dtype),
                timestep=sigma,
                guidance=scale,
                pooled_projections=own.pooled.to(self.dtype),
                encoder_hidden_states=text,
                txt_ids=torch.zeros(text.shape[1], AXES, device=sample.device),
                img_ids=grid_ids(height, width, AXES, sample.device),
                return_dict=False,
            )[0]
        return {IMAGE: unpack(self.widened(predicted), sample)}


class FluxConditioner(StockConditioner):
    """`encode_prompt` of a FluxPipeline that holds tokenizers and frozen encoders alone."""

    layout = TextLayout.FIXED
    encoders = ("text_encoder", "text_encoder_2")
    takes_scale = True
    """Whether the transformer has a guidance scale as an input."""

    @torch.no_grad()
    def encode(
        self, prompts: Sequence[str], *, negative_prompt: str, guidance: Guidance
    ) -> FluxConditioning:
        """Encode G prompts.

        Raises:
            ValueError: a negative prompt, or a guidance scale that the transformer does not take.
        """
        if negative_prompt:
            raise ValueError(
                "negative_prompt: FLUX.1 has no negative branch (its guidance scale is an input of the "
                "transformer); leave it empty"
            )
        if not self.takes_scale and guidance.scale != 1.0:
            raise ValueError(
                f"guidance_scale {guidance.scale}: this FLUX.1 takes no guidance (guidance_embeds is "
                "false in its transformer's config); take 1.0"
            )
        text, pooled, _ = self.pipeline.encode_prompt(
            prompt=list(prompts),
            device=self.device,
            max_sequence_length=self.max_sequence_length,
        )
        return FluxConditioning(prompt_embeds=text, pooled=pooled)


class FluxFamily(FolderFamily):
    """Loads the parts of a FluxPipeline folder."""

    name = "flux"
    pipeline_classes = ("FluxPipeline",)
    transformer_class = FluxTransformer2DModel
    denoiser_class = FluxDenoiser
    guidance = GuidanceKind.EMBEDDED
    lora_targets = FluxDenoiser.targets

    def load_conditioner(self, dtype: torch.dtype) -> FluxConditioner:
        """Read tokenizers and encoders.

        Raises:
            ValueError: `model.pipeline.max_sequence_length` is more than the stock pipeline takes.
        """
        absent: dict[str, Any] = {"image_encoder": None, "feature_extractor": None}
        conditioner = self.conditioner_of(
            FluxConditioner, FluxPipeline, dtype, most=MAX_TEXT, **absent
        )
        conditioner.takes_scale = self.transformer_config["guidance_embeds"]
        return conditioner

    def prompt_lengths(self, prompts: Sequence[str]) -> list[PromptLength]:
        """Count with T5's tokenizer: CLIP reads 77 tokens of any prompt."""
        length = self.config.pipeline.max_sequence_length
        return self.count_tokens("tokenizer_2", prompts, limit=length)

    def load_codec(self, dtype: torch.dtype) -> KLCodec:
        """Read the autoencoder."""
        scale = self.autoencoder_scale(AutoencoderKL)
        return KLCodec(
            self.folder.load("vae", AutoencoderKL, dtype=dtype),
            channels=self.transformer_config["in_channels"] // PATCH**2,
            scale=scale,
            unit=scale * PATCH,
        )

    def stock_call(self, sampling: DiffusionSamplingConfig) -> dict[str, Any]:
        """Leave the negative prompt out: there is none."""
        return {k: v for k, v in super().stock_call(sampling).items() if k != "negative_prompt"}

    def stock_schedule(self, sampling: DiffusionSamplingConfig) -> FlowMatchSchedule:
        """Evenly spaced sigmas, shifted by the size of the picture where the scheduler is dynamic."""
        scheduler, steps = self.scheduler(), sampling.num_inference_steps
        unit = self.autoencoder_scale(AutoencoderKL) * PATCH
        size = self.config.pipeline
        tokens = (size.height // unit) * (size.width // unit)
        shift = shift_keywords(scheduler.config, calculate_shift, tokens, most=1.15)
        return sigmas_of(scheduler, sigmas=np.linspace(1.0, 1 / steps, steps), **shift)
