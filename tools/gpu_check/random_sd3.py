"""Pipelines of random weights at the real size of SD3.5-medium (or tiny), without a file of weights of it.

The folder holds configs, tokenizers, small text encoders of the right widths and the autoencoder; the
transformer is built where it computes, from its config alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import attrs
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    T5Config,
    T5EncoderModel,
)

from omni_core import device as devices
from omni_core import plugins
from omni_core.options import DiffusionModelConfig
from omni_engine_fsdp.families.sd3 import SD3Family

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny_models.text import clip_tokenizer, t5_tokenizer

FAMILY = "random_sd3"


@attrs.frozen(kw_only=True)
class Size:
    """What is measured: a model and a step."""

    name: str
    transformer: dict[str, Any]
    """Of SD3Transformer2DModel."""
    clip_widths: tuple[int, int]
    """Their sum is the pooled width."""
    channels: tuple[int, ...]
    """Blocks of the autoencoder: each but the first halves the picture."""
    groups: int
    """Of its norms."""
    pixels: int
    tokens: int
    """Of T5."""
    prompts: int
    samples: int
    """Of one prompt."""
    steps: int
    trained: tuple[int, ...]
    """Steps of the window."""
    micro_batch: int
    rank: int


SD35_MEDIUM = Size(
    name="SD3.5-medium, 512 px, guidance 4.5",
    transformer={
        "sample_size": 128,
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 16,
        "num_layers": 24,
        "attention_head_dim": 64,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "caption_projection_dim": 1536,
        "pooled_projection_dim": 2048,
        "pos_embed_max_size": 384,
        "dual_attention_layers": tuple(range(13)),
        "qk_norm": "rms_norm",
    },
    clip_widths=(768, 1280),
    channels=(128, 256, 512, 512),
    groups=32,
    pixels=512,
    tokens=256,
    prompts=2,
    samples=3,
    steps=10,
    trained=(1, 2),
    micro_batch=4,
    rank=32,
)

SMOKE = Size(
    name="tiny, 16 px, guidance 4.5 (a smoke test: no figure means anything)",
    transformer={
        "sample_size": 8,
        "patch_size": 2,
        "in_channels": 8,
        "out_channels": 8,
        "num_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "joint_attention_dim": 16,
        "caption_projection_dim": 16,
        "pooled_projection_dim": 16,
        "pos_embed_max_size": 4,
        "qk_norm": "rms_norm",
    },
    clip_widths=(8, 8),
    channels=(8, 8, 8),
    groups=4,
    pixels=16,
    tokens=8,
    prompts=1,
    samples=2,
    steps=3,
    trained=(0, 1),
    micro_batch=2,
    rank=2,
)


class RandomSD3Family(SD3Family):
    """SD3 whose transformer is drawn, not read."""

    def load_transformer(self, dtype: torch.dtype) -> Any:
        """Draw the weights on the device."""
        torch.manual_seed(0)
        config = SD3Transformer2DModel.load_config(self.folder.root / "transformer")
        with torch.device(devices.resolve()):
            transformer: Any = SD3Transformer2DModel.from_config(config)
        return transformer.to(dtype).eval()


def register() -> None:
    """Make the family known in this process."""
    registry = plugins.registry(plugins.MODELS)
    if FAMILY not in registry.names():
        target = f"{__name__}:{RandomSD3Family.__name__}"
        registry.register(
            FAMILY, plugins.Plugin(api=1, options=DiffusionModelConfig, target=target)
        )


def write(directory: Path, size: Size) -> Path:
    """Write the folder of a pipeline, all but the transformer's weights."""
    index: dict[str, Any] = {"_class_name": "StableDiffusion3Pipeline", "_diffusers_version": "0"}

    def add(name: str, library: str, part: Any) -> None:
        index[name] = [library, type(part).__name__]
        part.save_pretrained(directory / name)

    tokenizer = clip_tokenizer(length=77)
    for place, width in enumerate(size.clip_widths):
        suffix = "_2" if place else ""
        add(f"text_encoder{suffix}", "transformers", _clip(tokenizer, width))
        add(f"tokenizer{suffix}", "transformers", tokenizer)
    t5 = t5_tokenizer()
    add("text_encoder_3", "transformers", _t5(t5, size.transformer["joint_attention_dim"]))
    add("tokenizer_3", "transformers", t5)
    add("scheduler", "diffusers", FlowMatchEulerDiscreteScheduler(shift=3.0))
    add("vae", "diffusers", _vae(size))
    with torch.device("meta"):
        SD3Transformer2DModel(**size.transformer).save_config(directory / "transformer")
    index["transformer"] = ["diffusers", SD3Transformer2DModel.__name__]
    (directory / "model_index.json").write_text(json.dumps(index))
    return directory


def _clip(tokenizer: Any, width: int) -> CLIPTextModelWithProjection:
    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=width,
            projection_dim=width,
            num_hidden_layers=2,
            num_attention_heads=2,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def _t5(tokenizer: Any, width: int) -> T5EncoderModel:
    return T5EncoderModel(
        T5Config(
            vocab_size=len(tokenizer),
            d_model=width,
            d_kv=8,
            d_ff=32,
            num_layers=1,
            num_heads=4,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def _vae(size: Size) -> AutoencoderKL:
    count = len(size.channels)
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * count,
        up_block_types=("UpDecoderBlock2D",) * count,
        block_out_channels=size.channels,
        layers_per_block=2,
        latent_channels=size.transformer["in_channels"],
        norm_num_groups=size.groups,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.5305,
        shift_factor=0.0609,
    )
