"""Conditioning of FLUX.2. Letters: G prompts, L tokens, D text width (several layers of the encoder)."""

from __future__ import annotations

import attrs
from torch import Tensor

from omni_core.trajectory import Conditioning


@attrs.frozen(kw_only=True, eq=False)
class Flux2Conditioning(Conditioning):
    """What the stock pipeline's `encode_prompt` returns, in the encoder's dtype."""

    prompt_embeds: Tensor
    """[G, L, D]."""
    negative_prompt_embeds: Tensor | None = None
    """[G, L, D]; None without guidance."""
