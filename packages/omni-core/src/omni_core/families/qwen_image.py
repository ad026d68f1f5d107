"""Conditioning of Qwen-Image: text of each prompt's own length. Source: arXiv 2508.02324."""

from __future__ import annotations

import attrs

from omni_core.families.masked_text import MaskedTextConditioning


@attrs.frozen(kw_only=True, eq=False)
class QwenImageConditioning(MaskedTextConditioning):
    """What the stock pipeline's `encode_prompt` returns."""
