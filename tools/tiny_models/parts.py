"""Parts that the tiny pipelines of several families share."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import nn

LATENT_CHANNELS = 4


def autoencoder(channels: int = LATENT_CHANNELS, **options: Any) -> AutoencoderKL:
    """An AutoencoderKL that scales by 4."""
    return AutoencoderKL(
        **{
            "down_block_types": ("DownEncoderBlock2D",) * 3,
            "up_block_types": ("UpDecoderBlock2D",) * 3,
            "block_out_channels": (8, 16, 16),
            "layers_per_block": 1,
            "latent_channels": channels,
            "norm_num_groups": 4,
            "use_quant_conv": False,
            "use_post_quant_conv": False,
            "mid_block_add_attention": False,
            "scaling_factor": 1.3,
            "shift_factor": 0.05,
            **options,
        }
    )


def lively(transformer: nn.Module) -> nn.Module:
    """Draw its matrices larger than at their start, where a picture hardly depends on its prompt."""
    for parameter in transformer.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return transformer


def nonzero(*parameters: torch.Tensor) -> None:
    """Draw parameters that start at zero."""
    for parameter in parameters:
        nn.init.normal_(parameter)
