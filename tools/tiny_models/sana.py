"""A SanaPipeline of random weights: sides in multiples of 32 px, of 8 latents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderDC,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    SanaPipeline,
    SanaTransformer2DModel,
)

from tiny_models.parts import LATENT_CHANNELS, lively
from tiny_models.saved import saved
from tiny_models.text import GEMMA_DIM, gemma_encoder, gemma_tokenizer


def build_tiny_sana(
    directory: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    solver: bool = False,
) -> Path:
    """Write it; with *solver* its scheduler is DPM-Solver++ as published, not Euler. See `saved.saved`."""
    return saved(lambda: _sana(solver), directory, seed=seed, dtype=dtype)


def _scheduler(solver: bool) -> Any:
    if not solver:
        return FlowMatchEulerDiscreteScheduler(shift=3.0)
    return DPMSolverMultistepScheduler(
        algorithm_type="dpmsolver++",
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=3.0,
        solver_order=2,
    )


def _sana(solver: bool) -> SanaPipeline:
    tokenizer = gemma_tokenizer()
    return SanaPipeline(
        transformer=lively(
            SanaTransformer2DModel(
                in_channels=LATENT_CHANNELS,
                out_channels=LATENT_CHANNELS,
                num_attention_heads=2,
                attention_head_dim=16,
                num_layers=1,
                num_cross_attention_heads=2,
                cross_attention_head_dim=16,
                cross_attention_dim=32,
                caption_channels=GEMMA_DIM,
                sample_size=16,
            )
        ),
        scheduler=_scheduler(solver),
        vae=AutoencoderDC(
            latent_channels=LATENT_CHANNELS,
            encoder_block_out_channels=(8, 16, 16),
            decoder_block_out_channels=(8, 16, 16),
            encoder_layers_per_block=(1, 1, 1),
            decoder_layers_per_block=(1, 1, 1),
            encoder_block_types=("ResBlock",) * 3,
            decoder_block_types=("ResBlock",) * 3,
            encoder_qkv_multiscales=((), (), ()),
            decoder_qkv_multiscales=((), (), ()),
            attention_head_dim=8,
            scaling_factor=0.41,
        ),
        text_encoder=gemma_encoder(tokenizer),
        tokenizer=tokenizer,
    )
