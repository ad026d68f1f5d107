"""Stable Diffusion 3 and 3.5: one transformer, two CLIP encoders and T5, fixed text length.

Everything that conditions the model comes from the stock pipeline's own code, so that what is
trained is what stock diffusers runs. Letters: G prompts, B rows, L = CLIP tokens + T5 tokens, D and P
text widths, C H W latents. Source: Esser et al., arXiv 2403.03206.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import AutoencoderKL, SD3Transformer2DModel, StableDiffusion3Pipeline
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift
from torch import Tensor, nn

from omni_core.families.sd3 import SD3Conditioning
from omni_core.model import Guidance, SequencePlan, Step, TextLayout
from omni_core.options import DiffusionSamplingConfig
from omni_core.prompt_length import PromptLength
from omni_core.reverse_step import Latents
from omni_core.schedule import FlowMatchSchedule
from omni_core.trajectory import Conditioning
from omni_engine_fsdp.families.folder_family import FolderFamily, shift_keywords, sigmas_of
from omni_engine_fsdp.families.image_codec import IMAGE, KLCodec
from omni_engine_fsdp.families.text_encoders import StockConditioner
from omni_engine_fsdp.families.transformer import (
    JOINT_ATTENTION,
    TEXT,
    TransformerDenoiser,
    check_scale,
    conditioning_of,
    guided,
    negative_of,
    twice,
)

MAX_TEXT = 512
"""T5 tokens that the stock pipeline takes at most."""


class SD3Denoiser(TransformerDenoiser):
    """The MMDiT transformer with classifier-free guidance.

    LoRA adapts the attention projections of both streams, as Flow-GRPO does (arXiv 2505.05470).
    """

    targets = tuple(f"attn.{name}" for name in JOINT_ATTENTION)

    branches_as_batch = True

    def sequence_plan(self, expert: nn.Module) -> SequencePlan:
        """Image and text meet in every block's attention; SD3.5's second one is the image's alone."""
        config: Any = expert.config
        return SequencePlan(
            cut={"pos_embed": IMAGE, "context_embedder": TEXT},
            join={"proj_out": IMAGE},
            attention={"attn": (IMAGE, TEXT), "attn2": (IMAGE,)},
            heads=config.num_attention_heads,
        )

    def velocity(
        self, latents: Latents, step: Step, conditioning: Conditioning, guidance: Guidance
    ) -> Latents:
        """Predict the velocity as the stock pipeline does: both branches as one batch.

        Returns:
            `image` -> [B, C, H, W], float32 (float64 where the transformer computes in it); branches
            are combined in that precision.

        Raises:
            ValueError: guidance is asked for and there is no negative prompt.
        """
        own = conditioning_of(conditioning, SD3Conditioning)
        if self.branches(guidance) == 1:
            return {
                IMAGE: self._predict(latents[IMAGE], step.timestep, own.prompt_embeds, own.pooled)
            }
        text, pooled = negative_of(own.negative_prompt_embeds, own.negative_pooled)
        both = self._predict(
            twice(latents[IMAGE]),
            twice(step.timestep),
            torch.cat([text, own.prompt_embeds]),
            torch.cat([pooled, own.pooled]),
        )
        return {IMAGE: guided(both, guidance)}

    def _predict(self, sample: Tensor, timestep: Tensor, text: Tensor, pooled: Tensor) -> Tensor:
        predicted: Tensor = self.transformer(
            hidden_states=sample.to(self.dtype),
            timestep=timestep,
            encoder_hidden_states=text.to(self.dtype),
            pooled_projections=pooled.to(self.dtype),
            return_dict=False,
        )[0]
        return self.widened(predicted)


