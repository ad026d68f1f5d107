"""Variable-length embeddings are (flat values, lengths); padding is put on and taken off here only.

Padding is on the right. Letters: B rows, L padded length, D width, N = sum of the lengths.
"""

from __future__ import annotations

import torch
from torch import Tensor


def embeds_padding_2_no_padding(embeds: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Drop the padding of right-padded embeddings.

    Args:
        embeds: [B, L, D].
        mask: [B, L], bool or 0/1: ones, then zeros, in every row; a row may be all zeros.

    Returns:
        (values [N, D] row after row, lengths int64 [B] on the mask's device). Differentiable.

    Raises:
        ValueError: wrong shapes, a mask of other values, or a masked row with a hole or left padding
            (the message names the row).
    """
    if embeds.ndim != 3 or mask.shape != embeds.shape[:2]:
        raise ValueError(
            "embeds must be [B, L, D] and mask [B, L], got "
            f"{tuple(embeds.shape)} and {tuple(mask.shape)}"
        )
    keep = mask.bool()
    if not torch.equal(keep.to(mask.dtype), mask):
        raise ValueError("mask must hold only 0 and 1 (or be bool)")
    lengths = keep.sum(dim=1)
    wrong = (keep != _right_padded(lengths, int(mask.shape[1]))).any(dim=1).nonzero()
    if wrong.numel():
        raise ValueError(
            f"row {int(wrong[0])} of the mask is not right-padded: ones must come first and "
            "without a hole"
        )
    return embeds[keep], lengths


def no_padding_2_padding(
    values: Tensor, lengths: Tensor, *, length: int | None = None
) -> tuple[Tensor, Tensor]:
    """Put right padding of zeros back: the inverse of `embeds_padding_2_no_padding`.

    Args:
        values: [N, D].
        lengths: integer [B] >= 0, summing to N.
        length: L of the result; None for the longest row.

    Returns:
        (embeds [B, L, D], mask bool [B, L]). Differentiable.

    Raises:
        ValueError: wrong shapes, a negative length, a sum other than N, or a row longer than `length`.
    """
    if values.ndim != 2 or lengths.ndim != 1 or lengths.is_floating_point():
        raise ValueError(
            "values must be [N, D] and lengths integer [B], got "
            f"{tuple(values.shape)} and {lengths.dtype} {tuple(lengths.shape)}"
        )
    sizes = [int(size) for size in lengths.tolist()]
    if min(sizes, default=0) < 0 or sum(sizes) != values.shape[0]:
        raise ValueError(
            f"lengths must be at least 0 and sum to the {values.shape[0]} values, got {sizes}"
        )
    longest = max(sizes, default=0)
    padded = longest if length is None else length
    if longest > padded:
        row = sizes.index(longest)
        raise ValueError(f"row {row} has {longest} values, more than the length {padded}")
    mask = _right_padded(lengths, padded)
    embeds = values.new_zeros((len(sizes), padded, values.shape[1]))
    return embeds.masked_scatter(mask.unsqueeze(-1).to(values.device), values), mask


def _right_padded(lengths: Tensor, length: int) -> Tensor:
    """bool [B, L]: True on the first `lengths` positions of each row."""
    return torch.arange(length, device=lengths.device) < lengths.unsqueeze(1)
