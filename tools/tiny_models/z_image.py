"""A ZImagePipeline of random weights: sides in multiples of 8 px."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from transformers import Qwen3Model

from tiny_models.parts import LATENT_CHANNELS, autoencoder, lively, nonzero
from tiny_models.saved import saved
from tiny_models.text import QWEN_DIM, qwen3_config, qwen_tokenizer


def build_tiny_z_image(
    directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Path:
    """Write it; see `saved.saved`."""
    return saved(_z_image, directory, seed=seed, dtype=dtype)


def _z_image() -> ZImagePipeline:
    tokenizer = qwen_tokenizer()
    transformer = ZImageTransformer2DModel(
        in_channels=LATENT_CHANNELS,
        dim=32,
        n_layers=1,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=QWEN_DIM,
        axes_dims=[4, 6, 6],
        axes_lens=[640, 16, 16],
    )
    nonzero(transformer.x_pad_token, transformer.cap_pad_token)
    return ZImagePipeline(
        transformer=lively(transformer),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=autoencoder(),
        text_encoder=Qwen3Model(qwen3_config(tokenizer, layers=2)),
        tokenizer=tokenizer,
    )
