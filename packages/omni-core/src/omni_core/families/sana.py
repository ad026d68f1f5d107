"""Conditioning of SANA: text padded to one length and masked. Source: arXiv 2410.10629."""

from __future__ import annotations

import attrs

from omni_core.families.masked_text import MaskedTextConditioning


@attrs.frozen(kw_only=True, eq=False)
class SanaConditioning(MaskedTextConditioning):
    """What the stock pipeline's `encode_prompt` returns."""
