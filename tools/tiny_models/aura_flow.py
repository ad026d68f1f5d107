"""An AuraFlowPipeline of random weights, for a family outside the repository: sides in multiples of 8 px."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    AuraFlowPipeline,
    AuraFlowTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
)
from transformers import UMT5Config, UMT5EncoderModel

from tiny_models.parts import LATENT_CHANNELS, autoencoder, lively
from tiny_models.saved import saved
from tiny_models.text import T5_DIM, t5_encoder, t5_tokenizer


def build_tiny_aura_flow(
    directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Path:
    """Write it; see `saved.saved`."""
    return saved(_aura_flow, directory, seed=seed, dtype=dtype)


def _aura_flow() -> AuraFlowPipeline:
    tokenizer = t5_tokenizer()
    return AuraFlowPipeline(
        transformer=lively(
            AuraFlowTransformer2DModel(
                sample_size=8,
                in_channels=LATENT_CHANNELS,
                out_channels=LATENT_CHANNELS,
                num_mmdit_layers=1,
                num_single_dit_layers=1,
                attention_head_dim=16,
                num_attention_heads=2,
                joint_attention_dim=T5_DIM,
                caption_projection_dim=32,
                pos_embed_max_size=64,
            )
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.73),
        vae=autoencoder(shift_factor=None),
        text_encoder=t5_encoder(tokenizer, UMT5EncoderModel, UMT5Config),
        tokenizer=tokenizer,
    )
