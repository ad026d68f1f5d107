"""Conditioning of LTX-2, one text for the video and one for its sound. Letters: G prompts, L tokens, D and
E text widths. Source: arXiv 2601.03233.
"""

from __future__ import annotations

import attrs
from torch import Tensor

from omni_core.trajectory import Conditioning


@attrs.frozen(kw_only=True, eq=False)
class LTX2Conditioning(Conditioning):
    """What the stock pipeline's text connectors return, in their dtype."""

    video_embeds: Tensor
    """[G, L, D]."""
    audio_embeds: Tensor
    """[G, L, E]."""
    mask: Tensor
    """int64 [G, L]: 1 for a token that is attended to."""
    negative_video_embeds: Tensor | None = None
    """[G, L, D]; None without guidance, like the two below."""
    negative_audio_embeds: Tensor | None = None
    """[G, L, E]."""
    negative_mask: Tensor | None = None
    """int64 [G, L]."""
