"""A WanPipeline of random weights and two experts: frames of multiples of 16 px, 2 n + 1 of them."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import UMT5Config, UMT5EncoderModel

from tiny_models.parts import lively
from tiny_models.saved import saved
from tiny_models.text import t5_tokenizer

TEXT_DIM = 16
CHANNELS = 4


def build_tiny_wan(
    directory: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    boundary_ratio: float | None = 0.875,
    shift: float = 3.0,
) -> Path:
    """Write a WanPipeline of random weights.

    Args:
        directory: Made if missing.
        seed: Of the weights.
        dtype: What the weights are stored in.
        boundary_ratio: Between the two experts; None makes a pipeline of one (Wan2.1).
        shift: Of the scheduler.

    Returns:
        *directory*.
    """
    return saved(lambda: _wan(boundary_ratio, shift), directory, seed=seed, dtype=dtype)


def _wan(boundary_ratio: float | None, shift: float) -> WanPipeline:
    tokenizer = t5_tokenizer()
    return WanPipeline(
        transformer=_transformer(),
        transformer_2=None if boundary_ratio is None else _transformer(),
        boundary_ratio=boundary_ratio,
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
        ),
        vae=AutoencoderKLWan(
            base_dim=4,
            z_dim=CHANNELS,
            dim_mult=[1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True],
            latents_mean=[0.1, -0.2, 0.3, 0.0],
            latents_std=[1.5, 0.8, 1.2, 2.0],
            scale_factor_temporal=2,
            scale_factor_spatial=4,
        ),
        text_encoder=UMT5EncoderModel(
            UMT5Config(
                vocab_size=len(tokenizer),
                d_model=TEXT_DIM,
                d_kv=8,
                d_ff=32,
                num_layers=1,
                num_heads=2,
                dropout_rate=0.0,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
            )
        ),
        tokenizer=tokenizer,
    )


def _transformer() -> WanTransformer3DModel:
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        text_dim=TEXT_DIM,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    )
    lively(transformer)
    return transformer
