"""An LTX2Pipeline of random weights: frames of multiples of 32 px, 2 n + 1 of them, with 25 sound latents a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    FlowMatchEulerDiscreteScheduler,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from tiny_models.parts import lively
from tiny_models.saved import saved
from tiny_models.text import gemma_tokenizer

TEXT_DIM = 16
TEXT_LAYERS = 2
CHANNELS = 4


def build_tiny_ltx2(directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write an LTX2Pipeline of random weights.

    Args:
        directory: Made if missing.
        seed: Of the weights.
        dtype: What the weights are stored in.

    Returns:
        *directory*.
    """
    return saved(_ltx2, directory, seed=seed, dtype=dtype)


def _ltx2() -> LTX2Pipeline:
    tokenizer = gemma_tokenizer()
    audio_vae = _audio_vae()
    return LTX2Pipeline(
        transformer=_transformer(),
        connectors=_connectors(),
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            base_shift=0.95,
            max_shift=2.05,
            base_image_seq_len=1024,
            max_image_seq_len=4096,
        ),
        vae=_video_vae(),
        audio_vae=audio_vae,
        vocoder=LTX2Vocoder(
            in_channels=audio_vae.config.output_channels * audio_vae.config.mel_bins,
            hidden_channels=8,
            upsample_kernel_sizes=[4, 4],
            upsample_factors=[2, 2],
            resnet_kernel_sizes=[3],
            resnet_dilations=[[1, 3, 5]],
            output_sampling_rate=16000,
        ),
        text_encoder=_text_encoder(len(tokenizer)),
        tokenizer=tokenizer,
    )


def _transformer() -> LTX2VideoTransformer3DModel:
    transformer = LTX2VideoTransformer3DModel(
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        audio_in_channels=CHANNELS,
        audio_out_channels=CHANNELS,
        audio_num_attention_heads=2,
        audio_attention_head_dim=4,
        audio_cross_attention_dim=8,
        vae_scale_factors=(2, 8, 8),
        num_layers=2,
        caption_channels=TEXT_DIM,
        rope_double_precision=False,
        rope_type="split",
    )
    lively(transformer)
    return transformer


def _connectors() -> LTX2TextConnectors:
    sizes: dict[str, Any] = {}
    for stream in ("video", "audio"):
        sizes[f"{stream}_connector_num_attention_heads"] = 2
        sizes[f"{stream}_connector_attention_head_dim"] = 8
        sizes[f"{stream}_connector_num_layers"] = 1
        sizes[f"{stream}_connector_num_learnable_registers"] = None
    return LTX2TextConnectors(
        caption_channels=TEXT_DIM,
        text_proj_in_factor=TEXT_LAYERS + 1,
        connector_rope_base_seq_len=32,
        rope_double_precision=False,
        rope_type="split",
        **sizes,
    )


def _video_vae() -> AutoencoderKLLTX2Video:
    return AutoencoderKLLTX2Video(
        latent_channels=CHANNELS,
        block_out_channels=(8,),
        down_block_types=("LTX2VideoDownBlock3D",),
        decoder_block_out_channels=(8,),
        layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        spatio_temporal_scaling=(True,),
        decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False),
        downsample_type=("spatiotemporal",),
        upsample_type=("spatiotemporal",),
        upsample_residual=(False,),
        upsample_factor=(1,),
        patch_size=4,
        decoder_causal=False,
    )


def _audio_vae() -> AutoencoderKLLTX2Audio:
    return AutoencoderKLLTX2Audio(
        base_channels=CHANNELS,
        ch_mult=(1, 1, 1),
        num_res_blocks=1,
        resolution=32,
        latent_channels=2,
        mel_bins=8,
    )


def _text_encoder(vocabulary: int) -> Gemma3ForConditionalGeneration:
    text = {
        "vocab_size": vocabulary,
        "hidden_size": TEXT_DIM,
        "intermediate_size": 16,
        "num_hidden_layers": TEXT_LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "max_position_embeddings": 1024,
        "initializer_range": 0.3,
    }
    vision = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 16,
        "patch_size": 8,
    }
    return Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    )
