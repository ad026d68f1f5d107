"""Conditioning of Qwen-Image-Edit: text that saw the image, and the image's latents. Source: arXiv 2508.02324."""

from __future__ import annotations

import attrs
from torch import Tensor

from omni_core.families.masked_text import MaskedTextConditioning


@attrs.frozen(kw_only=True, eq=False)
class QwenImageEditConditioning(MaskedTextConditioning):
    """What the stock pipeline's `encode_prompt` returns, with what its sequences are continued by."""

    image_latents: Tensor
    """[G, C, H', W'] of the input images, in the autoencoder's dtype; both branches look at them."""