class SD3Conditioner(StockConditioner):
    """`encode_prompt` of a StableDiffusion3Pipeline that holds tokenizers and frozen encoders alone."""

    layout = TextLayout.FIXED
    encoders = ("text_encoder", "text_encoder_2", "text_encoder_3")

    @torch.no_grad()
    def encode(
        self, prompts: Sequence[str], *, negative_prompt: str, guidance: Guidance
    ) -> SD3Conditioning:
        """Encode G prompts, and the negative prompt G times where there is guidance.

        Raises:
            ValueError: a guidance scale below 1, which the stock pipeline takes for none.
        """
        check_scale(guidance, "StableDiffusion3Pipeline")
        text, negative, pooled, negative_pooled = self.pipeline.encode_prompt(
            prompt=list(prompts),
            prompt_2=None,
            prompt_3=None,
            device=self.device,
            do_classifier_free_guidance=guidance.branches == 2,
            negative_prompt=negative_prompt,
            max_sequence_length=self.max_sequence_length,
        )
        return SD3Conditioning(
            prompt_embeds=text,
            pooled=pooled,
            negative_prompt_embeds=negative,
            negative_pooled=negative_pooled,
        )


class SD3Family(FolderFamily):
    """Loads the parts of a StableDiffusion3Pipeline folder."""

    name = "sd3"
    pipeline_classes = ("StableDiffusion3Pipeline",)
    transformer_class = SD3Transformer2DModel
    denoiser_class = SD3Denoiser
    lora_targets = SD3Denoiser.targets

    def load_conditioner(self, dtype: torch.dtype) -> SD3Conditioner:
        """Read tokenizers and encoders; without a third encoder, T5's part is zeros as in stock.

        Raises:
            ValueError: `model.pipeline.max_sequence_length` is more than the stock pipeline takes.
        """
        for name in ("text_encoder", "text_encoder_2"):
            self.folder.require(name, "CLIPTextModelWithProjection")
        absent: dict[str, Any] = {}
        if "text_encoder_3" in self.folder.components:
            self.folder.require("text_encoder_3", "T5EncoderModel")
        else:
            # T5's width is read off the transformer then, which needs no weights for that.
            absent = {
                "transformer": self.transformer_skeleton,
                "text_encoder_3": None,
                "tokenizer_3": None,
            }
        return self.conditioner_of(
            SD3Conditioner,
            StableDiffusion3Pipeline,
            dtype,
            most=MAX_TEXT,
            image_encoder=None,
            feature_extractor=None,
            **absent,
        )

    def prompt_lengths(self, prompts: Sequence[str]) -> list[PromptLength]:
        """Count with T5's tokenizer; without T5, with CLIP's (which reads 77 tokens in any case)."""
        if "text_encoder_3" in self.folder.components:
            length = self.config.pipeline.max_sequence_length
            return self.count_tokens("tokenizer_3", prompts, limit=length)
        return self.count_tokens("tokenizer", prompts)

    def load_codec(self, dtype: torch.dtype) -> KLCodec:
        """Read the autoencoder."""
        scale, config = self.autoencoder_scale(AutoencoderKL), self.transformer_config
        unit = scale * int(config["patch_size"])
        return KLCodec(
            self.folder.load("vae", AutoencoderKL, dtype=dtype),
            channels=config["in_channels"],
            scale=scale,
            unit=unit,
            largest=unit * int(config["pos_embed_max_size"]),
        )

    def stock_schedule(self, sampling: DiffusionSamplingConfig) -> FlowMatchSchedule:
        """Ask the pipeline's own scheduler, with the resolution's shift where it is dynamic.

        Since diffusers 0.40 the scheduler's default path applies its shift twice; what stock does is
        what the model is used with, so it is taken as it is.
        """
        scheduler = self.scheduler()
        dynamic: dict[str, Any] = {}
        if scheduler.config.use_dynamic_shifting:
            unit = self.autoencoder_scale(AutoencoderKL) * self.transformer_config["patch_size"]
            size = self.config.pipeline
            tokens = (size.height // unit) * (size.width // unit)
            dynamic = shift_keywords(scheduler.config, calculate_shift, tokens, most=1.16)
        return sigmas_of(scheduler, num_inference_steps=sampling.num_inference_steps, **dynamic)
