"""A QwenImagePipeline of random weights in the diffusers folder layout: real classes, small sizes."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

LATENT_CHANNELS = 4
TEXT_DIM = 32


def build_tiny_qwen(directory: Path, *, seed: int = 0) -> Path:
    """Write the pipeline; pictures are multiples of 8 px (the VAE scales by 4, patches are 2 x 2)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = QwenImagePipeline(
            transformer=QwenImageTransformer2DModel(
                in_channels=4 * LATENT_CHANNELS,
                out_channels=LATENT_CHANNELS,
                num_layers=2,
                attention_head_dim=16,
                num_attention_heads=2,
                joint_attention_dim=TEXT_DIM,
                axes_dims_rope=(4, 6, 6),
            ),
            scheduler=FlowMatchEulerDiscreteScheduler(
                shift=1.0, use_dynamic_shifting=True, time_shift_type="exponential"
            ),
            vae=AutoencoderKLQwenImage(
                base_dim=8,
                z_dim=LATENT_CHANNELS,
                dim_mult=[1, 2, 2],
                num_res_blocks=1,
                temperal_downsample=[False, True],
                latents_mean=[0.0] * LATENT_CHANNELS,
                latents_std=[1.0] * LATENT_CHANNELS,
            ),
            text_encoder=_text_encoder(),
            tokenizer=_tokenizer(),
        )
        # At their start these are so small that a picture hardly depends on its prompt.
        for parameter in pipeline.transformer.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    pipeline.save_pretrained(directory)
    return directory


def _tokenizer() -> Any:
    vocab = {c: i for i, c in enumerate(sorted(set(string.printable) - set(string.whitespace)))}
    for extra in ("Ġ", "Ċ", "<|endoftext|>", "<|im_start|>", "<|im_end|>"):
        vocab.setdefault(extra, len(vocab))
    return Qwen2Tokenizer(vocab=vocab, merges=[], pad_token="<|endoftext|>")


def _text_encoder() -> Qwen2_5_VLForConditionalGeneration:
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
        Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True)
    )
