"""A StableDiffusion3Pipeline of random weights: at most 32 x 32 px, sides in multiples of 8."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)

from tiny_models.parts import autoencoder
from tiny_models.saved import saved
from tiny_models.text import (
    CLIP_DIM,
    T5_DIM,
    clip_encoder,
    clip_tokenizer,
    t5_encoder,
    t5_tokenizer,
)


def build_tiny_sd3(
    directory: Path,
    *,
    seed: int = 0,
    shift: float = 3.0,
    dtype: torch.dtype = torch.float32,
    layers: int = 2,
    heads: int = 2,
) -> Path:
    """Write a StableDiffusion3Pipeline of random weights.

    Args:
        directory: Made if missing.
        seed: Of the weights.
        shift: Of the scheduler.
        dtype: What the weights are stored in.
        layers: Blocks of the transformer: more of both is slower, for measuring.
        heads: Its attention heads, of 16 channels each.

    Returns:
        *directory*.
    """
    return saved(lambda: _sd3(shift, layers, heads), directory, seed=seed, dtype=dtype)


def _sd3(shift: float, layers: int, heads: int) -> StableDiffusion3Pipeline:
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    return StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=8,
            out_channels=8,
            num_layers=layers,
            attention_head_dim=16,
            num_attention_heads=heads,
            joint_attention_dim=T5_DIM,
            caption_projection_dim=16 * heads,
            pooled_projection_dim=2 * CLIP_DIM,
            pos_embed_max_size=4,
            qk_norm="rms_norm",
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
        vae=autoencoder(channels=8),
        text_encoder=clip_encoder(clip, "quick_gelu"),
        tokenizer=clip,
        text_encoder_2=clip_encoder(clip, "gelu"),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=t5_encoder(t5),
        tokenizer_3=t5,
    )
