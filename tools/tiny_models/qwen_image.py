"""A QwenImagePipeline of random weights: sides of multiples of 8 px.

Its tokenizer knows single characters, so that the stock template alone is some 150 tokens long.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from tiny_models.parts import LATENT_CHANNELS, lively
from tiny_models.saved import saved
from tiny_models.text import qwen_tokenizer

TEXT_DIM = 32


def build_tiny_qwen_image(
    directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Path:
    """Write a QwenImagePipeline of random weights.

    Args:
        directory: Made if missing.
        seed: Of the weights.
        dtype: What the weights are stored in.

    Returns:
        *directory*.
    """
    return saved(_qwen_image, directory, seed=seed, dtype=dtype)


def _qwen_image() -> QwenImagePipeline:
    return QwenImagePipeline(**parts(), text_encoder=text_encoder(), tokenizer=qwen_tokenizer())


def parts() -> dict[str, Any]:
    """Transformer, scheduler and autoencoder: what the pipelines of the family have alike."""
    return {
        "transformer": lively(
            QwenImageTransformer2DModel(
                in_channels=4 * LATENT_CHANNELS,
                out_channels=LATENT_CHANNELS,
                num_layers=2,
                attention_head_dim=16,
                num_attention_heads=2,
                joint_attention_dim=TEXT_DIM,
                axes_dims_rope=(4, 6, 6),
            )
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(
            shift=1.0, use_dynamic_shifting=True, time_shift_type="exponential"
        ),
        "vae": AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=LATENT_CHANNELS,
            dim_mult=[1, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[False, True],
            latents_mean=[0.1, -0.2, 0.3, 0.0],
            latents_std=[1.5, 0.8, 1.2, 2.0],
        ),
    }


def text_encoder(**tokens: int) -> Qwen2_5_VLForConditionalGeneration:
    """A Qwen2.5-VL of two layers for text and one for pictures.

    Args:
        tokens: Ids of the tokens that stand for pictures, by their names in its config.
    """
    text = {
        "vocab_size": 128,
        "hidden_size": TEXT_DIM,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [2, 3, 3],
            "rope_theta": 10000.0,
        },
        "max_position_embeddings": 2048,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": TEXT_DIM,
        "fullatt_block_indexes": [0],
    }
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **tokens)
    )
