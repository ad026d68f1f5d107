"""Conditioning of families whose text is as long as each prompt: padding is masked. Letters: G prompts,
L tokens of the longest, D text width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import attrs
import torch
from torch import Tensor
from torch.nn.functional import pad

from omni_core.trajectory import Conditioning

M = TypeVar("M", bound="MaskedTextConditioning")


@attrs.frozen(kw_only=True, eq=False)
class MaskedTextConditioning(Conditioning):
    """Text and mask of each branch, in the encoder's dtype; a family derives its own class."""

    prompt_embeds: Tensor
    """[G, L, D]."""
    prompt_mask: Tensor
    """int64 [G, L]: 1 for a token, 0 for padding at the end."""
    negative_prompt_embeds: Tensor | None = None
    """[G, L', D]; None without guidance."""
    negative_prompt_mask: Tensor | None = None
    """int64 [G, L']; None without guidance."""

    @classmethod
    def concat(cls: type[M], parts: Sequence[M]) -> M:
        """Join along G; shorter texts are padded to the longest and masked.

        Raises:
            ValueError: no parts, or parts of which only some have a negative prompt.
        """
        if not parts:
            msg = f"{cls.__name__}.concat: no parts"
            raise ValueError(msg)
        return super().concat([_padded(part, parts) for part in parts])


def _padded(part: M, among: Sequence[M]) -> M:
    longest: dict[str, Tensor] = {}
    for name in ("prompt", "negative_prompt"):
        embeds: Tensor | None = getattr(part, f"{name}_embeds")
        mask: Tensor | None = getattr(part, f"{name}_mask")
        others = [getattr(other, f"{name}_embeds") for other in among]
        if embeds is None or mask is None or any(other is None for other in others):
            continue  # the join says which part lacks it
        more = max(other.shape[1] for other in others) - embeds.shape[1]
        longest[f"{name}_embeds"] = pad(embeds, (0, 0, 0, more))
        longest[f"{name}_mask"] = pad(mask.to(torch.int64), (0, more))
    return attrs.evolve(part, **longest)
