"""Conditioning of Wan text-to-video. Letters: G prompts, L tokens, D text width. Source: arXiv 2503.20314."""

from __future__ import annotations

import attrs
from torch import Tensor

from omni_core.trajectory import Conditioning


@attrs.frozen(kw_only=True, eq=False)
class WanConditioning(Conditioning):
    """What the stock pipeline's `encode_prompt` returns, in the encoder's dtype; padding is zeros."""

    prompt_embeds: Tensor
    """[G, L, D]."""
    negative_prompt_embeds: Tensor | None = None
    """[G, L, D]; None without guidance."""
