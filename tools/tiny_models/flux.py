"""A FluxPipeline of random weights: sides in multiples of 8 px, the guidance scale an input."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from transformers import CLIPTextModel

from tiny_models.parts import LATENT_CHANNELS, autoencoder, lively
from tiny_models.saved import saved
from tiny_models.text import (
    CLIP_DIM,
    T5_DIM,
    clip_encoder,
    clip_tokenizer,
    t5_encoder,
    t5_tokenizer,
)


def build_tiny_flux(
    directory: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    guidance_embeds: bool = True,
) -> Path:
    """Write it; without *guidance_embeds* it is like FLUX.1-schnell. See `saved.saved`."""
    return saved(lambda: _flux(guidance_embeds), directory, seed=seed, dtype=dtype)


def _flux(guidance_embeds: bool) -> FluxPipeline:
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    return FluxPipeline(
        transformer=lively(
            FluxTransformer2DModel(
                in_channels=4 * LATENT_CHANNELS,
                num_layers=1,
                num_single_layers=1,
                attention_head_dim=16,
                num_attention_heads=2,
                joint_attention_dim=T5_DIM,
                pooled_projection_dim=CLIP_DIM,
                guidance_embeds=guidance_embeds,
                axes_dims_rope=(4, 6, 6),
            )
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(
            shift=3.0 if guidance_embeds else 1.0,
            use_dynamic_shifting=guidance_embeds,
            base_shift=0.5,
            max_shift=1.15,
        ),
        vae=autoencoder(),
        text_encoder=clip_encoder(clip, "quick_gelu", CLIPTextModel),
        tokenizer=clip,
        text_encoder_2=t5_encoder(t5),
        tokenizer_2=t5,
    )
