"""Conditioning of Stable Diffusion 3 and 3.5. Letters: G prompts, L = CLIP tokens + T5 tokens, D and P
text widths. Source: Esser et al., arXiv 2403.03206.
"""

from __future__ import annotations

import attrs
from torch import Tensor

from omni_core.trajectory import Conditioning


@attrs.frozen(kw_only=True, eq=False)
class SD3Conditioning(Conditioning):
    """What the stock pipeline's `encode_prompt` returns, in the encoders' dtype."""

    prompt_embeds: Tensor
    """[G, L, D]."""
    pooled: Tensor
    """[G, P]."""
    negative_prompt_embeds: Tensor | None = None
    """[G, L, D]; None without guidance."""
    negative_pooled: Tensor | None = None
    """[G, P]; None without guidance."""
