"""Conditioning of Z-Image: text of each prompt's own length. Source: arXiv 2511.22699."""

from __future__ import annotations

import attrs

from omni_core.families.masked_text import MaskedTextConditioning


@attrs.frozen(kw_only=True, eq=False)
class ZImageConditioning(MaskedTextConditioning):
    """What the stock pipeline's `encode_prompt` returns, padded to the longest prompt."""
