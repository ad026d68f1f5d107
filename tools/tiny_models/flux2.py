"""A Flux2KleinPipeline of random weights: sides in multiples of 8 px."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
)
from transformers import Qwen3ForCausalLM

from tiny_models.parts import LATENT_CHANNELS, lively
from tiny_models.saved import saved
from tiny_models.text import QWEN_DIM, qwen3_config, qwen_tokenizer

ENCODER_LAYERS = 28
"""The pipeline reads the encoder's layers 9, 18 and 27."""


def build_tiny_flux2(
    directory: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    distilled: bool = False,
) -> Path:
    """Write it; see `saved.saved`."""
    return saved(lambda: _flux2(distilled), directory, seed=seed, dtype=dtype)


def _flux2(distilled: bool) -> Flux2KleinPipeline:
    tokenizer = qwen_tokenizer()
    vae = AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 16, 16),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )
    vae.bn.running_mean.normal_(std=0.1)
    vae.bn.running_var.uniform_(0.5, 1.5)
    return Flux2KleinPipeline(
        transformer=lively(
            Flux2Transformer2DModel(
                in_channels=4 * LATENT_CHANNELS,
                num_layers=1,
                num_single_layers=1,
                attention_head_dim=16,
                num_attention_heads=2,
                joint_attention_dim=3 * QWEN_DIM,
                axes_dims_rope=(4, 4, 4, 4),
                guidance_embeds=False,
            )
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(
            shift=3.0, use_dynamic_shifting=True, time_shift_type="exponential"
        ),
        vae=vae,
        text_encoder=Qwen3ForCausalLM(qwen3_config(tokenizer, layers=ENCODER_LAYERS)),
        tokenizer=tokenizer,
        is_distilled=distilled,
    )
