"""Conditioning of FLUX.1. Letters: G prompts, L T5 tokens, D and P text widths."""

from __future__ import annotations

import attrs
from torch import Tensor

from omni_core.trajectory import Conditioning


@attrs.frozen(kw_only=True, eq=False)
class FluxConditioning(Conditioning):
    """What the stock pipeline's `encode_prompt` returns, in the encoders' dtype; there is no negative branch."""

    prompt_embeds: Tensor
    """[G, L, D]."""
    pooled: Tensor
    """[G, P]."""
