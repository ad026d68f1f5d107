"""Latents as sequences of 2 x 2 patches, as FLUX.1 and Qwen-Image take them.

Trajectories hold latents as pictures [B, C, H, W]: they say their size themselves, and noise is drawn in
that shape as stock pipelines draw it. Letters: B rows, C H W latents, N = H/2 * W/2 patches.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

PATCH = 2


def pack(latents: Tensor) -> Tensor:
    """[B, C, H, W] -> [B, N, 4C]."""
    return pixel_unshuffle(latents, PATCH).flatten(2).transpose(1, 2).contiguous()


def unpack(tokens: Tensor, like: Tensor) -> Tensor:
    """[B, N, 4C] -> [B, C, H, W], the shape of *like*."""
    _, channels, height, width = like.shape
    patches = tokens.transpose(1, 2).reshape(
        len(tokens), channels * PATCH**2, height // PATCH, width // PATCH
    )
    return pixel_shuffle(patches, PATCH)


def grid_ids(height: int, width: int, axes: int, device: torch.device) -> Tensor:
    """Return each patch's place: float32 [height * width, axes], row and column in axes 1 and 2, others 0."""
    ids = torch.zeros(height, width, axes, device=device)
    ids[..., 1] = torch.arange(height, device=device)[:, None]
    ids[..., 2] = torch.arange(width, device=device)[None, :]
    return ids.reshape(height * width, axes)
